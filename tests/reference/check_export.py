#!/usr/bin/env python3
"""export.py against the packages it stands in for (by hand, not in CI; needs torch, transformers and
safetensors; run from the repo root):

    python tests/reference/check_export.py

1. transformers opens what --to-hf writes, and the logits are bit-equal to those of the original checkpoint;
   after rounding to bf16 they are bit-equal to those of the original opened with dtype=bfloat16.
2. Mutated safetensors files: what the reference implementation refuses, export.py refuses too. (It refuses a
   little more: duplicate keys.)
"""
import collections
import os
import random
import struct
import subprocess
import sys
import tempfile

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from transformers.utils import logging

import make_fixtures as fixtures

sys.path.insert(0, os.getcwd())
import export

MUTATIONS = 20000


def run(*arguments):
    subprocess.run(["python3", "-I", "-S", "export.py", *arguments], check=True, stderr=subprocess.DEVNULL)


def round_trips(scratch):
    prompt, failures = [list(range(100, 130))], 0
    for name in fixtures.FIXTURES:
        folder = f"{fixtures.ROOT}/{name}"
        for options, dtype in ((["--keep-dtype"], "auto"), ([], torch.bfloat16)):
            model, back = f"{scratch}/{name}.bin", f"{scratch}/{name}.{len(options)}"
            run(folder, model, *options)
            run("--to-hf", model, back)
            original = fixtures.load(folder, dtype, "sdpa")
            again = fixtures.load(back, "auto", "sdpa")
            same = (again.dtype == original.dtype and again.generation_config.to_dict() ==
                    original.generation_config.to_dict() and
                    torch.equal(fixtures.logits_of(original, prompt), fixtures.logits_of(again, prompt)))
            failures += not same
            how = " ".join(options) or "to bf16"
            print(f"{name} {how}: {again.dtype}, {'logits bit-equal' if same else 'FAILED'}")
    return failures


def reference_accepts(path):
    try:
        with safe_open(path, "pt") as file:
            for name in file.keys():
                file.get_slice(name).get_shape()
        return True
    except (SafetensorError, OSError, ValueError, TypeError, RuntimeError):
        return False


def export_accepts(path):
    try:
        export.read_header(path)
        return True
    except export.Fault:
        return False


def mutate(rng, good):
    """A few edits of the header: bytes changed, removed, doubled, pieces swapped, numbers moved."""
    size = struct.unpack("<Q", good[:8])[0]
    header, data = bytearray(good[8 : 8 + size]), good[8 + size:]
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        at = rng.randrange(len(header))
        kind = rng.randrange(6)
        if kind == 0:
            header[at] = rng.randrange(256)
        elif kind == 1:
            del header[at : at + rng.randint(1, 4)]
        elif kind == 2:
            header[at:at] = rng.choice([b"0", b"1", b"-", b".", b"e1", b",", b"[", b"]", b"{", b"}", b'"',
                                        b" ", b"null", b"\xff", b"\\ud800", b"18446744073709551616"])
        elif kind == 3:
            digits = [i for i, c in enumerate(header) if 48 <= c <= 57]
            if digits:
                header[rng.choice(digits)] = 48 + rng.randrange(10)
        elif kind == 4:
            data = data[: rng.randrange(len(data) + 1)] if rng.random() < 0.5 else data + b"\0"
        else:
            other = rng.randrange(len(header))
            header[at], header[other] = header[other], header[at]
    size = len(header)
    if rng.random() < 0.05:
        size = rng.choice([0, 1, size - 1, size + 1, 100_000_001, 1 << 63])
    return struct.pack("<Q", size) + bytes(header) + data


def refusals(scratch):
    rng, path = random.Random(1), scratch + "/x.safetensors"
    tensors = {"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16), "c": torch.zeros(0)}
    good = save(tensors, {"k": "v"})
    counts, laxer = collections.Counter(), []
    for _ in range(MUTATIONS):
        bad = mutate(rng, good)
        with open(path, "wb") as file:
            file.write(bad)
        verdict = reference_accepts(path), export_accepts(path)
        counts[verdict] += 1
        if verdict == (False, True):
            laxer.append(bad)
    print(f"{MUTATIONS} mutated files: both accept {counts[True, True]}, both refuse {counts[False, False]}, "
          f"only export.py refuses {counts[True, False]}, only the reference refuses {counts[False, True]}")
    for bad in laxer[:5]:
        print("  accepted by export.py alone:", bad[:300])
    return len(laxer)


if __name__ == "__main__":
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="check_export.") as scratch:
        failures = round_trips(scratch) + refusals(scratch)
    print("all passed" if not failures else f"{failures} FAILED")
    sys.exit(1 if failures else 0)
