#!/usr/bin/env python3
"""RoPE beyond the positions of training, by transformers (needs torch and transformers; run from the repo root):
tests/fixtures/rope, which tests/fixtures/README.md describes.

    python tests/reference/make_rope_fixtures.py
"""
import json
import os
import tempfile

import torch
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb
from transformers.utils import logging

FIXTURES = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + "/fixtures"
MODEL = "untied_f32_sharded"  # one layer: the keys of a long text need no attention
POSITIONS = (100, 40_000, 120_000)
ROWS = 4  # up to and with such a position
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}

# theta, head_dim, max_position_embeddings, rope_scaling
TABLES = [
    (1e6, 128, 40960, {"rope_type": "default"}),
    (1e6, 128, 40960, {"rope_type": "linear", "factor": 4.0}),
    (1e4, 64, 8192, {"type": "linear", "factor": 3.0}),
    (5e5, 128, 131072, LLAMA3),
    (1e4, 64, 131072, dict(LLAMA3, factor=2.5, low_freq_factor=0.5, high_freq_factor=32)),
    (1e6, 128, 40960, YARN),
    (1e6, 128, 131072, YARN),
    (1e6, 128, 40960, {"type": "yarn", "factor": 4}),
    (1e4, 64, 4096, dict(YARN, factor=2.5, original_max_position_embeddings=1000)),
    (1e6, 128, 40960, dict(YARN, factor=1)),
    (1e6, 128, 40960, dict(YARN, attention_factor=1.25)),
    (1e6, 128, 40960, dict(YARN, attention_factor=None, beta_fast=None, beta_slow=16.0)),
    (1e6, 128, 40960, dict(YARN, beta_fast=8, beta_slow=0.5)),
    (1e6, 128, 40960, dict(YARN, truncate=False)),
    (1e4, 64, 40960, dict(YARN, factor=40, mscale=1.0, mscale_all_dim=0.707)),
    (1e4, 64, 40960, dict(YARN, factor=40, mscale=0.5)),
    (1e4, 6, 64, {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}),
]


def tables():
    for theta, head, most, scaling in TABLES:
        config = Qwen3Config(head_dim=head, max_position_embeddings=most, rope_theta=theta, rope_scaling=dict(scaling))
        kind = config.rope_parameters["rope_type"]
        if kind == "default":
            frequency, factor = 1.0 / (theta ** (torch.arange(0, head, 2).float() / head)), 1.0
        else:
            frequency, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
        yield {"rope_theta": theta, "head_dim": head, "max_position_embeddings": most, "rope_scaling": scaling,
               "attention_factor": factor, "frequencies": [float(f) for f in frequency.float()]}


def token(position):
    return ((position * 2654435761 & 0xFFFFFFFF) >> 7) % 1000


@torch.no_grad()
def logits_at(model, position):
    """(ROWS, V): of the last tokens of a text that ends at `position`. Keys and values of the others go to the cache
    without their queries."""
    ids = torch.tensor([[token(p) for p in range(position + 1)]])
    past = position + 1 - ROWS
    layer = model.model.layers[0]
    h = layer.input_layernorm(model.model.embed_tokens(ids[:, :past]))
    shape = (1, past, -1, layer.self_attn.head_dim)
    key = layer.self_attn.k_norm(layer.self_attn.k_proj(h).view(shape)).transpose(1, 2)
    value = layer.self_attn.v_proj(h).view(shape).transpose(1, 2)
    cosine, sine = model.model.rotary_emb(h, torch.arange(past)[None])
    cache = DynamicCache()
    cache.update(apply_rotary_pos_emb(key, key, cosine, sine)[1], value, 0)
    out = model(ids[:, past:], past_key_values=cache, position_ids=torch.arange(past, position + 1)[None])
    return out.logits[0].float()


def model_with(scaling):
    with open(f"{FIXTURES}/{MODEL}/config.json", encoding="utf-8") as file:
        config = json.load(file)
    config["rope_parameters"] = dict(scaling, rope_theta=config["rope_parameters"]["rope_theta"])
    with tempfile.TemporaryDirectory() as folder:
        for name in os.listdir(f"{FIXTURES}/{MODEL}"):
            os.symlink(f"{FIXTURES}/{MODEL}/{name}", f"{folder}/{name}")
        os.remove(folder + "/config.json")
        with open(folder + "/config.json", "w", encoding="utf-8") as file:
            json.dump(config, file)
        return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def main():
    os.makedirs(FIXTURES + "/rope", exist_ok=True)
    with open(FIXTURES + "/rope/tables.jsonl", "w", encoding="utf-8") as out:
        for table in tables():
            out.write(json.dumps(table) + "\n")
    model = model_with(YARN)
    rows = [logits_at(model, position) for position in POSITIONS]
    whole = model(torch.tensor([[token(p) for p in range(POSITIONS[0] + 1)]])).logits[0, -ROWS:].float()
    assert (whole - rows[0]).abs().max() < 1e-4, "the cache is not the model's"
    plain = logits_at(model_with({"rope_type": "default"}), POSITIONS[-1])
    print(f"at {POSITIONS[-1]}: YaRN moves logits by up to {(plain - rows[-1]).abs().max():.2f}")
    with open(FIXTURES + "/rope/logits.f32", "wb") as out:
        out.write(torch.cat(rows).numpy().astype("<f4").tobytes())


if __name__ == "__main__":
    logging.disable_progress_bar()
    main()
