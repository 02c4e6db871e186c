// cpu/tiles.h: product tiles and attention's loops, by instruction set.
#pragma once
#include "cpu/instruction_set.h"
#include "cpu/lanes.h"

// A tile is y[n * TILE_ROWS + r] = W[r] . x[n] for `rows` <= TILE_ROWS rows of W and N <= TILE_TOKENS tokens. Each
// implementation computes an output as one sum in one order, whatever the other rows and tokens are.
constexpr int TILE_ROWS = 32, TILE_TOKENS = 64;

// Consecutive rows of one block of a Linear.
template <class T> struct WeightRows {
    const Linear<T>& W;
    const T* w;
    const int8_t* q;
    const bf16* scale;    // INT8's
    const uint16_t* half; // INT4's
    const uint8_t* zero;
    size_t row;           // of the block
    size_t groups, row_bytes;
    int block, in;
    WeightRows(const Linear<T>& W, int block, size_t r)
        : W(W), w(W.w[block]), q(W.q[block]), scale((const bf16*)W.scale[block]),
          half((const uint16_t*)W.scale[block]), zero(W.zero[block]), row(0), groups(W.groups()),
          row_bytes(W.row_bytes(block)), block(block), in(W.in) { skip(r); }
    INLINE void skip(size_t r) {
        row += r;
        if (w) w += r * in;
        else q += r * row_bytes;
        if (W.format == Format::INT8) scale += r * groups;
        if (W.format == Format::INT4) half += r * groups, zero += zero ? r * groups : 0;
    }
    INLINE const float* block_scales() const { // FP8: of this row
        return (const float*)W.scale[block] + row / W.group_rows * groups;
    }
    // The numbers of this row from column k on, a multiple of GROUP, as X: acc<T>, or rounded to T. INT8 and INT4 are
    // exact as acc<T>: a scale has 8 or 11 bits, a weight 7 or 5. Any format; the loops have faster code for some.
    // BLOCKS: k and columns are as in widen_row (cpu/blocks.h).
    template <class X> void widen(X* out, int k, int columns) const;
};
// Whether products of T take bf16, and so the nearest bf16 (ties to even) of a packed weight: then their bits are those
// of the same weights stored as bf16. Other instruction sets take floats, and the exact weight.
template <class T> bool takes_bf16() { return std::is_same_v<T, bf16> && instruction_set >= ISA_BF16; }

template <class T> using ProductTile = void (*)(acc<T>* y, WeightRows<T> w, int rows, const void* x, int N);

// This thread's scratch for a tile's intermediate results, aligned to a cache line.
void* tile_scratch(size_t bytes);

// Prefetch distance of packed weights in bytes, at least. (Zen 4: 2 KB is too late; 8 to 64 KB are equal.)
constexpr size_t FETCH_AHEAD = 8192;

// The two loops of attention: see cpu/loops.h. S is the stored type of keys and values, or A.
template <class A, class S> struct AttentionLoops {
    void (*scores)(A* p, const A* q, const S* keys, const S* next, int D);
    void (*mix)(A* out, A scale, const A* p, const S* values, const S* next, int D);
};

// Sums of products of two vectors, (rows, columns) at once: see outer_tile in cpu/loops.h.
template <class A> struct OuterLoop {
    void (*add)(A* sums, size_t apart, const A* u, const A* v, int terms); // u (terms, rows), v (terms, columns)
    int rows, columns;
};

// The loops of one instruction set for stored type T.
template <class T> struct Loops {
    ProductTile<T> tile[5];                       // by Format; x is acc<T>
    AttentionLoops<acc<T>, T> stored[2];          // for any D; for D = 128, every Qwen3's
    AttentionLoops<acc<T>, acc<T>> widened[2];
    OuterLoop<acc<T>> outer;
};
template <class T> const Loops<T>& best_loops();  // of `instruction_set`

// ---- Each instruction set's, in the source of that name.
template <class T> const Loops<T>& plain_loops();
#ifdef QWEN3_DOUBLE
template <> const Loops<double>& plain_loops();
#else
template <> const Loops<bf16>& plain_loops();
template <> const Loops<float>& plain_loops();
#endif
#ifdef HAVE_SIMD
template <class T> const Loops<T>& avx2_loops();
template <> const Loops<bf16>& avx2_loops();
template <> const Loops<float>& avx2_loops();

template <class T> const Loops<T>& avx512_loops();
template <> const Loops<bf16>& avx512_loops();
template <> const Loops<float>& avx512_loops();

extern const ProductTile<bf16> avx512_bf16_tile[5]; // by Format; x is bf16, and so is every weight
#endif
#ifdef HAVE_ARM
extern const ProductTile<bf16> arm_bf16_tile[5];
#endif
