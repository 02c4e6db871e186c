#!/usr/bin/env python3
"""train_lora against PEFT and transformers on random Qwen3 checkpoints of random shapes (by hand, not in CI; needs torch,
transformers and peft; run from the repo root after `make`).

    python tests/reference/parity_train.py [-n 8] [--seed 1] [--steps 30]

Each checkpoint is trained both ways from the same numbers, in fp32, in the same order of rows; adapters of random rank,
alpha, rslora and targets, every fourth time all parameters (--full). Then
 - every step's loss is compared,
 - the adapter that train_lora wrote is loaded by PEFT: no key missing or left over, the logits those of qwen3 --adapter,
   and its greedy text word for word,
 - the folder that --merge wrote is loaded by transformers, with the base's tokenizer: the logits those of PEFT's own merge.
Prints a table; exit status 1 if any row fails.
"""
import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import warnings

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoTokenizer
from transformers.utils import logging

import make_fixtures as fixtures
import make_train_fixtures as training
import parity

MODULES = [m + "_proj" for m in "q k v o gate up down".split()]
LOSS, LOGIT = 1e-4, 5e-4  # the median difference of losses, the largest of logits


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)[:200]}: status {done.returncode}: {done.stderr.strip()}")
    return done.stderr


def train_all(model, rows, steps, batch, rate):
    """As training.train_peft, where norms do not decay, as in the Trainer."""
    groups = [{"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.01},
              {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0}]
    original = torch.optim.AdamW
    torch.optim.AdamW = lambda parameters, lr, weight_decay: original(groups, lr=lr)
    try:
        return training.train_peft(model, rows, steps, batch, rate)
    finally:
        torch.optim.AdamW = original


def our_logits(scratch, prompt, *model):
    parity.ours("./qwen3", model[0], prompt, *model[1:], "--logits", scratch + "/logits")
    return torch.from_numpy(np.fromfile(scratch + "/logits", "<f4").reshape(len(prompt), -1))


def one(i, rng, args, scratch, packed, rows):
    f = dict(parity.random_shape(rng, 0), V=1024, D=rng.choice([16, 48, 64, 128]), L=rng.randint(1, 3), end=[1002])
    folder, out = f"{scratch}/{i}", f"{scratch}/{i}.out"
    fixtures.save(folder, f, fixtures.weights(f))
    shutil.copy(fixtures.ROOT + "/tiny/tokenizer.json", folder)
    full = i % 4 == 3
    batch, accum = rng.choice([(8, 1), (3, 2), (1, 8), (16, 1)])
    rate = 1e-3
    command = ["./train_lora", folder, packed, "-o", out, "--no-shuffle", "--steps", str(args.steps), "--lr", str(rate),
               "--batch", str(batch), "--accum", str(accum), "-z", fixtures.ROOT + "/tiny/tokenizer.bin"]
    model = fixtures.load(folder, torch.float32, "eager")
    if full:
        text = "all parameters"
        run(*command, "--full")
        losses, _ = train_all(model.train(), rows, args.steps, batch * accum, rate)
    else:
        targets = MODULES if rng.random() < 0.5 else rng.sample(MODULES, rng.randint(1, 6))
        rank = rng.choice([1, 2, 4, 7, 16])
        config = LoraConfig(r=rank, lora_alpha=rng.choice([rank, 2 * rank, 5]), use_rslora=rng.random() < 0.3, lora_dropout=0.0, target_modules=targets, task_type="CAUSAL_LM")
        text = f"rank {rank}, {len(targets)} modules{', rslora' if config.use_rslora else ''}"
        peft = get_peft_model(model, config)
        peft.save_pretrained(f"{scratch}/{i}.init")
        run(*command, "--dropout", "0", "--adapter-init", f"{scratch}/{i}.init", "--merge", f"{scratch}/{i}.merged")
        losses, _ = training.train_peft(peft.train(), rows, args.steps, batch * accum, rate)
    with open(out + "/trainer_log.jsonl", encoding="utf-8") as log:
        ours = [json.loads(line)["loss"] for line in log]
    off = [abs(a - b) for a, b in zip(ours, losses)]
    passed = len(ours) == args.steps and statistics.median(off) < LOSS
    text += f": loss {losses[0]:.3f} -> {losses[-1]:.3f}, median |diff| {statistics.median(off):.1e}, max {max(off):.1e}"
    prompt = [rng.randrange(1000) for _ in range(20)]
    if full:
        difference = (our_logits(scratch, prompt, out + "/model.bin") - fixtures.logits_of(model.eval(), [prompt])).abs().max().item()
        return passed and difference < 50 * LOGIT, f"{text}; logits of the two models {difference:.1e}"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = PeftModel.from_pretrained(fixtures.load(folder, torch.float32, "eager"), out).eval()
    strange = [str(w.message) for w in caught if "key" in str(w.message)]
    difference = (our_logits(scratch, prompt, folder, "--adapter", out) - fixtures.logits_of(loaded, [prompt])).abs().max().item()
    expected, lead = fixtures.greedy(loaded, prompt)
    answer = subprocess.run(["./qwen3", folder, "--adapter", out, "--ids", ",".join(map(str, prompt)), "-t", "0", "-n", str(fixtures.GREEDY), "--json"],
                            capture_output=True, text=True, check=True).stdout
    ids = json.loads(answer)["ids"]
    same = next((n for n, (a, b) in enumerate(zip(expected, ids)) if a != b), len(ids))
    ends = 1002 in expected and expected.index(1002) == len(ids)
    merged = fixtures.load(f"{scratch}/{i}.merged", torch.float32, "eager")
    before, after = (AutoTokenizer.from_pretrained(path)("What is a warp?").input_ids for path in (folder, f"{scratch}/{i}.merged"))
    merge_difference = (fixtures.logits_of(merged, [prompt]) - fixtures.logits_of(loaded.merge_and_unload(), [prompt])).abs().max().item()
    passed = passed and before == after and not strange and difference < LOGIT and merge_difference < LOGIT and (same == fixtures.GREEDY or ends or lead < parity.LEAD)
    return passed, f"{text}; PEFT loads it: {strange or 'no strange key'}, logits {difference:.1e}, greedy {same}/{fixtures.GREEDY}; merged {merge_difference:.1e}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="train_lora against PEFT on random checkpoints")
    parser.add_argument("-n", type=int, default=8, help="how many random shapes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    rng, failures = random.Random(args.seed), 0
    with tempfile.TemporaryDirectory(prefix="parity.") as scratch:
        run("./datagen", "pack", "-z", fixtures.ROOT + "/tiny/tokenizer.bin", training.ROOT + "/rows.jsonl", scratch + "/rows.bin", "--info", "none")
        for i in range(args.n):
            try:
                passed, text = one(i, rng, args, scratch, scratch + "/rows.bin", training.dataset_rows(scratch + "/rows.bin"))
            except RuntimeError as error:
                passed, text = False, str(error)
            failures += not passed
            print(f"{i:3} {text}: {'ok' if passed else 'FAILED'}", flush=True)
    print("all passed" if not failures else f"{failures} FAILED")
    sys.exit(1 if failures else 0)
