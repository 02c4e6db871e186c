#!/usr/bin/env python3
"""Writes a model.bin with every second layer of another, and its last: a student whose teacher is the whole model (docs/training.md).

    python3 tests/reference/half_model.py data/tiny/model.bin half.bin
"""
import json
import re
import struct
import sys


def main(source, target):
    with open(source, "rb") as file:
        (n,) = struct.unpack("<Q", file.read(8))
        head, body = json.loads(file.read(n)), file.read()
    metadata = head.pop("__metadata__")
    config = json.loads(metadata["config"])
    layers = config["num_hidden_layers"]
    kept = [*range(0, layers - 2, 2), layers - 1]
    metadata["config"] = json.dumps(dict(config, num_hidden_layers=len(kept)))
    out, parts, size = {"__metadata__": metadata}, [], 0
    for name, t in sorted(head.items(), key=lambda item: item[1]["data_offsets"]):
        layer = re.match(r"model\.layers\.(\d+)\.(.*)", name)
        if layer and int(layer[1]) not in kept:
            continue
        begin, end = t["data_offsets"]
        parts.append(body[begin:end])
        out[f"model.layers.{kept.index(int(layer[1]))}.{layer[2]}" if layer else name] = dict(t, data_offsets=[size, size + end - begin])
        size += end - begin
    text = json.dumps(out).encode()
    text += b" " * (-len(text) % 8)
    with open(target, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(parts))


if __name__ == "__main__":
    main(*sys.argv[1:])
