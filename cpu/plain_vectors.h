// cpu/plain_vectors.h: the compilers' own vectors as a set of instructions.
#pragma once
#include "cpu/lanes.h"
#include "cpu/tiles.h"

namespace { // (a type of each source's own: see cpu/loops.h)
template <class A> struct Plain {
    using Vector = lanes<A>;
    using Operand = Vector;
    template <class T> using Input = A;
    static constexpr int WIDTH = LANES, SUMS = LANES, ROWS = 2, TOKENS = 2, CHAINS = 1, STREAMS = 1, KEYS = 1,
                         MIXED = 1, OUTER = 2;
    using Part = int;
    static INLINE Part part(int n) { return std::min(LANES, n); }
    template <class T> static INLINE void load(Vector& v, const T* p, Part n) { load_some(v, p, n); }
    static INLINE void store(A* p, const Vector& v, Part n) { memcpy(p, &v, n * sizeof(A)); }
    static INLINE void keep(Vector&) {}
    static INLINE void load_sum(Vector& v, const A* p) { memcpy(&v, p, sizeof v); }
    static INLINE void store_sum(A* p, const Vector& v) { memcpy(p, &v, sizeof v); }
    static INLINE void fill(Vector& v, A a) { v = Vector{} + a; }
    static INLINE void fill_two(Vector& v, Vector& u, const bf16* p) {
        fill(v, as_float(p[0])), fill(u, as_float(p[1]));
    }
    template <class S> static INLINE void load_scaled(Operand& v, const S* p, const Vector& scale) {
        load_lanes(v, p);
        v *= scale;
    }
    struct Codes {
        A scale;
        int zero;
    };
    static INLINE void make_codes(Codes& c, uint16_t half, int zero) { c = {half_as_float(half), zero}; }
    template <int SHIFT> static INLINE void load_codes(Operand& v, const uint8_t* p, const Codes& c) {
        uchar16v bytes;
        memcpy(&bytes, p, sizeof bytes);
        const int16v codes = __builtin_convertvector(bytes >> SHIFT & 15, int16v) - c.zero;
        v = __builtin_convertvector(codes, Vector) * c.scale;
    }
    static INLINE void multiply(Vector& v, A s) { v *= s; }
    static INLINE void multiply_add(Vector& sum, const Vector& a, const Vector& b) { sum += a * b; }
    template <int R, int M, int C> static INLINE void totals(A* y, const Vector (&sum)[R][M][C]) {
        for (int m = 0; m < M; m++)
            for (int r = 0; r < R; r++) y[m * TILE_ROWS + r] = sum_lanes(sum[r][m][0]);
    }
};
} // namespace
