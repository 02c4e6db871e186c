// cpu_loops.h: the three inner loops of cpu.h that take a CPU's time, written once. cpu.h includes this file within
// each struct of vector instructions (Plain, Avx2, Avx512, Bf16Dot). The loops use the struct's vectors and operations;
// TARGET is the attribute that lets the compiler use these instructions. (A template cannot have the attribute as a
// parameter, and g++ inlines the operations only into functions with the same attribute: hence a file.)

// The columns i, i + 1, ... of R rows of W by M tokens, added to their sums: as many columns as a sum has lanes, or the
// `left` that there still are. Each chain of a sum takes the next WIDTH columns. INT8: C * WIDTH is GROUP.
template <bool INT8, int R, int M, int C, class W, class X>
TARGET static INLINE void product_step(Vector (&sum)[R][M][C], const W* w, const bf16* scale, const X* x, int in, int i,
                                       int left) {
    UNROLL for (int c = 0; c < C; c++) {
        const Part some = part(std::max(0, left - c * WIDTH));
        const int at = i + c * WIDTH;
        Operand a, b[M];
        UNROLL for (int m = 0; m < M; m++) load(b[m], x + (size_t)m * in + at, some);
        UNROLL for (int r = 0; r < R; r++) {
            load(a, w + (size_t)r * in + at, some);
            if constexpr (INT8) multiply(a, to_acc(scale[r * ((in + GROUP - 1) / GROUP) + i / GROUP]));
            UNROLL for (int m = 0; m < M; m++) multiply_add(sum[r][m][c], a, b[m]);
        }
    }
}

// y[m][r] = W[r] . x[m] for R rows of W and M tokens; all sums stay in registers. (Without UNROLL g++ keeps them in
// memory: three times slower.)
template <bool INT8, int R, int M, int C, class Y, class W, class X>
TARGET static void product_loop(Y* y, const W* w, const bf16* scale, const X* x, int in) {
    constexpr int LANES_OF_SUM = C * WIDTH;
    Vector sum[R][M][C];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int m = 0; m < M; m++)
            UNROLL for (int c = 0; c < C; c++) sum[r][m][c] = Vector{};
    int i = 0;
    for (; i + LANES_OF_SUM <= in; i += LANES_OF_SUM) product_step<INT8>(sum, w, scale, x, in, i, LANES_OF_SUM);
    if (i < in) product_step<INT8>(sum, w, scale, x, in, i, in - i);
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int m = 0; m < M; m++)
            UNROLL for (int c = 1; c < C; c++) sum[r][m][0] += sum[r][m][c];
    totals<R, M>(y, sum);
}

// The two loops of attention. HEAD: D where the compiler should know it, so that addresses are constants, a multiple of
// what registers hold; or 0.
// p[j] = q . keys[j] for the 16 keys of a page; keys (16,D).
template <class U> TARGET static INLINE void scores_step(Vector (&sum)[KEYS][1][1], const U* q, const U* keys, int D,
                                                         Part some) {
    Vector a, b;
    load(a, q, some);
    UNROLL for (int k = 0; k < KEYS; k++) {
        load(b, keys + k * D, some);
        multiply_add(sum[k][0][0], a, b);
    }
}
template <int HEAD, class U> TARGET static void attention_scores(U* p, const U* q, const U* keys, int head) {
    const int D = HEAD ? HEAD : head;
    for (int j = 0; j < PAGE; j += KEYS, keys += KEYS * D) {
        Vector sum[KEYS][1][1];
        UNROLL for (int k = 0; k < KEYS; k++) sum[k][0][0] = Vector{};
        int i = 0;
        for (; i + WIDTH <= D; i += WIDTH) scores_step(sum, q + i, keys + i, D, part(WIDTH));
        if (HEAD == 0 && i < D) scores_step(sum, q + i, keys + i, D, part(D - i));
        totals<KEYS, 1>(p + j, sum);
    }
}

// out = out * scale + sum_j p[j] values[j] over the 16 values of a page; values (16,D). MIXED vectors of out at a time
// hide each other's latency.
template <class U> TARGET static INLINE void mix_columns(U* out, U scale, const U* p, const U* values, int D, int left) {
    Vector o[MIXED], weight, v;
    UNROLL for (int c = 0; c < MIXED; c++) {
        load(o[c], out + c * WIDTH, part(std::max(0, left - c * WIDTH)));
        multiply(o[c], scale);
    }
    for (int j = 0; j < PAGE; j++) {
        fill(weight, p[j]);
        UNROLL for (int c = 0; c < MIXED; c++) {
            load(v, values + j * D + c * WIDTH, part(std::max(0, left - c * WIDTH)));
            multiply_add(o[c], weight, v);
        }
    }
    UNROLL for (int c = 0; c < MIXED; c++) store(out + c * WIDTH, o[c], part(std::max(0, left - c * WIDTH)));
}
template <int HEAD, class U> TARGET static void attention_mix(U* out, U scale, const U* p, const U* values, int head) {
    const int D = HEAD ? HEAD : head;
    int i = 0;
    for (; i + MIXED * WIDTH <= D; i += MIXED * WIDTH) mix_columns(out + i, scale, p, values + i, D, MIXED * WIDTH);
    if (HEAD == 0 && i < D) mix_columns(out + i, scale, p, values + i, D, D - i);
}
