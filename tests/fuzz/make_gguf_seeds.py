#!/usr/bin/env python3
"""Writes tests/fixtures/fuzz/gguf/*, the seeds of tests/fuzz/fuzz_gguf.cpp: small GGUF files that take each way through the
reader, and quantisation configs. Standard library only; run from the repository's root; always the same bytes."""
import json
import os
import random
import struct

FOLDER = "tests/fixtures/fuzz/gguf"
U32, I32, F32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
BLOCKS = {0: (1, 4), 1: (1, 2), 30: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34),
          12: (256, 144), 13: (256, 176), 14: (256, 210)}


def text(s):
    return struct.pack("<Q", len(s.encode())) + s.encode()


def value(x):
    if isinstance(x, bool):
        return struct.pack("<IB", BOOL, x)
    if isinstance(x, int):
        return struct.pack("<II", U32, x)
    if isinstance(x, float):
        return struct.pack("<If", F32, x)
    if isinstance(x, str):
        return struct.pack("<I", STRING) + text(x)
    if isinstance(x[0], str):
        return struct.pack("<IIQ", ARRAY, STRING, len(x)) + b"".join(map(text, x))
    return struct.pack("<IIQ", ARRAY, I32, len(x)) + struct.pack(f"<{len(x)}i", *x)


def model(kinds, C=32, tied=True, tokenizer=False, alignment=None):
    draw = random.Random(str(kinds))
    V, D, F = 8, 32 if C == 32 else 4, 32 if C == 32 else 4
    meta = {"general.architecture": "qwen3", "qwen3.block_count": 1, "qwen3.context_length": 8, "qwen3.embedding_length": C,
            "qwen3.feed_forward_length": F, "qwen3.attention.head_count": 1, "qwen3.attention.head_count_kv": 1,
            "qwen3.attention.key_length": D, "qwen3.attention.layer_norm_rms_epsilon": 1e-6, "qwen3.rope.freq_base": 1e4}
    if alignment:
        meta["general.alignment"] = alignment
    if tokenizer:
        meta.update({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2",
                     "tokenizer.ggml.tokens": ["!", "\u0120a", "<|im_end|>", "[PAD3]"], "tokenizer.ggml.token_type": [1, 1, 3, 5],
                     "tokenizer.ggml.merges": ["\u0120 a"], "tokenizer.ggml.eos_token_id": 2,
                     "tokenizer.ggml.add_bos_token": False, "tokenizer.chat_template": "<|im_start|>"})
    shapes = [("token_embd", [V, C])]
    shapes += [("blk.0." + n, s) for n, s in [("attn_norm", [C]), ("attn_q", [D, C]), ("attn_k", [D, C]), ("attn_v", [D, C]),
                                              ("attn_q_norm", [D]), ("attn_k_norm", [D]), ("attn_output", [C, D]), ("ffn_norm", [C]),
                                              ("ffn_gate", [F, C]), ("ffn_up", [F, C]), ("ffn_down", [C, F])]]
    shapes += [("output_norm", [C])] + ([] if tied else [("output", [V, C])])
    entries, data, turn = b"", b"", 0
    for name, shape in shapes:
        kind = 0
        if len(shape) == 2:
            kind = kinds[turn % len(kinds)]
            turn += 1
            if shape[1] % BLOCKS[kind][0]:
                kind = 1
        count, size = BLOCKS[kind]
        n = shape[0] * (shape[1] if len(shape) == 2 else 1)
        entries += text(name + ".weight") + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape[::-1])
        entries += struct.pack("<IQ", kind, len(data))
        if kind == 0:
            data += struct.pack(f"<{n}f", *(draw.uniform(0.5, 1.5) for _ in range(n)))
        else: # halves below 2: any two bytes with the exponent's top bit off
            data += bytes(draw.randrange(256) & 0x3f for _ in range(n // count * size))
        data += b"\0" * (-len(data) % (alignment or 32))
    head = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(meta)) + b"".join(text(k) + value(v) for k, v in meta.items()) + entries
    return head + b"\0" * (-len(head) % (alignment or 32)) + data


os.makedirs(FOLDER, exist_ok=True)
SEEDS = {
    "blocks": model([2, 3, 6, 7, 8]),
    "plain": model([0, 1, 30], tied=False, alignment=8),
    "k": model([12, 13, 14], C=256),
    "tokenizer": model([8], tokenizer=True),
    # A byte for the tensors' shapes, then the config.
    "fp8": b"\x00" + json.dumps({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128],
                                 "activation_scheme": "dynamic"}).encode(),
    "awq": b"\x05" + json.dumps({"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm",
                                 "zero_point": True}).encode(),
    "gptq": b"\x02" + json.dumps({"quant_method": "gptq", "bits": 4, "group_size": -1, "checkpoint_format": "gptq"}).encode(),
    "gptq8": b"\x03" + json.dumps({"quant_method": "gptq", "bits": 8, "group_size": 32, "checkpoint_format": "gptq_v2"}).encode(),
}
for name, data in SEEDS.items():
    with open(f"{FOLDER}/{name}", "wb") as f:
        f.write(data)
