// transpose_copy.cu: a matrix is copied, then transposed. Nothing is computed, so all there is to see is the way to the
// memory: coalescing, bank conflicts, padding, swizzling, vector loads.   (lab/lab.h says how to run it)
#include "lab.h"

namespace lab::transpose_copy {

// out = in (copy) or in^T, float32. in is (rows, columns).
struct Matrix : Problem {
    int rows, columns;
    std::vector<float> numbers;
    Array<float> in, out;
    explicit Matrix(Shape s)
        : rows(s.x), columns(s.y), numbers(random_numbers((size_t)s.x * s.y, 1)), in(numbers), out(numbers.size()) {
        bytes = 8. * (double)numbers.size(); // each number is read once and written once
    }
    void spoil() override { out.spoil(); }
};
struct Copy : Matrix {
    using Matrix::Matrix;
    double error() override { return largest_difference(out.get(), numbers); }
};
struct Transpose : Matrix {
    using Matrix::Matrix;
    double error() override {
        std::vector<float> want(numbers.size());
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < columns; c++) want[(size_t)c * rows + r] = numbers[(size_t)r * columns + c];
        return largest_difference(out.get(), want);
    }
};
constexpr int TILE = 32, ROWS = 8; // a block of 32 x 8 threads has a tile of 32 x 32: four numbers a thread

static dim3 tiles(const Matrix& m) { return {(unsigned)blocks_for(m.columns, TILE), (unsigned)blocks_for(m.rows, TILE)}; }

// ---- 1 copy. The ceiling of all that follows: nothing that moves each number once can be faster. A warp's 32 threads
// read 32 neighbours, 128 bytes, which is one cache line: the accesses are coalesced.
__global__ void copy(const float* in, float* out, int rows, int columns) {
    const int c = blockIdx.x * TILE + threadIdx.x, r0 = blockIdx.y * TILE + threadIdx.y;
    for (int r = r0; r < r0 + TILE && r < rows; r += ROWS)
        if (c < columns) out[(size_t)r * columns + c] = in[(size_t)r * columns + c];
}

// ---- 2 naive. One index pair turned round. Reads stay coalesced; a warp's 32 writes are `rows` numbers apart, each in a
// sector of 32 bytes of its own, of which it fills four.
__global__ void naive(const float* in, float* out, int rows, int columns) {
    const int c = blockIdx.x * TILE + threadIdx.x, r0 = blockIdx.y * TILE + threadIdx.y;
    for (int r = r0; r < r0 + TILE && r < rows; r += ROWS)
        if (c < columns) out[(size_t)c * rows + r] = in[(size_t)r * columns + c];
}

template <class K> void on_tiles(K kernel, const Matrix& m) {
    launch(kernel, tiles(m), dim3(TILE, ROWS), 0, m.in, m.out, m.rows, m.columns);
}
inline Laboratory laboratory() {
    Laboratory l("transpose_copy", "the way to memory: coalescing, bank conflicts, padding, swizzling", {8192, 8192, 1},
                 {67, 45, 1});
    l.step<Copy>("copy", "the ceiling: each number is moved once", [](Copy& m) { on_tiles(copy, m); }, COPY,
                 "dram__throughput.avg.pct_of_peak_sustained_elapsed", "near 90% of the memory's peak");
    l.step<Transpose>("naive", "the indices turned round: writes are scattered", [](Transpose& m) { on_tiles(naive, m); },
                      COPY, "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_st.ratio",
                      "32 sectors a store, where the copy has 4");
    l.exercise("A warp stores 32 float32, each 8,192 numbers from the next. How many sectors of 32 bytes does it touch?",
               [] { return 32.; });
    l.exercise("The tile has rows of 36 numbers, and a warp reads a column. Its conflict has how many ways?", [] {
        int most = 0, lanes[32] = {};
        for (int lane = 0; lane < 32; lane++) most = std::max(most, ++lanes[lane * 36 % 32]);
        return (double)most;
    });
    l.exercise("At 3,000 GB/s, how many microseconds does a transposition of 8,192 x 8,192 float32 take at the least?",
               [] { return 2 * 4. * 8192 * 8192 / 3e12 * 1e6; });
    return l;
}
} // namespace lab::transpose_copy

#ifndef LAB_NO_MAIN
int main(int argc, char** argv) { return lab::transpose_copy::laboratory().main(argc, argv); }
#endif
