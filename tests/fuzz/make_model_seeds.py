#!/usr/bin/env python3
"""Writes tests/fixtures/fuzz/model/*.bin, the seeds of tests/fuzz/fuzz_model.cpp: the smallest models that take each
way through the loader. Standard library only; run from the repository's root; always the same bytes."""
import json
import os
import random
import struct

FOLDER = "tests/fixtures/fuzz/model"
BASE = {"model_type": "qwen3", "hidden_size": 3, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 2, "intermediate_size": 3, "vocab_size": 5,
        "max_position_embeddings": 8, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": True,
        "eos_token_id": 2}
NEW_ROPE = {"rope_theta": None, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}

# name: changes of the config, generation_config, the dtypes in turn, spaces behind the header
SEEDS = {
    "tied_bf16": ({}, {"eos_token_id": [1, 4]}, ["BF16"], 0),
    "untied_f32": ({"tie_word_embeddings": False, "num_hidden_layers": 2, "hidden_act": "silu"}, None, ["F32"], 0),
    "f16": (NEW_ROPE, {"eos_token_id": 3, "top_k": 20}, ["F16"], 0),
    "mixed_odd": ({"head_dim": 4, "layer_types": ["full_attention"], "rope_scaling": None}, None,
                  ["F32", "BF16", "F16"], 1),
}
PACK = {"F32": lambda x: struct.pack("<f", x), "BF16": lambda x: struct.pack("<f", x)[2:],
        "F16": lambda x: struct.pack("<e", x)}


def shapes(c):
    C, D, F = c["hidden_size"], c["head_dim"], c["intermediate_size"]
    HD, KD = c["num_attention_heads"] * D, c["num_key_value_heads"] * D
    yield "model.embed_tokens", [c["vocab_size"], C]
    for l in range(c["num_hidden_layers"]):
        for name, shape in [("input_layernorm", [C]), ("self_attn.q_proj", [HD, C]), ("self_attn.k_proj", [KD, C]),
                            ("self_attn.v_proj", [KD, C]), ("self_attn.q_norm", [D]), ("self_attn.k_norm", [D]),
                            ("self_attn.o_proj", [C, HD]), ("post_attention_layernorm", [C]),
                            ("mlp.gate_proj", [F, C]), ("mlp.up_proj", [F, C]), ("mlp.down_proj", [C, F])]:
            yield f"model.layers.{l}.{name}", shape
    yield "model.norm", [C]
    if not c["tie_word_embeddings"]:
        yield "lm_head", [c["vocab_size"], C]


os.makedirs(FOLDER, exist_ok=True)
for name, (changes, generation, dtypes, spaces) in SEEDS.items():
    config = {k: v for k, v in {**BASE, **changes}.items() if v is not None or k == "rope_scaling"}
    header = {"__metadata__": {"format": "pt", "config": json.dumps(config)}}
    if generation:
        header["__metadata__"]["generation_config"] = json.dumps(generation)
    draw, data = random.Random(name), b""
    for i, (tensor, shape) in enumerate(shapes(config)):
        dtype, begin = dtypes[i % len(dtypes)], len(data)
        for _ in range(shape[0] * (shape[1] if len(shape) == 2 else 1)):
            data += PACK[dtype](draw.uniform(-1, 1))
        header[tensor + ".weight"] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, len(data)]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8 + spaces)
    with open(f"{FOLDER}/{name}.bin", "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + data)
