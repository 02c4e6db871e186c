"""The peer of vectors on a CPU: sentence-transformers beside `serve`, in turns, on the same weights and texts. By hand:

    pip install sentence-transformers
    python export.py --to-hf m.bin m --tokenizer-from FOLDER      (a Hugging Face folder with tokenizer.json)
    rm m/chat_template.jinja                                      (sentence-transformers 6 would put the texts into it)
    ./serve m.bin -z tokenizer.bin -d cpu -j 2 --task embed --port 8077 &
    OMP_WAIT_POLICY=passive python \
        tests/reference/peer_sentence_transformers.py m texts.txt 2 8077 [TURNS, default 3, and COUNTS]

A text a line; last token's vector, normalised, <|endoftext|> behind each text, as Qwen3-Embedding has it. Prints for 1,
32 and 256 texts (or COUNTS) the medians of texts a second, and the smallest cosine between the vectors of both. With
BATCH=1 sentence-transformers computes them one by one, which can be faster.
"""
import json
import os
import statistics
import sys
import time
import urllib.request

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Normalize, Pooling, Transformer

folder, file, threads, port = sys.argv[1:5]
batch = int(os.environ.get("BATCH", 32))  # sentence-transformers' default
turns = int(sys.argv[5]) if len(sys.argv) > 5 else 3
torch.set_num_threads(int(threads))
lines = open(file, encoding="utf-8").read().splitlines()
body = Transformer(folder, model_kwargs={"dtype": torch.bfloat16}, processor_kwargs={"padding_side": "left"})
last = Pooling(body.get_word_embedding_dimension(), "lasttoken")
model = SentenceTransformer(modules=[body, last, Normalize()], device="cpu")


def ours(texts):
    ask = urllib.request.Request(f"http://127.0.0.1:{port}/v1/embeddings", json.dumps({"input": texts}).encode(),
                                 {"Content-Type": "application/json"})
    return torch.tensor([one["embedding"] for one in json.load(urllib.request.urlopen(ask))["data"]])


def theirs(texts):
    return model.encode([t + "<|endoftext|>" for t in texts], batch_size=batch, convert_to_tensor=True).float()


for count in (int(n) for n in (sys.argv[6:] or (1, 32, 256))):
    rates = {ours: [], theirs: []}
    theirs(lines[:4]), ours(lines[:4])  # the first pass finds its kernels
    for turn in range(turns):
        texts = [f"{count} {turn} {line}" for line in lines[:count]]  # (new ones: the server keeps the keys of texts)
        for who in rates:
            start = time.time()
            who(texts)
            rates[who].append(len(texts) / (time.time() - start))
    cosine = (ours(texts[:8]) * theirs(texts[:8])).sum(1).min()
    a, b = (statistics.median(rates[who]) for who in (ours, theirs))
    tokens = sum(len(body.tokenizer(t)["input_ids"]) + 1 for t in texts)
    print(f"{len(texts)} texts, {tokens} tokens: ours {a:.2f} ({min(rates[ours]):.2f} to {max(rates[ours]):.2f}), "
          f"sentence-transformers {b:.2f} ({min(rates[theirs]):.2f} to {max(rates[theirs]):.2f}), ratio {a / b:.2f}, "
          f"least cosine {cosine:.5f}", flush=True)
