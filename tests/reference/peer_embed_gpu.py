"""The peer of `qwen3 --embed --texts` on a GPU: transformers, the 0.6B shape with random weights in bf16. Run by hand:

    pip install torch transformers tokenizers
    ./datagen chunk data/course/notes/*.md --tokens 110 --overlap 0 -z tokenizer.bin -o ch.jsonl
    python tests/reference/peer_embed_gpu.py FOLDER/tokenizer.json ch.jsonl       (Qwen3's, from a Hugging Face folder)

JSON lines with `text`; <|endoftext|> behind each, the last token's vector, normalised, as Qwen3-Embedding has it. The
texts are sorted by length and padded on the left, attention is PyTorch's (sdpa). Each size of batch runs once before it
is timed. The tokenizer's time is not counted.
"""
import json
import sys
import time

import torch
from tokenizers import Tokenizer
from transformers import Qwen3Config, Qwen3Model

END = 151643  # <|endoftext|>
tokenizer = Tokenizer.from_file(sys.argv[1])
texts = [json.loads(line)["text"] for line in open(sys.argv[2], encoding="utf-8")]
ids = sorted((tokenizer.encode(text).ids + [END] for text in texts), key=len)
tokens = sum(map(len, ids))
config = Qwen3Config(vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
                     num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True)
model = Qwen3Model._from_config(config, torch_dtype=torch.bfloat16, attn_implementation="sdpa").cuda().eval()


@torch.inference_mode()
def vectors(size):
    found = []
    for i in range(0, len(ids), size):
        batch = ids[i:i + size]
        width = max(map(len, batch))
        x = torch.tensor([[END] * (width - len(row)) + row for row in batch]).cuda()
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch]).cuda()
        last = model(input_ids=x, attention_mask=mask).last_hidden_state[:, -1]
        found.append(torch.nn.functional.normalize(last.float(), dim=-1))
    return torch.cat(found).cpu()


for size in (32, 128, 512):
    vectors(size)
    torch.cuda.synchronize()
    start = time.time()
    vectors(size)
    spent = time.time() - start
    print(f"batches of {size}: {len(ids)} texts, {tokens} tokens in {spent:.2f} s: {len(ids) / spent:.0f} texts/s, "
          f"{tokens / spent:.0f} tok/s")
