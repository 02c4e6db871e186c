/* gpu/packed/formats.h: INT4, INT8 and FP8 weights on a GPU, as Linear has them, and how they become bf16.

   Of up to 16 tokens packed_kernel streams the packed bytes, and converts them in registers: time is bytes. On Hopper
   packed_hopper_kernel does so for fewer than UNPACKED_FROM tokens. Else, with an adapter, and backwards unpack_kernel
   makes bf16 numbers of a matrix, or of a part of it, in a scratch of fixed size, and the products of bf16 weights
   follow; so neither card nor host ever holds the whole model in bf16.

   How eight bytes become bf16 numbers. A bf16 has 7 bits of fraction: 0x4300 | u is 128 + u for u < 128. So the bits of
   a weight are put into the fraction of a number with that exponent, two weights at once, and a multiply-add of pairs
   takes off what they stand above zero. No conversion instruction, no shuffle, and nothing is rounded: q - zero (INT4),
   q (INT8) and e4m3 are bf16 numbers. A group's scale multiplies the float32 sum of the group's products.

   Every format is a struct with the same names, and the one template argument F of each kernel.

   A product of many tokens with FP8 weights may have both operands in e4m3 (--activations fp8): the tokens are made
   e4m3, as model/fp8_activations.h says, by the norm or the SwiGLU that makes them, or else by round_kernel, and
   hopper_kernel multiplies them by W as it is stored. */
#pragma once
#include "qwen3.cu"

// ======================================================================================================== 1 Formats

#ifdef __CUDACC__
// a & b | c. PTX ISA: lop3.b32 (of two constants the compiler makes two instructions)
__device__ inline uint32_t and_or(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
__device__ inline float half_value(uint16_t h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}
// 8 bytes of weights: as load_stream.
__device__ inline uint2 load_eight(const void* p, bool there) {
    uint2 v;
    asm volatile("{ .reg .pred there; setp.ne.u32 there, %3, 0; mov.u32 %0, 0; mov.u32 %1, 0;\n"
                 "@there ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2]; }"
                 : "=&r"(v.x), "=&r"(v.y) : "l"(p), "r"((uint32_t)there));
    return v;
}
#endif

// A scale as two bf16, twice each: its bf16 part, and the rest; and a pair of weights times their sum.
__device__ inline void two_words(uint32_t (&words)[2], float s) {
    const uint32_t first = pack(s, s);
    const float rest = s - low(first);
    words[0] = first, words[1] = pack(rest, rest);
}
__device__ inline uint32_t times_two(uint32_t pair, const uint32_t (&words)[2]) {
    return fma_pair(pair, words[0], fma_pair(pair, words[1], 0x80008000));
}

// A run: eight neighbouring columns of a row, the first a multiple of 8. A format defines
//   RUNS     in 8 bytes: run j of a lane begins 32 j columns after its first
//   SCALES   groups that these runs can be of
//   LOADS    of 8 bytes that a lane has in flight, limited by registers
//   byte     where in a row the 8 bytes of the run at `column` are
//   run      its eight numbers as bf16 pairs, but for the scale; `zero` is INT4's
//   pair     two of them, whose bytes are both bytes of the halves of `twice`
//   SLOTS    scales that 128 columns of a row, a stage of section 5, have; WORDS of 32 bits each
//   scaled   such a pair times its scale, rounded once as unpack_run rounds it; words: scale_words of the scale
//   Raw      a scale as it is stored, and to_float of it; BLOCKS: group_rows rows share it
struct PackedInt8 {
    static constexpr int RUNS = 1, SCALES = 1, LOADS = 8, SLOTS = 4, WORDS = 1;
    static constexpr bool ZEROS = false, BLOCKS = false;
    using Raw = uint16_t;
    __device__ static float to_float(Raw s) { return to_acc(bf16{s}); }
    __device__ static size_t byte(int column) { return (size_t)column; }
    // A byte with its sign is u - 128 (sign), u < 128. Appended to a byte 0x43 its sign is the last bit of the
    // exponent: 128 + u if it is 0. So without that bit: (128 + u) - (sign ? 256 : 128).
    __device__ static uint32_t two(uint32_t word, uint32_t bytes) {
        const uint32_t raised = __byte_perm(word, 0x43434343, bytes);
        return fma_pair(raised & 0x43804380, 0xbf80bf80, raised & 0x437f437f); // times -1
    }
    __device__ static uint4 run(const uint2& v, int, uint32_t) {
        return {two(v.x, 0x4140), two(v.x, 0x4342), two(v.y, 0x4140), two(v.y, 0x4342)};
    }
    __device__ static uint32_t pair(uint32_t twice, int, uint32_t) {
        return fma_pair(and_or(twice, 0x00800080, 0x43004300), 0xbf80bf80, and_or(twice, 0x007f007f, 0x43004300));
    }
    __device__ static void scale_words(uint32_t (&words)[1], Raw s) { words[0] = s * 0x10001u; }
    __device__ static uint32_t scaled(uint32_t pair, const uint32_t (&words)[1]) {
        return fma_pair(pair, words[0], 0x80008000);
    }
};

struct PackedFp8 {
    static constexpr int RUNS = 1, SCALES = 1, LOADS = 8, SLOTS = 1, WORDS = 2;
    static constexpr bool ZEROS = false, BLOCKS = true;
    using Raw = float;
    __device__ static float to_float(Raw s) { return s; }
    __device__ static size_t byte(int column) { return (size_t)column; }
    __device__ static uint32_t two(uint32_t word, uint32_t bytes) { return widen_e4m3(word, bytes); }
    __device__ static uint4 run(const uint2& v, int, uint32_t) { return widen_e4m3(v); }
    __device__ static uint32_t pair(uint32_t twice, int, uint32_t) {
        return fma_pair((twice & 0x80008000) | (twice >> 4 & 0x07f007f0), 0x7b807b80, 0x80008000);
    }
    // (The scale has more bits than two bf16, so near the middle of two numbers it may be rounded in the other
    // direction.)
    __device__ static void scale_words(uint32_t (&words)[2], Raw s) { two_words(words, s); }
    __device__ static uint32_t scaled(uint32_t pair, const uint32_t (&words)[2]) { return times_two(pair, words); }
};

// GROUPS: 2 if a group has 32 columns, so that the lower and the upper halves belong to different groups.
template <int GROUPS> struct PackedInt4 {
    static constexpr int RUNS = 2, SCALES = GROUPS, LOADS = 4, SLOTS = GROUPS == 2 ? 4 : 1, WORDS = 2;
    static constexpr bool ZEROS = true, BLOCKS = false;
    using Raw = uint16_t;
    __device__ static float to_float(Raw h) { return half_value(h); }
    __device__ static size_t byte(int column) { return (size_t)(column / 64 * 32 + column % 32); }
    __device__ static uint32_t two(uint32_t word, uint32_t bytes, uint32_t less) { // of the lower halves
        return fma_pair(__byte_perm(word, 0x43434343, bytes) & 0x430f430f, 0x3f803f80, less);
    }
    __device__ static uint4 run(const uint2& v, int upper, uint32_t zero) {
        const uint32_t less = 0xc300c300 | zero * 0x00010001, a = v.x >> 4 * upper, b = v.y >> 4 * upper;
        return {two(a, 0x4140, less), two(a, 0x4342, less), two(b, 0x4140, less), two(b, 0x4342, less)};
    }
    __device__ static uint32_t pair(uint32_t twice, int upper, uint32_t less) { // less: as in `run`
        return fma_pair(and_or(twice >> 4 * upper, 0x000f000f, 0x43004300), 0x3f803f80, less);
    }
    // (A half is a bf16 and a rest of three bits; a weight, of five, times that rest is a bf16.)
    __device__ static void scale_words(uint32_t (&words)[2], Raw h) { two_words(words, to_float(h)); }
    __device__ static uint32_t scaled(uint32_t pair, const uint32_t (&words)[2]) { return times_two(pair, words); }
};

// A packed matrix, its blocks one after another, and its other operand.
struct PackedArgs {
    const uint8_t* q;    // (out, row_bytes), with PAIR (2 out, row_bytes)
    const void* scale;   // (out / group_rows, groups)
    const uint8_t* zero; // INT4: (out, groups), or null: all 8
    size_t row_bytes;
    int in, out, group, groups, group_rows;
    int shift; // group = 1 << shift, or -1
    const bf16* x = nullptr;    // (., in)
    const int* rows = nullptr;  // (N) rows of x, or null: the first N
    int N = 0, steps = 0;       // steps a warp: set by launch_packed

    // The scale, and the zero point, that a column of row r has.
    template <class F> __device__ size_t scale_at(int r, int column) const {
        const int g = shift < 0 ? column / group : column >> shift;
        return (size_t)(F::BLOCKS ? r / group_rows : r) * groups + min(g, groups - 1);
    }
    template <class F> __device__ uint32_t zero_at(int r, int column) const {
        return zero ? zero[scale_at<F>(r, column)] : 8;
    }
};

inline PackedArgs packed_args(const Linear<bf16>& W) {
    // (FP8's blocks of rows continue across the blocks of a Linear: `upload` ensures it.)
    const int shift = W.group & (W.group - 1) ? -1 : __builtin_ctz((unsigned)W.group);
    return {(const uint8_t*)W.q[0], W.scale[0], W.zero[0], W.row_bytes(), W.in, W.out(), W.group, W.groups(),
            W.group_rows, shift};
}
// Calls f with W's format. INT4 in groups of up to `few` columns is treated as groups of 32.
template <class Use> auto with_packing(const Linear<bf16>& W, Use f, int few = GROUP) {
    if (W.in % 8 || W.out() % 8) DIE("a packed matrix is (%d,%d): the GPU takes multiples of 8", W.out(), W.in);
    switch (W.format) {
        case Format::INT8: return f(PackedInt8());
        case Format::FP8: return f(PackedFp8());
        case Format::INT4: return W.group <= few ? f(PackedInt4<2>()) : f(PackedInt4<1>());
        default: DIE("a product with packed weights: W has none");
    }
}
