"""The course's tasks in Triton: vector addition, softmax and its gradient, RMSNorm, a matrix product, attention.

Each kernel says which step of the CUDA laboratories it stands beside. A Triton program owns a block of numbers, not
one: its loads, sums and products are of whole tiles, and the compiler shares them out to threads, places them in
registers or shared memory, and orders the copies. So what the laboratories write out by hand (coalescing, swizzles,
fragments, stages, warp specialisation) is not here; what is here is what a program decides: tiles, the order of the
work, and where a number is rounded.
"""
import torch
import triton
import triton.language as tl


# ---- Vector addition: one program, one block of BLOCK numbers. Beside lab/transpose_copy 1 (each number moved once).
@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) + tl.load(y + i, mask=i < n), mask=i < n)


def add(x, y):
    out = torch.empty_like(x)
    add_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, out, x.numel(), BLOCK=1024)
    return out


# ---- Softmax of rows. A program has a whole row as one block, so one read is enough: no online softmax is needed as
# long as a row fits a multiprocessor. Beside lab/reduce_scan 8 and 9.
@triton.jit
def softmax_kernel(x, out, columns, BLOCK: tl.constexpr):
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    v = tl.load(x + row * columns + c, mask=c < columns, other=float("-inf"))
    v = tl.exp(v - tl.max(v, axis=0))
    tl.store(out + row * columns + c, v / tl.sum(v, axis=0), mask=c < columns)


def warps_for(block):
    return min(max(block // 512, 1), 16)


def softmax(x):
    out, block = torch.empty_like(x), triton.next_power_of_2(x.shape[1])
    softmax_kernel[(x.shape[0],)](x, out, x.shape[1], BLOCK=block, num_warps=warps_for(block))
    return out


# dx = y (dy - sum(y dy)): from y, not from x, which is not needed any more.
@triton.jit
def softmax_backward_kernel(y, dy, dx, columns, BLOCK: tl.constexpr):
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    v = tl.load(y + row * columns + c, mask=c < columns, other=0.0)
    d = tl.load(dy + row * columns + c, mask=c < columns, other=0.0)
    tl.store(dx + row * columns + c, v * (d - tl.sum(v * d, axis=0)), mask=c < columns)


def softmax_backward(y, dy):
    dx, block = torch.empty_like(y), triton.next_power_of_2(y.shape[1])
    softmax_backward_kernel[(y.shape[0],)](y, dy, dx, y.shape[1], BLOCK=block, num_warps=warps_for(block))
    return dx


# ---- RMSNorm: y = x / sqrt(mean(x^2) + eps) * gain, bf16 in and out, float32 between. Beside lab/reduce_scan 7.
@triton.jit
def rmsnorm_kernel(x, gain, out, columns, eps, BLOCK: tl.constexpr):
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    v = tl.load(x + row * columns + c, mask=c < columns, other=0.0).to(tl.float32)
    factor = 1 / tl.sqrt(tl.sum(v * v, axis=0) / columns + eps)
    g = tl.load(gain + c, mask=c < columns, other=0.0).to(tl.float32)
    tl.store(out + row * columns + c, (v * factor * g).to(out.dtype.element_ty), mask=c < columns)


def rmsnorm(x, gain, eps=1e-6):
    out, block = torch.empty_like(x), triton.next_power_of_2(x.shape[1])
    rmsnorm_kernel[(x.shape[0],)](x, gain, out, x.shape[1], eps, BLOCK=block, num_warps=warps_for(block))
    return out


# ---- C (M,N) = A (M,K) B (N,K)^T, bf16. Tiles are numbered in bands of BAND rows of tiles, as in lab/matmul 13; the
# stages of copies are `num_stages`, which the compiler makes of the loop. Beside lab/matmul 10 (mma.sync) or, on
# Hopper, 11 (wgmma).
@triton.jit
def matmul_kernel(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BAND: tl.constexpr):
    tile, down, across = tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN)
    band, within = tile // (BAND * across), tile % (BAND * across)
    high = min(BAND, down - band * BAND)
    i = (band * BAND + within % high) * BM + tl.arange(0, BM)
    j = within // high * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    left = a + i[:, None].to(tl.int64) * K + k[None, :]
    right = b + j[None, :].to(tl.int64) * K + k[:, None]
    sums = tl.zeros((BM, BN), dtype=tl.float32)
    for k0 in range(0, K, BK):
        x = tl.load(left + k0, mask=(i[:, None] < M) & (k0 + k[None, :] < K), other=0.0)
        y = tl.load(right + k0, mask=(j[None, :] < N) & (k0 + k[:, None] < K), other=0.0)
        sums = tl.dot(x, y, sums)
    to = c + i[:, None].to(tl.int64) * N + j[None, :]
    tl.store(to, sums.to(c.dtype.element_ty), mask=(i[:, None] < M) & (j[None, :] < N))


def matmul(a, b, BM=128, BN=128, BK=64, num_stages=3, num_warps=8):
    (M, K), N = a.shape, b.shape[0]
    c = torch.empty((M, N), device=a.device, dtype=a.dtype)
    grid = (triton.cdiv(M, BM) * triton.cdiv(N, BN),)
    matmul_kernel[grid](a, b, c, M, N, K, BM=BM, BN=BN, BK=BK, BAND=16, num_stages=num_stages, num_warps=num_warps)
    return c


# ---- Causal attention with grouped heads: q (T,H,128), k and v (T,K,128), bf16. A program has BM tokens of a head, and
# keys pass by, BN at a time: first those that all of its tokens see, then those on the diagonal, with a mask. Beside
# lab/attention 6 (mma.sync) or, on Hopper, 7 (wgmma).
@triton.jit
def attend(q, k, v, top, total, mixed, n, first, last, T, stride, scale, BN: tl.constexpr, D: tl.constexpr,
           MASKED: tl.constexpr):
    d = tl.arange(0, D)
    for m0 in range(first, last, BN):
        m = m0 + tl.arange(0, BN)
        keys = tl.load(k + m[None, :] * stride + d[:, None], mask=m[None, :] < T, other=0.0)
        s = tl.dot(q, keys) * scale
        if MASKED:
            s = tl.where(n[:, None] >= m[None, :], s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, axis=1))
        weight, shrink = tl.exp2(s - higher[:, None]), tl.exp2(top - higher)
        total, top = total * shrink + tl.sum(weight, axis=1), higher
        values = tl.load(v + m[:, None] * stride + d[None, :], mask=m[:, None] < T, other=0.0)
        mixed = tl.dot(weight.to(values.dtype), values, mixed * shrink[:, None])
    return top, total, mixed


@triton.jit
def attention_kernel(q, k, v, out, T, H, G, scale, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr):
    tl.static_assert(BM % BN == 0)
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # later tokens see more keys: long programs first
    h, d = tl.program_id(1), tl.arange(0, D)
    n = block * BM + tl.arange(0, BM)
    stride = H // G * D
    at = (n[:, None].to(tl.int64) * H + h) * D + d[None, :]
    k, v = k + h // G * D, v + h // G * D
    rows = tl.load(q + at, mask=n[:, None] < T, other=0.0)
    top = tl.full((BM,), -1e30, dtype=tl.float32)
    total = tl.zeros((BM,), dtype=tl.float32)
    mixed = tl.zeros((BM, D), dtype=tl.float32)
    top, total, mixed = attend(rows, k, v, top, total, mixed, n, 0, block * BM, T, stride, scale, BN, D, False)
    top, total, mixed = attend(rows, k, v, top, total, mixed, n, block * BM, min(block * BM + BM, T), T, stride, scale,
                               BN, D, True)
    tl.store(out + at, (mixed / total[:, None]).to(out.dtype.element_ty), mask=n[:, None] < T)


def attention(q, k, v, BM=128, BN=64, num_stages=3, num_warps=8):
    (T, H, D), K = q.shape, k.shape[1]
    out = torch.empty_like(q)
    scale = 1.44269504 / D**0.5  # for powers of two
    attention_kernel[(triton.cdiv(T, BM), H)](q, k, v, out, T, H, H // K, scale, BM=BM, BN=BN, D=D,
                                              num_stages=num_stages, num_warps=num_warps)
    return out
