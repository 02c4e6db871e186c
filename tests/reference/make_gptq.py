"""GPTQ in NumPy, written from the paper (Frantar et al., 2022, Algorithm 1), column by column in float64. Run by hand:

    python3 tests/reference/make_gptq.py > tests/fixtures/quantized/gptq.json

It needs NumPy. The fixture has the layer's error |X (W - Q)^T|^2 / |X W^T|^2 for each format and group, to the nearest and
by GPTQ, of matrices that tests/unit/test_quantized.cpp draws in the same way: integers of a linear congruential generator,
sums of them in double.
"""
import json

import numpy as np

ROWS, IN, TOKENS = 130, 256, 600
DEAD = 77  # a column that no token has


class Draws:
    def __init__(self, state):
        self.state = state

    def __call__(self, n):  # uniform in -0.5 .. 0.5
        out = np.empty(n)
        for i in range(n):
            self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
            out[i] = (self.state >> 33) / 2**31 - 0.5
        return out


def inputs():
    w = (Draws(1)(ROWS * IN) + Draws(2)(ROWS * IN) ** 3 * 8).reshape(ROWS, IN) * 0.1
    noise = Draws(3)(TOKENS * IN).reshape(TOKENS, IN)
    x = np.zeros((TOKENS, IN))
    for k in range(IN):  # neighbours go together, and every 16th column is ten times as large
        x[:, k] = noise[:, k] + (0.75 * x[:, k - 1] if k else 0)
    x[:, ::16] *= 10
    x[:, DEAD] = 0
    return w.astype(np.float32).astype(float), x.astype(np.float32).astype(float)


def e4m3(x):
    size = np.abs(x)
    exponent = np.maximum(np.floor(np.log2(np.maximum(size, 1e-300))), -6)
    step = 2.0 ** (exponent - 3)
    return np.sign(x) * np.minimum(np.round(size / step) * step, 448)


def int4_grid(w):  # of one group: (scale, zero)
    low, high = min(w.min(), 0), max(w.max(), 0)
    best = None
    for c in range(8):
        keep = 1 - 0.05 * c
        s = max(float(np.float16((high - low) * keep / 15)), 2.0**-24)
        z = np.clip(np.round(-low * keep / s), 0, 15)
        lost = ((w - (np.clip(np.round(w / s) + z, 0, 15) - z) * s) ** 2).sum()
        if best is None or lost < best[0]:
            best = lost, s, z
    return best[1:]


def quantise(w, fmt, group, hinv):
    """hinv: the upper Cholesky factor of the inverse of H, or None."""
    w, q = w.copy(), np.zeros_like(w)
    for k in range(IN):
        if k % group == 0:
            block = w[:, k:k + group]
            if fmt == "int4":
                grids = [int4_grid(row) for row in block]
                s, z = np.array([g[0] for g in grids]), np.array([g[1] for g in grids])
            else:
                s = np.repeat([np.abs(block[r:r + 128]).max() / 448 for r in range(0, ROWS, 128)], 128)[:ROWS]
        if fmt == "int4":
            q[:, k] = (np.clip(np.round(w[:, k] / s) + z, 0, 15) - z) * s
        else:
            q[:, k] = e4m3(w[:, k] / s) * s
        if hinv is not None:
            off = (w[:, k] - q[:, k]) / hinv[k, k]
            w[:, k + 1:] -= np.outer(off, hinv[k, k + 1:])
    return q


def main():
    w, x = inputs()
    h = 2 * x.T @ x
    dead = np.diag(h) == 0
    mean = np.diag(h).mean()
    h[dead, dead] = mean
    h += 0.01 * mean * np.eye(IN)
    hinv = np.linalg.cholesky(np.linalg.inv(h)).T
    live = w.copy()
    live[:, dead] = 0
    error = lambda q: ((x @ (w - q).T) ** 2).sum() / ((x @ w.T) ** 2).sum()
    rows = []
    for fmt, group in (("int4", 32), ("int4", 64), ("int4", 128), ("fp8", 128)):
        nearest, gptq = error(quantise(w, fmt, group, None)), error(quantise(live, fmt, group, hinv))
        rows.append({"format": fmt, "group": group, "nearest": nearest, "gptq": gptq})
    print(json.dumps({"w": float(w.sum()), "x": float(np.abs(x).sum()), "rows": rows}, indent=1))


main()
