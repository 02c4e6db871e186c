#!/usr/bin/env python3
"""A random model in the shape of Qwen3-Embedding and Qwen3-Reranker, and what sentence-transformers and transformers make
of texts with it, for tests/unit/test_embed.cpp (needs torch, transformers and sentence-transformers; run from the repo
root). The result, tests/fixtures/embed, is committed; tests/fixtures/README.md describes it.

    python tests/reference/make_embed_fixtures.py
"""
import json
import os
import subprocess
import sys

import torch
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer
from transformers import AutoTokenizer, Qwen3ForCausalLM

import make_fixtures as fixtures

FOLDER = fixtures.ROOT + "/embed"
SHAPE = dict(seed=2038, C=48, L=2, H=4, K=2, D=64, F=96, tied=True, theta=1e6, eps=1e-6, dtype="bfloat16", style=4)
TASK = "Given a web search query, retrieve relevant passages that answer the query"
TASKS = [None, TASK, "Find the section that defines the term"]  # None: a document, as it is
TEXTS = ["", "a", "What is a warp?", "A warp is a group of 32 threads that run together.", "线程束是什么？", "  two  blanks, \n\n and lines\t\n",
         "The shared memory of a block is split into banks. " * 6, "é caffè — naïve 𝄞", "x" * 90]
# As the model's card asks: https://huggingface.co/Qwen/Qwen3-Reranker-0.6B
BEFORE = ('<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. '
          'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n')
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
QUERIES = ["What is a warp?", "线程束"]
DOCUMENTS = ["A warp is a group of 32 threads that run together.", "Bread is made of flour.", "", "线程束有三十二个线程。\n", "one " * 40]
DIMENSIONS = [48, 7]


def write_tokenizer():
    """The tests' small tokenizer, with a token for "yes" as Qwen3's has one, and with the end token that Qwen3-Embedding's adds."""
    with open(fixtures.ROOT + "/tiny/tokenizer.json", encoding="utf-8") as file:
        tokenizer = json.load(file)
    model = tokenizer["model"]
    first = len(model["vocab"])
    model["vocab"]["yes"] = first
    model["merges"].append(["y", "es"])
    for token in tokenizer["added_tokens"]:
        token["id"] += 1
    end = next(t for t in tokenizer["added_tokens"] if t["content"] == "<|endoftext|>")
    one = {"id": end["content"], "ids": [end["id"]], "tokens": [end["content"]]}
    tokenizer["post_processor"] = {"type": "Sequence", "processors": [tokenizer["post_processor"], {
        "type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": one["id"], "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": one["id"], "type_id": 0}},
                 {"Sequence": {"id": "B", "type_id": 1}}, {"SpecialToken": {"id": one["id"], "type_id": 1}}],
        "special_tokens": {one["id"]: one}}]}
    os.makedirs(FOLDER, exist_ok=True)
    with open(FOLDER + "/tokenizer.json", "w", encoding="utf-8") as out:
        json.dump(tokenizer, out, ensure_ascii=False, indent=0)
    subprocess.run([sys.executable, "-I", "-S", "export.py", "--tokenizer", FOLDER, FOLDER + "/tokenizer.bin"], check=True)
    return first + 1 + len(tokenizer["added_tokens"]), end["id"]


def write_folder():
    """As Qwen3-Embedding's: the tensors of the bare model, without "model." before their names, and sentence-transformers' modules."""
    size, end = write_tokenizer()
    shape = dict(SHAPE, V=size, end=end, shards=1)
    weights = fixtures.weights(shape)
    fixtures.write_json(FOLDER + "/config.json", fixtures.config_json(shape))
    save_file({name.removeprefix("model."): t.to(torch.bfloat16).contiguous() for name, t in weights.items()},
              FOLDER + "/model.safetensors", {"format": "pt"})
    fixtures.write_json(FOLDER + "/tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer", "model_max_length": 4096, "padding_side": "left",
                                                            "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"})
    modules = [("", "sentence_transformers.models.Transformer"), ("1_Pooling", "sentence_transformers.models.Pooling"),
               ("2_Normalize", "sentence_transformers.models.Normalize")]
    fixtures.write_json(FOLDER + "/modules.json", [{"idx": i, "name": str(i), "path": p, "type": t} for i, (p, t) in enumerate(modules)])
    os.makedirs(FOLDER + "/1_Pooling", exist_ok=True)
    fixtures.write_json(FOLDER + "/1_Pooling/config.json", {
        "word_embedding_dimension": SHAPE["C"], "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False,
        "pooling_mode_max_tokens": False, "pooling_mode_mean_sqrt_len_tokens": False, "pooling_mode_weightedmean_tokens": False,
        "pooling_mode_lasttoken": True, "include_prompt": True})
    fixtures.write_json(FOLDER + "/config_sentence_transformers.json", {
        "prompts": {"query": f"Instruct: {TASK}\nQuery:", "document": ""}, "default_prompt_name": None, "similarity_fn_name": "cosine"})


def prompt(task):
    return "" if task is None else f"Instruct: {task}\nQuery:"


def sentence_vectors(dtype, task):
    model = SentenceTransformer(FOLDER, device="cpu", model_kwargs={"dtype": dtype})
    # (One at a time: in a batch the shorter ones are padded, which changes their last bits.)
    return torch.stack([model.encode(t, prompt=prompt(task), convert_to_tensor=True).float() for t in TEXTS])


@torch.no_grad()
def scores(dtype, tokenizer):
    """P(yes), and the ids, of every query with every document."""
    model = Qwen3ForCausalLM.from_pretrained(FOLDER, dtype=dtype).eval()
    yes, no = (tokenizer.convert_tokens_to_ids(word) for word in ("yes", "no"))
    plain = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    out = []
    for query in QUERIES:
        for document in DOCUMENTS:
            ids = plain(BEFORE) + plain(f"<Instruct>: {TASK}\n<Query>: {query}\n<Document>: {document}") + plain(AFTER)
            logits = model(torch.tensor([ids])).logits[0, -1].double()
            out.append((torch.stack([logits[no], logits[yes]]).softmax(0)[1].item(), ids))
    return out


def main():
    torch.set_num_threads(1)
    write_folder()
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    rows, apart = [], {str(d): [] for d in DIMENSIONS}
    for task in TASKS:
        truth, coarse = (sentence_vectors(dtype, task) for dtype in (torch.float32, torch.bfloat16))
        for i, text in enumerate(TEXTS):
            vectors = {}
            for d in DIMENSIONS:
                short = [torch.nn.functional.normalize(v[i, :d], dim=0) for v in (truth, coarse)]
                vectors[str(d)] = [round(x, 8) for x in short[0].tolist()]
                apart[str(d)].append((short[0] - short[1]).norm().item())
            rows.append({"task": task, "text": text, "ids": tokenizer(prompt(task) + text)["input_ids"], "vectors": vectors})
    truth, coarse = (scores(dtype, tokenizer) for dtype in (torch.float32, torch.bfloat16))
    pairs = [{"query": q, "document": d} for q in QUERIES for d in DOCUMENTS]
    for pair, (score, ids) in zip(pairs, truth):
        pair.update(ids=ids, score=round(score, 8))
    mean = lambda numbers: sum(numbers) / len(numbers)
    errors = {"bf16_distance": {d: mean(all) for d, all in apart.items()},
              "bf16_score_error": mean([abs(a[0] - b[0]) for a, b in zip(truth, coarse)])}
    fixtures.write_golden(FOLDER + "/golden.json", {"task": TASK, "texts": rows, "pairs": pairs, **errors})
    print(errors)
    print("scores:", [round(s, 4) for s, _ in truth])


if __name__ == "__main__":
    main()
