#!/usr/bin/env python3
"""The course's Triton tasks, checked against PyTorch in float64 and timed beside PyTorch's own kernels (README.md).

    python3 lab/triton/run.py                    a table: time, rate, share of the ceiling and of PyTorch's, error
    python3 lab/triton/run.py softmax matmul     some of them
    python3 lab/triton/run.py --check            small odd sizes, right or wrong, no time
    TRITON_INTERPRET=1 python3 lab/triton/run.py --check      the same without a GPU, by Triton's interpreter

The ceilings are measured in the same run: a copy of 1 GB, and PyTorch's product of 8,192 x 8,192 x 8,192 in bf16. Ends
with 1 if a task is wrong.
"""
import argparse
import os
import sys

try:
    import torch
    import triton
except ImportError as missing:
    sys.exit(f"{missing.name} is not installed here; lab/triton needs torch and triton: pip install torch")
import kernels

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
NARROW = torch.float16 if INTERPRETED else torch.bfloat16  # (the interpreter multiplies the bits of bf16 as integers)


def numbers(*shape, dtype=torch.float32, seed=1):
    made = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return made.to(dtype).to(DEVICE)


class Task:
    """ours() and library() compute the same; truth() is the definition in float64. Counts are of the task at least."""

    def __init__(self, ours, library, truth, tolerance, bytes=0, flops=0):
        self.ours, self.library, self.truth, self.tolerance = ours, library, truth, tolerance
        self.bytes, self.flops = bytes, flops

    def error(self, run):
        return (run().double() - self.truth()).abs().max().item()


def add(rows, columns):
    x, y = numbers(rows * columns), numbers(rows * columns, seed=2)
    return Task(lambda: kernels.add(x, y), lambda: x + y, lambda: x.double() + y.double(), 2**-23, 12 * x.numel())


def softmax(rows, columns):
    x = numbers(rows, columns) * 8
    return Task(lambda: kernels.softmax(x), lambda: torch.softmax(x, 1), lambda: torch.softmax(x.double(), 1), 1e-6,
                8 * x.numel())


def softmax_backward(rows, columns):
    y, dy = torch.softmax(numbers(rows, columns) * 8, 1), numbers(rows, columns, seed=2)

    def truth():
        v, d = y.double(), dy.double()
        return v * (d - (v * d).sum(1, keepdim=True))

    return Task(lambda: kernels.softmax_backward(y, dy),
                lambda: torch._softmax_backward_data(dy, y, 1, torch.float32), truth, 1e-6, 12 * y.numel())


def rmsnorm(rows, columns):
    x, gain = numbers(rows, columns, dtype=torch.bfloat16), numbers(columns, dtype=torch.bfloat16, seed=2)

    def truth():
        v = x.double()
        return v / (v.square().mean(1, keepdim=True) + 1e-6).sqrt() * gain.double()

    return Task(lambda: kernels.rmsnorm(x, gain), lambda: torch.nn.functional.rms_norm(x, (columns,), gain, 1e-6),
                truth, 2**-7, 4 * x.numel())  # (|y| < 2: a unit in its last place; the interpreter cuts off)


def matmul(M, N, K):
    a, b = numbers(M, K, dtype=NARROW), numbers(N, K, dtype=NARROW, seed=2)
    return Task(lambda: kernels.matmul(a, b), lambda: a @ b.T, lambda: a.double() @ b.double().T,
                max(K, 256)**0.5 * 2**-7, flops=2 * M * N * K)  # (|C| < 4 sqrt(K / 9) or so, rounded to 8 bits)


def attention(T, H, K):
    q = numbers(T, H, 128, dtype=NARROW) * 4
    k, v = (numbers(T, K, 128, dtype=NARROW, seed=seed) for seed in (2, 3))

    def torch_way(dtype):
        heads = [x.to(dtype).transpose(0, 1)[None] for x in (q, k, v)]
        out = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=H > K)
        return out[0].transpose(0, 1)

    def truth():  # (a head at a time: T x T numbers in float64)
        seen, out = torch.ones(T, T, device=DEVICE, dtype=torch.bool).tril(), []
        for h in range(H):
            s = q[:, h].double() @ k[:, h * K // H].double().T / 128**0.5
            out.append(torch.softmax(s.masked_fill(~seen, float("-inf")), 1) @ v[:, h * K // H].double())
        return torch.stack(out, 1)

    return Task(lambda: kernels.attention(q, k, v), lambda: torch_way(NARROW), truth, 1 / 170,
                flops=2 * T * T * 128 * H)


#        task              what it is                                      on a GPU               small and odd
TASKS = {
    "add": (add, "x + y, float32", (8192, 8192), (37, 45)),
    "softmax": (softmax, "of rows, float32", (16384, 4096), (5, 77)),
    "softmax backward": (softmax_backward, "dx from y and dy", (16384, 4096), (5, 77)),
    "rmsnorm": (rmsnorm, "of rows, bf16", (16384, 4096), (5, 77)),
    "matmul": (matmul, "A B^T, bf16", (4096, 4096, 4096), (130, 67, 90)),
    "attention": (attention, "causal, bf16", (4096, 16, 8), (150, 4, 2)),
}


def seconds(run):
    """Median time of a call inside a CUDA graph, as the laboratories time theirs."""
    return triton.testing.do_bench_cudagraph(run, return_mode="median") / 1e3


def ceilings():
    big = torch.empty(1 << 28, device=DEVICE)
    other, a = torch.empty_like(big), numbers(8192, 8192, dtype=torch.bfloat16)
    return 8 * big.numel() / seconds(lambda: other.copy_(big)), 2 * 8192**3 / seconds(lambda: a @ a.T)


def main():
    parser = argparse.ArgumentParser(description="Triton beside PyTorch: lab/triton/README.md")
    parser.add_argument("tasks", nargs="*", help=", ".join(TASKS))
    parser.add_argument("--check", action="store_true", help="small odd sizes, no time")
    options = parser.parse_args()
    for name in options.tasks:
        if name not in TASKS:
            sys.exit(f"no task {name}: there are {', '.join(TASKS)}")
    if INTERPRETED and not options.check:
        sys.exit("Triton's interpreter has no times: --check says right or wrong")
    if not INTERPRETED and not torch.cuda.is_available():
        sys.exit("no GPU here; without one: TRITON_INTERPRET=1 python3 lab/triton/run.py --check")
    if not options.check:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        copy, multiply = ceilings()
        print(f"triton: {torch.cuda.get_device_name()}, Triton {triton.__version__}, PyTorch {torch.__version__}\n"
              f"ceilings, measured now: copy {copy / 1e9:.0f} GB/s; bf16 by PyTorch {multiply / 1e12:.0f} TFLOP/s\n"
              f"{'':2}  {'step':22} {'adds':52} {'time':>10} {'rate':>14} {'ceiling':>8} {'library':>8}  error")
    wrong = False
    for i, (name, (make, adds, size, small)) in enumerate(TASKS.items(), 1):
        if options.tasks and name not in options.tasks:
            continue
        task = make(*(small if options.check else size))
        error = task.error(task.ours)
        right = error <= task.tolerance
        wrong |= not right
        if options.check or not right:
            print(f"{i:2}  {name:22} {'right' if right else 'WRONG'}: error {error:.2g}")
            continue
        if (off := task.error(task.library)) > task.tolerance:
            print(f"PyTorch's {name} differs from the definition by {off:.2g}", file=sys.stderr)
        time, library = seconds(task.ours), seconds(task.library)
        memory = task.bytes > 0
        rate = (task.bytes or task.flops) / time
        print(f"{i:2}  {name:22} {adds:52} {time * 1e6:7.1f} us {rate / (1e9 if memory else 1e12):7.1f} "
              f"{'GB/s  ' if memory else 'TFLOPS'} {100 * rate / (copy if memory else multiply):7.1f}% "
              f"{100 * library / time:7.1f}%  {error:.1e}")
    sys.exit(wrong)


if __name__ == "__main__":
    main()
