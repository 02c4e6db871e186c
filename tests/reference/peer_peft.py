#!/usr/bin/env python3
"""100 steps of LoRA beside PEFT on a GPU: the same model, first adapter, rows, order and schedule, without dropout.
Prints how far our losses are from PEFT's in float32 (the truth), from PEFT's in bf16 with two kinds of attention (sdpa and
eager), and how far those are from the truth and from each other; then loads our adapter into PEFT. By hand, where torch,
transformers, peft and safetensors are:

    python tests/reference/peer_peft.py MODEL.bin TRAIN.bin FOLDER [steps]        FOLDER gets the adapters
"""
import itertools
import json
import math
import statistics
import struct
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from transformers import Qwen3Config, Qwen3ForCausalLM, get_cosine_schedule_with_warmup

model_path, data_path, folder = sys.argv[1:4]
steps = int(sys.argv[4]) if len(sys.argv) > 4 else 100
BATCH, RATE, RANK, ALPHA = 16, 1.5e-4, 32, 64


def dataset_rows(path):  # see dataset.h
    data = open(path, "rb").read()
    rows, tokens = struct.unpack_from("<QQ", data, 32)
    words = struct.unpack_from(f"<{tokens}I", data, 48)
    begin = struct.unpack_from(f"<{rows + 1}Q", data, 48 + 4 * (tokens + tokens % 2))
    return [[w & 0x7FFFFFFF for w in words[a:b]] for a, b in zip(begin, begin[1:])], [[w >> 31 for w in words[a:b]] for a, b in zip(begin, begin[1:])]


def base(dtype=torch.bfloat16, attention="sdpa"):
    with safe_open(model_path, "pt", device="cuda") as file:
        config = Qwen3Config(**json.loads(file.metadata()["config"]), attn_implementation=attention)
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config).to(dtype)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    return model


def loss_of(model, ids, trained, halves=True):
    longest = max(map(len, ids))
    tokens = torch.tensor([i + [0] * (longest - len(i)) for i in ids], device="cuda")
    mask = torch.tensor([[1] * len(i) + [0] * (longest - len(i)) for i in ids], device="cuda")
    labels = torch.tensor([[i if t else -100 for i, t in zip(a, b)] + [-100] * (longest - len(a)) for a, b in zip(ids, trained)], device="cuda")
    with torch.autocast("cuda", torch.bfloat16, enabled=halves):
        logits = model(tokens, attention_mask=mask).logits[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum", ignore_index=-100) / (labels[:, 1:] >= 0).sum()


rows, trained = dataset_rows(data_path)
rows = [(i, t) for i, t in zip(rows, trained) if len(i) <= 512]
epoch = math.ceil(len(rows) / BATCH)
batch = lambda k: rows[k % epoch * BATCH : (k % epoch + 1) * BATCH]


def train(dtype, attention):
    """The losses of PEFT's steps, all from the first adapter."""
    model = PeftModel.from_pretrained(base(dtype, attention), folder + "/first", is_trainable=True)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.01)
    schedule = get_cosine_schedule_with_warmup(optimizer, math.ceil(0.1 * steps), steps)
    losses, fed, start = [], 0, time.perf_counter()
    for k in range(steps):
        some = batch(k)
        loss = loss_of(model, [i for i, _ in some], [t for _, t in some], dtype == torch.bfloat16)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step(), schedule.step(), optimizer.zero_grad()
        losses.append(loss.item())
        fed += sum(len(i) - 1 for i, _ in some)
    print(f"PEFT, {dtype}, {attention}: {fed / (time.perf_counter() - start):.0f} tok/s (padded batches)", flush=True)
    return losses


torch.manual_seed(0)
get_peft_model(base(), LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0, target_modules="all-linear", task_type="CAUSAL_LM")).save_pretrained(folder + "/first")
command = ["./train_lora", model_path, data_path, "-o", folder + "/ours", "--adapter-init", folder + "/first", "--dropout", "0", "--no-shuffle",
           "--steps", str(steps), "--batch", str(BATCH), "--lr", str(RATE), "--overwrite", "-d", "cuda"]
subprocess.run(command, check=True, stderr=subprocess.PIPE)
ours = [json.loads(line)["loss"] for line in open(folder + "/ours/trainer_log.jsonl") if '"loss"' in line]
runs = {"ours": ours, "PEFT bf16 sdpa": train(torch.bfloat16, "sdpa"), "PEFT bf16 eager": train(torch.bfloat16, "eager"),
        "PEFT float32": train(torch.float32, "sdpa")}
for k in [0, 1, 2, 9, 49, steps - 1]:
    if k < steps:
        print(f"step {k + 1}: " + ", ".join(f"{name} {losses[k]:.5f}" for name, losses in runs.items()))
for one, other in itertools.combinations(runs, 2):
    differences = [abs(a - b) for a, b in zip(runs[one], runs[other])]
    print(f"{one} and {other}: losses of {steps} steps differ by {statistics.median(differences):.2e} in the median, {max(differences):.2e} at most")

torch.cuda.empty_cache()
loaded = PeftModel.from_pretrained(base(), folder + "/ours").eval()
with torch.no_grad():
    some = batch(0)
    print(f"our adapter in PEFT: loss {loss_of(loaded, [i for i, _ in some], [t for _, t in some]).item():.5f} on the first batch")
