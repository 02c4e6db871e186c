#!/usr/bin/env python3
"""Reference values for the training tests, from PyTorch, transformers and PEFT (run from the repo root after `make`).
The result is committed; tests/fixtures/README.md describes every file.

    python tests/make_train_fixtures.py [ops] [gradients] [peft]        all of them, or only the named ones

ops        every op's gradients by autograd, in double
gradients  two small models, tied and not, and the gradients of all their parameters by the loss of a few rows, in fp32
peft       a first adapter, and the losses of 100 steps from it, with PEFT, AdamW and the Trainer's schedule, in fp32
"""
import json
import math
import os
import struct
import subprocess
import sys
import tempfile

import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import Qwen3ForCausalLM, get_cosine_schedule_with_warmup
from transformers.utils import logging

import make_fixtures as fixtures

ROOT = fixtures.ROOT + "/train"
STEPS, BATCH, RATE = 100, 8, 2e-3
SMALL = dict(V=96, C=24, L=2, H=4, K=2, D=16, F=40, theta=1e4, eps=1e-5, dtype="float32", shards=1, style=5, end=[95])


def dataset_rows(path):
    """[(ids, trained)] of a dataset (see dataset.h)."""
    with open(path, "rb") as file:
        data = file.read()
    rows, tokens = struct.unpack_from("<QQ", data, 32)
    words = struct.unpack_from(f"<{tokens}I", data, 48)
    begin = struct.unpack_from(f"<{rows + 1}Q", data, 48 + 4 * (tokens + tokens % 2))
    return [([w & 0x7FFFFFFF for w in words[a:b]], [w >> 31 for w in words[a:b]]) for a, b in zip(begin, begin[1:])]


def row_loss(model, ids, trained):
    """Sum of the trained tokens' losses."""
    logits = model(torch.tensor([ids])).logits[0, :-1].float()
    labels = torch.tensor([i if t else -100 for i, t in zip(ids, trained)])[1:]
    return F.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)


def train_peft(model, rows, steps, batch, rate):
    """The losses of `steps` steps in the rows' order."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.01)
    schedule = get_cosine_schedule_with_warmup(optimizer, math.ceil(0.1 * steps), steps)
    losses, norms = [], []
    for step in range(steps):
        first = step * batch % len(rows)
        some = rows[first : first + batch]
        count = sum(sum(trained) for _, trained in some)
        total = 0
        for ids, trained in some:
            loss = row_loss(model, ids, trained) / count
            loss.backward()
            total += loss.item()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, 1.0).item())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, norms


def tiny_model(scratch):
    subprocess.run([sys.executable, "-I", "-S", "export.py", "--to-hf", fixtures.ROOT + "/tiny/model.bin", scratch + "/hf"], check=True, capture_output=True)
    return Qwen3ForCausalLM.from_pretrained(scratch + "/hf", dtype=torch.float32, attn_implementation="eager")


def make_peft():
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(["./datagen", "pack", "-z", fixtures.ROOT + "/tiny/tokenizer.bin", ROOT + "/rows.jsonl", scratch + "/rows.bin", "--info", "none"],
                       check=True, capture_output=True)
        rows = dataset_rows(scratch + "/rows.bin")
        torch.manual_seed(1)
        config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=[m + "_proj" for m in "q k v o gate up down".split()], task_type="CAUSAL_LM")
        model = get_peft_model(tiny_model(scratch), config)
        model.peft_config["default"].base_model_name_or_path = "tiny"
        model.save_pretrained(ROOT + "/adapter")
        os.remove(ROOT + "/adapter/README.md")
        losses, norms = train_peft(model.train(), rows, STEPS, BATCH, RATE)
        model.eval()
        with torch.no_grad():
            count = sum(sum(trained) for _, trained in rows)
            final = sum(row_loss(model, *row).item() for row in rows) / count
    fixtures.write_golden(ROOT + "/peft.json", {"steps": STEPS, "batch": BATCH, "lr": RATE, "losses": losses, "norms": norms, "final": final})
    print(f"peft: {len(rows)} rows, loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    os.makedirs(ROOT, exist_ok=True)
    for name in sys.argv[1:] or ["ops", "gradients", "peft"]:
        globals()["make_" + name]()
