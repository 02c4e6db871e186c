// convolution_stencil.cu: a filter over an image, a stencil in three dimensions, a layer of a convolutional network.
// Each output is a weighted sum of its neighbours, so every input is read many times; the steps differ in where from:
// constant memory, halo tiles, registers along a column, and im2col beside.   (lab/lab.h says how to run it)
//
// --size AxBxC: an image of A x A, a grid of B x B x B, a layer of C x C. "Predicted" is arithmetic for an
// H100 (132 SMs, 3.35 TB/s), unless it says RTX 4090 (1.0 TB/s, 72 MB L2).
#include "lab/lab.h"
#ifndef __CUDACC__
#define cudaMemcpyToSymbol(to, from, bytes) memcpy(to, from, bytes)
#endif

namespace lab::convolution_stencil {

constexpr int R = 2, W = 2 * R + 1; // a filter of W x W
constexpr int T = 32;               // a block's tile of the output: T x T
__constant__ float filt[W * W];

// out[y][x] = sum over j, i of in[y + j - R][x + i - R] filt[j][i], zeros outside. (Deep learning's convolution: the
// filter is not turned round.)
struct Image : Problem {
    int w, h;
    std::vector<float> pixels, weights, want;
    Array<float> in, filter, out;
    Image(int w, int h)
        : w(w), h(h), pixels(random_numbers((size_t)w * h, 1)), weights(random_numbers(W * W, 2)), want(pixels.size()),
          in(pixels), filter(weights), out(pixels.size()) {
        bytes = 8. * (double)pixels.size(); // each pixel is read once and written once
        GPU_CHECK(cudaMemcpyToSymbol(filt, weights.data(), sizeof filt));
#pragma omp parallel for
        for (int y = 0; y < h; y++)
            for (int x = 0; x < w; x++)
                for (int v = std::max(y - R, 0); v <= std::min(y + R, h - 1); v++)
                    for (int u = std::max(x - R, 0); u <= std::min(x + R, w - 1); u++)
                        want[(size_t)y * w + x] += pixels[(size_t)v * w + u] * weights[(v - y + R) * W + u - x + R];
    }
    explicit Image(Shape s) : Image(s.x, s.x) {}
    void spoil() override { out.spoil(); }
    double error() override { return largest_difference(out.get(), want); }
};

// ---- 1 conv2d_global. A thread an output, the filter in global memory. A warp's pixels are neighbours (coalesced),
// and nearly all of them are in the L1 cache, since 25 outputs share each. The coefficients are one address for the
// whole warp, but each is a load all the same: 50 loads for 25 multiply-adds. Predicted: memory's floor is 8 B a pixel,
// 0.16 ms for 8,192 x 8,192 (RTX 4090: 0.54 ms). But 67.1M x 50 / 32 loads of a warp, one a cycle and SM, are 0.79M
// cycles, 0.45 ms at 1.755 GHz: the L1 cache bounds, not the memory.
__global__ void conv2d_global(const float* in, const float* filt, float* out, int w, int h) {
    int x = blockIdx.x * blockDim.x + threadIdx.x;
    int y = blockIdx.y * blockDim.y + threadIdx.y;
    if (x >= w || y >= h) return;
    float acc = 0;
    for (int j = 0; j < W; j++)
        for (int i = 0; i < W; i++) {
            int u = x + i - R, v = y + j - R;
            if (u >= 0 && u < w && v >= 0 && v < h) acc += in[(size_t)v * w + u] * filt[j * W + i];
        }
    out[(size_t)y * w + x] = acc;
}

// ---- 2 conv2d_const. Bound before: the L1 cache's loads, half of them for the filter. Only the first line differs:
// filt is now the array in constant memory, whose cache gives one address to all 32 lanes and leaves the L1 cache
// alone. The machine code for sm_90a has 25 LDG a thread instead of 50, and 25 LDC; in steps 3 and 4, where no `if`
// guards the sum, ULDC instead: into a register of the whole warp. Predicted: between half of step 1's time and all of
// it, since the bounds of the image cost instructions too.
__global__ void conv2d_const(const float* in, float* out, int w, int h) {
    int x = blockIdx.x * blockDim.x + threadIdx.x;
    int y = blockIdx.y * blockDim.y + threadIdx.y;
    if (x >= w || y >= h) return;
    float acc = 0;
    for (int j = 0; j < W; j++)
        for (int i = 0; i < W; i++) {
            int u = x + i - R, v = y + j - R;
            if (u >= 0 && u < w && v >= 0 && v < h) acc += in[(size_t)v * w + u] * filt[j * W + i];
        }
    out[(size_t)y * w + x] = acc;
}

// ---- 3 conv2d_tiled. Bound before: 25 loads from the L1 cache. Here the block copies its tile and a halo of R into
// shared memory: the loads from global memory fall to (36 / 32)^2 = 1.27 an output. But shared memory and the L1 cache
// are one memory with one port: 25 reads stay 25 reads, and the copy, its division by 36 and a barrier come on top.
// Predicted: no gain, perhaps a loss. A tile pays only where it lowers what bounds.
__global__ void conv2d_tiled(const float* in, float* out, int w, int h) {
    __shared__ float s[T + 2 * R][T + 2 * R];
    int x0 = blockIdx.x * T - R, y0 = blockIdx.y * T - R;
    // exercise convolution_stencil-3: the block's threads fill s[][], the tile and its halo of R on each side; zeros
    // outside of the image.
    // There are more numbers than threads: each thread takes several, T * T apart.
    for (int k = threadIdx.y * T + threadIdx.x; k < (T + 2 * R) * (T + 2 * R); k += T * T) {
        int j = k / (T + 2 * R), i = k % (T + 2 * R), u = x0 + i, v = y0 + j;
        s[j][i] = u >= 0 && u < w && v >= 0 && v < h ? in[(size_t)v * w + u] : 0.0f;
    }
    // end of exercise
    __syncthreads();
    int x = blockIdx.x * T + threadIdx.x, y = blockIdx.y * T + threadIdx.y;
    if (x >= w || y >= h) return;
    float acc = 0;
    for (int j = 0; j < W; j++)
        for (int i = 0; i < W; i++) acc += s[threadIdx.y + j][threadIdx.x + i] * filt[j * W + i];
    out[(size_t)y * w + x] = acc;
}

// ---- 4 conv2d_column. Bound before: 25 reads an output, from whichever memory. A thread takes ROWS outputs of a
// column: a pixel once in a register serves up to five of them. With 8 rows the reads fall to 5 x (8 + 4) / 8 = 7.5 an
// output, straight from the L1 cache, without a barrier. Predicted: 67.1M x 7.5 / 32 loads take 0.07 ms, 1.68G
// multiply-adds on 132 x 128 lanes 0.06 ms: memory bounds at last, 0.16 ms.
template <int ROWS> __global__ void conv2d_column(const float* in, float* out, int w, int h) {
    int x = blockIdx.x * blockDim.x + threadIdx.x;
    int y = (blockIdx.y * blockDim.y + threadIdx.y) * ROWS; // of the first of them
    if (x >= w || y >= h) return;
    float acc[ROWS] = {};
    UNROLL for (int r = 0; r < ROWS + 2 * R; r++) {
        // exercise convolution_stencil-4: row r of what the thread's ROWS outputs see: each of its W pixels is read
        // once.
        // Output k has this pixel in row r - k of its window, if the window has such a row.
        UNROLL for (int i = 0; i < W; i++) {
            int u = x + i - R, v = y + r - R;
            float pixel = u >= 0 && u < w && v >= 0 && v < h ? in[(size_t)v * w + u] : 0.0f;
            UNROLL for (int k = 0; k < ROWS; k++) // output y + k has it in row r - k of its window
                if (r - k >= 0 && r - k < W) acc[k] += pixel * filt[(r - k) * W + i];
        }
        // end of exercise
    }
    UNROLL for (int k = 0; k < ROWS; k++)
        if (y + k < h) out[(size_t)(y + k) * w + x] = acc[k];
}

// ---- A stencil. Each inner point of N x N x N becomes c0 times itself + c1 times the sum of its six neighbours: a
// step of the heat equation. What lies on the faces stays as it was.
struct Grid : Problem {
    int N;
    float c0 = 0.25f, c1 = 0.125f; // their sum c0 + 6 c1 is 1: a constant field stays what it is
    std::vector<float> points, want;
    Array<float> in, out;
    explicit Grid(int N)
        : N(N), points(random_numbers((size_t)N * N * N, 3)), want(points), in(points), out(points.size()) {
        bytes = 8. * (double)points.size();
        const size_t row = N, plane = row * N;
#pragma omp parallel for
        for (int z = 1; z < N - 1; z++)
            for (int y = 1; y < N - 1; y++)
                for (int x = 1; x < N - 1; x++) {
                    const float* p = &points[z * plane + y * row + x];
                    want[p - points.data()] =
                        c0 * *p + c1 * (p[-1] + p[1] + p[-(long)row] + p[row] + p[-(long)plane] + p[plane]);
                }
    }
    explicit Grid(Shape s) : Grid(s.y) {}
    void spoil() override { // but for the faces, which no step writes
        std::vector<float> faces = points;
        for (int z = 1; z < N - 1; z++)
            for (int y = 1; y < N - 1; y++) std::fill_n(&faces[((size_t)z * N + y) * N + 1], std::max(N - 2, 0), NAN);
        GPU_CHECK(cudaMemcpy(out, faces.data(), faces.size() * sizeof(float), cudaMemcpyHostToDevice));
    }
    double error() override { return largest_difference(out.get(), want); }
};
constexpr int TX = 32, TY = 8; // a block's threads

// ---- 5 stencil_basic. A thread a point. x runs along the warp, so that each of the seven reads is coalesced. The
// neighbours in x and y are in the L1 cache; those in z are a plane away (512 x 512: 1 MB), in the L2 cache. Predicted:
// memory gives each point once, 8 B a point, 0.32 ms for 512^3 (RTX 4090: 1.07 ms); three of the seven reads are the L2
// cache's, at about twice the memory's rate: up to half as long again.
__global__ void stencil_basic(const float* in, float* out, int N, float c0, float c1) {
    int x = blockIdx.x * blockDim.x + threadIdx.x;
    int y = blockIdx.y * blockDim.y + threadIdx.y;
    int z = blockIdx.z * blockDim.z + threadIdx.z;
    if (x < 1 || y < 1 || z < 1 || x >= N - 1 || y >= N - 1 || z >= N - 1) return;
    size_t i = ((size_t)z * N + y) * N + x, row = N, plane = (size_t)N * N;
    out[i] = c0 * in[i] + c1 * (in[i - 1] + in[i + 1] + in[i - row] + in[i + row] + in[i - plane] + in[i + plane]);
}

// ---- 6 stencil_registers. Bound before: the L2 cache, which has to give three planes. A thread walks along z; the
// points below and above are its own, in registers, and what is `above` now is `here` in the next plane. Predicted: the
// memory's 0.32 ms, with 1 / depth of the threads: 8,192 blocks of 256 for depth 64 are still 7.8 waves.
__global__ void stencil_registers(const float* in, float* out, int N, int depth, float c0, float c1) {
    int x = blockIdx.x * TX + threadIdx.x + 1;
    int y = blockIdx.y * TY + threadIdx.y + 1;
    int z0 = blockIdx.z * depth + 1, z1 = min(z0 + depth, N - 1);
    if (x >= N - 1 || y >= N - 1) return;
    size_t row = N, plane = (size_t)N * N, i = z0 * plane + y * row + x;
    float below = in[i - plane], here = in[i];
    for (int z = z0; z < z1; z++, i += plane) {
        // exercise convolution_stencil-6: one plane: the point above comes from memory, those below and here are in
        // registers.
        // Four neighbours in the plane are read. Then the registers move up by one plane.
        float above = in[i + plane];
        out[i] = c0 * here + c1 * (in[i - 1] + in[i + 1] + in[i - row] + in[i + row] + below + above);
        below = here, here = above;
        // end of exercise
    }
}

// ---- 7 stencil_slide. Bound before: memory; if not, the four reads a point from the L1 cache. The plane goes to
// shared memory, so that global memory is read 340 / 256 = 1.33 times a point, at the price of two barriers a plane and
// four branches for the halo. Predicted: no faster than step 6, for the reason of step 3.
__global__ void stencil_slide(const float* in, float* out, int N, int depth, float c0, float c1) {
    __shared__ float s[TY + 2][TX + 2];                    // the current plane only
    int tx = threadIdx.x, ty = threadIdx.y;
    int x = blockIdx.x * TX + tx + 1, y = blockIdx.y * TY + ty + 1;
    int z0 = blockIdx.z * depth + 1, z1 = min(z0 + depth, N - 1);
    bool inside = x < N - 1 && y < N - 1;
    int cx = min(x, N - 1), cy = min(y, N - 1);            // (beyond the edge: reads the edge, writes nothing)
    size_t plane = (size_t)N * N, at = (size_t)cy * N + cx;
    float below = in[(z0 - 1) * plane + at], here = in[z0 * plane + at];
    for (int z = z0; z < z1; z++) {
        float above = in[(z + 1) * plane + at];            // one new point a thread and plane
        s[ty + 1][tx + 1] = here;
        if (tx == 0) s[ty + 1][0] = in[z * plane + at - 1];
        if (tx == TX - 1 && cx + 1 < N) s[ty + 1][TX + 1] = in[z * plane + at + 1];
        if (ty == 0) s[0][tx + 1] = in[z * plane + at - N];
        if (ty == TY - 1 && cy + 1 < N) s[TY + 1][tx + 1] = in[z * plane + at + N];
        __syncthreads();
        if (inside)
            out[z * plane + at] = c0 * here + c1 * (s[ty + 1][tx] + s[ty + 1][tx + 2] + s[ty][tx + 1] +
                                                    s[ty + 2][tx + 1] + below + above);
        __syncthreads();                                   // all have finished reading this plane
        below = here, here = above;
    }
}

// ---- A layer of a network: F filters of C x K x K over C planes of H x H, padded by P: out has F planes of H x H.
constexpr int K = 3, P = 1;
struct Layer : Problem {
    int C, F, H;
    std::vector<float> planes, weights, want;
    Array<float> in, weight, col, out;
    int rows() const { return C * K * K; }    // of im2col's matrix: what a filter sees
    int columns() const { return H * H; }     // ... and where
    Layer(int C, int F, int H)
        : C(C), F(F), H(H), planes(random_numbers((size_t)C * H * H, 4)),
          weights(random_numbers((size_t)F * C * K * K, 5)), want((size_t)F * H * H), in(planes), weight(weights),
          col((size_t)rows() * columns()), out(want.size()) {
        bytes = 4. * (double)(planes.size() + weights.size() + want.size());
        flops = 2. * F * rows() * columns();
#pragma omp parallel for
        for (int f = 0; f < F; f++)
            for (int r = 0; r < rows(); r++)
                for (int y = 0; y < H; y++)
                    for (int x = 0; x < H; x++) {
                        const int c = r / (K * K), v = y + r / K % K - P, u = x + r % K - P;
                        if (u >= 0 && u < H && v >= 0 && v < H)
                            want[((size_t)f * H + y) * H + x] +=
                                weights[(size_t)f * rows() + r] * planes[((size_t)c * H + v) * H + u];
                    }
    }
    explicit Layer(Shape s) : Layer(64, 64, s.z) {}
    void spoil() override { col.spoil(), out.spoil(); }
    double error() override { return largest_difference(out.get(), want); }
};

// ---- 8 layer_direct. A thread an output again, now 9 C products each. Predicted for C = F = 64 and 224 x 224: 3.7
// GFLOP, 0.055 ms at 67 TFLOP/s. But each multiply-add is a load of a pixel (and one of a weight, the same for a warp):
// 1.85G x 2 / 32 loads of a warp are 0.88M cycles of 132 SMs, 0.5 ms: a tenth of the multiply rate.
__global__ void layer_direct(const float* in, const float* weight, float* out, int C, int H) {
    int n = blockIdx.x * blockDim.x + threadIdx.x, f = blockIdx.y, y = n / H, x = n % H;
    if (n >= H * H) return;
    const float* w = weight + (size_t)f * C * K * K;
    float acc = 0;
    for (int r = 0; r < C * K * K; r++) {
        int u = x + r % K - P, v = y + r / K % K - P;
        if (u >= 0 && u < H && v >= 0 && v < H) acc += in[((size_t)(r / (K * K)) * H + v) * H + u] * w[r];
    }
    out[(size_t)f * H * H + n] = acc;
}

// ---- 9 im2col, then a product. Bound before: two loads a multiply-add. A matrix product has tiles for that
// (lab/matmul.cu), so the layer is made one: im2col writes what each filter sees as a column, and out (F, H H) = weight
// (F, 9 C) col (9 C, H H). Predicted: a product of 4 x 4 outputs a thread reads 8 numbers for 16 multiply-adds instead
// of 32: a quarter of step 8. But col is 9 times the input: 116 MB written and read again are 0.07 ms, more than the
// product's floor.
__global__ void im2col(const float* in, float* col, int C, int H, int W, int K, int P) {
    int Ho = H + 2 * P - K + 1, Wo = W + 2 * P - K + 1;
    size_t n = (size_t)C * K * K * Ho * Wo;
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int xo = i % Wo, yo = i / Wo % Ho;
    size_t r = i / ((size_t)Wo * Ho);              // row (c K + ky) K + kx
    int kx = r % K, ky = r / K % K, c = r / (K * K);
    int x = xo + kx - P, y = yo + ky - P;
    col[i] = x >= 0 && x < W && y >= 0 && y < H ? in[((size_t)c * H + y) * W + x] : 0.0f;
}

constexpr int TILE = 64, STEP = 16; // a block's tile of the output, and how many rows of col it takes at a time
template <bool IMPLICIT>
__global__ void __launch_bounds__(256)
layer_product(const float* weight, const float* col, float* out, int F, int D, int H) {
    __shared__ float a[STEP][TILE + 1], b[STEP][TILE];
    int t = threadIdx.x, f0 = blockIdx.y * TILE, n0 = blockIdx.x * TILE, N = H * H;
    float acc[4][4] = {};
    for (int d0 = 0; d0 < D; d0 += STEP) {
        for (int e = t; e < STEP * TILE; e += 256) {
            int k = e % STEP, f = f0 + e / STEP; // (a row of weight is contiguous)
            a[k][e / STEP] = d0 + k < D && f < F ? weight[(size_t)f * D + d0 + k] : 0.0f;
            int d = d0 + e / TILE, n = n0 + e % TILE;
            if (IMPLICIT) { // col[d][n], straight from the input
                // exercise convolution_stencil-10: number (d, n) of im2col's matrix, straight from the input `col` (C,
                // H, H); zero outside.
                // d is (channel K + ky) K + kx, n is y H + x of the output. Rows past D and columns past N are zero.
                int u = n % H + d % K - P, v = n / H + d / K % K - P;
                bool inside = d < D && n < N && u >= 0 && u < H && v >= 0 && v < H;
                b[e / TILE][e % TILE] = inside ? col[((size_t)(d / (K * K)) * H + v) * H + u] : 0.0f;
                // end of exercise
            } else
                b[e / TILE][e % TILE] = d < D && n < N ? col[(size_t)d * N + n] : 0.0f;
        }
        __syncthreads();
        for (int k = 0; k < STEP; k++)
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++) acc[i][j] += a[k][t / 16 + 16 * i] * b[k][t % 16 + 16 * j];
        __syncthreads();
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            int f = f0 + t / 16 + 16 * i, n = n0 + t % 16 + 16 * j;
            if (f < F && n < N) out[(size_t)f * N + n] = acc[i][j];
        }
}

// ---- 10 layer_implicit. Bound before: col's bytes, beside the product. The same product, but a tile of col is made
// where it is loaded, from the input: col is never written. A few integer operations for each element of a tile, which
// 64 outputs share. Predicted: step 9 less its 0.07 ms for col and the launch.

template <class F> void on_image(F kernel, Image& m, int rows = 1) {
    launch(kernel, dim3(blocks_for(m.w, T), blocks_for(m.h, 8 * rows)), dim3(T, 8), 0, m.in, m.out, m.w, m.h);
}
constexpr int DEPTH = 64; // planes that a thread walks
template <class F> void on_columns(F kernel, Grid& g) {
    if (g.N < 3) return; // all of it is faces
    const dim3 grid(blocks_for(g.N - 2, TX), blocks_for(g.N - 2, TY), blocks_for(g.N - 2, DEPTH));
    launch(kernel, grid, dim3(TX, TY), 0, g.in, g.out, g.N, DEPTH, g.c0, g.c1);
}
template <bool IMPLICIT> void product(Layer& l) {
    launch(layer_product<IMPLICIT>, dim3(blocks_for(l.columns(), TILE), blocks_for(l.F, TILE)), 256, 0, l.weight,
           IMPLICIT ? l.in : l.col, l.out, l.F, l.rows(), l.H);
}
inline Laboratory laboratory() {
    Laboratory l("convolution_stencil", "neighbours: constant memory, halo tiles, registers, im2col", {8192, 512, 224},
                 {45, 13, 9});
    const char* loads = "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum";
    l.step<Image>("conv2d_global", "a thread an output, the filter in global memory", [](Image& m) {
        const dim3 grid(blocks_for(m.w, T), blocks_for(m.h, 8));
        launch(conv2d_global, grid, dim3(T, 8), 0, m.in, m.filter, m.out, m.w, m.h);
    }, COPY, loads, "loads of a warp: 50 for each 32 outputs");
    l.step<Image>("conv2d_const", "the filter in constant memory", [](Image& m) { on_image(conv2d_const, m); }, COPY,
                  loads, "half as many as step 1");
    l.step<Image>("conv2d_tiled", "the tile and its halo in shared memory", [](Image& m) {
        launch(conv2d_tiled, dim3(blocks_for(m.w, T), blocks_for(m.h, T)), dim3(T, T), 0, m.in, m.out, m.w, m.h);
    }, COPY, "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum", "as many reads of it as step 2 had loads");
    l.step<Image>("conv2d_column", "eight outputs of a column to a thread", [](Image& m) {
        on_image(conv2d_column<8>, m, 8);
    }, COPY, "dram__throughput.avg.pct_of_peak_sustained_elapsed", "now the memory is busy most of the time");
    const char* sectors = "lts__t_sectors_op_read.sum";
    l.step<Grid>("stencil_basic", "a thread a point", [](Grid& g) {
        const dim3 grid(blocks_for(g.N, TX), blocks_for(g.N, TY), g.N);
        launch(stencil_basic, grid, dim3(TX, TY), 0, g.in, g.out, g.N, g.c0, g.c1);
    }, COPY, sectors, "about three times N^3 / 8: three planes come from the L2 cache");
    l.step<Grid>("stencil_registers", "a thread walks along z", [](Grid& g) { on_columns(stencil_registers, g); }, COPY,
                 sectors, "a third of step 5's, and the halo in y");
    l.step<Grid>("stencil_slide", "the plane in shared memory", [](Grid& g) { on_columns(stencil_slide, g); }, COPY,
                 "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio", "warps now wait at barriers");
    l.step<Layer>("layer_direct", "a thread an output, 9 C products each", [](Layer& l) {
        launch(layer_direct, dim3(blocks_for(l.columns(), 256), l.F), 256, 0, l.in, l.weight, l.out, l.C, l.H);
    }, FMA, loads, "two for each 32 multiply-adds");
    l.step<Layer>("im2col", "the layer made a product", [](Layer& l) {
        launch(im2col, blocks_for((size_t)l.rows() * l.columns(), 256), 256, 0, l.in, l.col, l.C, l.H, l.H, K, P);
        product<false>(l);
    }, FMA, "dram__bytes.sum", "nine times the input, written and read");
    l.step<Layer>("layer_implicit", "a tile of col made where it is loaded", [](Layer& l) { product<true>(l); }, FMA,
                  "dram__bytes.sum", "the input and the output once");
    l.exercise("A block of 16 x 16 outputs of a 7 x 7 filter has its tile and halo in shared memory. How many pixels "
               "does it load for each output?", [] { return 22. * 22 / (16 * 16); });
    l.exercise("conv2d_column with 16 rows a thread: how many loads from global memory for each output?",
               [] { return W * (16. + 2 * R) / 16; });
    l.exercise("A stencil of radius 1 takes two time steps in one kernel: it loads a cube of (t + 4)^3 for t^3 "
               "outputs. From which t on does it load less than two kernels that load (t + 2)^3 each?", [] {
                   int t = 1;
                   while (std::pow(t + 4., 3) >= 2 * std::pow(t + 2., 3)) t++;
                   return (double)t;
               });
    return l;
}
} // namespace lab::convolution_stencil

#ifndef LAB_NO_MAIN
int main(int argc, char** argv) { return lab::convolution_stencil::laboratory().main(argc, argv); }
#endif
