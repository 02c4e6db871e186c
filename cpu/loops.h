// cpu/loops.h: the inner loops of float products and attention, written once: templates on a set of instructions.
#pragma once
#include "cpu/blocks.h"
#include "cpu/tiles.h"

// Each instruction set has a source (plain.cpp, avx2.cpp, ...) that is compiled for these instructions, instantiates
// the loops and exports pointers to them. Its other functions must not reach a CPU that lacks the instructions: if
// several objects hold an inline function, the linker keeps any one copy. So everything that these sources define or
// call is in an anonymous namespace, static or INLINE; they call nothing of std but compiler built-ins, and have no
// variables that are initialised by code. (tests: nm finds no weak symbol in them.)
//
// A struct `Set` is a set of vector instructions:
//     Vector    SUMS sums; load_sum, store_sum       Operand  WIDTH numbers that are multiplied
//     part      of n >= 0 numbers that follow, those that fit into an Operand
//     load      that part of a row, zeros past it    store    that part to memory
//     fill      the same number in all lanes         keep     in a register: g++ would reload it for every product
//     multiply  v *= s    multiply_add  sum += a * b    total  the sum of the lanes: halves onto each other
//     totals    of R rows by M tokens: y[m][r]
//     Codes     the 16 numbers of an INT4 group, or its scale and zero point; make_codes; load_codes: an Operand of the
//               lower (SHIFT 0) or upper (4) halves of WIDTH bytes
//     load_scaled  an Operand of bytes, times the same scale in all lanes; fill_two: two neighbours' scales
//     Input     the type of x: acc<T>, made once a product, or T where the instructions accept it
//     CHAINS    independent vectors per sum, to hide latency in a single token's product
//     OUTER     rows of a tile of sums of products of two vectors, 2 Vectors wide
//     STREAMS   packed rows that are read side by side for a single token
//     ROWS, TOKENS  of W and x at once; KEYS and MIXED of attention: as many as the registers hold
template <class Set> using Vector = typename Set::Vector;

// The numbers of one row of W as Operands, by format, STEP columns after another. `open` begins at column k, a multiple
// of 2 * GROUP, and group g of the row; it and `begin` load the scales of the next `unit` columns; `read` gives the
// next STEP columns. A format without a Reader (STEP 0) is widened by WeightRows, BLOCKS by cpu/blocks.h.
template <class Set, Format F, class T> struct Reader {
    static constexpr int STEP = 0;
};
template <class Set, class T> struct Reader<Set, Format::PLAIN, T> {
    static constexpr int STEP = Set::CHAINS * Set::WIDTH;
    const T* at;
    int unit;
    INLINE void open(const WeightRows<T>& w, int k, int) { at = w.w + k, unit = w.in; }
    INLINE void begin() {}
    INLINE void read(typename Set::Operand (&a)[STEP / Set::WIDTH]) {
        UNROLL for (int c = 0; c < STEP / Set::WIDTH; c++, at += Set::WIDTH) Set::load(a[c], at, Set::part(Set::WIDTH));
    }
};
template <class Set, class T> struct Reader<Set, Format::INT8, T> {
    static constexpr int STEP = 2 * GROUP, HALF = GROUP / Set::WIDTH, unit = STEP;
    const int8_t* at;
    const bf16* next;
    Vector<Set> scale[2];
    INLINE void open(const WeightRows<T>& w, int k, int g) {
        at = w.q + k, next = w.scale + g, scale[0] = scale[1] = Vector<Set>{};
        if (k + STEP <= w.in) begin(); // (else there is no second scale)
    }
    INLINE void begin() {
        Set::fill_two(scale[0], scale[1], next);
        next += 2;
    }
    INLINE void read(typename Set::Operand (&a)[STEP / Set::WIDTH]) {
        UNROLL for (int c = 0; c < 2 * HALF; c++, at += Set::WIDTH) Set::load_scaled(a[c], at, scale[c / HALF]);
    }
};
template <class Set, class T> struct Reader<Set, Format::FP8, T> {
    static constexpr int STEP = GROUP;
    const e4m3* at;
    const float* next;
    int unit;
    Vector<Set> scale;
    INLINE void open(const WeightRows<T>& w, int k, int g) {
        at = (const e4m3*)w.q + k, next = w.block_scales() + g, unit = w.W.group;
        begin();
    }
    INLINE void begin() { Set::fill(scale, *next++); }
    INLINE void read(typename Set::Operand (&a)[STEP / Set::WIDTH]) {
        UNROLL for (int c = 0; c < STEP / Set::WIDTH; c++, at += Set::WIDTH) Set::load_scaled(a[c], at, scale);
    }
};
template <class Set, class T> struct Reader<Set, Format::INT4, T> {
    static constexpr int STEP = 2 * GROUP, HALF = GROUP / Set::WIDTH;
    const uint8_t *at, *zero;
    const uint16_t* half;
    int unit;
    bool two;                     // groups of 32: each half of the bytes has its own
    typename Set::Codes codes[2]; // of the lower and the upper halves
    INLINE void open(const WeightRows<T>& w, int k, int g) {
        at = (const uint8_t*)w.q + k / 2, half = w.half + g, zero = w.zero ? w.zero + g : nullptr;
        two = w.W.group == GROUP, unit = larger(w.W.group, STEP);
        begin();
    }
    INLINE void one(typename Set::Codes& c) {
        Set::make_codes(c, *half++, zero ? *zero : 8);
        if (zero) zero++;
    }
    INLINE void begin() {
        one(codes[0]);
        if (two) one(codes[1]);
        else codes[1] = codes[0];
    }
    INLINE void read(typename Set::Operand (&a)[STEP / Set::WIDTH]) {
        UNROLL for (int c = 0; c < HALF; c++, at += Set::WIDTH) {
            Set::template load_codes<0>(a[c], at, codes[0]);
            Set::template load_codes<4>(a[HALF + c], at, codes[1]);
        }
    }
};

// `columns` numbers of each of `rows` rows from column k on, a multiple of 2 * GROUP; row r's from out + r * row_apart
// on, each GROUP of them `apart` behind the last. (BLOCKS: k is a multiple of 128.) Each line prefetches the one
// `ahead` bytes further on.
template <class Set, Format F, class T, class X>
static INLINE void widen_rows(X* out, size_t row_apart, size_t apart, WeightRows<T> w, int rows, int k, int columns,
                              size_t ahead) {
    using Rows = Reader<Set, F, T>;
    if constexpr (F == Format::BLOCKS)
        return WIDEN_BLOCKS<X>[(int)w.W.type[w.block] - (int)Dtype::Q4_0](out, row_apart, apart, (const uint8_t*)w.q,
                                                                          w.row_bytes, rows, k, columns, ahead);
    const int g = k / w.W.group;
    for (int r = 0; r < rows; r++, out += row_apart, w.skip(1)) {
        X* to = out;
        int i = 0;
        if constexpr (Rows::STEP > 0) {
            constexpr int PARTS = Rows::STEP / Set::WIDTH;
            const int full = columns / Rows::STEP * Rows::STEP;
            Rows from;
            from.open(w, k, g);
            for (int end = from.unit - (F == Format::FP8 ? k % from.unit : 0); i < full; i += Rows::STEP) {
                if (i == end) from.begin(), end += from.unit;
                typename Set::Operand a[PARTS];
                __builtin_prefetch((const void*)((uintptr_t)from.at + ahead), 0, 2);
                from.read(a);
                UNROLL for (int c = 0; c < PARTS; c++) {
                    memcpy(to + c * Set::WIDTH % GROUP, &a[c], sizeof a[c]);
                    if ((c + 1) * Set::WIDTH % GROUP == 0) to += apart;
                }
                if (Rows::STEP < GROUP) to += Rows::STEP;
            }
        }
        for (; i < columns; i += GROUP, to += apart) w.widen(to, k + i, smaller(GROUP, columns - i));
    }
}

// W[r] . x for R rows and one token. A sum has C chains of WIDTH lanes, so that one addition does not wait for the
// other: chain c takes the columns from c * WIDTH on, WIDTH of each C * WIDTH. Packed rows take many instructions a
// cache line, so a CPU with a window of 300 instructions has too few loads in flight. Hence each line prefetches the
// line at its own place whole blocks of R rows later; into the second-level cache, since the first one tracks too few
// misses.
template <class Set, Format F, int R, class T, class X>
static void product_rows(acc<T>* y, const WeightRows<T>& w, const X* x) {
    using Rows = Reader<Set, F, T>;
    constexpr int WIDTH = Set::WIDTH, C = Set::CHAINS, STEP = Rows::STEP, PARTS = STEP / WIDTH;
    const int in = w.in, full = in / STEP * STEP;
    const size_t block = R * w.row_bytes, ahead = (FETCH_AHEAD + block - 1) / block * block;
    Vector<Set> sum[R][1][C];
    typename Set::Operand a[PARTS], b[PARTS];
    Rows from[R];
    WeightRows<T> at = w, end = w;
    UNROLL for (int r = 0; r < R; r++, at.skip(1)) {
        from[r].open(at, 0, 0);
        UNROLL for (int c = 0; c < C; c++) sum[r][0][c] = Vector<Set>{};
    }
    for (int k = 0, stop = from[0].unit; k < full; k += STEP) {
        if (k == stop) {
            UNROLL for (int r = 0; r < R; r++) from[r].begin();
            stop += from[0].unit;
        }
        UNROLL for (int c = 0; c < PARTS; c++) Set::load(b[c], x + k + c * WIDTH, Set::part(WIDTH));
        UNROLL for (int r = 0; r < R; r++) {
            if (F != Format::PLAIN) __builtin_prefetch((const void*)((uintptr_t)from[r].at + ahead), 0, 2);
            from[r].read(a);
            UNROLL for (int c = 0; c < PARTS; c++) Set::multiply_add(sum[r][0][c % C], a[c], b[c]);
        }
    }
    if (full < in) UNROLL for (int r = 0; r < R; r++, end.skip(1)) {
        X rest[STEP] = {};
        end.widen(rest, full, in - full);
        UNROLL for (int c = 0; c < PARTS; c++)
            if (full + c * WIDTH < in) {
                Set::load(a[c], rest + c * WIDTH, Set::part(WIDTH));
                Set::load(b[c], x + full + c * WIDTH, Set::part(in - full - c * WIDTH));
                Set::multiply_add(sum[r][0][c % C], a[c], b[c]);
            }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int c = 1; c < C; c++) sum[r][0][0] += sum[r][0][c];
    Set::totals(y, sum);
}

// The same sums for R rows of W and M tokens, over `columns` columns that stay in the first-level cache: chain after
// chain, so that all sums of one chain are in registers. (Without UNROLL g++ keeps them in memory: three times slower.)
// `sums` carries them to the next columns; after the last ones, y[m][r] are the totals.
template <class Set, int R, int M, class W, class X>
static INLINE void block_step(Vector<Set> (&sum)[R][M][1], const W* w, size_t w_row, const X* x, size_t x_row,
                              typename Set::Part some) {
    typename Set::Operand a, b[M];
    UNROLL for (int m = 0; m < M; m++) {
        Set::load(b[m], x + m * x_row, some);
        if constexpr (R > 1 && M > 1) Set::keep(b[m]);
    }
    UNROLL for (int r = 0; r < R; r++) {
        Set::load(a, w + r * w_row, some);
        if constexpr (R > 1 && M > 1) Set::keep(a);
        UNROLL for (int m = 0; m < M; m++) Set::multiply_add(sum[r][m][0], a, b[m]);
    }
}
template <class Set, int R, int M, int C, class Y, class W, class X>
static void product_block(Y* y, Y* sums, const W* w, size_t w_row, const X* x, size_t x_row, int columns,
                          bool first, bool last) {
    constexpr int WIDTH = Set::WIDTH, SUMS = Set::SUMS;
    Vector<Set> sum[R][M][1], chain;
    for (int c = 0; c < C; c++) {
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int m = 0; m < M; m++)
                if (first) sum[r][m][0] = Vector<Set>{};
                else Set::load_sum(sum[r][m][0], sums + ((c * R + r) * M + m) * SUMS);
        int i = c * WIDTH;
        for (; i + WIDTH <= columns; i += C * WIDTH)
            block_step<Set>(sum, w + i, w_row, x + i, x_row, Set::part(WIDTH));
        if (i < columns) block_step<Set>(sum, w + i, w_row, x + i, x_row, Set::part(columns - i));
        if (last && C == 1) break;
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int m = 0; m < M; m++) Set::store_sum(sums + ((c * R + r) * M + m) * SUMS, sum[r][m][0]);
    }
    if (!last) return;
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int m = 0; m < M; m++)
            for (int c = 0; c < C && C > 1; c++) {
                Set::load_sum(chain, sums + ((c * R + r) * M + m) * SUMS);
                if (c) sum[r][m][0] += chain;
                else sum[r][m][0] = chain;
            }
    Set::totals(y, sum);
}

// The two loops of attention. HEAD: D as a compile-time constant, a multiple of the vector width, or 0. p[j] = q .
// keys[j] for the 16 keys of a page; keys (16,D), stored or widened before. A stored key prefetches the key at its
// place in the next page: no hardware prefetcher can predict it, since the block table places pages of 4 KB.
template <class Set, class U, class S>
static INLINE void scores_step(Vector<Set> (&sum)[Set::KEYS][1][1], const U* q, const S* keys, const S* next, int D,
                               typename Set::Part some) {
    Vector<Set> a, b;
    Set::load(a, q, some);
    UNROLL for (int k = 0; k < Set::KEYS; k++) {
        if (sizeof(S) < sizeof(U)) __builtin_prefetch(next + k * D, 0, 2);
        Set::load(b, keys + k * D, some);
        Set::multiply_add(sum[k][0][0], a, b);
    }
}
template <class Set, int HEAD, class U, class S>
static void attention_scores(U* p, const U* q, const S* keys, const S* next, int head) {
    constexpr int WIDTH = Set::WIDTH, KEYS = Set::KEYS;
    const int D = HEAD ? HEAD : head;
    for (int j = 0; j < PAGE; j += KEYS, keys += KEYS * D, next += KEYS * D) {
        Vector<Set> sum[KEYS][1][1];
        UNROLL for (int k = 0; k < KEYS; k++) sum[k][0][0] = Vector<Set>{};
        int i = 0;
        for (; i + WIDTH <= D; i += WIDTH) scores_step<Set>(sum, q + i, keys + i, next + i, D, Set::part(WIDTH));
        if (HEAD == 0 && i < D) scores_step<Set>(sum, q + i, keys + i, next + i, D, Set::part(D - i));
        Set::totals(p + j, sum);
    }
}

// out = out * scale + sum_j p[j] values[j] over the 16 values of a page; values (16,D). MIXED vectors of out at a time
// hide each other's latency.
template <class Set, class U, class S>
static INLINE void mix_columns(U* out, U scale, const U* p, const S* values, const S* next, int D, int left) {
    constexpr int WIDTH = Set::WIDTH, MIXED = Set::MIXED;
    Vector<Set> o[MIXED], weight, v;
    UNROLL for (int c = 0; c < MIXED; c++) {
        Set::load(o[c], out + c * WIDTH, Set::part(larger(0, left - c * WIDTH)));
        Set::multiply(o[c], scale);
    }
    for (int j = 0; j < PAGE; j++) {
        Set::fill(weight, p[j]);
        UNROLL for (int c = 0; c < MIXED; c++) {
            const bool ask = sizeof(S) < sizeof(U) && c * WIDTH * sizeof(S) % 64 == 0;
            if (ask) __builtin_prefetch(next + j * D + c * WIDTH, 0, 2);
            Set::load(v, values + j * D + c * WIDTH, Set::part(larger(0, left - c * WIDTH)));
            Set::multiply_add(o[c], weight, v);
        }
    }
    UNROLL for (int c = 0; c < MIXED; c++) Set::store(out + c * WIDTH, o[c], Set::part(larger(0, left - c * WIDTH)));
}
template <class Set, int HEAD, class U, class S>
static void attention_mix(U* out, U scale, const U* p, const S* values, const S* next, int head) {
    constexpr int WIDTH = Set::WIDTH, MIXED = Set::MIXED;
    const int D = HEAD ? HEAD : head;
    int i = 0;
    for (; i + MIXED * WIDTH <= D; i += MIXED * WIDTH)
        mix_columns<Set>(out + i, scale, p, values + i, next + i, D, MIXED * WIDTH);
    if (HEAD == 0 && i < D) mix_columns<Set>(out + i, scale, p, values + i, next + i, D, D - i);
}


// A tile. For a single token W is streamed in memory order, which gives the highest bandwidth: row after row, and
// several rows at once of packed ones. For several tokens a few rows are converted to Inputs once, BLOCK bytes of each
// at a time.
template <class Set, Format F, class T>
static void product_tile(acc<T>* y, WeightRows<T> w, int rows, const void* input, int N) {
    using X = typename Set::template Input<T>;
    constexpr bool IN_PLACE = F == Format::PLAIN && std::is_same_v<T, X>;
    constexpr int BLOCK = 2048 / sizeof(X), C = Set::CHAINS, R = Set::ROWS, M = Set::TOKENS;
    const X* x = (const X*)input;
    const int in = w.in;
    if constexpr (Reader<Set, F, T>::STEP > 0) if (N == 1) {
        constexpr int S = F == Format::PLAIN ? 1 : Set::STREAMS;
        for (int r = 0, some; r < rows; r += some, w.skip(some)) {
            some = r + S <= rows ? S : 1;
            if (some == S) product_rows<Set, F, S>(y + r, w, x);
            else product_rows<Set, F, 1>(y + r, w, x);
        }
        return;
    }
    const size_t waiting = (size_t)TILE_ROWS * TILE_TOKENS * C * Set::SUMS, ahead = TILE_ROWS * w.row_bytes;
    acc<T>* const sums = (acc<T>*)tile_scratch(waiting * sizeof(acc<T>) + (R * BLOCK) * sizeof(X));
    X* const wide = (X*)(sums + waiting);
    for (int k = 0; k < in; k += BLOCK) {
        const int columns = smaller(BLOCK, in - k);
        const bool first = k == 0, last = k + columns == in;
        WeightRows<T> at = w;
        for (int r = 0, some; r < rows; r += some, at.skip(some)) {
            some = r + R <= rows ? R : 1;
            if constexpr (!IN_PLACE) widen_rows<Set, F>(wide, BLOCK, GROUP, at, some, k, columns, ahead);
            const X* from = wide;
            if constexpr (IN_PLACE) from = at.w + k;
            for (int n = 0, tokens; n < N; n += tokens) {
                tokens = n + M <= N ? M : 1;
                acc<T>* part = sums + (size_t)(r * TILE_TOKENS + n * some) * C * Set::SUMS;
                auto loop = some == R ? tokens == M ? product_block<Set, R, M, C, acc<T>, X, X>
                                                    : product_block<Set, R, 1, C, acc<T>, X, X>
                                      : tokens == M ? product_block<Set, 1, M, C, acc<T>, X, X>
                                                    : product_block<Set, 1, 1, C, acc<T>, X, X>;
                loop(y + n * TILE_ROWS + r, part, from, IN_PLACE ? in : BLOCK, x + (size_t)n * in + k, in, columns,
                     first, last);
            }
        }
    }
}

// sums[r * apart + i] += sum_t u[t * OUTER + r] v[t * 2 * WIDTH + i], each sum in the order of t. All sums stay in
// registers.
template <class Set, class A> static void outer_tile(A* sums, size_t apart, const A* u, const A* v, int terms) {
    constexpr int R = Set::OUTER, WIDTH = Set::WIDTH;
    const typename Set::Part all = Set::part(WIDTH);
    Vector<Set> sum[R][2], a, b[2];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int c = 0; c < 2; c++) Set::load(sum[r][c], sums + r * apart + c * WIDTH, all);
    for (int t = 0; t < terms; t++, u += R, v += 2 * WIDTH) {
        UNROLL for (int c = 0; c < 2; c++) Set::load(b[c], v + c * WIDTH, all);
        UNROLL for (int r = 0; r < R; r++) {
            Set::fill(a, u[r]);
            UNROLL for (int c = 0; c < 2; c++) Set::multiply_add(sum[r][c], a, b[c]);
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int c = 0; c < 2; c++) Set::store(sums + r * apart + c * WIDTH, sum[r][c], all);
}

template <class Set, class T>
constexpr Loops<T> LOOPS = {
    {product_tile<Set, Format::PLAIN, T>, product_tile<Set, Format::INT8, T>, product_tile<Set, Format::INT4, T>,
     product_tile<Set, Format::FP8, T>, product_tile<Set, Format::BLOCKS, T>},
    {{attention_scores<Set, 0, acc<T>, T>, attention_mix<Set, 0, acc<T>, T>},
     {attention_scores<Set, 128, acc<T>, T>, attention_mix<Set, 128, acc<T>, T>}},
    {{attention_scores<Set, 0, acc<T>, acc<T>>, attention_mix<Set, 0, acc<T>, acc<T>>},
     {attention_scores<Set, 128, acc<T>, acc<T>>, attention_mix<Set, 128, acc<T>, acc<T>>}},
    {outer_tile<Set, acc<T>>, Set::OUTER, 2 * Set::WIDTH}};
