// transpose_copy.cu: a matrix is copied, then transposed. Nothing is computed, so all there is to see is the way to the
// memory: coalescing, bank conflicts, padding, swizzling, vector loads.   (lab/lab.h says how to run it)
#include "lab/ptx.h"

namespace lab::transpose_copy {

// out = in (copy) or in^T, float32. in is (rows, columns), each rounded up to a multiple of four: vector loads and TMA
// want rows that begin at multiples of 16 bytes.
struct Matrix : Problem {
    int rows, columns;
    std::vector<float> numbers;
    Array<float> in, out;
    explicit Matrix(Shape s)
        : rows((s.x + 3) / 4 * 4), columns((s.y + 3) / 4 * 4), numbers(random_numbers((size_t)rows * columns, 1)),
          in(numbers), out(numbers.size()) {
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

// ---- 1 copy. The ceiling of all that follows: nothing that moves each number once can be faster. A warp's 32 threads
// read 32 neighbours, 128 bytes, which is one cache line or four sectors of 32 bytes: the accesses are coalesced.
// Predicted at 8,192 x 8,192: 2 x 268 MB at the copy ceiling; with 3,000 GB/s that is 179 us.
__global__ void copy(const float* in, float* out, int rows, int columns) {
    const int r0 = blockIdx.y * TILE, c = blockIdx.x * TILE + threadIdx.x;
    for (int r = r0 + threadIdx.y; r < min(r0 + TILE, rows); r += ROWS)
        if (c < columns) out[(size_t)r * columns + c] = in[(size_t)r * columns + c];
}

// ---- 2 naive. The output's indices are turned round. Reads stay coalesced, but a warp's 32 writes are `rows` numbers
// apart, each in a sector of its own of which it fills 4 bytes of 32.
// Predicted: the L2 cache takes 8 times as many sectors as the copy's. The other 28 bytes of a sector come from the
// block's other threads and its neighbours soon after, and the L2 collects many of them before the memory sees the
// line, so the loss at the memory is less than 8 times. How much less is not obvious: look.
__global__ void scattered_writes(const float* in, float* out, int rows, int columns) {
    const int r0 = blockIdx.y * TILE, c = blockIdx.x * TILE + threadIdx.x;
    // exercise transpose_copy-2: number c of row r of `in` (rows, columns) goes to its place in `out` (columns,
    // rows).
    // Then look at the count of sectors: 32 a store.
    for (int r = r0 + threadIdx.y; r < min(r0 + TILE, rows); r += ROWS)
        if (c < columns) out[(size_t)c * rows + r] = in[(size_t)r * columns + c];
    // end of exercise
}

// ---- 3 scattered reads. The same with the roles exchanged: a warp writes 32 neighbours and reads a column. A sector
// that was fetched for one number stays in the L1 cache for the block's other 31 columns, which want the rest of it; a
// write has no such help. Predicted: faster than step 2, though as many sectors are asked for.
__global__ void scattered_reads(const float* in, float* out, int rows, int columns) {
    const int c0 = blockIdx.x * TILE, r = blockIdx.y * TILE + threadIdx.x;
    for (int c = c0 + threadIdx.y; c < min(c0 + TILE, columns); c += ROWS)
        if (r < rows) out[(size_t)c * rows + r] = in[(size_t)r * columns + c];
}

// ---- 4 a tile in shared memory. What bounds step 3 is the number of sectors, so both sides must be coalesced: the
// tile is read by rows, put into shared memory, and taken from there by columns. Shared memory has 32 banks of 4 bytes,
// word i in bank i % 32; a column's words are 32 apart, so all 32 lanes want the same bank and are served one by one.
// Predicted: global memory as in the copy, but a read of a column takes 32 turns instead of one.
//
// Steps 5 and 6 change only where (r, c) of the tile lies: PLACE.
enum Place { PLAIN, PADDED, SWIZZLED };
template <Place PLACE> __host__ __device__ constexpr int place(int r, int c) {
    // exercise transpose_copy-6: the place of number c of row r of the tile, for PLAIN, PADDED and SWIZZLED.
    // PADDED: rows of 33 words. SWIZZLED: 32 words, a row permuted by r so that a column meets all banks.
    // instead: return 0;
    return PLACE == PADDED ? r * (TILE + 1) + c : PLACE == SWIZZLED ? r * TILE + (c ^ r) : r * TILE + c;
    // end of exercise
}
template <Place PLACE> __global__ void tiled(const float* in, float* out, int rows, int columns) {
    __shared__ float tile[TILE * (TILE + 1)];
    const int r0 = blockIdx.y * TILE, c0 = blockIdx.x * TILE, x = threadIdx.x;
    // exercise transpose_copy-4: read the tile by rows, write it by columns; both with neighbouring threads at
    // neighbouring numbers.
    // place<PLACE>(r, c) says where (r, c) of the tile lies. Between the two: a barrier.
    for (int y = threadIdx.y; y < TILE; y += ROWS)
        if (r0 + y < rows && c0 + x < columns) tile[place<PLACE>(y, x)] = in[(size_t)(r0 + y) * columns + c0 + x];
    __syncthreads();
    for (int y = threadIdx.y; y < TILE; y += ROWS) // row y of the output's tile: column y of ours
        if (c0 + y < columns && r0 + x < rows) out[(size_t)(c0 + y) * rows + r0 + x] = tile[place<PLACE>(x, y)];
    // end of exercise
}
// ---- 5 padding. A row of 33 words: neighbours in a column are 33 apart, in banks one apart. No conflicts, for 128
// bytes.
// ---- 6 a swizzle. No padding: number c of row r lies in place c ^ r. A row is permuted within itself, and the 32
// places c ^ r of a column, r = 0 .. 31, are all different. As fast as padding; rows stay aligned, which step 7 and the
// tensor cores' loads (lab/matmul.cu) need, and which no padding can give to what TMA writes.

// ---- 7 vector loads. By now a thread takes four loads and four stores of 4 bytes, each with its address and its
// bounds check. One of 16 bytes does the same with a quarter of the instructions. The block has 8 x 32 threads, and the
// swizzle keeps both sides free of conflicts: a warp has 4 rows of 8 threads, number k of each lies in bank (4 x + k) ^
// r. Predicted: the memory is what bounds step 6, so little is gained, and most on a card with few instructions to
// spare.
__global__ void vectors(const float* in, float* out, int rows, int columns) {
    __shared__ float tile[TILE * TILE];
    const int r0 = blockIdx.y * TILE, c0 = blockIdx.x * TILE, x = threadIdx.x * 4, y = threadIdx.y;
    // exercise transpose_copy-7: 16 bytes a thread on both sides, by float4; the tile is swizzled.
    // Read four numbers of row y, put each in its place; after a barrier take four numbers of column y.
    if (r0 + y < rows && c0 + x < columns) { // (a row is a multiple of four: all of them are inside, or none)
        const float4 v = *(const float4*)&in[(size_t)(r0 + y) * columns + c0 + x];
        tile[place<SWIZZLED>(y, x)] = v.x, tile[place<SWIZZLED>(y, x + 1)] = v.y;
        tile[place<SWIZZLED>(y, x + 2)] = v.z, tile[place<SWIZZLED>(y, x + 3)] = v.w;
    }
    __syncthreads();
    if (c0 + y < columns && r0 + x < rows)
        *(float4*)&out[(size_t)(c0 + y) * rows + r0 + x] =
            make_float4(tile[place<SWIZZLED>(x, y)], tile[place<SWIZZLED>(x + 1, y)], tile[place<SWIZZLED>(x + 2, y)],
                        tile[place<SWIZZLED>(x + 3, y)]);
    // end of exercise
}

// ---- 8 TMA (Hopper). One thread asks the Tensor Memory Accelerator for a box of 64 rows of 32
// numbers; there are no addresses, bounds checks or registers on the way in. It counts in numbers of two bytes, so
// a float32 is two columns of the map. Rows have 128 bytes, swizzled by 16 bytes: number c of row r lies in chunk c / 4
// ^ r % 8. A thread takes four numbers of a column, rows 4 a to 4 a + 3, and writes 16 bytes. In a warp are two
// neighbouring a and 16 columns: number k lies in bank (c / 4 ^ (a % 2 * 4 + k)) * 4 + c % 4, all different; and each
// pair of lanes writes a whole sector. Predicted: as step 7, with fewer instructions; the block waits for its box, so
// several blocks a multiprocessor must overlap (8 KB each: they do). TMA pays where one block has work to do meanwhile
// (lab/matmul.cu).
constexpr int BOX_ROWS = 64;
__host__ __device__ constexpr int box_place(int r, int c) { return r * 32 + (((c / 4) ^ (r % 8)) * 4 + c % 4); }
__global__ void __launch_bounds__(128)
by_tma(const __grid_constant__ CUtensorMap map, float* out, int rows, int columns) {
    DYNAMIC_SHARED(float, room);
    __shared__ uint64_t filled;
    float* const box = aligned_1024(room);
    const int r0 = blockIdx.y * BOX_ROWS, c0 = blockIdx.x * 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) barrier_init(&filled, 1), barriers_ready();
    __syncthreads();
    if (threadIdx.x == 0) barrier_expect(&filled, BOX_ROWS * 128), tma_load(box, map, &filled, c0 * 2, r0);
    barrier_wait(&filled, 0);
    for (int part = threadIdx.x / 32; part < 16; part += 4) { // pairs of a, halves of the columns
        const int r = (part / 2 * 2 + lane % 2) * 4, c = part % 2 * 16 + lane / 2;
        if (r0 + r < rows && c0 + c < columns)
            *(float4*)&out[(size_t)(c0 + c) * rows + r0 + r] = make_float4(
                box[box_place(r, c)], box[box_place(r + 1, c)], box[box_place(r + 2, c)], box[box_place(r + 3, c)]);
    }
}

// ---- The table
static dim3 tiles(const Matrix& m, int high = TILE) {
    return dim3(blocks_for(m.columns, TILE), blocks_for(m.rows, high));
}
template <class K> void on_tiles(K kernel, dim3 block, const Matrix& m) {
    launch(kernel, tiles(m), block, 0, m.in, m.out, m.rows, m.columns);
}
inline Laboratory laboratory() {
    Laboratory l("transpose_copy", "the way to memory: coalescing, bank conflicts, padding, swizzling", {8192, 8192, 1},
                 {67, 45, 1});
    constexpr const char *LOADS = "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio",
                         *STORES = "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_st.ratio",
                         *CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
                         *MEMORY = "dram__throughput.avg.pct_of_peak_sustained_elapsed,smsp__inst_executed.sum";
    const dim3 block(TILE, ROWS);
    l.step<Copy>("copy", "the ceiling: each number is moved once", [=](Copy& m) { on_tiles(copy, block, m); }, COPY,
                 MEMORY, "the memory's throughput, which no later step can pass");
    l.step<Transpose>("scattered writes", "the indices turned round",
                      [=](Transpose& m) { on_tiles(scattered_writes, block, m); }, COPY, STORES,
                      "32 sectors a store, where the copy has 4");
    l.step<Transpose>("scattered reads", "reads turned round instead: a cache helps them",
                      [=](Transpose& m) { on_tiles(scattered_reads, block, m); }, COPY, LOADS,
                      "32 sectors a load; beside it the hit rate of L1, l1tex__t_sector_hit_rate.pct");
    l.step<Transpose>("tile", "both sides coalesced, through shared memory",
                      [=](Transpose& m) { on_tiles(tiled<PLAIN>, block, m); }, COPY, CONFLICTS,
                      "31 conflicts for each load of a column");
    l.step<Transpose>("padding", "rows of 33 words: no bank conflicts",
                      [=](Transpose& m) { on_tiles(tiled<PADDED>, block, m); }, COPY, CONFLICTS, "about none");
    l.step<Transpose>("swizzle", "c ^ r instead: no padding, rows aligned",
                      [=](Transpose& m) { on_tiles(tiled<SWIZZLED>, block, m); }, COPY, CONFLICTS, "about none");
    l.step<Transpose>("vectors", "16 bytes a thread: a quarter of the instructions",
                      [](Transpose& m) { on_tiles(vectors, dim3(8, 32), m); }, COPY, MEMORY,
                      "instructions, beside those of step 6");
    l.step<Transpose>("TMA", "one thread asks for a box; no addresses, no checks", [](Transpose& m) {
        const CUtensorMap map = tensor_map(m.in, m.rows, m.columns * 2, BOX_ROWS);
        launch(by_tma, tiles(m, BOX_ROWS), dim3(128), BOX_ROWS * 128 + 1024, map, m.out, m.rows, m.columns);
    }, COPY, MEMORY, "instructions, beside those of step 7", 90);
    l.exercise("A warp stores 32 float32, each 8,192 numbers from the next. How many sectors does it touch?",
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
