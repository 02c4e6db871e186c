// cpu_loops.h: the inner loops of cpu.h that take a CPU's time, written once. cpu.h includes this file within each
// struct of vector instructions (Plain, Avx2, Avx512, Bf16Dot; Avx2Integers and VnniIntegers with INTEGERS). The loops
// use the struct's vectors and operations; TARGET is the attribute that lets the compiler use these instructions. (A
// template cannot have the attribute as a parameter, and g++ inlines the operations only into functions with the same
// attribute: hence a file.)

// W[0] . x for one row and one token. A sum has C chains of WIDTH lanes, so that one addition does not wait for the
// other: chain c takes the columns from c * WIDTH on, WIDTH of each C * WIDTH. SCALED: `group` columns share a scale,
// and C * WIDTH is GROUP.
template <bool SCALED, int C, class W, class X, class S>
TARGET static INLINE void row_step(Vector (&sum)[1][1][C], const W* w, S scale, const X* x, int left) {
    UNROLL for (int c = 0; c < C; c++) {
        const Part some = part(std::max(0, left - c * WIDTH));
        Operand a, b;
        load(a, w + c * WIDTH, some);
        load(b, x + c * WIDTH, some);
        if constexpr (SCALED) multiply(a, scale);
        multiply_add(sum[0][0][c], a, b);
    }
}
template <bool SCALED, int C, class Y, class W, class X, class S>
TARGET static void product_row(Y* y, const W* w, const S* scale, int group, const X* x, int in) {
    Vector sum[1][1][C];
    UNROLL for (int c = 0; c < C; c++) sum[0][0][c] = Vector{};
    for (int begin = 0, g = 0; begin < in; begin += group, g++) {
        const int end = std::min(in, begin + group);
        float s = 0;
        if constexpr (SCALED) s = to_acc(scale[g]);
        int i = begin;
        for (; i + C * WIDTH <= end; i += C * WIDTH) row_step<SCALED>(sum, w + i, s, x + i, C * WIDTH);
        if (i < end) row_step<SCALED>(sum, w + i, s, x + i, end - i);
    }
    UNROLL for (int c = 1; c < C; c++) sum[0][0][0] += sum[0][0][c];
    totals<1, 1>(y, sum);
}

// The same sums for R rows of W and M tokens, over `columns` columns that stay in the first-level cache: chain after
// chain, so that all sums of one are in registers. (Without UNROLL g++ keeps them in memory: three times slower.) In
// `sums` they wait for the next columns; after the last ones, y[m][r] are the totals.
template <int R, int M, class W, class X>
TARGET static INLINE void block_step(Vector (&sum)[R][M][1], const W* w, size_t w_row, const X* x, size_t x_row,
                                     Part some) {
    Operand a, b[M];
    UNROLL for (int m = 0; m < M; m++) {
        load(b[m], x + m * x_row, some);
        if constexpr (R > 1 && M > 1) keep(b[m]);
    }
    UNROLL for (int r = 0; r < R; r++) {
        load(a, w + r * w_row, some);
        if constexpr (R > 1 && M > 1) keep(a);
        UNROLL for (int m = 0; m < M; m++) multiply_add(sum[r][m][0], a, b[m]);
    }
}
template <int R, int M, int C, class Y, class W, class X>
TARGET static void product_block(Y* y, Y* sums, const W* w, size_t w_row, const X* x, size_t x_row, int columns,
                                 bool first, bool last) {
    Vector sum[R][M][1], chain;
    for (int c = 0; c < C; c++) {
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int m = 0; m < M; m++)
                if (first) sum[r][m][0] = Vector{};
                else load_sum(sum[r][m][0], sums + ((c * R + r) * M + m) * SUMS);
        int i = c * WIDTH;
        for (; i + WIDTH <= columns; i += C * WIDTH) block_step(sum, w + i, w_row, x + i, x_row, part(WIDTH));
        if (i < columns) block_step(sum, w + i, w_row, x + i, x_row, part(columns - i));
        if (last && C == 1) break;
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int m = 0; m < M; m++) store_sum(sums + ((c * R + r) * M + m) * SUMS, sum[r][m][0]);
    }
    if (!last) return;
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int m = 0; m < M; m++)
            for (int c = 0; c < C && C > 1; c++) {
                load_sum(chain, sums + ((c * R + r) * M + m) * SUMS);
                if (c) sum[r][m][0] += chain;
                else sum[r][m][0] = chain;
            }
    totals<R, M>(y, sum);
}

// The two loops of attention. HEAD: D where the compiler should know it, so that addresses are constants, a multiple of
// what registers hold; or 0.
// p[j] = q . keys[j] for the 16 keys of a page; keys (16,D), stored or widened before. A stored key asks for the one in
// its place of the next page, which no prefetcher of a CPU can guess: pages of 4 KB lie where the table says.
template <class U, class S>
TARGET static INLINE void scores_step(Vector (&sum)[KEYS][1][1], const U* q, const S* keys, const S* next, int D,
                                      Part some) {
    Vector a, b;
    load(a, q, some);
    UNROLL for (int k = 0; k < KEYS; k++) {
        if (sizeof(S) < sizeof(U)) __builtin_prefetch(next + k * D, 0, 2);
        load(b, keys + k * D, some);
        multiply_add(sum[k][0][0], a, b);
    }
}
template <int HEAD, class U, class S>
TARGET static void attention_scores(U* p, const U* q, const S* keys, const S* next, int head) {
    const int D = HEAD ? HEAD : head;
    for (int j = 0; j < PAGE; j += KEYS, keys += KEYS * D, next += KEYS * D) {
        Vector sum[KEYS][1][1];
        UNROLL for (int k = 0; k < KEYS; k++) sum[k][0][0] = Vector{};
        int i = 0;
        for (; i + WIDTH <= D; i += WIDTH) scores_step(sum, q + i, keys + i, next + i, D, part(WIDTH));
        if (HEAD == 0 && i < D) scores_step(sum, q + i, keys + i, next + i, D, part(D - i));
        totals<KEYS, 1>(p + j, sum);
    }
}

// out = out * scale + sum_j p[j] values[j] over the 16 values of a page; values (16,D). MIXED vectors of out at a time
// hide each other's latency.
template <class U, class S>
TARGET static INLINE void mix_columns(U* out, U scale, const U* p, const S* values, const S* next, int D, int left) {
    Vector o[MIXED], weight, v;
    UNROLL for (int c = 0; c < MIXED; c++) {
        load(o[c], out + c * WIDTH, part(std::max(0, left - c * WIDTH)));
        multiply(o[c], scale);
    }
    for (int j = 0; j < PAGE; j++) {
        fill(weight, p[j]);
        UNROLL for (int c = 0; c < MIXED; c++) {
            const bool ask = sizeof(S) < sizeof(U) && c * WIDTH * sizeof(S) % 64 == 0;
            if (ask) __builtin_prefetch(next + j * D + c * WIDTH, 0, 2);
            load(v, values + j * D + c * WIDTH, part(std::max(0, left - c * WIDTH)));
            multiply_add(o[c], weight, v);
        }
    }
    UNROLL for (int c = 0; c < MIXED; c++) store(out + c * WIDTH, o[c], part(std::max(0, left - c * WIDTH)));
}
template <int HEAD, class U, class S>
TARGET static void attention_mix(U* out, U scale, const U* p, const S* values, const S* next, int head) {
    const int D = HEAD ? HEAD : head;
    int i = 0;
    for (; i + MIXED * WIDTH <= D; i += MIXED * WIDTH)
        mix_columns(out + i, scale, p, values + i, next + i, D, MIXED * WIDTH);
    if (HEAD == 0 && i < D) mix_columns(out + i, scale, p, values + i, next + i, D, D - i);
}

#ifdef INTEGERS
// y[m][r] = W[r] . x[m] for R rows of INT8 weights and M tokens that are integers. A cache line of weights takes some
// 20 instructions, so a CPU that looks 300 instructions ahead has too few lines on their way from memory. Hence each
// line asks for the one in its own place whole blocks of R rows later; into the second-level cache, since the first
// one tracks too few misses.
template <int R, int M>
TARGET static void integer_loop(float* y, const int8_t* q, const bf16* scale, const Fixed* x, int in) {
    const int steps = in / COLUMNS;
    const size_t block = (size_t)R * in, ahead = (FETCH_AHEAD + block - 1) / block * block;
    Vector sum[R][M][1];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int m = 0; m < M; m++) sum[r][m][0] = Vector{};
    for (int i = 0; i < steps; i++) {
        Weights w[R];
        Vector s[R];
        UNROLL for (int r = 0; r < R; r++) {
            const int8_t* from = q + ((size_t)r * steps + i) * COLUMNS;
            __builtin_prefetch((const void*)((uintptr_t)from + ahead), 0, 2);
            load_weights(w[r], from);
            load_scales(s[r], scale + ((size_t)r * steps + i) * (COLUMNS / GROUP));
        }
        UNROLL for (int m = 0; m < M; m++)
            UNROLL for (int r = 0; r < R; r++) add_product(sum[r][m][0], w[r], s[r], x[(size_t)m * steps + i]);
    }
    totals<R, M>(y, sum);
}
#endif

#ifdef PAIRS
// The same for rows of INT4 in groups of G. Two halves of columns at a time: of one group each, or of the same one.
template <int G>
TARGET static INLINE void add_pairs(Vector& sum, const Weights& w, const Scales<G>& s, const Fixed<G>& x) {
    Integers sums;
    if constexpr (G == 32) {
        four_sums<0, 0>(sums, w, x);
        add_group(sum, sums, s.s[0], s.zero[0], x.sum[0], x.step[0]);
        four_sums<1, 1>(sums, w, x);
        add_group(sum, sums, s.s[1], s.zero[1], x.sum[1], x.step[1]);
    } else {
        four_sums<0, 1>(sums, w, x);
        add_group(sum, sums, s.s[0], s.zero[0], x.sum[0], x.step[0]);
    }
}
template <int G, int R, int M>
TARGET static void pairs_loop(float* y, const int8_t* q, const uint16_t* scale, const uint8_t* zero, const Fixed<G>* x,
                              int in) {
    const size_t row = (size_t)in / 2, groups = (in + G - 1) / G, block = R * row;
    const size_t ahead = (FETCH_AHEAD + block - 1) / block * block;
    const int steps = (in + 2 * HALF - 1) / (2 * HALF);
    Vector sum[R][M][1];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int m = 0; m < M; m++) sum[r][m][0] = Vector{};
    for (int i = 0; i < steps; i++)
        UNROLL for (int r = 0; r < R; r++) {
            Weights w;
            Scales<G> s;
            const int8_t* from = q + r * row + (size_t)i * HALF;
            __builtin_prefetch((const void*)((uintptr_t)from + ahead), 0, 2);
            load_pairs(w, from, in - i * 2 * HALF);
            load_scales<G>(s, scale + r * groups, zero ? zero + r * groups : nullptr, i * 2 * HALF);
            UNROLL for (int m = 0; m < M; m++) add_pairs<G>(sum[r][m][0], w, s, x[(size_t)m * steps + i]);
        }
    totals<R, M>(y, sum);
}
#endif
