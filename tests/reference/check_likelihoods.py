#!/usr/bin/env python3
"""lm-evaluation-harness against ./serve, and the same questions through ./qwen3 --eval, by hand:
pip install 'lm-eval[api]' transformers; python3 tests/reference/check_likelihoods.py [ROWS]

The model is data/tiny/model.bin. Three checks of the first ROWS rows (all) of data/course/mc_exam.jsonl:
1. local-completions and --eval -n 0 of every answer: the same accuracy, and differences between the log-likelihoods of
   a question's answers that are the same to 0.02. (The harness adds the prompt's last token to each of them.) With the
   tokenizer's files and with the server's /tokenizer_info, /tokenize and /detokenize the harness gets the same numbers.
2. local-chat-completions and --eval: the same answers, so the same number of right letters.
3. Rates: the prompts of check 1 with echo and logprobs in a batch, against the same prompts without, and one by one.
The numbers are printed; a difference ends the script. SERVE and QWEN3 name other programs."""
import json
import os
import pathlib
import re
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import export  # bytes as characters

os.chdir(ROOT)
SERVE, QWEN3 = os.environ.get("SERVE", "./serve"), os.environ.get("QWEN3", "./qwen3")
MODEL, TOKENIZER, QUESTIONS = "data/tiny/model.bin", "data/tiny/tokenizer.bin", "data/course/mc_exam.jsonl"
rows = [json.loads(line) for line in pathlib.Path(QUESTIONS).read_text(encoding="utf-8").splitlines()]
rows = rows[: int(sys.argv[1]) if len(sys.argv) > 1 else None]


def write_tokenizer(folder):
    """tokenizer.bin -> tokenizer.json for transformers."""
    data = pathlib.Path(TOKENIZER).read_bytes()
    assert data[:8] == b"qwen3tok"
    T, M, B, R, D, C = struct.unpack_from("<6I", data, 12)
    offset = struct.unpack_from(f"<{T + 1}I", data, 36)
    numbers = struct.unpack_from(f"<{3 * M}I", data, 40 + 4 * T)
    flags, text = data[-T - B : -B], data[-B:]
    names = {byte: c for c, byte in export.byte_alphabet().items()}
    piece = ["".join(names[b] for b in text[offset[i] : offset[i + 1]]) for i in range(T)]
    added = [i for i in range(T) if flags[i] & export.ADDED]
    whole = [text[offset[i] : offset[i + 1]].decode() if i in added else piece[i] for i in range(T)]
    step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": export.SPLIT}, "behavior": "Isolated", "invert": False}
    made = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": {"type": "NFC"},
        "added_tokens": [{"id": i, "content": whole[i], "single_word": False, "lstrip": False, "rstrip": False,
                          "normalized": False, "special": bool(flags[i] & export.SPECIAL)} for i in added],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, step]}, "post_processor": step, "decoder": step,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {whole[i]: i for i in range(T)},
                  "merges": [[piece[numbers[3 * i]], piece[numbers[3 * i + 1]]] for i in range(M)]}}
    pathlib.Path(folder, "tokenizer.json").write_text(json.dumps(made), encoding="utf-8")
    pathlib.Path(folder, "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}))


def evaluate(folder, name, qa, *options):
    """./qwen3 --eval of QA rows: its rows."""
    path = pathlib.Path(folder, name)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in qa), encoding="utf-8")
    subprocess.run([QWEN3, MODEL, "--eval", path, "-o", f"{path}.out", *options], check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in pathlib.Path(f"{path}.out").read_text(encoding="utf-8").splitlines()]


def harness(output, task, kind, path, *options):
    """The harness's results of a task, and its samples in order. They are written into the folder `output`."""
    arguments = f"model=tiny,base_url=http://127.0.0.1:{port}/v1/{path},num_concurrent=1,max_retries=1,{','.join(options)}"
    more = ["--apply_chat_template"] if "chat" in kind else ["--batch_size", "16"]
    begun = time.monotonic()
    subprocess.run([sys.executable, "-m", "lm_eval", "--model", kind, "--model_args", arguments, "--tasks", task,
                    "--include_path", "tests/reference/lm_eval", "--output_path", output, "--log_samples",
                    *more, *(["--limit", sys.argv[1]] if len(sys.argv) > 1 else [])], check=True)
    print(f"{task}: {time.monotonic() - begun:.1f} s")
    (results,) = pathlib.Path(output).rglob("results_*.json")
    (samples,) = pathlib.Path(output).rglob("samples_*.jsonl")
    samples = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    return json.loads(results.read_text())["results"][task], sorted(samples, key=lambda s: s["doc_id"])


def rate(folder, name, prompts, **fields):
    """Prompt tokens a second of `serve --batch`, which ends with its figures; the requests of 4 prompts each."""
    path = pathlib.Path(folder, name)
    path.write_text("".join(json.dumps({"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body":
                                        {"prompt": prompts[i : i + 4], "max_tokens": 1, "temperature": 0, **fields}}) + "\n"
                            for i in range(0, len(prompts), 4)))
    begun = time.monotonic()
    subprocess.run([SERVE, MODEL, "--batch", path, "-o", f"{path}.out"], check=True, stderr=subprocess.DEVNULL)
    took = time.monotonic() - begun
    return sum(map(len, prompts)) / took


with tempfile.TemporaryDirectory() as folder:
    write_tokenizer(folder)
    server = subprocess.Popen([SERVE, MODEL, "--port", "0", "--name", "tiny"], stderr=subprocess.PIPE, text=True,
                              stdout=subprocess.DEVNULL)
    try:
        port = next(int(m[1]) for line in server.stderr if (m := re.search(r"listening on http://127\.0\.0\.1:(\d+)", line)))
        os.environ.update(HF_HUB_OFFLINE="1", HF_HOME=folder, TOKENIZERS_PARALLELISM="false")
        likely, told = harness(f"{folder}/files", "course_mc", "local-completions", "completions", f"tokenizer={folder}",
                               "tokenizer_backend=huggingface", "tokenized_requests=True")
        _, asked_for = harness(f"{folder}/remote", "course_mc", "local-completions", "completions",
                               "tokenizer_backend=remote", "tokenized_requests=True")
        assert [s["resps"] for s in asked_for] == [s["resps"] for s in told]
        print("the server's tokenizer: the same numbers")
        said, spoken = harness(f"{folder}/chat", "course_chat", "local-chat-completions", "chat/completions")
    finally:
        server.terminate()

    letters = "ABCDEFGH"
    asked = [(row, i) for row in rows for i in range(len(row["choices"]))]
    nll = evaluate(folder, "mc", [{"instruction": row["instruction"], "input": row["input"],
                                   "output": f"{letters[i]}. {row['choices'][i]}"} for row, i in asked], "-n", "0")
    right = at = 0
    worst = 0.0
    for row, sample in zip(rows, told):
        n = len(row["choices"])
        own = [-line["nll"] for line in nll[at : at + n]]
        theirs = [float(answer[0][0]) for answer in sample["resps"]]
        offset = [a - b for a, b in zip(theirs, own)]
        worst = max(worst, max(offset) - min(offset))
        right += max(range(n), key=lambda i: own[i]) == letters.index(row["choice"])
        at += n
    print(f"likelihood: harness {likely['acc,none']:.6f}, --eval {right / len(rows):.6f} ({right} of {len(rows)}); "
          f"log-likelihoods differ by {worst:.2g} at most")
    assert abs(likely["acc,none"] - right / len(rows)) < 1e-9 and worst < 0.02

    answers = evaluate(folder, "chat", [{k: row[k] for k in ("instruction", "input", "output")} for row in rows], "-n", "64")
    right = sum(line["answer"][:1] == row["choice"] for line, row in zip(answers, rows))
    same = sum(sample["resps"][0][0] == line["answer"] for sample, line in zip(spoken, answers))
    print(f"chat: harness {said['exact_match,letter']:.6f}, --eval {right / len(rows):.6f} ({right} of {len(rows)}); "
          f"{same} answers are the same")
    assert abs(said["exact_match,letter"] - right / len(rows)) < 1e-9 and same == len(rows)

    import tokenizers
    tokenizer = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
    prompts = [tokenizer.encode(f"<|im_start|>user\n{row['instruction']}\n{row['input']}<|im_end|>\n<|im_start|>assistant\n"
                                f"<think>\n\n</think>\n\n{letters[i]}. {row['choices'][i]}<|im_end|>\n").ids for row, i in asked]
    for turn in range(2):
        plain = rate(folder, f"plain{turn}", prompts)
        scored = rate(folder, f"scored{turn}", prompts, echo=True, logprobs=1)
        print(f"prompts in a batch: {plain:,.0f} tokens a second, with echo and logprobs {scored:,.0f}: {scored / plain:.2f}")
