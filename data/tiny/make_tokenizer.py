#!/usr/bin/env python3
"""The default model's vocabulary: byte-level BPE of 8,192 ids from the notes and the training rows, and nothing else.

    python3 data/tiny/make_tokenizer.py        (from the repository's root; needs `tokenizers`)

It writes data/tiny/tokenizer.bin, by way of export.py. Normalizer, pre-tokenizer, decoder and the texts of the special
tokens are Qwen3's; only the ids differ. In Qwen3's order they come first: 0 to 25 here, then the bytes, then what
was merged. The same files give the same bytes.
"""
import json, pathlib, subprocess, sys, tempfile
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import export  # Qwen's regular expression stands there

SIZE = 8192
SPECIAL = """<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|>
    <|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>""".split()
PLAIN = """<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|>
    <tool_response> </tool_response> <think> </think>""".split()  # added, but not special: decoding shows them (the trainer knows no such difference)


def texts():
    for note in sorted((ROOT / "data/course/notes").glob("*.md"))[:15]:  # (what the committed model has read)
        yield note.read_text(encoding="utf-8")
    for line in (ROOT / "data/course/gpu_qa.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        yield row["instruction"]
        yield row["output"]


BYTES = {"add_prefix_space": False, "trim_offsets": False, "use_regex": False}
tokenizer = Tokenizer(models.BPE())
tokenizer.normalizer = normalizers.NFC()
tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
    pre_tokenizers.Split(Regex(export.SPLIT), "isolated"), pre_tokenizers.ByteLevel(**BYTES)])
tokenizer.post_processor = processors.ByteLevel(**BYTES)
tokenizer.decoder = decoders.ByteLevel(**BYTES)
added = [AddedToken(text, normalized=False) for text in SPECIAL + PLAIN]
tokenizer.train_from_iterator(texts(), trainers.BpeTrainer(
    vocab_size=SIZE, min_frequency=2, special_tokens=added, show_progress=False,
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
tokenizer = json.loads(tokenizer.to_str())
for token in tokenizer["added_tokens"]:
    token["special"] = token["content"] in SPECIAL
with tempfile.TemporaryDirectory() as folder:
    pathlib.Path(folder, "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    subprocess.run([sys.executable, ROOT / "export.py", "--tokenizer", folder, ROOT / "data/tiny/tokenizer.bin"], check=True)
