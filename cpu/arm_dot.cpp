// cpu/arm_dot.cpp: products with activations in bytes for 64-bit Arm with the dot product (sdot).
#include "cpu/instruction_set.h"
#if defined(HAVE_ARM) && !defined(QWEN3_DOUBLE)
#ifndef __ARM_FEATURE_DOTPROD
#error "compiled with -march=armv8.2-a+dotprod: see the Makefile"
#endif
#include "cpu/byte_loops.h"
#include <arm_neon.h>

namespace {
struct ArmDot {
    typedef int Int __attribute__((vector_size(16)));
    typedef float Float __attribute__((vector_size(16)));
    static constexpr int ROWS = 4, TOKENS = 4, SQUARE = 0;
    static constexpr bool NARROW = false, SIGNED = true, SUMS = false;
    static INLINE void panel(Int (&v)[4], const uint8_t* p, size_t apart) {
        uint32x4_t t[4];
        uint64x2_t a[2], b[2];
        UNROLL for (int i = 0; i < 4; i++) t[i] = vreinterpretq_u32_u8(vld1q_u8(p + i * apart));
        UNROLL for (int i = 0; i < 2; i++) {
            a[i] = vreinterpretq_u64_u32(vzip1q_u32(t[2 * i], t[2 * i + 1]));
            b[i] = vreinterpretq_u64_u32(vzip2q_u32(t[2 * i], t[2 * i + 1]));
        }
        v[0] = (Int)vzip1q_u64(a[0], a[1]), v[1] = (Int)vzip2q_u64(a[0], a[1]);
        v[2] = (Int)vzip1q_u64(b[0], b[1]), v[3] = (Int)vzip2q_u64(b[0], b[1]);
    }
    static INLINE void gather(Int& v, const uint8_t* p, size_t apart) {
        v = Int{load_as<int>(p), load_as<int>(p + apart), load_as<int>(p + 2 * apart), load_as<int>(p + 3 * apart)};
    }
    static INLINE void half(Float& v, const Int& u) {
        v = (Float)vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32((uint32x4_t)u)));
    }
    static INLINE void fill(Int& v, const void* p) { v = (Int)vdupq_n_s32(load_as<int>(p)); }
    static INLINE void multiply_add(Int& sum, const Int& w, const Int& x) { // (unsigned bytes of w are below 128)
        sum = (Int)vdotq_s32((int32x4_t)sum, (int8x16_t)w, (int8x16_t)x);
    }
    static INLINE void multiply_add_signed(Int& sum, const Int& w, const Int& x) { multiply_add(sum, w, x); }
    static INLINE void fma(Float& sum, const Float& a, const Float& b) {
        sum = (Float)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
    }
};
} // namespace
const ByteTile arm_bytes = byte_tile<ArmDot>;
#endif
