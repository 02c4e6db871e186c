// cpu_loops.h: the three inner loops of cpu.h that take a CPU's time, written once. cpu.h includes this file within each
// struct of vector instructions (Plain, Avx2, Avx512, Bf16Dot), whose vectors and operations the loops use; TARGET is the
// attribute that lets the compiler use these instructions. (A template cannot have the attribute as a parameter, and g++
// inlines the operations only into functions with the same attribute: hence a file.)

// y[m][r] = W[r] . x[m] for R rows of W and M tokens; all R * M sums stay in registers.
template <bool INT8, int R, int M, class T>
TARGET static void product_loop(acc<T>* y, const WeightRows<T>& w, const T* x) {
    Vector sum[R][M];
    Operand a, b[M];
    for (int r = 0; r < R; r++)
        for (int m = 0; m < M; m++) sum[r][m] = Vector{};
    const int in = w.in;
    const size_t groups = (in + GROUP - 1) / GROUP;
    for (size_t g = 0; g < groups; g += 16) { // the scales of 16 groups are made floats together
        [[maybe_unused]] alignas(64) acc<T> scale[R][16];
        if constexpr (INT8)
            for (int r = 0; r < R; r++)
                for (int l = 0; l < 16; l += WIDTH) {
                    load(a, w.scale + r * groups + g + l, std::max(0, (int)(groups - g) - l));
                    store(scale[r] + l, a, WIDTH);
                }
        for (int i = (int)g * GROUP; i < std::min(in, (int)(g + 16) * GROUP); i += WIDTH) {
            for (int m = 0; m < M; m++) load(b[m], x + (size_t)m * in + i, in - i);
            for (int r = 0; r < R; r++) {
                // A row is short; the next ones are asked for while this one is computed on.
                const void* next = INT8 ? (const void*)(w.q + (size_t)(R + r) * in + i) : (const void*)(w.w + (size_t)(R + r) * in + i);
                if (PREFETCH && M == 1 && i % 64 == 0) __builtin_prefetch(next);
                if constexpr (INT8) {
                    load(a, w.q + (size_t)r * in + i, in - i);
                    multiply(a, scale[r][i / GROUP - g]);
                } else {
                    load(a, w.w + (size_t)r * in + i, in - i);
                }
                for (int m = 0; m < M; m++) multiply_add(sum[r][m], a, b[m]);
            }
        }
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
            load(a, q + i, D - i);
            for (int k = 0; k < KEYS; k++) {
                load(b, keys + (j + k) * D + i, D - i);
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
        auto left = [&](int c) { return std::max(0, D - i - c * WIDTH); };
        for (int c = 0; c < CHAINS; c++) {
            load(o[c], out + i + c * WIDTH, left(c));
            multiply(o[c], scale);
        }
        for (int j = 0; j < PAGE; j++) {
            fill(weight, p[j]);
            for (int c = 0; c < CHAINS; c++) {
                load(v, values + j * D + i + c * WIDTH, left(c));
                multiply_add(o[c], weight, v);
            }
        }
        for (int c = 0; c < CHAINS; c++) store(out + i + c * WIDTH, o[c], left(c));
    }
}
