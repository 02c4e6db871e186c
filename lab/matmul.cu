// matmul.cu: one matrix product, from three nested loops to the kernel of qwen3.cu.   (lab/lab.h says how to run it)
//
// Steps 1 to 8 multiply float32 on the CUDA cores: C = A B, A (M,K), B (K,N), as textbooks have it. Steps 9 to 15
// multiply bf16 on the tensor cores: C = A B^T with B (N,K), as the weights of a model lie (y = W x: A holds tokens, B
// is W). So `in`, which both are summed over, lies along the rows of both, and both are read the same way.
//
// The bound of a product: 2 M N K flops and, if each number is moved once, 4 (M K + K N + M N) bytes. At 4,096 that is
// 137 GFLOP and 201 MB: 683 flops a byte, where an H100 has about 20 of float32 and 300 of bf16 for each byte it can
// read. Only a kernel that uses each number it reads many times comes near the multiply rate. Each step until 8 is a
// way to read less: from memory, from the caches, then from shared memory.
#ifdef LAB_QWEN3 // `make lab` by nvcc: the last step is the program's own kernel
#include "model/device.h"
#include "qwen3.cu"
#endif
#include "lab/ptx.h"
#ifdef HAVE_CUBLAS
#include "lab/cublas.h"
#endif

namespace lab::matmul {

// ---- What is computed, and how it is checked: float32 has C = A B, bf16 C = A B^T. The numbers are such that every
// order of the sums gives the same (random_numbers), so the tolerance is less than half of the smallest difference
// there can be. In bf16 C is that sum, rounded once. Of large products 48 rows are checked, of small ones all.
template <class T> struct Product : Problem {
    static constexpr bool NARROW = sizeof(T) == 2;
    int M, N, K;
    std::vector<float> a, b, want;
    std::vector<int> checked;
    Array<T> A, B, C;
    static constexpr int EACH = 16 / sizeof(T); // rows are whole pieces of 16 bytes: K and N are rounded up to that
    static int up(int n) { return (n + EACH - 1) / EACH * EACH; }
    static std::vector<T> stored(const std::vector<float>& v) {
        std::vector<T> w(v.size());
        for (size_t i = 0; i < v.size(); i++)
            if constexpr (NARROW) w[i] = __float2bfloat16(v[i]);
            else w[i] = v[i];
        return w;
    }
    explicit Product(Shape s)
        : M(s.x), N(up(s.y)), K(up(s.z)), a(random_numbers((size_t)M * K, 1)), b(random_numbers((size_t)N * K, 2)),
          A(stored(a)), B(stored(b)), C((size_t)M * N) {
        flops = 2. * M * N * K;
        bytes = (double)sizeof(T) * ((double)M * K + (double)K * N + (double)M * N);
        tolerance = 1. / 32768;
#ifdef HAVE_CUBLAS
        library_name = "cuBLAS";
#endif
        for (int i = 0; i < M; i++)
            if (M <= 256 || i == M - 1 || i % (M / 47) == i / (M / 47) % 47) checked.push_back(i); // of every residue
    }
    void define() { // three loops
        want.assign(checked.size() * N, 0);
#pragma omp parallel for
        for (size_t r = 0; r < checked.size(); r++)
            for (int j = 0; j < N; j++) {
                double sum = 0;
                for (int k = 0; k < K; k++)
                    sum += (double)a[(size_t)checked[r] * K + k] * b[NARROW ? (size_t)j * K + k : (size_t)k * N + j];
                want[r * N + j] = NARROW ? __bfloat162float(__float2bfloat16((float)sum)) : (float)sum;
            }
    }
    void spoil() override { C.spoil(); }
    double error() override {
        if (want.empty()) define();
        const std::vector<T> all = C.get();
        std::vector<float> got;
        for (int i : checked)
            for (int j = 0; j < N; j++)
                if constexpr (NARROW) got.push_back(__bfloat162float(all[(size_t)i * N + j]));
                else got.push_back(all[(size_t)i * N + j]);
        return largest_difference(got, want);
    }
#ifdef HAVE_CUBLAS
    void library() override { // its matrices go by columns: it computes C^T
        constexpr auto TYPE = NARROW ? CUDA_R_16BF : CUDA_R_32F;
        const float one = 1, zero = 0;
        const cublasStatus_t said =
            cublasGemmEx(cublas(), NARROW ? CUBLAS_OP_T : CUBLAS_OP_N, CUBLAS_OP_N, N, M, K, &one, B.p, TYPE,
                         NARROW ? K : N, A.p, TYPE, K, &zero, C.p, TYPE, N, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
        if (said != CUBLAS_STATUS_SUCCESS) fail("cuBLAS says %d", (int)said);
    }
#endif
};
using Float = Product<float>;
using Narrow = Product<bf16>;

// One number, or four neighbours, of row r of a matrix; zeros outside of it.
__device__ inline float at(const float* p, int r, int c, int rows, int columns) {
    return r < rows && c < columns ? p[(size_t)r * columns + c] : 0;
}
__device__ inline float4 four_at(const float* p, int r, int c, int rows, int columns) {
    return r < rows && c < columns ? *(const float4*)&p[(size_t)r * columns + c] : make_float4(0, 0, 0, 0);
}

// ================================================================================ float32 on the CUDA cores
// ---- 1 naive. A thread computes one number of C: a row of A times a column of B. Neighbouring threads of a warp have
// neighbouring rows. So in each step of the loop a warp reads 32 numbers of A that are K apart, 32 sectors, and one of
// B. Predicted: bound by the L1 cache and what stands before it. A warp's load of A takes 32 cache lines, one a clock
// at best, for 32 multiply-adds, where a multiprocessor could do 128 a clock: under 1/100 of the ceiling.
__global__ void naive(const float* A, const float* B, float* C, int M, int N, int K) {
    const int i = blockIdx.x * 32 + threadIdx.x, j = blockIdx.y * 32 + threadIdx.y;
    if (i >= M || j >= N) return;
    float sum = 0;
    for (int k = 0; k < K; k++) sum += A[(size_t)i * K + k] * B[(size_t)k * N + j];
    C[(size_t)i * N + j] = sum;
}

// ---- 2 coalesced. One line: x and y change places. Neighbouring threads have neighbouring columns, read one number of
// A between them, and 32 neighbours of B, one cache line. Predicted: two loads for one multiply-add still, one of 4
// sectors and one of one. A multiprocessor issues a load of a warp a clock at most, so a multiply-add of a warp every
// second clock: 16 of 128 lanes' worth, an eighth of the ceiling at best. The L1 cache's latency makes it less.
__global__ void coalesced(const float* A, const float* B, float* C, int M, int N, int K) {
    // exercise matmul-2: which number of C, row i and column j, does this thread compute?
    // Neighbouring threads of a warp (threadIdx.x) read neighbours of B: one cache line, not 32.
    // instead: const int i = M, j = N;
    const int j = blockIdx.x * 32 + threadIdx.x, i = blockIdx.y * 32 + threadIdx.y;
    // end of exercise
    if (i >= M || j >= N) return;
    float sum = 0;
    for (int k = 0; k < K; k++) sum += A[(size_t)i * K + k] * B[(size_t)k * N + j];
    C[(size_t)i * N + j] = sum;
}

// ---- 3 shared tiles. A block of 32 x 32 threads reads a tile of A and one of B once, and uses each number 32 times
// out of shared memory. What comes from the caches falls to 1/32; what each multiply-add reads, two numbers, does not:
// it now reads them from shared memory, which serves a warp a clock, as L1 did. Predicted: a gain, but by no means of
// 32 times.
__global__ void tiles(const float* A, const float* B, float* C, int M, int N, int K) {
    __shared__ float a[32][32], b[32][32];
    const int x = threadIdx.x, y = threadIdx.y, i = blockIdx.y * 32 + y, j = blockIdx.x * 32 + x;
    float sum = 0;
    for (int k0 = 0; k0 < K; k0 += 32) {
        // exercise matmul-3: a tile of A and a tile of B go to shared memory, then each thread adds up 32 products.
        // at() reads a number, or zero outside of the matrix. Two barriers: before the tiles are read, and after.
        a[y][x] = at(A, i, k0 + x, M, K), b[y][x] = at(B, k0 + y, j, K, N);
        __syncthreads();
        for (int k = 0; k < 32; k++) sum += a[y][k] * b[k][x];
        __syncthreads(); // all have finished reading this tile
        // end of exercise
    }
    if (i < M && j < N) C[(size_t)i * N + j] = sum;
}

// ---- 4 a column of registers. The multiply-add must read less from shared memory, so a thread takes eight rows of one
// column: the number of B that it reads is used eight times out of a register. 9 loads for 8 multiply-adds instead of
// 16. The tile is 64 x 64, the block 512 threads, a step 8 deep so that every thread copies one number of each operand.
// Predicted: nearly twice step 3.
__global__ void __launch_bounds__(512) column(const float* A, const float* B, float* C, int M, int N, int K) {
    __shared__ float a[64][8], b[8][64];
    const int t = threadIdx.x, i0 = blockIdx.y * 64, j0 = blockIdx.x * 64, x = t % 64, y = t / 64 * 8;
    float sum[8] = {};
    for (int k0 = 0; k0 < K; k0 += 8) {
        a[t / 8][t % 8] = at(A, i0 + t / 8, k0 + t % 8, M, K), b[t / 64][x] = at(B, k0 + t / 64, j0 + x, K, N);
        __syncthreads();
        for (int k = 0; k < 8; k++) {
            const float right = b[k][x];
            UNROLL for (int i = 0; i < 8; i++) sum[i] += a[y + i][k] * right;
        }
        __syncthreads();
    }
    for (int i = 0; i < 8; i++)
        if (i0 + y + i < M && j0 + x < N) C[(size_t)(i0 + y + i) * N + j0 + x] = sum[i];
}

// ---- 5 a square of registers. The same in both directions: 8 x 8 numbers of C a thread, 16 loads for 64
// multiply-adds, one for four where step 4 had one for one. The tile is 128 x 128, the block 256 threads, and a number
// read from memory is used 128 times. A thread's rows and columns are 16 apart, so that a warp's lanes read
// neighbouring banks. Predicted: three to four times step 4; 64 sums and 16 operands are 80 registers, so 16 warps a
// multiprocessor.
constexpr int TILE = 128, DEEP = 8; // of C; of a step
__global__ void __launch_bounds__(256) square(const float* A, const float* B, float* C, int M, int N, int K) {
    __shared__ float a[TILE][DEEP], b[DEEP][TILE];
    const int t = threadIdx.x, i0 = blockIdx.y * TILE, j0 = blockIdx.x * TILE, x = t % 16, y = t / 16;
    float sum[8][8] = {};
    for (int k0 = 0; k0 < K; k0 += DEEP) {
        for (int n = t; n < TILE * DEEP; n += 256) {
            a[n / DEEP][n % DEEP] = at(A, i0 + n / DEEP, k0 + n % DEEP, M, K);
            b[n / TILE][n % TILE] = at(B, k0 + n / TILE, j0 + n % TILE, K, N);
        }
        __syncthreads();
        // exercise matmul-5: a step of 8 k: 8 numbers of a and 8 of b go to registers, then 64 products are added to
        // sum.
        // Rows y + 16 i and columns x + 16 j: a warp's lanes read neighbouring banks.
        for (int k = 0; k < DEEP; k++) {
            float left[8], right[8];
            UNROLL for (int i = 0; i < 8; i++) left[i] = a[y + 16 * i][k], right[i] = b[k][x + 16 * i];
            UNROLL for (int i = 0; i < 8; i++)
                UNROLL for (int j = 0; j < 8; j++) sum[i][j] += left[i] * right[j];
        }
        // end of exercise
        __syncthreads();
    }
    UNROLL for (int i = 0; i < 8; i++)
        UNROLL for (int j = 0; j < 8; j++)
            if (i0 + y + 16 * i < M && j0 + x + 16 * j < N)
                C[(size_t)(i0 + y + 16 * i) * N + j0 + x + 16 * j] = sum[i][j];
}

// ---- 6 vector loads, and A stored transposed. What bounds step 5 is the number of load instructions. A load of 16
// bytes brings four numbers: B's lie side by side already; A's would if its tile were stored by columns, so that is how
// it is stored (the stores pay for it, but there are few of them). Now 4 loads from shared memory serve 64
// multiply-adds, and a thread's copies from memory are one load for each operand. A thread's columns: 4 x to 4 x + 3,
// and the same 64 on. Predicted: the multiply-adds are most of the instructions, 64 of about 70: 70 to 80% of the
// ceiling.
struct Loads { float4 a, b; }; // what a thread copies in a step
__device__ inline Loads load(const float* A, const float* B, int i0, int j0, int k0, int M, int N, int K) {
    const int t = threadIdx.x;
    return {four_at(A, i0 + t / 2, k0 + t % 2 * 4, M, K), four_at(B, k0 + t / 32, j0 + t % 32 * 4, K, N)};
}
__device__ inline void store(float (*a)[TILE], float (*b)[TILE], const Loads& v) {
    const int t = threadIdx.x, k = t % 2 * 4, i = t / 2;
    a[k][i] = v.a.x, a[k + 1][i] = v.a.y, a[k + 2][i] = v.a.z, a[k + 3][i] = v.a.w;
    *(float4*)&b[t / 32][t % 32 * 4] = v.b;
}
__device__ inline void multiply(float (&sum)[8][8], const float (*a)[TILE], const float (*b)[TILE]) {
    const int x = threadIdx.x % 16 * 4, y = threadIdx.x / 16 * 4;
    UNROLL for (int k = 0; k < DEEP; k++) {
        alignas(16) float left[8], right[8];
        UNROLL for (int h = 0; h < 2; h++) {
            *(float4*)&left[h * 4] = *(const float4*)&a[k][y + h * 64];
            *(float4*)&right[h * 4] = *(const float4*)&b[k][x + h * 64];
        }
        UNROLL for (int i = 0; i < 8; i++)
            UNROLL for (int j = 0; j < 8; j++) sum[i][j] += left[i] * right[j];
    }
}
__device__ inline void write(float* C, const float (&sum)[8][8], int i0, int j0, int M, int N) {
    const int x = threadIdx.x % 16 * 4, y = threadIdx.x / 16 * 4;
    UNROLL for (int i = 0; i < 8; i++)
        UNROLL for (int h = 0; h < 2; h++) {
            const int row = i0 + y + i % 4 + i / 4 * 64, c = j0 + x + h * 64;
            if (row < M && c < N)
                *(float4*)&C[(size_t)row * N + c] =
                    make_float4(sum[i][h * 4], sum[i][h * 4 + 1], sum[i][h * 4 + 2], sum[i][h * 4 + 3]);
        }
}
__global__ void __launch_bounds__(256) vectors(const float* A, const float* B, float* C, int M, int N, int K) {
    __shared__ __align__(16) float a[DEEP][TILE], b[DEEP][TILE];
    const int i0 = blockIdx.y * TILE, j0 = blockIdx.x * TILE;
    float sum[8][8] = {};
    for (int k0 = 0; k0 < K; k0 += DEEP) {
        store(a, b, load(A, B, i0, j0, k0, M, N, K));
        __syncthreads();
        multiply(sum, a, b);
        __syncthreads();
    }
    write(C, sum, i0, j0, M, N);
}

// ---- 7 double buffer. In step 6 only other blocks multiply while a block waits for memory. With two
// buffers the loads of the next step are asked for before this one's products, arrive in registers meanwhile, and go to
// the other buffer. One barrier a step is left. Predicted: a few percent, as two blocks a multiprocessor already hide a
// part.
__global__ void __launch_bounds__(256, 2) two_buffers(const float* A, const float* B, float* C, int M, int N, int K) {
    __shared__ __align__(16) float a[2][DEEP][TILE], b[2][DEEP][TILE];
    const int i0 = blockIdx.y * TILE, j0 = blockIdx.x * TILE;
    float sum[8][8] = {};
    store(a[0], b[0], load(A, B, i0, j0, 0, M, N, K));
    __syncthreads();
    for (int k0 = 0, s = 0; k0 < K; k0 += DEEP, s ^= 1) {
        // exercise matmul-7: the next step's loads come before this step's products, and go to the other buffer after
        // them.
        // load(), multiply() and store() are step 6's. One barrier is enough: say why.
        const Loads next = load(A, B, i0, j0, k0 + DEEP, M, N, K); // zeros past the end
        multiply(sum, a[s], b[s]);
        store(a[s ^ 1], b[s ^ 1], next);
        __syncthreads();
        // end of exercise
    }
    write(C, sum, i0, j0, M, N);
}

// ---- 8 asynchronous copies. cp.async (sm_80) copies 16 bytes from memory to shared memory without a register: the
// next steps can be three ahead, not one, for no registers at all. It cannot transpose. So A's tile is stored by rows,
// and what step 6 gained is kept for the most part by reading two k of a row at once: 8 loads of A and 4 of B for 128
// multiply-adds (four k at once took more than 128 registers a thread, and so the second block). The two rows that a
// warp reads are neighbours, 8 words apart: no conflict. Predicted: as step 7 within a few percent, perhaps less for
// its half more of loads. It pays later: stages of 32 KB could not wait in registers.
constexpr int FLOAT_STAGE = 2 * TILE * DEEP, FLOAT_STAGES = 4; // floats in a stage: A's tile (128,8), B's (8,128)
__device__ inline void copy_stage(float* stage, const float* A, const float* B, int i0, int j0, int k0, int M, int N,
                                  int K) {
    const int t = threadIdx.x, i = i0 + t / 2, ka = k0 + t % 2 * 4, kb = k0 + t / 32, j = j0 + t % 32 * 4;
    copy16(stage + t * 4, A + (size_t)i * K + ka, i < M && ka < K);
    copy16(stage + TILE * DEEP + t * 4, B + (size_t)kb * N + j, kb < K && j < N);
    copies_commit();
}
__global__ void __launch_bounds__(256, 2) stages(const float* A, const float* B, float* C, int M, int N, int K) {
    DYNAMIC_SHARED(float, shared);
    const int t = threadIdx.x, i0 = blockIdx.y * TILE, j0 = blockIdx.x * TILE, x = t % 16 * 4, y = t / 16;
    float sum[8][8] = {};
    for (int s = 0; s < FLOAT_STAGES - 1; s++)
        copy_stage(shared + s * FLOAT_STAGE, A, B, i0, j0, s * DEEP, M, N, K);
    for (int k0 = 0, s = 0; k0 < K; k0 += DEEP, s++) {
        copies_wait<FLOAT_STAGES - 2>(); // this thread's part of stage s has come
        __syncthreads();                 // all copies have come, and all have finished reading the stage before
        const int ahead = s + FLOAT_STAGES - 1;
        copy_stage(shared + ahead % FLOAT_STAGES * FLOAT_STAGE, A, B, i0, j0, ahead * DEEP, M, N, K);
        const float *a = shared + s % FLOAT_STAGES * FLOAT_STAGE, *b = a + TILE * DEEP;
        UNROLL for (int k = 0; k < DEEP; k += 2) {
            alignas(16) float left[8][2], right[8];
            UNROLL for (int i = 0; i < 8; i++) *(float2*)left[i] = *(const float2*)&a[(y + 16 * i) * DEEP + k];
            UNROLL for (int e = 0; e < 2; e++) {
                UNROLL for (int h = 0; h < 2; h++)
                    *(float4*)&right[h * 4] = *(const float4*)&b[(k + e) * TILE + x + h * 64];
                UNROLL for (int i = 0; i < 8; i++)
                    UNROLL for (int j = 0; j < 8; j++) sum[i][j] += left[i][e] * right[j];
            }
        }
    }
    UNROLL for (int i = 0; i < 8; i++)
        UNROLL for (int h = 0; h < 2; h++)
            if (i0 + y + 16 * i < M && j0 + x + h * 64 < N)
                *(float4*)&C[(size_t)(i0 + y + 16 * i) * N + j0 + x + h * 64] =
                    make_float4(sum[i][h * 4], sum[i][h * 4 + 1], sum[i][h * 4 + 2], sum[i][h * 4 + 3]);
}

// ================================================================================ bf16 on the tensor cores
// Why bf16 from here on? A CUDA core does one multiply-add of float32 a clock, and step 8 keeps it busy most of the
// time: no trick makes it twice as fast. The tensor cores of an H100 multiply bf16 at about 15 times that rate (989
// TFLOP/s against 67, says the data sheet), and each number has half the bytes. Sums stay float32.
//
// Tiles of 128 x 128 again, steps of 64 numbers: a row of a stage has 128 bytes, the width of all banks. 8 warps, each
// with 64 rows by 32 columns of the tile: 4 x 4 fragments of 16 x 8, whose sums are spread over the lanes as mma has
// it.
constexpr int STEP = 64, STAGE = 2 * TILE * STEP, STAGES = 3; // bf16 in a stage: A's tile, then B's
template <bool SWIZZLED> __host__ __device__ constexpr int place(int r, int c) { // of number c of row r in a tile
    // exercise matmul-10: where in the tile lies number c of row r? A row has 64 numbers, chunks of 8 (16 bytes) stay
    // whole.
    // If SWIZZLED, the same chunk of 8 neighbouring rows must meet all 32 banks: exclusive-or.
    // instead: return 0;
    return r * STEP + (c / 8 ^ (SWIZZLED ? r % 8 : 0)) * 8 + c % 8;
    // end of exercise
}
template <bool SWIZZLED>
__device__ void copy_stage(bf16* stage, const bf16* A, const bf16* B, int i0, int j0, int k0, int M, int N, int K) {
    for (int n = threadIdx.x; n < TILE * STEP / 8; n += 256) {
        const int r = n / 8, k = n % 8 * 8;
        bf16* const to = stage + place<SWIZZLED>(r, k);
        copy16(to, A + (size_t)(i0 + r) * K + k0 + k, i0 + r < M && k0 + k < K);
        copy16(to + TILE * STEP, B + (size_t)(j0 + r) * K + k0 + k, j0 + r < N && k0 + k < K);
    }
    copies_commit();
}
// Fragments of a (16,16) and b (two of (16,8)) at row r, number k, as mma wants them.
template <bool LDMATRIX> __device__ inline void read_fragment(uint32_t (&f)[4], const bf16* tile, int r, int k) {
    const int lane = threadIdx.x % 32;
    if constexpr (LDMATRIX) ldmatrix4(f, tile + place<true>(r + lane % 16, k + lane / 16 * 8));
    else
        UNROLL for (int i = 0; i < 4; i++)
            f[i] = *(const uint32_t*)&tile[place<false>(r + lane / 4 + i % 2 * 8, k + lane % 4 * 2 + i / 2 * 8)];
}
// Two neighbours of C.
__device__ inline void write_pair(bf16* C, int i, int j, float first, float second, int M, int N) {
    if (i < M && j < N) *(__nv_bfloat162*)&C[(size_t)i * N + j] = __floats2bfloat162_rn(first, second);
}

// ---- 9 mma.sync. A warp multiplies 16 x 16 by 16 x 8 in one instruction: 2,048 multiply-adds, of which a lane holds 4
// sums, 4 registers of a and 2 of b. The stages are step 8's, with bf16 in them. Fragments are read as the
// instruction's table says, two numbers at a time. Predicted: many times step 8, yet far from the ceiling: rows are 128
// bytes apart, so the 8 rows that a warp reads at once lie in the same banks, and each load takes 8 turns.
//
// ---- 10 ldmatrix and a swizzle. Two lines: chunk c of 16 bytes of row r lies in place c ^ r % 8, so that the same
// chunk of 8 rows meets all banks; and ldmatrix reads four 8 x 8 matrices in one instruction, where step 9 takes 4
// loads for a and 2 for b. Predicted: now the tensor cores bound it, at the rate that mma.sync has on this card (which
// on Hopper is about two thirds of what wgmma has; on a 4090 or an A100 this is the last step there is).
template <bool LDMATRIX>
__global__ void __launch_bounds__(256) tensor(const bf16* A, const bf16* B, bf16* C, int M, int N, int K) {
    DYNAMIC_SHARED(bf16, shared);
    const int i0 = blockIdx.y * TILE, j0 = blockIdx.x * TILE, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = warp / 4 * 64, col = warp % 4 * 32; // the warp's part of the tile
    float sum[4][4][4] = {};
    for (int s = 0; s < STAGES - 1; s++) copy_stage<LDMATRIX>(shared + s * STAGE, A, B, i0, j0, s * STEP, M, N, K);
    for (int k0 = 0, s = 0; k0 < K; k0 += STEP, s++) {
        copies_wait<STAGES - 2>();
        __syncthreads();
        const int ahead = s + STAGES - 1;
        copy_stage<LDMATRIX>(shared + ahead % STAGES * STAGE, A, B, i0, j0, ahead * STEP, M, N, K);
        const bf16 *a = shared + s % STAGES * STAGE, *b = a + TILE * STEP;
        UNROLL for (int k = 0; k < STEP; k += 16) {
            uint32_t left[4][4], right[2][4]; // of right two fragments: [0], [2] and [1], [3]
            UNROLL for (int i = 0; i < 4; i++) read_fragment<LDMATRIX>(left[i], a, row + i * 16, k);
            UNROLL for (int j = 0; j < 2; j++) read_fragment<LDMATRIX>(right[j], b, col + j * 16, k);
            UNROLL for (int i = 0; i < 4; i++)
                UNROLL for (int j = 0; j < 4; j++)
                    mma(sum[i][j], left[i], right[j / 2][j % 2], right[j / 2][j % 2 + 2]);
        }
    }
    UNROLL for (int i = 0; i < 4; i++)
        UNROLL for (int j = 0; j < 4; j++)
            UNROLL for (int h = 0; h < 2; h++)
                write_pair(C, i0 + row + i * 16 + h * 8 + lane / 4, j0 + col + j * 8 + lane % 4 * 2, sum[i][j][h * 2],
                           sum[i][j][h * 2 + 1], M, N);
}

// ---- 11 wgmma (Hopper). What bounds step 10 on Hopper is mma.sync itself: operands
// go through registers, and a warp waits for each. wgmma has four warps multiply 64 x 16 by 16 x 128 straight out of
// shared memory, in the swizzle that step 10 already has, in the background. Two groups of four warps: each has 64 rows
// of the tile and all of its columns, 64 sums a lane. The copies are step 10's; a fence makes what they wrote visible
// to wgmma. Predicted: past the ceiling of mma.sync, and bound by 256 threads that must stop to copy, and by the
// barrier.
template <int N_TILE>
__device__ inline void multiply_step(float (&sum)[N_TILE / 2], const bf16* a, const bf16* b, bool more) {
    wgmma_fence();
    UNROLL for (int k = 0; k < STEP; k += 16) wgmma_64x<N_TILE>(sum, a + k, b + k, more || k);
    wgmma_commit();
}
template <int N_TILE> // a group of four warps has 64 rows from i0 on
__device__ inline void write_group(bf16* C, const float (&sum)[N_TILE / 2], int i0, int j0, int M, int N) {
    const int lane = threadIdx.x % 32, i = i0 + threadIdx.x % 128 / 32 * 16 + lane / 4;
    UNROLL for (int j = 0; j < N_TILE / 8; j++)
        UNROLL for (int h = 0; h < 2; h++)
            write_pair(C, i + h * 8, j0 + j * 8 + lane % 4 * 2, sum[j * 4 + h * 2], sum[j * 4 + h * 2 + 1], M, N);
}
__global__ void __launch_bounds__(256) groups(const bf16* A, const bf16* B, bf16* C, int M, int N, int K) {
#ifdef HAVE_HOPPER
    DYNAMIC_SHARED(bf16, room);
    bf16* const shared = aligned_1024(room);
    const int i0 = blockIdx.y * TILE, j0 = blockIdx.x * TILE, row = threadIdx.x / 128 * 64;
    float sum[TILE / 2];
    for (int s = 0; s < STAGES - 1; s++) copy_stage<true>(shared + s * STAGE, A, B, i0, j0, s * STEP, M, N, K);
    for (int k0 = 0, s = 0; k0 < K; k0 += STEP, s++) {
        copies_wait<STAGES - 2>();
        shared_to_async();
        __syncthreads();
        const int ahead = s + STAGES - 1;
        copy_stage<true>(shared + ahead % STAGES * STAGE, A, B, i0, j0, ahead * STEP, M, N, K);
        const bf16 *a = shared + s % STAGES * STAGE, *b = a + TILE * STEP;
        multiply_step<TILE>(sum, a + row * STEP, b, s > 0);
        wgmma_wait<0>();
    }
    settle(sum);
    write_group<TILE>(C, sum, i0 + row, j0, M, N);
#endif
}

// ---- 12 TMA and a producer warp (Hopper). Of step 11's instructions most compute
// addresses of copies. The Tensor Memory Accelerator copies a whole tile for one instruction of one thread. So that no
// one stops to copy, that thread is of a ninth warp, the producer, which does nothing else. It runs as far ahead as
// there are stages. No barrier of the block is left in the loop; each stage has two of its own: `full` says that its
// bytes have come, `empty` that all consumers have multiplied them. One group of wgmma stays under way while the next
// stage is waited for. Predicted: 80% or more of cuBLAS.
template <int N_TILE_, int STAGES_> struct Shape16 {
    static constexpr int N_TILE = N_TILE_, STAGES = STAGES_, A_SIZE = TILE * STEP, SIZE = A_SIZE + N_TILE * STEP;
    static constexpr int CONSUMERS = 256, THREADS = CONSUMERS + (N_TILE > 128 ? 128 : 32);
    static constexpr size_t SHARED = STAGES * SIZE * sizeof(bf16) + 1024;
};
template <class S> struct Ring { // stages in turn, from the first; `parity` of the phase that is waited for
    bf16* shared;
    uint64_t *full, *empty;
    int stage = 0;
    uint32_t parity = 0;
    __device__ void next() {
        if (++stage == S::STAGES) stage = 0, parity ^= 1;
    }
    __device__ bf16* a() const { return shared + stage * S::SIZE; }
    __device__ bf16* b() const { return a() + S::A_SIZE; }
};
template <class S> __device__ void begin(const Ring<S>& ring, int releases = S::CONSUMERS / 32) { // all threads
    if (threadIdx.x == 0) {
        for (int s = 0; s < S::STAGES; s++) barrier_init(&ring.full[s], 1), barrier_init(&ring.empty[s], releases);
        barriers_ready();
    }
    __syncthreads();
}
template <class S> // one thread
__device__ void produce(Ring<S>& ring, const CUtensorMap& A, const CUtensorMap& B, int i0, int j0, int K) {
    for (int k0 = 0; k0 < K; k0 += STEP, ring.next()) {
        barrier_wait(&ring.empty[ring.stage], ring.parity ^ 1); // at first it is
        barrier_expect(&ring.full[ring.stage], S::SIZE * sizeof(bf16));
        tma_load(ring.a(), A, &ring.full[ring.stage], k0, i0), tma_load(ring.b(), B, &ring.full[ring.stage], k0, j0);
    }
}
struct ToOwn { __device__ void operator()(uint64_t* empty) const { barrier_arrive(empty); } };
template <class S, class Release = ToOwn> // all consumers
__device__ void consume(Ring<S>& ring, float (&sum)[S::N_TILE / 2], int K, Release release = Release()) {
    const int row = threadIdx.x / 128 * 64;
    int before = 0;
    for (int k0 = 0; k0 < K; k0 += STEP, ring.next()) {
        barrier_wait(&ring.full[ring.stage], ring.parity);
        multiply_step<S::N_TILE>(sum, ring.a() + row * STEP, ring.b(), k0 > 0);
        wgmma_wait<1>(); // the step before is done
        if (k0 && threadIdx.x % 32 == 0) release(&ring.empty[before]);
        before = ring.stage;
    }
    wgmma_wait<0>();
    settle(sum);
    if (threadIdx.x % 32 == 0) release(&ring.empty[before]);
}
template <class S>
__global__ void __launch_bounds__(S::THREADS)
specialised(const __grid_constant__ CUtensorMap A, const __grid_constant__ CUtensorMap B, bf16* C, int M, int N,
            int K) {
#ifdef HAVE_HOPPER
    DYNAMIC_SHARED(bf16, room);
    __shared__ uint64_t full[S::STAGES], empty[S::STAGES];
    Ring<S> ring = {aligned_1024(room), full, empty};
    begin(ring);
    const int i0 = blockIdx.y * TILE, j0 = blockIdx.x * S::N_TILE;
    if (threadIdx.x >= S::CONSUMERS) {
        if (threadIdx.x == S::CONSUMERS) produce(ring, A, B, i0, j0, K);
        return;
    }
    float sum[S::N_TILE / 2];
    consume(ring, sum, K);
    write_group<S::N_TILE>(C, sum, i0 + threadIdx.x / 128 * 64, j0, M, N);
#endif
}

// ---- 13 persistent (Hopper). In step 12 the tensor cores rest while a block writes
// its tile, and again while the next one starts and waits for its first stage. Here there are as many blocks as
// multiprocessors, and each takes tiles in turn. The producer does not stop at the end of a tile: while the consumers
// write it, the next one's stages come. Tiles are numbered in bands of 16 rows of tiles, so that blocks that run at the
// same time share rows of A and B in the L2 cache.
//
// ---- 14 128 x 256 (Hopper). wgmma reads both operands from shared memory,
// 128 bytes a clock: of 64 x 16 and 128 x 16 they are 6 KB, 48 clocks, where the tensor cores take 64 (at 2,048
// multiply-adds a clock). Of 64 x 16 and 256 x 16 they are 10 KB, 80 clocks of 128. A tile twice as wide also reads
// less from the L2 cache for what it computes. It takes 128 sums a thread, so the producer's group gives registers back
// and the consumers take them: 128 x 40 + 256 x 232 are 64,512 of a multiprocessor's 65,536. Predicted: cuBLAS within
// 5%; at 4,096 the last wave of tiles has 116 for 132 blocks (exercise 3).
template <int N_TILE, int M_TILE = TILE> __device__ inline void find_tile(int tile, int M, int N, int& i0, int& j0) {
    constexpr int BAND = 16 * TILE / M_TILE;
    const int down = (M + M_TILE - 1) / M_TILE, across = (N + N_TILE - 1) / N_TILE;
    const int band = tile / (BAND * across), within = tile % (BAND * across), high = min(BAND, down - band * BAND);
    i0 = (band * BAND + within % high) * M_TILE, j0 = within / high * N_TILE;
}
template <class S>
__global__ void __launch_bounds__(S::THREADS)
persistent(const __grid_constant__ CUtensorMap A, const __grid_constant__ CUtensorMap B, bf16* C, int M, int N, int K) {
#ifdef HAVE_HOPPER
    DYNAMIC_SHARED(bf16, room);
    __shared__ uint64_t full[S::STAGES], empty[S::STAGES];
    Ring<S> ring = {aligned_1024(room), full, empty};
    begin(ring);
    const int count = ((M + TILE - 1) / TILE) * ((N + S::N_TILE - 1) / S::N_TILE);
    int i0, j0;
    if (threadIdx.x >= S::CONSUMERS) {
        if (S::N_TILE > 128) keep_registers<40>();
        if (threadIdx.x == S::CONSUMERS)
            for (int tile = blockIdx.x; tile < count; tile += gridDim.x)
                find_tile<S::N_TILE>(tile, M, N, i0, j0), produce(ring, A, B, i0, j0, K);
        return;
    }
    if (S::N_TILE > 128) take_registers<232>();
    for (int tile = blockIdx.x; tile < count; tile += gridDim.x) {
        find_tile<S::N_TILE>(tile, M, N, i0, j0);
        float sum[S::N_TILE / 2];
        consume(ring, sum, K);
        write_group<S::N_TILE>(C, sum, i0 + threadIdx.x / 128 * 64, j0, M, N);
    }
#endif
}

// ---- 15 pairs (Hopper). Each block of step 14 reads 48 KB from the L2 cache for a step of 64. Two neighbouring
// multiprocessors as a cluster take tiles one below the other, which need the same rows of B: each block fetches half
// of them for both, and reads 32 KB. A stage may be overwritten when the consumers of both blocks have multiplied it,
// so these say so to both. And lanes exchange sums, so that a row's four write whole sectors. Predicted: 0.95 of cuBLAS
// at 8,192, and little at 4,096, whose last wave is not full. Measured: 1 to 5% at 8,192, 0.85 to 0.89 of cuBLAS, and
// 3.5% at 4,096, all of it by the stores. What a consumer says must not be a release for the cluster (`mbarrier.arrive.
// release.cluster`): it then waits for all that it has written, twice a step, and the whole took twice as long.
struct __align__(8) Four { __nv_bfloat162 low, high; };
template <int N_TILE> // as write_group, but a row's four lanes write 32 bytes at once, a whole sector
__device__ inline void write_sectors(bf16* C, const float (&sum)[N_TILE / 2], int i0, int j0, int M, int N) {
    const int lane = threadIdx.x % 32, odd = lane % 2, i = i0 + threadIdx.x % 128 / 32 * 16 + lane / 4;
    UNROLL for (int j = 0; j < N_TILE / 8; j += 2)
        UNROLL for (int h = 0; h < 2; h++) {
            const float* s = &sum[j * 4 + h * 2]; // even lanes get columns of the first eight, odd ones of the next
            const __nv_bfloat162 first = __floats2bfloat162_rn(s[0], s[1]), second = __floats2bfloat162_rn(s[4], s[5]);
            const __nv_bfloat162 other = __shfl_xor_sync(~0u, odd ? first : second, 1);
            const int row = i + h * 8, column = j0 + (j + odd) * 8 + lane % 4 / 2 * 4;
            if (row < M && column < N)
                *(Four*)&C[(size_t)row * N + column] = odd ? Four{other, second} : Four{first, other};
        }
}
template <class S>
__global__ void CLUSTERS_OF_PAIR __launch_bounds__(S::THREADS)
pairs(const __grid_constant__ CUtensorMap A, const __grid_constant__ CUtensorMap B, bf16* C, int M, int N, int K) {
#ifdef HAVE_HOPPER
    DYNAMIC_SHARED(bf16, room);
    __shared__ uint64_t full[S::STAGES], empty[S::STAGES];
    Ring<S> ring = {aligned_1024(room), full, empty};
    begin(ring, PAIR * S::CONSUMERS / 32);
    cluster_sync(); // the other block's barriers are there
    const int rank = cluster_rank(), clusters = gridDim.x / PAIR, half = S::N_TILE / PAIR;
    const int count = ((M + PAIR * TILE - 1) / (PAIR * TILE)) * ((N + S::N_TILE - 1) / S::N_TILE);
    int i0, j0;
    if (threadIdx.x >= S::CONSUMERS) {
        keep_registers<40>();
        if (threadIdx.x != S::CONSUMERS) return;
        for (int tile = blockIdx.x / PAIR; tile < count; tile += clusters) {
            find_tile<S::N_TILE, PAIR * TILE>(tile, M, N, i0, j0);
            for (int k0 = 0; k0 < K; k0 += STEP, ring.next()) {
                uint64_t* there = &ring.full[ring.stage];
                barrier_wait(&ring.empty[ring.stage], ring.parity ^ 1);
                barrier_expect(there, S::SIZE * sizeof(bf16));
                tma_load(ring.a(), A, there, k0, i0 + rank * TILE);
                tma_load_to_all(ring.b() + rank * half * STEP, B, there, k0, j0 + rank * half);
            }
        }
        return;
    }
    take_registers<232>();
    for (int tile = blockIdx.x / PAIR; tile < count; tile += clusters) {
        find_tile<S::N_TILE, PAIR * TILE>(tile, M, N, i0, j0);
        float sum[S::N_TILE / 2];
        consume(ring, sum, K, [](uint64_t* empty) {
            for (int block = 0; block < PAIR; block++) barrier_arrive_at(empty, block);
        });
        write_sectors<S::N_TILE>(C, sum, i0 + rank * TILE + threadIdx.x / 128 * 64, j0, M, N);
    }
    cluster_sync(); // the other block tells this one's barriers until then
#endif
}

// ---- 16 the kernel of qwen3.cu: step 14, and what a model's products need beside it. Splits of `in` over the blocks
// of a cluster where tiles are few, epilogues (residual, SwiGLU, softmax's parts, gradients), adapters, three more tile
// shapes and a rule to choose one, and a start that overlaps the end of the kernel before. Its section in Book II is
// called "The same on Hopper". (Built by nvcc only.)

// ================================================================================ the table
template <class P> dim3 grid_of(const P& p, int down, int across) {
    return dim3(blocks_for(p.N, across), blocks_for(p.M, down));
}
template <class K> std::function<void(Float&)> runs(K kernel, dim3 block, int tile, size_t shared = 0) {
    return [=](Float& p) { launch(kernel, grid_of(p, tile, tile), block, shared, p.A, p.B, p.C, p.M, p.N, p.K); };
}
template <class K> std::function<void(Narrow&)> runs_narrow(K kernel) {
    return [=](Narrow& p) {
        constexpr size_t SHARED = STAGES * STAGE * sizeof(bf16) + 1024;
        launch(kernel, grid_of(p, TILE, TILE), dim3(256), SHARED, p.A, p.B, p.C, p.M, p.N, p.K);
    };
}
template <class S, class K> std::function<void(Narrow&)> runs_hopper(K kernel, bool all_tiles) {
    return [=](Narrow& p) {
        const CUtensorMap A = tensor_map(p.A, p.M, p.K, TILE), B = tensor_map(p.B, p.N, p.K, S::N_TILE);
        const dim3 tiles = grid_of(p, TILE, S::N_TILE);
        const dim3 grid = all_tiles ? tiles : dim3(min((int)(tiles.x * tiles.y), multiprocessors()));
        launch(kernel, grid, dim3(S::THREADS), S::SHARED, A, B, p.C, p.M, p.N, p.K);
    };
}
template <class S> std::function<void(Narrow&)> runs_pairs() {
    return [=](Narrow& p) {
        const CUtensorMap A = tensor_map(p.A, p.M, p.K, TILE), B = tensor_map(p.B, p.N, p.K, S::N_TILE / PAIR);
        const int all = blocks_for(p.M, PAIR * TILE) * blocks_for(p.N, S::N_TILE), most = multiprocessors() / PAIR;
        launch(pairs<S>, dim3(min(all, most) * PAIR), dim3(S::THREADS), S::SHARED, A, B, p.C, p.M, p.N, p.K);
    };
}
#ifdef LAB_QWEN3
inline void run_qwen3(Narrow& p) {
    static Array<float> partial(PARTIAL_BYTES / sizeof(float)); // for small products, whose sums blocks share
    static Array<int> arrived(MAX_TILES);
    static Context ctx = [] {
        Context c = open_gpu(0);
        arrived.fill(0);
        c.gpu->stream = stream, c.gpu->partial = partial, c.gpu->arrived = arrived;
        return c;
    }();
    Linear<::bf16> W;
    W.w[0] = (::bf16*)p.B.p, W.rows[0] = p.N, W.in = p.K;
    linear_gpu(ctx, (::bf16*)p.C.p, (const ::bf16*)p.A.p, W, p.M);
}
#endif
inline Laboratory laboratory() {
    Laboratory l("matmul", "one product, from three loops to the kernel of qwen3.cu", {4096, 4096, 4096}, {70, 40, 50});
    constexpr const char *SECTORS = "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio",
                         *SHARED = "smsp__inst_executed_pipe_lsu.sum,smsp__inst_executed_pipe_fma.sum",
                         *WARPS = "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio,"
                                  "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",
                         *CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
                         *TENSORS = "sm__inst_executed_pipe_tensor.sum,"
                                    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed";
    l.step<Float>("naive", "three loops; a warp reads a column of A", [](Float& p) {
        launch(naive, dim3(blocks_for(p.M, 32), blocks_for(p.N, 32)), dim3(32, 32), 0, p.A, p.B, p.C, p.M, p.N, p.K);
    }, FMA, SECTORS, "more than 16 sectors a load: the mean of 32 (A) and 1 (B)");
    l.step<Float>("coalesced", "a warp reads a row of B", runs(coalesced, dim3(32, 32), 32), FMA, SECTORS,
                  "2.5: the mean of 4 (B) and 1 (A)");
    l.step<Float>("shared tiles", "each number from memory is used 32 times", runs(tiles, dim3(32, 32), 32), FMA,
                  SHARED, "two loads a multiply-add, now of shared memory");
    l.step<Float>("column of registers", "8 sums a thread: 9 loads for 8", runs(column, dim3(512), 64), FMA, SHARED,
                  "one load a multiply-add");
    l.step<Float>("square of registers", "64 sums a thread: 16 loads for 64", runs(square, dim3(256), TILE), FMA,
                  SHARED, "one load for four multiply-adds");
    l.step<Float>("vectors", "16 bytes a load; A's tile transposed", runs(vectors, dim3(256), TILE), FMA, SHARED,
                  "one load for 16 multiply-adds");
    l.step<Float>("double buffer", "the next step is fetched during this one", runs(two_buffers, dim3(256), TILE), FMA,
                  WARPS, "less waiting for memory and at barriers than step 6");
    l.step<Float>("cp.async", "four stages, and no registers for copies",
                  runs(stages, dim3(256), TILE, FLOAT_STAGES * FLOAT_STAGE * sizeof(float)), FMA, WARPS,
                  "waits for memory all but gone");
    l.step<Narrow>("mma.sync", "bf16 on the tensor cores", runs_narrow(tensor<false>), TENSOR, CONFLICTS,
                   "7 conflicts for each load of a fragment");
    l.step<Narrow>("ldmatrix, swizzle", "four matrices a load, no conflicts", runs_narrow(tensor<true>), TENSOR,
                   CONFLICTS, "about none");
    l.step<Narrow>("wgmma", "operands straight from shared memory", runs_narrow(groups), TENSOR, TENSORS,
                   "fewer instructions than step 10, pipe busier", 90);
    using Narrow128 = Shape16<128, 4>;
    using Deep128 = Shape16<128, 6>;
    using Wide = Shape16<256, 4>;
    l.step<Narrow>("TMA, a producer", "one thread copies, the others only multiply",
                   runs_hopper<Narrow128>(specialised<Narrow128>, true), TENSOR, TENSORS, "pipe busier", 90);
    l.step<Narrow>("persistent", "copies run on while a tile is written",
                   runs_hopper<Deep128>(persistent<Deep128>, false), TENSOR, TENSORS,
                   "pipe busier: no gaps between tiles", 90);
    l.step<Narrow>("128 x 256", "less read from shared memory; registers moved",
                   runs_hopper<Wide>(persistent<Wide>, false), TENSOR, TENSORS, "near what the power limit allows", 90);
    l.step<Narrow>("pairs", "two blocks fetch B for each other", runs_pairs<Wide>(), TENSOR,
                   "lts__t_sectors_op_read.sum,sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
                   "fewer sectors from the L2 cache than in step 14", 90);
#ifdef LAB_QWEN3
    l.step<Narrow>("qwen3.cu", "the program's own kernel, which chooses a tile", run_qwen3, TENSOR, TENSORS,
                   "as step 14");
#endif
    l.exercise("A product of 4,096 x 4,096 x 4,096 in float32, each number moved once: how many flops a byte?",
               [] { return 2. * 4096 * 4096 * 4096 / (4. * 3 * 4096 * 4096); });
    l.exercise("Step 5's tile is 128 x 128. How many times is a number of A read from memory or L2 at N = 4,096?",
               [] { return 4096. / TILE; });
    l.exercise("Step 14 at 4,096 x 4,096 on 132 multiprocessors: in what share (%) of the blocks' time is there work?",
               [] {
        const double count = 4096. / TILE * (4096. / 256), waves = std::ceil(count / 132);
        return 100 * count / (waves * 132);
    });
    return l;
}
} // namespace lab::matmul

#ifndef LAB_NO_MAIN
int main(int argc, char** argv) { return lab::matmul::laboratory().main(argc, argv); }
#endif
