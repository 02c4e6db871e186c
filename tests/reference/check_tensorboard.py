#!/usr/bin/env python3
"""Event files of train_lora --tensorboard beside trainer_log.jsonl, read by TensorBoard itself. By hand:

    pip install tensorboard
    python tests/reference/check_tensorboard.py OUT        the folder of a run

Every number of every line must be there under its name, at its step, as float32, and nothing else. Of a run that was
killed and resumed, steps that were computed twice must be there once.
"""
import collections
import json
import math
import sys

import numpy
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

out = sys.argv[1]
expected = collections.defaultdict(dict)
for line in open(out + "/trainer_log.jsonl"):
    row = json.loads(line)
    for name, value in row.items():
        if isinstance(value, str) or name in ("current_steps", "total_steps", "percentage"):
            continue
        tag = "eval/" + name[5:] if name.startswith("eval_") else "train/" + name
        expected[tag][row["current_steps"]] = float(numpy.float32(value))

found = EventAccumulator(out, size_guidance={"scalars": 0}, purge_orphaned_data=True)
found.Reload()
tags = found.Tags()["scalars"]
assert set(tags) == set(expected), (sorted(tags), sorted(expected))
points = 0
for tag in tags:
    ours = {e.step: e.value for e in found.Scalars(tag)}
    assert ours == expected[tag], (tag, ours, expected[tag])
    assert all(math.isfinite(v) for v in ours.values())
    points += len(ours)
print(f"{len(tags)} curves, {points} points, as in trainer_log.jsonl: {', '.join(sorted(tags))}")
