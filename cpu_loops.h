// cpu_loops.h: the three inner loops of cpu.h that take a CPU's time, written once. cpu.h includes this file within
// each struct of vector instructions (Plain, Avx2, Avx512, Bf16Dot). The loops use the struct's vectors and operations;
// TARGET is the attribute that lets the compiler use these instructions. (A template cannot have the attribute as a
// parameter, and g++ inlines the operations only into functions with the same attribute: hence a file.)

constexpr static int SCALES = 16; // of INT8 weights, that are made floats together

// Adds columns i, i + 1, ... of R rows of W by M tokens to their sums: as many columns as `some` says. For INT8,
// `scale` begins with the group of column i0.
template <bool INT8, int R, int M, class T>
TARGET static INLINE void product_step(Vector (&sum)[R][M], const WeightRows<T>& w, const T* x, int i, Part some,
                                       const acc<T> (&scale)[R][SCALES], int i0) {
    const size_t in = w.in;
    Operand a, b[M];
    for (int m = 0; m < M; m++) load(b[m], x + m * in + i, some);
    for (int r = 0; r < R; r++) {
        // A row is short; the next ones are asked for while this one is computed on.
        const void* next = INT8 ? (const void*)(w.q + (R + r) * in + i) : (const void*)(w.w + (R + r) * in + i);
        if (PREFETCH && M == 1 && i % 64 == 0) __builtin_prefetch(next);
        if constexpr (INT8) {
            load(a, w.q + r * in + i, some);
            multiply(a, scale[r][(i - i0) / GROUP]);
        } else {
            load(a, w.w + r * in + i, some);
        }
        for (int m = 0; m < M; m++) multiply_add(sum[r][m], a, b[m]);
    }
}

// y[m][r] = W[r] . x[m] for R rows of W and M tokens; all R * M sums stay in registers.
template <bool INT8, int R, int M, class T>
TARGET static void product_loop(acc<T>* y, const WeightRows<T>& w, const T* x) {
    Vector sum[R][M];
    for (int r = 0; r < R; r++)
        for (int m = 0; m < M; m++) sum[r][m] = Vector{};
    const int in = w.in, groups = (in + GROUP - 1) / GROUP;
    for (int i0 = 0; i0 < in; i0 += INT8 ? SCALES * GROUP : in) {
        acc<T> scale[R][SCALES];
        if constexpr (INT8)
            for (int r = 0; r < R; r++)
                for (int l = 0; l < SCALES; l += WIDTH) {
                    const int g = i0 / GROUP + l;
                    Vector v;
                    load(v, w.scale + (size_t)r * groups + g, part(std::max(0, groups - g)));
                    store(scale[r] + l, v, part(WIDTH));
                }
        const int end = INT8 ? std::min(in, i0 + SCALES * GROUP) : in;
        int i = i0;
        for (; i + WIDTH <= end; i += WIDTH) product_step<INT8>(sum, w, x, i, part(WIDTH), scale, i0);
        if (i < end) product_step<INT8>(sum, w, x, i, part(end - i), scale, i0);
    }
    for (int r = 0; r < R; r++)
        for (int m = 0; m < M; m++) y[m * TILE_ROWS + r] = total(sum[r][m]);
}

// p[j] = q . keys[j] for the 16 keys of a page; keys (16,D).
template <class U> TARGET static void attention_scores(U* p, const U* q, const U* keys, int D) {
    for (int j = 0; j < PAGE; j += KEYS) {
        Vector sum[KEYS], a, b;
        for (int k = 0; k < KEYS; k++) sum[k] = Vector{};
        for (int i = 0; i < D; i += WIDTH) {
            const Part some = part(D - i);
            load(a, q + i, some);
            for (int k = 0; k < KEYS; k++) {
                load(b, keys + (j + k) * D + i, some);
                multiply_add(sum[k], a, b);
            }
        }
        for (int k = 0; k < KEYS; k++) p[j + k] = total(sum[k]);
    }
}

// out = out * scale + sum_j p[j] values[j] over the 16 values of a page; values (16,D). CHAINS sums at a time hide each
// other's latency.
template <class U> TARGET static void attention_mix(U* out, U scale, const U* p, const U* values, int D) {
    for (int i = 0; i < D; i += CHAINS * WIDTH) {
        Vector o[CHAINS], weight, v;
        Part some[CHAINS];
        for (int c = 0; c < CHAINS; c++) {
            some[c] = part(std::max(0, D - i - c * WIDTH));
            load(o[c], out + i + c * WIDTH, some[c]);
            multiply(o[c], scale);
        }
        for (int j = 0; j < PAGE; j++) {
            fill(weight, p[j]);
            for (int c = 0; c < CHAINS; c++) {
                load(v, values + j * D + i + c * WIDTH, some[c]);
                multiply_add(o[c], weight, v);
            }
        }
        for (int c = 0; c < CHAINS; c++) store(out + i + c * WIDTH, o[c], some[c]);
    }
}
