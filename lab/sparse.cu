// sparse.cu: y = A x, where most of A is zero: formats (COO, CSR, ELL), and the owners of entries (a thread, a warp, a
// part of a warp a row; equal shares of a merged path). Two matrices, one with rows of equal length and one without: a
// step that wins on the one may lose on the other.   (lab/lab.h says how to run it)
//
// --size MxNxK: M rows, N columns, K entries a row (on average: skewed has rows of up to 1,024 K).
// "Predicted" is arithmetic for an H100 (3.35 TB/s, 50 MB L2), unless it says RTX 4090 (1.0 TB/s, 72 MB L2).
#include "lab/lab.h"
#if defined(__CUDACC__) && defined(HAVE_CUSPARSE)
#include <cusparse.h>
#endif

namespace lab::sparse {

// An entry is 8 bytes of CSR for 2 flops: 0.25 a byte, so memory bounds whatever the step. The least that must move: 8
// nnz + 4 (M + 1) + 4 N + 4 M bytes; for M = N = 1M and 16 a row 147 MB: 0.044 ms (RTX 4090: 0.15 ms). x, 4 MB, stays
// in the L2 cache. Where columns are near the diagonal (even) the L1 cache has what is read of x; where they are
// anywhere (skewed) each entry reads a sector of 32 bytes of x from the L2 cache: 537 MB, 0.1 ms at 5.5 TB/s, more than
// all the rest.
struct Host {
    int M, N, nnz, width;       // width: ELL's K
    std::vector<int> rowptr, row, col, ell_col, rest_row, rest_col; // rest: what ELL has no place for, as COO
    std::vector<float> val, ell_val, rest_val, x, y;
    Host(int M, int N, const std::vector<int>& lengths, int band) : M(M), N(N), rowptr(M + 1), y(M) {
        for (int r = 0; r < M; r++) rowptr[r + 1] = rowptr[r] + lengths[r];
        nnz = rowptr[M], row.resize(nnz), col.resize(nnz);
        val = random_numbers(nnz, 1), x = random_numbers(N, 2);
        const int longest = *std::max_element(lengths.begin(), lengths.end());
        width = std::max(1, std::min(longest, 2 * (nnz / M)));
        for (auto* list : {&row, &col, &rest_row, &rest_col}) list->reserve(1); // (a copy takes no null pointer)
        for (auto* list : {&val, &rest_val}) list->reserve(1);
        ell_col.assign((size_t)M * width, -1), ell_val.resize(ell_col.size());
        uint32_t seed = 3;
        for (int r = 0; r < M; r++)
            for (int i = rowptr[r]; i < rowptr[r + 1]; i++) {
                seed = seed * 1664525u + 1013904223u;
                const int first = std::clamp((int)((double)r / M * N) - band / 2, 0, N - band);
                row[i] = r, col[i] = first + (int)((uint64_t)seed * band >> 32);
                y[r] += val[i] * x[col[i]];
                if (const size_t k = i - rowptr[r]; k < (size_t)width)
                    ell_col[k * M + r] = col[i], ell_val[k * M + r] = val[i];
                else
                    rest_row.push_back(r), rest_col.push_back(col[i]), rest_val.push_back(val[i]);
            }
    }
};
struct Matrix : Problem {
    Host h;
    int blocks; // of spmv_merge
    Array<int> rowptr, row, col, ell_col, rest_row, rest_col, carry_row;
    Array<float> val, ell_val, rest_val, x, y, carry;
    explicit Matrix(Host host);
    void spoil() override { y.spoil(); }
    double error() override { return largest_difference(y.get(), h.y); }
    ~Matrix() override;
#ifdef HAVE_CUSPARSE
    cusparseHandle_t handle = nullptr;
    cusparseSpMatDescr_t A = nullptr;
    cusparseDnVecDescr_t X = nullptr, Y = nullptr;
    std::unique_ptr<Array<char>> work;
    void library() override {
        const float one = 1, zero = 0;
        if (!handle) { // the descriptors, and what its algorithm wants to know of the matrix
            size_t size = 0;
            cusparseCreate(&handle), cusparseSetStream(handle, stream);
            cusparseCreateCsr(&A, h.M, h.N, h.nnz, rowptr.p, col.p, val.p, CUSPARSE_INDEX_32I, CUSPARSE_INDEX_32I,
                              CUSPARSE_INDEX_BASE_ZERO, CUDA_R_32F);
            cusparseCreateDnVec(&X, h.N, x.p, CUDA_R_32F), cusparseCreateDnVec(&Y, h.M, y.p, CUDA_R_32F);
            cusparseSpMV_bufferSize(handle, CUSPARSE_OPERATION_NON_TRANSPOSE, &one, A, X, &zero, Y, CUDA_R_32F,
                                    CUSPARSE_SPMV_CSR_ALG2, &size);
            work = std::make_unique<Array<char>>(size + 1);
        }
        cusparseSpMV(handle, CUSPARSE_OPERATION_NON_TRANSPOSE, &one, A, X, &zero, Y, CUDA_R_32F, CUSPARSE_SPMV_CSR_ALG2,
                     work->p);
    }
#endif
};

// ---- 1 spmv_coo. A thread an entry, added to its row by an atomic. All threads do the same work on neighbours:
// coalesced, and no row is too long. But an entry is 12 bytes instead of CSR's 8, y has to be zero before, and each
// entry is an atomic addition, which the L2 cache does one after the other where they meet in an address: a warp's 32
// entries are of two rows. Their order differs from run to run, and so do y's last bits. (Here sums are exact, so that
// no order shows.) Predicted: the bytes alone are 0.06 ms; the atomics bound.
__global__ void spmv_coo(const int* row, const int* col, const float* val,
                         const float* x, float* y, int nnz) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < nnz) atomicAdd(&y[row[i]], val[i] * x[col[i]]);
}

// ---- 2 spmv_csr_scalar. Bound before: atomics. A thread a row: none are needed, and 8 bytes an entry. But a warp's 32
// loads are a row's length apart: with 16 a row in 32 sectors of which one load uses 4 of 32 bytes, and the L1 cache
// has to keep the rest for the next seven rounds: 2 arrays x 32 B x 2,048 threads of an SM are 128 KB of its 256. A
// warp ends with its longest row. Predicted: even: 1.5 to 3 times the floor; skewed: many times.
__global__ void spmv_csr_scalar(const int* rowptr, const int* col, const float* val,
                                const float* x, float* y, int M) {
    int r = blockIdx.x * blockDim.x + threadIdx.x;
    if (r >= M) return;
    float sum = 0.0f;
    // exercise sparse-2: the product of row r with x: entries rowptr[r] up to rowptr[r + 1].
    // Then look at the count of sectors: why are neighbouring threads' loads far apart?
    for (int i = rowptr[r]; i < rowptr[r + 1]; i++) sum += val[i] * x[col[i]];
    // end of exercise
    y[r] = sum;
}

// ---- 3 spmv_csr_warp. Bound before: sectors that are loaded and not used, and the longest row of 32. A warp a row:
// its lanes take neighbours, and add up by shuffles. A row of 16 leaves half of the lanes idle, with a warp and five
// shuffles for each 128 bytes. Predicted: even: twice the floor; skewed: better than step 2 by far.
__global__ void spmv_csr_warp(const int* rowptr, const int* col, const float* val,
                              const float* x, float* y, int M) {
    int r = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (r >= M) return;                       // a whole warp leaves together
    float sum = 0.0f;
    // exercise sparse-3: the product of row r by a warp: lanes take neighbouring entries.
    // Five shuffles add the lanes' sums up; lane 0 writes y[r].
    for (int i = rowptr[r] + lane; i < rowptr[r + 1]; i += 32) sum += val[i] * x[col[i]];
    for (int d = 16; d > 0; d /= 2) sum += __shfl_down_sync(0xffffffffu, sum, d);
    if (lane == 0) y[r] = sum;
    // end of exercise
}

// ---- 4 spmv_csr_lanes. Bound before: idle lanes. 32 becomes LANES, about the average row. (All of a warp have to come
// to the shuffles, so that a row past the end is an empty one.) Predicted: even: near the floor; skewed: a warp now
// waits for the longest of its rows, and so does y.
template <int LANES> __global__ void spmv_csr_lanes(const int* rowptr, const int* col, const float* val,
                                                    const float* x, float* y, int M) {
    int r = (blockIdx.x * blockDim.x + threadIdx.x) / LANES, lane = threadIdx.x % LANES;
    float sum = 0.0f;
    if (r < M)
        for (int i = rowptr[r] + lane; i < rowptr[r + 1]; i += LANES) sum += val[i] * x[col[i]];
    for (int d = LANES / 2; d > 0; d /= 2) sum += __shfl_down_sync(0xffffffffu, sum, d, LANES);
    if (lane == 0 && r < M) y[r] = sum;
}

// ---- 5 spmv_ell. Bound before: shuffles and the start of each row. ELL pads rows to K entries and stores them by
// columns: a thread a row is coalesced, without row pointers, shuffles or divergence. Padding is read like the rest, so
// K is at most twice the average here; what is left of longer rows goes to COO, whose kernel adds it afterwards (the
// hybrid format). Predicted: even: the floor, 8 B an entry. Skewed: the padding's bytes and the atomics.
__global__ void spmv_ell(const int* col, const float* val,   // (K,M): M x K by columns
                         const float* x, float* y, int M, int K) {
    int r = blockIdx.x * blockDim.x + threadIdx.x;
    if (r >= M) return;
    float sum = 0.0f;
    // exercise sparse-5: the product of row r: entry k of row r lies at k M + r. A padded entry has column -1.
    // Neighbouring threads have neighbouring rows: are their loads coalesced?
    for (int k = 0; k < K; k++) {
        int c = col[(size_t)k * M + r];
        if (c >= 0) sum += val[(size_t)k * M + r] * x[c];
    }
    // end of exercise
    y[r] = sum;
}

// ---- 6 spmv_merge. Bound before: what a row's length does to warp or format. Think of two sorted lists, the rows'
// ends and the entries 0, 1, 2, ...: merged, they are a path of M + nnz steps, on which an entry is added and a row's
// end writes the sum. A block takes PATH steps, a thread ITEMS, whatever the rows are; a binary search along the
// diagonal says where a share begins. A row may begin in one share and end in another: threads hand on what is left,
// blocks through a second kernel, always in the same order: no atomics, the same bits each time. Predicted: even and
// skewed alike, 1.2 to 1.5 times what bounds each (memory; x from the L2 cache): searches, two barriers, the second
// launch.
constexpr int THREADS = 128, ITEMS = 8, PATH = THREADS * ITEMS;
// How many of the ends are among the first `steps` steps of the path: end r comes before entry j where end[r] <= j.
__device__ int ends_before(const int* end, int ends, int entries, int steps) {
    int lo = max(0, steps - entries), hi = min(steps, ends);
    // exercise sparse-6: binary search: how many of the rows' ends are among the first `steps` steps of the merged
    // path?
    // The answer is from lo to hi. End r comes before entry j where end[r] <= j; steps = ends + entries.
    while (lo < hi) {
        int mid = (lo + hi) / 2;
        if (end[mid] < steps - mid) lo = mid + 1;
        else hi = mid;
    }
    // end of exercise
    return lo;
}
__global__ void __launch_bounds__(THREADS)
spmv_merge(const int* rowptr, const int* col, const float* val, const float* x, float* y, int* carry_row, float* carry,
           int M, int nnz) {
    __shared__ float product[PATH], left[THREADS];
    __shared__ int end[PATH], row_of[THREADS];
    int t = threadIdx.x, step0 = blockIdx.x * PATH, steps = min(PATH, M + nnz - step0);
    int r0 = ends_before(rowptr + 1, M, nnz, step0), rows = ends_before(rowptr + 1, M, nnz, step0 + steps) - r0;
    int i0 = step0 - r0, entries = steps - rows;
    for (int i = t; i < entries; i += THREADS) product[i] = val[i0 + i] * x[col[i0 + i]];
    for (int r = t; r < rows; r += THREADS) end[r] = rowptr[r0 + r + 1] - i0;
    __syncthreads();
    int step = min(t * ITEMS, steps), last = min(step + ITEMS, steps);
    int r = ends_before(end, rows, entries, step), i = step - r;
    float sum = 0;
    for (; step < last; step++)
        if (r < rows && end[r] <= i) y[r0 + r++] = sum, sum = 0;
        else sum += product[i++];
    left[t] = sum, row_of[t] = r; // of a row that ends further on
    __syncthreads();
    if (t > 0 && row_of[t - 1] == r) return; // the first of those with this row adds for all of them
    for (int k = t + 1; k < THREADS && row_of[k] == r; k++) sum += left[k];
    if (r < rows) y[r0 + r] += sum;
    else carry_row[blockIdx.x] = r0 + r, carry[blockIdx.x] = sum;
}
__global__ void add_carries(const int* carry_row, const float* carry, float* y, int blocks, int M) {
    int b = blockIdx.x * blockDim.x + threadIdx.x;
    if (b >= blocks || carry_row[b] == M || (b > 0 && carry_row[b - 1] == carry_row[b])) return;
    float sum = 0;
    for (int k = b; k < blocks && carry_row[k] == carry_row[b]; k++) sum += carry[k];
    y[carry_row[b]] += sum;
}

inline Matrix::Matrix(Host host)
    : h(std::move(host)), blocks(blocks_for((size_t)h.M + h.nnz, PATH)), rowptr(h.rowptr), row(h.row), col(h.col),
      ell_col(h.ell_col), rest_row(h.rest_row), rest_col(h.rest_col), carry_row(blocks), val(h.val), ell_val(h.ell_val),
      rest_val(h.rest_val), x(h.x), y(h.M), carry(blocks) {
    bytes = 8. * h.nnz + 4. * (h.M + 1) + 4. * h.N + 4. * h.M, flops = 2. * h.nnz;
#ifdef HAVE_CUSPARSE
    library_name = "cuSPARSE, CSR (ALG2: the same bits each time)";
#endif
}
inline Matrix::~Matrix() {
#ifdef HAVE_CUSPARSE
    if (handle) cusparseDestroySpMat(A), cusparseDestroyDnVec(X), cusparseDestroyDnVec(Y), cusparseDestroy(handle);
#endif
}
struct Even : Matrix { // as from a mesh: rows of one length, columns near the diagonal
    using Matrix::Matrix;
    explicit Even(Shape s) : Matrix(Host(s.x, s.y, std::vector<int>(s.x, s.z), std::min(s.y, 2048))) {}
};
struct Skewed : Matrix { // as from a graph: few neighbours for most, very many for some, anywhere
    using Matrix::Matrix;
    static std::vector<int> lengths(Shape s) { // a power law: K / 9 or less for half of the rows, K on average
        std::vector<int> all(s.x);
        uint32_t seed = 4;
        for (auto& n : all) {
            seed = seed * 1664525u + 1013904223u;
            n = (int)std::min(s.z / 9. * (16777216. / ((seed >> 8) + 1) - 1), 1024. * s.z);
        }
        return all;
    }
    explicit Skewed(Shape s) : Matrix(Host(s.x, s.y, lengths(s), s.y)) {}
};

inline void coo(Matrix& m, const int* row, const int* col, const float* val, size_t n) {
    if (n) launch(spmv_coo, blocks_for(n, 256), 256, 0, row, col, val, m.x, m.y, (int)n);
}
template <class K> void csr(K kernel, Matrix& m, int threads_a_row) {
    launch(kernel, blocks_for((size_t)m.h.M * threads_a_row, 256), 256, 0, m.rowptr, m.col, m.val, m.x, m.y, m.h.M);
}
template <class P> void steps(Laboratory& l, const std::string& which) {
    using Run = std::function<void(P&)>;
    const auto step = [&](const char* name, const char* adds, Run run, const char* counter, const char* look) {
        l.step<P>((which + " " + name).c_str(), adds, run, READ, counter, look);
    };
    step("coo", "a thread an entry, atomics", [](P& m) {
        m.y.clear();
        coo(m, m.row, m.col, m.val, m.h.nnz);
    }, "lts__t_sectors_op_red.sum", "reductions in the L2 cache: no other step has so many");
    step("csr_scalar", "a thread a row", [](P& m) { csr(spmv_csr_scalar, m, 1); },
         "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio", "near 32 sectors a load: 4 would do");
    step("csr_warp", "a warp a row", [](P& m) { csr(spmv_csr_warp, m, 32); },
         "smsp__thread_inst_executed_per_inst_executed.ratio", "of 32 lanes, how many work");
    step("csr_lanes", "eight lanes a row", [](P& m) { csr(spmv_csr_lanes<8>, m, 8); },
         "smsp__thread_inst_executed_per_inst_executed.ratio", "even: more than in the step before");
    step("ell", "rows padded, stored by columns; the rest in COO", [](P& m) {
        launch(spmv_ell, blocks_for(m.h.M, 256), 256, 0, m.ell_col, m.ell_val, m.x, m.y, m.h.M, m.h.width);
        coo(m, m.rest_row, m.rest_col, m.rest_val, m.rest_val.n);
    }, "dram__bytes_read.sum", "even: 8 B an entry; skewed: the padding too");
    step("merge", "equal shares of rows' ends and entries", [](P& m) {
        launch(spmv_merge, m.blocks, THREADS, 0, m.rowptr, m.col, m.val, m.x, m.y, m.carry_row, m.carry, m.h.M,
               m.h.nnz);
        launch(add_carries, blocks_for(m.blocks, 256), 256, 0, m.carry_row, m.carry, m.y, m.blocks, m.h.M);
    }, "dram__throughput.avg.pct_of_peak_sustained_elapsed", "even: above all steps but ELL");
}
inline Laboratory laboratory() {
    Laboratory l("sparse", "sparse matrix times vector: formats, and equal shares of work", {1 << 20, 1 << 20, 16},
                 {197, 101, 13});
    steps<Even>(l, "even"), steps<Skewed>(l, "skewed");
    l.exercise("A matrix of 1,000,000 rows has 10,000,000 entries, its longest row has 40. How many times CSR's bytes "
               "does ELL take (float32 values, 32-bit indices)?",
               [] { return 8. * 40 * 1e6 / (8. * 1e7 + 4. * 1000001); });
    l.exercise("A thread a row: 31 rows of a warp have 4 entries, one has 400. How many per cent of the lanes' rounds "
               "do work?", [] { return 100. * (31 * 4 + 400) / (32 * 400); });
    l.exercise("spmv_merge with 128 threads of 8 steps, on 1,000,000 rows with 16,000,000 entries: how many blocks?",
               [] { return std::ceil((1e6 + 16e6) / (128 * 8)); });
    return l;
}
} // namespace lab::sparse

#ifndef LAB_NO_MAIN
int main(int argc, char** argv) { return lab::sparse::laboratory().main(argc, argv); }
#endif
