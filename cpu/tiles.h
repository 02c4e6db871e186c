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
          row_bytes(W.row_bytes()), block(block), in(W.in) { skip(r); }
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
    // (rows, columns) from column k on, a multiple of 2 * GROUP. INT8 and INT4 are exact: a scale has 8 or 11 bits, a
    // weight 7 or 5. Returns out.
    const acc<T>* widen(acc<T>* out, int rows, int k, int columns) const;
};
template <class T> using ProductTile = void (*)(acc<T>* y, WeightRows<T> w, int rows, const void* x, int N);

// This thread's scratch for a tile's intermediate results, aligned to a cache line.
void* tile_scratch(size_t bytes);

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
    ProductTile<T> tile[4];                       // by Format; x is acc<T>
    AttentionLoops<acc<T>, T> stored[2];          // for any D; for D = 128, every Qwen3's
    AttentionLoops<acc<T>, acc<T>> widened[2];
    OuterLoop<acc<T>> outer;
};
template <class T> const Loops<T>& best_loops();  // of `instruction_set`

// Tiles that multiply integers, and how x is made integers for them.
struct IntegerTiles {
    int columns;                                     // numbers of a token that are made integers together
    size_t bytes;                                    // of these integers
    void (*fix)(void* out, const bf16* x, int left); // `left` numbers of the token follow
    ProductTile<bf16> tile;
};
// x (N,in) as such integers, (N, in / columns rounded up), in this thread's scratch until the next call.
const uint8_t* fix_all(const IntegerTiles& tiles, const bf16* x, int N, int in);

// ---- Each instruction set's, in the source of that name. An INT4 set is for groups of 32, 64 and 128.
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
extern const IntegerTiles avx2_int8, avx2_int4[3];

template <class T> const Loops<T>& avx512_loops();
template <> const Loops<bf16>& avx512_loops();
template <> const Loops<float>& avx512_loops();

void avx512_bf16_tile(float* y, WeightRows<bf16> w, int rows, const void* x, int N); // PLAIN; x is bf16
extern const IntegerTiles avx512_bf16_int8, avx512_bf16_int4[3];
#endif
