#!/usr/bin/env python3
"""GGUF files of `qwen3 --convert` in the programs that define them: the gguf package reads every tensor, llama.cpp's
server (inside xllamacpp) tokenizes, renders and answers. By hand, from the repository's root:

    pip install gguf jinja2 numpy xllamacpp
    python tests/reference/check_gguf.py data/tiny/model.bin tests/fixtures/default/questions.jsonl [--adapter DIR]

1. gguf dequantises each tensor to the numbers that our own reader gives of the model, as float32, exactly.
2. The template in the file, by jinja2, writes the texts of fixtures/chat.jsonl (which Qwen's own template wrote).
3. llama.cpp has our ids of each question, and our greedy answer; with each of its tokens goes the mean divergence of
   the distributions. With an adapter: the same with it (--convert-adapter).
QWEN3 names our program (default ./qwen3).
"""
import argparse
import json
import os
import struct
import subprocess
import tempfile
import urllib.request

import gguf
import jinja2
import numpy
import xllamacpp

parser = argparse.ArgumentParser()
parser.add_argument("model"), parser.add_argument("questions"), parser.add_argument("--adapter")
parser.add_argument("-z"), parser.add_argument("--count", type=int, default=12)
options = parser.parse_args()
folder = tempfile.mkdtemp()
own = os.environ.get("QWEN3", "./qwen3")
model = [options.model] + (["-z", options.z] if options.z else [])
TOKENS = 24


def ours(*words, text=True):
    return subprocess.run([own, *words], check=True, capture_output=True, text=text).stdout


# ---- 1
path = folder + "/model.gguf"
print(subprocess.run([own, *model, "--convert", path], check=True, capture_output=True, text=True).stderr, end="")
reader = gguf.GGUFReader(path)
tokens = reader.fields["tokenizer.ggml.tokens"]
template = reader.fields["tokenizer.chat_template"].contents()
vocabulary = len(tokens.data)
ours(*model, "--convert", folder + "/model.bin")
data = open(folder + "/model.bin", "rb").read()
length = struct.unpack("<Q", data[:8])[0]
header = json.loads(data[8:8 + length])
header.pop("__metadata__")
NAMES = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
         "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
         "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
         "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}


def plain(name):  # a tensor of model.bin as float32
    t = header[name]
    begin, end = (8 + length + x for x in t["data_offsets"])
    raw = data[begin:end]
    if t["dtype"] == "BF16":
        return (numpy.frombuffer(raw, "<u2").astype(numpy.uint32) << 16).view(numpy.float32).reshape(t["shape"])
    numbers = numpy.frombuffer(raw, {"F16": "<f2", "F32": "<f4", "I8": "i1"}[t["dtype"]]).reshape(t["shape"])
    if t["dtype"] != "I8":
        return numbers.astype(numpy.float32)
    return numbers * numpy.repeat(plain(name + "_scale"), 32, 1)[:, :numbers.shape[1]]


def gguf_name(name):
    name = name.removesuffix(".weight")
    if name.startswith("model.layers."):
        _, _, layer, part = name.split(".", 3)
        return f"blk.{layer}.{NAMES[part]}.weight"
    return {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}[name] + ".weight"


theirs = {t.name: t for t in reader.tensors}
off = {}
for name in header:
    if name.endswith("_scale"):
        continue
    t = theirs.pop(gguf_name(name))
    numbers, want = gguf.quants.dequantize(t.data, t.tensor_type).reshape(-1), plain(name).reshape(-1)
    if header[name]["dtype"] == "BF16" and t.tensor_type.name.startswith("Q"):  # model.bin is rounded, GGUF is not
        u = numbers.view(numpy.uint32)
        numbers = ((u + 0x7fff + (u >> 16 & 1)) & 0xffff0000).view(numpy.float32)
    off[t.tensor_type.name] = off.get(t.tensor_type.name, 0) + int((numbers != want).sum())
assert not theirs, list(theirs)
print(f"numbers that differ from model.bin's (what is quantised there: rounded to bf16): {off}")

# ---- 2
environment = jinja2.Environment()
environment.filters["tojson"] = lambda v: json.dumps(v, ensure_ascii=False)
render, rows = environment.from_string(template).render, 0
for line in open("tests/fixtures/chat.jsonl"):
    row = json.loads(line)
    if "text" not in row:
        continue
    text = render(messages=row["messages"], tools=row["tools"], add_generation_prompt=row["generation_prompt"],
                  enable_thinking=row["thinking"])
    assert text == row["text"], (row["name"], text, row["text"])
    rows += 1
print(f"{rows} conversations as Qwen's template writes them")


# ---- 3
def serve(lora=None):
    p = xllamacpp.CommonParams()
    p.model.path, p.n_ctx, p.n_parallel, p.warmup, p.cpuparams.n_threads, p.verbosity = path, 1024, 1, False, 1, 0
    p.use_jinja = True
    if lora:
        p.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(lora, 1.0)]
    return xllamacpp.Server(p)


def post(server, route, body):
    request = urllib.request.Request(server.listening_address + route, json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    return json.loads(urllib.request.urlopen(request).read())


def compare(server, extra):
    kl, same_first, answers, same_answers = [], 0, 0, 0
    for line in list(open(options.questions))[:options.count]:
        row = json.loads(line)
        question = row.get("instruction") or row.get("question") or row["messages"][0]["content"]
        text = post(server, "/apply-template", {"messages": [{"role": "user", "content": question}],
                                                "chat_template_kwargs": {"enable_thinking": False}})["prompt"]
        ids = post(server, "/tokenize", {"content": text, "parse_special": True})["tokens"]
        assert ids == [int(i) for i in ours(*model, "--tokenize", text).split()], text
        found = post(server, "/completion", {"prompt": ids, "n_predict": TOKENS, "temperature": 0,
                                             "cache_prompt": False, "n_probs": vocabulary, "return_tokens": True})
        answers += 1
        want = ours(*model, *extra, "-d", "cpu", "-i", question, "-t", "0", "-n", str(TOKENS))
        same_answers += want.rstrip("\n") == found["content"].rstrip("\n")
        if want.rstrip("\n") != found["content"].rstrip("\n"):
            print("  ours:", want.strip(), "| llama.cpp:", found["content"])
        steps = found["completion_probabilities"]
        all_ids, at = ids + found["tokens"], len(ids) - 1
        ours(*model, *extra, "-d", "cpu", "--ids", ",".join(map(str, all_ids)), "--logits", folder + "/logits")
        logits = numpy.fromfile(folder + "/logits", numpy.float32).reshape(len(all_ids), -1).astype(numpy.float64)
        for step in steps:  # (the server reports none for a token that ends within a character)
            while all_ids[at + 1] != step["id"]:
                at += 1
            mine = logits[at]
            at += 1
            mine = mine - mine.max()
            mine -= numpy.log(numpy.exp(mine).sum())
            other = numpy.full(len(mine), -numpy.inf)
            for one in step["top_logprobs"]:
                other[one["id"]] = one["logprob"]
            other -= numpy.log(numpy.exp(other).sum())  # (its sum is off by some 1e-5)
            there = numpy.isfinite(other)
            kl.append(float((numpy.exp(mine[there]) * (mine[there] - other[there])).sum()))
            same_first += int(mine.argmax() == other.argmax())
    print(f"{answers} questions, the ids are ours; {same_answers} greedy answers are ours; {len(kl)} positions, "
          f"{same_first} with the same likeliest token, "
          f"KL(ours || llama.cpp) mean {numpy.mean(kl):.2g}, largest {max(kl):.2g}")


server = serve()
compare(server, [])
if options.adapter:
    lora = folder + "/adapter.gguf"
    print(subprocess.run([own, *model, "--adapter", options.adapter, "--convert-adapter", lora], check=True,
                         capture_output=True, text=True).stderr, end="")
    del server
    compare(serve(lora), ["--adapter", options.adapter])
