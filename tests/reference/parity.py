#!/usr/bin/env python3
"""qwen3 against transformers on random Qwen3 checkpoints of shapes that no test uses (by hand, not in CI;
needs torch and transformers; run from the repo root after `make`).

    python tests/reference/parity.py [-n 20] [--seed 1] [--binary ./qwen3]     random shapes, every dtype
    python tests/reference/parity.py --shape 0.6B                              a real shape, made by qwen3 --synthesize

What must hold:
  F32        every logit within 2e-4 of transformers in fp32 (eager attention), and the same 64 greedy tokens
  BF16, F16  mean KL(truth || ours) <= mean KL(truth || transformers in bf16), the better of its eager and
             sdpa attention; truth is fp32 arithmetic on the same weights (F16: rounded to bf16, as the
             runtime does)
Half of the checkpoints go through export.py and model.bin, the others are read as Hugging Face folders.
Prints a table; exit status 1 if any row fails.
"""
import argparse
import json
import os
import random
import subprocess
import sys
import tempfile

import numpy as np
import torch
from transformers.utils import logging

import make_fixtures as fixtures

TOLERANCE = 2e-4  # on an fp32 logit
LEAD = 2e-3       # a greedy step of the reference must lead by this much, else another prompt is taken
IDS = {151936: 151669}  # rows of the real vocabulary -> how many ids exist; the runtime masks the others


def random_shape(rng, i):
    """The i-th configuration; dtypes take turns, so that each is tested in any run of six."""
    heads = rng.choice([1, 2, 3, 4])
    f = dict(seed=rng.randrange(1 << 30), V=rng.randint(40, 3000), C=rng.randint(8, 200), L=rng.randint(1, 5),
             K=heads, H=heads * rng.choice([1, 2, 3, 4, 5]), F=rng.randint(8, 400),
             D=rng.choice([2, 32, 48, 64, 64, 80, 96, 128, 128]), tied=rng.random() < 0.5,
             theta=rng.choice([1e4, 5e4, 1e6, 5e6]), eps=rng.choice([1e-6, 1e-6, 1e-5, 1e-3]),
             style=rng.choice([4, 5]), shards=rng.choice([1, 1, 2, 5]),
             dtype=["float32", "bfloat16", "float32", "bfloat16", "float32", "float16"][i % 6])
    return dict(f, end=[f["V"] - 1])


def ours(binary, model, ids, *options):
    """Standard output of one run."""
    command = [binary, model, "--ids", ",".join(map(str, ids)), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)[:200]}: status {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def our_logits(binary, model, prompts, V, scratch):
    """(total tokens, V), every position of every prompt."""
    rows = []
    for ids in prompts:
        ours(binary, model, ids, "--logits", scratch + "/logits")
        rows.append(np.fromfile(scratch + "/logits", "<f4").reshape(len(ids), V))
    return torch.from_numpy(np.concatenate(rows))


def truth_model(folder):
    """fp32 arithmetic on the weights as the runtime holds them."""
    model = fixtures.load(folder, torch.float32, "eager")
    with open(folder + "/config.json", encoding="utf-8") as file:
        config = json.load(file)
    if config.get("dtype", config.get("torch_dtype")) != "float32":
        for p in model.parameters():
            p.data = p.data.bfloat16().float()
    return model


def compare(binary, folder, model, f, prompts, scratch):
    """(passed, a text for the table)"""
    truth = truth_model(folder)
    expected = fixtures.logits_of(truth, prompts)
    got = our_logits(binary, model, prompts, f["V"], scratch)
    if not torch.isfinite(got).all():
        return False, "not finite"
    if f["dtype"] == "float32":
        difference = (got - expected).abs().max().item()
        return difference <= TOLERANCE, f"max |diff| {difference:.1e}, limit {TOLERANCE:.0e}"
    del truth  # the real shapes are large
    kl = fixtures.mean_kl(expected, got)
    rivals = (fixtures.load(folder, torch.bfloat16, attention) for attention in ("eager", "sdpa"))
    eager, sdpa = (fixtures.mean_kl(expected, fixtures.logits_of(rival, prompts)) for rival in rivals)
    return kl <= min(eager, sdpa), f"KL {kl:.2e}, transformers eager {eager:.2e}, sdpa {sdpa:.2e}"


def greedy_equal(binary, folder, model, f, rng):
    """(passed, a text): 64 greedy tokens after a prompt without near-ties."""
    truth = truth_model(folder)
    exist = IDS.get(f["V"], f["V"])
    for _ in range(50):
        prompt = [rng.randrange(exist) for _ in range(rng.randint(1, 30))]
        expected, lead = fixtures.greedy(truth, prompt)
        if lead > LEAD and f["end"][0] not in expected and max(expected) < exist:
            break
    else:
        return False, "no prompt without near-ties: take another --seed"
    out = json.loads(ours(binary, model, prompt, "-t", "0", "-n", str(fixtures.GREEDY), "--json"))
    same = next((i for i, (a, b) in enumerate(zip(expected, out["ids"])) if a != b), len(out["ids"]))
    return out["ids"] == expected, f"greedy {same}/{fixtures.GREEDY}"


def run(*command):
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


def random_shapes(args, scratch):
    rng, failures = random.Random(args.seed), 0
    for i in range(args.n):
        f = random_shape(rng, i)
        folder = model = f"{scratch}/{i}"
        fixtures.save(folder, f, fixtures.weights(f))
        if i // 2 % 2:
            model = folder + ".bin"
            keep = ["--keep-dtype"] if f["dtype"] == "float32" or rng.random() < 0.5 else []
            run("python3", "-I", "-S", "export.py", folder, model, *keep)
        prompts = [[rng.randrange(f["V"]) for _ in range(n)] for n in (1, 2, 17, rng.randint(18, 150), 150)]
        try:
            passed, text = compare(args.binary, folder, model, f, prompts, scratch)
            if f["dtype"] == "float32":
                same, more = greedy_equal(args.binary, folder, model, f, rng)
                passed, text = passed and same, f"{text}, {more}"
        except RuntimeError as error:
            passed, text = False, str(error)
        failures += not passed
        head, source = "tied" if f["tied"] else "own ", "folder   " if model == folder else "model.bin"
        print(f"{i:3} {f['dtype']:8} V {f['V']:<4} C {f['C']:<3} L {f['L']} H/K {f['H']:>2}/{f['K']} "
              f"D {f['D']:<3} F {f['F']:<3} {head} theta {f['theta']:.0e} eps {f['eps']:.0e} {source} "
              f"{text}: {'ok' if passed else 'FAILED'}", flush=True)
    return failures


def real_shape(args, scratch):
    model, folder = scratch + "/m.bin", scratch + "/hf"
    run(args.binary, "--synthesize", args.shape, model, "-s", str(args.seed))
    run("python3", "-I", "-S", "export.py", "--to-hf", model, folder)
    with open(folder + "/config.json", encoding="utf-8") as file:
        config = json.load(file)
    dtype = config.get("dtype", config.get("torch_dtype"))
    f = dict(V=config["vocab_size"], dtype=dtype, end=[config["eos_token_id"]])
    rng = random.Random(args.seed)
    prompts = [[rng.randrange(IDS.get(f["V"], f["V"])) for _ in range(n)] for n in (1, 15, 40)]
    passed, text = compare(args.binary, folder, model, f, prompts, scratch)
    print(f"{args.shape} {dtype}: {text}: {'ok' if passed else 'FAILED'}")
    return not passed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="qwen3 against transformers on random checkpoints")
    parser.add_argument("-n", type=int, default=20, help="how many random shapes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--shape", help="a real shape instead: 0.6B, 1.7B, ..., or a config.json")
    parser.add_argument("--binary", default="./qwen3")
    args = parser.parse_args()
    args.binary = os.path.abspath(args.binary)
    torch.set_num_threads(os.cpu_count() if args.shape else 1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="parity.") as scratch:
        failures = real_shape(args, scratch) if args.shape else random_shapes(args, scratch)
    print("all passed" if not failures else f"{failures} FAILED")
    sys.exit(1 if failures else 0)
