// low_precision.cu: y = W x with W in bf16, INT8, FP8, MXFP8 and INT4, as in decoding: W is read once, so bytes are
// time, and what a number of fewer bits loses stands beside it. How a number of few bits becomes a float32 without a
// conversion instruction. (lab/lab.h says how to run it)
//
// The error in the table is the largest difference from y of the weights before they were rounded; a kernel that
// differs from the definition with the rounded ones is wrong. --size AxB: A rows, B columns (to the next 128). Not run
// yet: "predicted" is arithmetic for an H100 (3.35 TB/s, 132 SMs, 1.755 GHz), unless it says RTX 4090 (1.0 TB/s).
#include "lab/lab.h"
#ifdef __CUDACC__
#include <cuda_fp16.h>
#endif

namespace lab::low_precision {

#ifndef __CUDACC__ // what the emulator has not
struct __half { uint16_t bits; };
inline float __half2float(__half h) { // of a positive number that is not subnormal
    return std::ldexp(1 + (h.bits & 1023) / 1024.f, (h.bits >> 10) - 15);
}
inline int __dp4a(int a, int b, int sum) {
    for (int i = 0; i < 32; i += 8) sum += (int8_t)(a >> i) * (int8_t)(b >> i);
    return sum;
}
#endif

// ---- The problem: M rows of K weights; x and y float32.
constexpr int GROUP = 128, BLOCK = 32; // weights to a scale: of INT4, of MXFP8
struct Gemv : Problem {
    int M, K;
    std::vector<float> weights, numbers;
    std::vector<double> exact, want; // y of the weights as they were; as they are stored
    Array<float> x, y;
    explicit Gemv(Shape s)
        : M(s.x), K(blocks_for(s.y, GROUP) * GROUP), weights(random_numbers((size_t)M * K, 1)),
          numbers(random_numbers(K, 2)), exact(M), want(M), x(numbers), y(M) {
        for (float& w : weights) w = w * w * w; // most are small and some are not, as in a trained model
    }
    // stored(i): weight i as it is stored.
    template <class F> void know(double stored_bytes, F stored) {
        bytes = stored_bytes + 4. * (M + K), flops = 2. * M * K;
        std::vector<double> bound(M);
#pragma omp parallel for
        for (int m = 0; m < M; m++)
            for (int k = 0; k < K; k++) {
                const size_t i = (size_t)m * K + k;
                const double value = stored(i), number = numbers[k];
                want[m] += value * number, exact[m] += weights[i] * number;
                bound[m] += std::fabs((value - weights[i]) * number);
            }
        tolerance = *std::max_element(bound.begin(), bound.end()) + 1e-3;
    }
    void spoil() override { y.spoil(); }
    double error() override {
        const auto got = y.get();
        const std::vector<double> y(got.begin(), got.end());
        return largest_difference(y, want) <= 1e-3 ? largest_difference(y, exact) : INFINITY;
    }
    float largest(size_t first, int n) const { // of |w|
        float most = 0;
        for (int i = 0; i < n; i++) most = std::max(most, std::fabs(weights[first + i]));
        return most;
    }
};
template <class T> void put(Array<T>& to, const std::vector<T>& from) {
    GPU_CHECK(cudaMemcpy(to, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
}

// ---- The kernel. A warp has ROWS rows; a lane takes 16 bytes of each at a time, and the numbers of x that go with
// them. What these 16 bytes mean is the format's: W.dot(m, c, K, x) is their product with x[0], x[1], ..., PER numbers.
template <int ROWS, class Format> __global__ void gemv(Format W, const float* x, float* y, int M, int K) {
    constexpr int PER = Format::PER;
    int m = (blockIdx.x * blockDim.x + threadIdx.x) / 32 * ROWS, lane = threadIdx.x % 32;
    float sum[ROWS] = {};
    for (int c = lane; c < K / PER; c += 32) {
        alignas(16) float part[PER];
        UNROLL for (int j = 0; j < PER; j += 4) *(float4*)(part + j) = *(const float4*)(x + c * PER + j);
        UNROLL for (int r = 0; r < ROWS; r++)
            if (m + r < M) sum[r] += W.dot(m + r, c, K, part);
    }
    UNROLL for (int r = 0; r < ROWS; r++) {
        for (int d = 16; d > 0; d /= 2) sum[r] += __shfl_xor_sync(~0u, sum[r], d);
        if (lane == 0 && m + r < M) y[m + r] = sum[r];
    }
}
struct Words { unsigned w[4]; };
__device__ inline Words load(const void* row, int c) { // 16 bytes
    uint4 v = ((const uint4*)row)[c];
    return {{v.x, v.y, v.z, v.w}};
}

// ---- 1 bf16. A bf16 is the upper half of a float32: a shift, or a mask, makes the number. Predicted for 65,536 x
// 4,096: 537 MB, 0.16 ms (RTX 4090: 0.54 ms), at an error of half a unit in the last of 8 bits.
struct Bf16 {
    const bf16* W;
    static constexpr int PER = 8;
    __device__ float dot(int m, int c, int K, const float* x) const {
        Words v = load(W + (size_t)m * K, c);
        float sum = 0;
        UNROLL for (int j = 0; j < 4; j++) {
            sum += __uint_as_float(v.w[j] << 16) * x[2 * j];
            sum += __uint_as_float(v.w[j] & 0xffff0000) * x[2 * j + 1];
        }
        return sum;
    }
};
// ---- 2 int8. Bound before: bytes. W = scale q, q from -127 to 127, scale = largest / 127 of a row. Each q is
// converted (I2F, 64 a cycle and SM; memory gives 14.5 weights). But 16 bytes are 16 weights now, 64 bytes of x a lane:
// a warp's load of x touches 16 cache lines, 64 for 512 weights, 8 weights a cycle. Predicted: 0.15 ms: half the bytes,
// and no gain.
// ---- 3 int8, eight rows. Bound before: x from the L1 cache. Eight rows share what is loaded of x. Predicted: 0.08 ms,
// half of step 1.
struct Int8 {
    const int8_t* W;
    const float* scale;
    static constexpr int PER = 16;
    __device__ float dot(int m, int c, int K, const float* x) const {
        // exercise low_precision-2: the product of 16 weights of row m, from number 16 c on, with x[0] .. x[15].
        // load() brings 16 bytes as four words. A byte is a signed number: cast to int8_t. The row has one scale.
        // instead: return 0;
        Words v = load(W + (size_t)m * K, c);
        float sum = 0;
        UNROLL for (int j = 0; j < 16; j++) sum += (float)(int8_t)(v.w[j / 4] >> 8 * (j % 4)) * x[j];
        return sum * scale[m];
        // end of exercise
    }
};
// ---- 4 w8a8. x in INT8 too: dp4a multiplies four pairs and adds them up in int32, exactly, without a conversion; and
// x is a quarter of the bytes. Predicted: no faster, since memory bounded; the gain is in products of many rows of x,
// on the tensor cores. The price is x's rounding.
__global__ void gemv_w8a8(const int8_t* W, const float* scale, const int8_t* x, float x_scale, float* y, int M, int K) {
    int m = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32, sum = 0;
    if (m >= M) return;
    // exercise low_precision-4: `sum` of this lane: 16 bytes of W and of x in each round, 32 pieces apart for
    // neighbouring lanes.
    // __dp4a(a, b, sum) multiplies four pairs of bytes, and adds to an int32.
    for (int c = lane; c < K / 16; c += 32) {
        Words v = load(W + (size_t)m * K, c), n = load(x, c);
        UNROLL for (int j = 0; j < 4; j++) sum = __dp4a((int)v.w[j], (int)n.w[j], sum);
    }
    // end of exercise
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
    if (lane == 0) y[m] = (float)sum * (scale[m] * x_scale);
}
// ---- 5 e4m3. INT8's bytes, other numbers: a sign, four bits of exponent (bias 7), three of mantissa; up to 448, a
// relative error of up to 1 / 16 for small and large alike. Where float32 has its exponent and mantissa, its bits are
// the number times 2^-120, subnormal ones too: shifts and masks, and one multiplication. (sm_89 and later also have an
// instruction, for two at a time.) Predicted: six instructions a weight are 87 of an SM's 128 a cycle: as step 3, if
// nothing else is in the way.
__device__ inline float e4m3(unsigned byte) {
    // exercise low_precision-5: the number of an E4M3 byte: sign, 4 bits of exponent (bias 7), 3 of mantissa, subnormal
    // ones too.
    // Shift sign, exponent and mantissa to their places in a float32; the rest is a power of two.
    // instead: return 0;
    return __uint_as_float((byte & 0x80) << 24 | (byte & 0x7f) << 20) * 0x1p120f;
    // end of exercise
}
struct E4m3 {
    const unsigned char* W;
    const float* scale;
    static constexpr int PER = 16;
    __device__ float dot(int m, int c, int K, const float* x) const {
        Words v = load(W + (size_t)m * K, c);
        float sum = 0;
        UNROLL for (int j = 0; j < 16; j++) sum += e4m3(v.w[j / 4] >> 8 * (j % 4)) * x[j];
        return sum * scale[m];
    }
};
// ---- 6 mxfp8. A scale for 32 weights instead of a row, a power of two in a byte (E8M0): an exponent, which a shift by
// 23 makes a float32. A large weight now spoils only its neighbours. Predicted: 3% more bytes than step 5, and hardly
// less of an error here: E4M3 is as good at 2^-6 as at 448. (MX pays where numbers spread further, as activations do,
// or with FP4.)
struct Mxfp8 {
    const unsigned char *W, *exponent;
    static constexpr int PER = 16;
    __device__ float dot(int m, int c, int K, const float* x) const {
        Words v = load(W + (size_t)m * K, c);
        float sum = 0;
        UNROLL for (int j = 0; j < 16; j++) sum += e4m3(v.w[j / 4] >> 8 * (j % 4)) * x[j];
        return sum * __uint_as_float((unsigned)exponent[((size_t)m * K + c * 16) / BLOCK] << 23);
    }
};
// ---- 7 gemv_int4. q + 8 from 0 to 15, eight in a word, and a scale in FP16 for 128: 4.125 bits. A warp a row, a word
// a lane. Predicted: bytes would allow 0.04 ms. But each load of x, 32 bytes apart, touches 8 cache lines: 8 loads for
// 256 weights are 64 cycles, 4 weights a cycle and SM: 0.29 ms, slower than bf16.
__global__ void gemv_int4(const uint32_t* W, const __half* scale, const float* x, float* y, int M, int K) {
    int m = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (m >= M) return;
    float sum = 0.0f;
    for (int w = lane; w < K / 8; w += 32) {               // 8 weights a word
        uint32_t bits = W[(size_t)m * (K / 8) + w];
        float part = 0.0f;
        for (int j = 0; j < 8; j++) part += float(int(bits >> (4 * j) & 15) - 8) * x[w * 8 + j];
        sum += part * __half2float(scale[(size_t)m * (K / 128) + w / 16]);
    }
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
    if (lane == 0) y[m] = sum;
}

// ---- 8 int4, by its bits. Bound before: x from the L1 cache. Sixteen bytes a lane and eight rows for the same x; and
// no conversion: the four bits go to the top of the mantissa of 1.0, which makes 1 + q / 16, and (q - 8) x = 16 (1 + q
// / 16) x - 24 x, where the sum of x is the same for all rows. A shift, a logical operation and a multiply-add a
// weight: 3 x 29 of 128 a cycle. Predicted: memory again, 0.045 ms with the scales (RTX 4090: 0.14 ms).
struct Int4 {
    const uint32_t* W;
    const __half* scale;
    static constexpr int PER = 32;
    __device__ float dot(int m, int c, int K, const float* x) const {
        // exercise low_precision-8: 32 weights of 4 bits, q + 8, without a conversion: the bits at the top of the
        // mantissa of 1.0 are 1 + q / 16.
        // (q - 8) x = 16 (1 + q / 16) x - 24 x with the stored q; the sum of x is needed once. GROUP numbers have a
        // scale.
        // instead: return 0;
        Words v = load(W + (size_t)m * (K / 8), c);
        float sum = 0, all = 0;
        UNROLL for (int j = 0; j < 32; j++) {
            const int up = 19 - 4 * (j % 8); // to bits 19 to 22
            const unsigned bits = up >= 0 ? v.w[j / 8] << up : v.w[j / 8] >> -up;
            sum += __uint_as_float((bits & 0x780000) | 0x3f800000) * x[j], all += x[j];
        }
        return (16 * sum - 24 * all) * __half2float(scale[(size_t)m * (K / GROUP) + c * PER / GROUP]);
        // end of exercise
    }
};

// ---- How weights are rounded, on the host
inline float from_e4m3(unsigned code) {
    const int e = code >> 3 & 15, m = code & 7;
    return std::ldexp((float)(code & 0x80 ? -1 : 1) * (float)(e ? 8 + m : m), std::max(e, 1) - 10);
}
inline unsigned char to_e4m3(float w) { // to the nearest, ties to the even code
    static const std::vector<float> codes = [] {
        std::vector<float> v(127);
        for (unsigned code = 0; code < 127; code++) v[code] = from_e4m3(code);
        return v;
    }();
    const float a = std::fabs(w);
    size_t code = std::lower_bound(codes.begin(), codes.end(), a) - codes.begin(); // the first that is not less
    if (code == 127) code = 126;                                                         // it saturates
    else if (code > 0 && codes[code] > a) {
        const float up = codes[code] - a, down = a - codes[code - 1];
        if (down < up || (down == up && code % 2)) code--;
    }
    return (unsigned char)(code | (w < 0 ? 0x80 : 0));
}


inline uint16_t to_half(float w) { // of a positive number that half has as a normal one
    int e;
    const long mantissa = std::lround(std::frexp(w, &e) * 2048); // 1024 to 2048
    return (uint16_t)(((e + 14) << 10) + (mantissa - 1024));
}
struct AsBf16 : Gemv {
    Array<bf16> W;
    explicit AsBf16(Shape s) : Gemv(s), W(weights.size()) {
        std::vector<bf16> q(weights.size());
        for (size_t i = 0; i < q.size(); i++) q[i] = __float2bfloat16(weights[i]);
        put(W, q);
        know(2. * (double)q.size(), [&](size_t i) { return __bfloat162float(q[i]); });
    }
};
struct AsInt8 : Gemv {
    std::vector<int8_t> q;
    std::vector<float> scales;
    Array<int8_t> W;
    Array<float> scale;
    explicit AsInt8(Shape s) : Gemv(s), q(weights.size()), scales(M), W(q.size()), scale(M) {
        for (size_t i = 0; i < q.size(); i++) {
            if (i % K == 0) scales[i / K] = largest(i, K) / 127;
            q[i] = (int8_t)std::lround(weights[i] / scales[i / K]);
        }
        put(W, q), put(scale, scales);
        know((double)q.size() + 4. * M, [&](size_t i) { return (double)scales[i / K] * q[i]; });
    }
};
struct AsW8A8 : AsInt8 {
    float x_scale;
    Array<int8_t> x8;
    explicit AsW8A8(Shape s) : AsInt8(s), x8(K) {
        x_scale = 1.f / 127; // no number of x is above 1
        std::vector<int8_t> xq(K);
        for (int k = 0; k < K; k++) xq[k] = (int8_t)std::lround(numbers[k] / x_scale);
        put(x8, xq);
        double bound = 0; // what x's rounding may add to the error
        for (int m = 0; m < M; m++) {
            long sum = 0, all = 0;
            for (int k = 0; k < K; k++) sum += q[(size_t)m * K + k] * xq[k], all += std::abs(q[(size_t)m * K + k]);
            want[m] = (double)scales[m] * x_scale * (double)sum;
            bound = std::max(bound, (double)scales[m] * (double)all * x_scale / 2);
        }
        tolerance += bound;
    }
};
struct AsE4m3 : Gemv {
    Array<unsigned char> W;
    Array<float> scale;
    explicit AsE4m3(Shape s) : Gemv(s), W(weights.size()), scale(M) {
        std::vector<unsigned char> q(weights.size());
        std::vector<float> scales(M);
        for (size_t i = 0; i < q.size(); i++) {
            if (i % K == 0) scales[i / K] = largest(i, K) / 448;
            q[i] = to_e4m3(weights[i] / scales[i / K]);
        }
        put(W, q), put(scale, scales);
        know((double)q.size() + 4. * M, [&](size_t i) { return (double)from_e4m3(q[i]) * scales[i / K]; });
    }
};
struct AsMxfp8 : Gemv {
    Array<unsigned char> W, exponent;
    explicit AsMxfp8(Shape s) : Gemv(s), W(weights.size()), exponent(weights.size() / BLOCK) {
        std::vector<unsigned char> q(weights.size()), e(q.size() / BLOCK);
        for (size_t i = 0; i < q.size(); i++) {
            if (i % BLOCK == 0) e[i / BLOCK] = (unsigned char)(127 + std::ceil(std::log2(largest(i, BLOCK) / 448)));
            q[i] = to_e4m3(std::ldexp(weights[i], 127 - e[i / BLOCK]));
        }
        put(W, q), put(exponent, e);
        know((double)(q.size() + e.size()),
             [&](size_t i) { return std::ldexp((double)from_e4m3(q[i]), e[i / BLOCK] - 127); });
    }
};
struct AsInt4 : Gemv {
    Array<uint32_t> W;
    Array<uint16_t> scale; // FP16
    explicit AsInt4(Shape s) : Gemv(s), W(weights.size() / 8), scale(weights.size() / GROUP) {
        std::vector<uint32_t> q(weights.size() / 8);
        std::vector<uint16_t> scales(weights.size() / GROUP);
        const auto scale_of = [&](size_t i) {
            const uint16_t half = scales[i / GROUP];
            return std::ldexp(1 + (half & 1023) / 1024., (half >> 10) - 15);
        };
        for (size_t i = 0; i < weights.size(); i++) {
            if (i % GROUP == 0) scales[i / GROUP] = to_half(largest(i, GROUP) / 7);
            const long n = std::lround(weights[i] / scale_of(i));
            q[i / 8] |= (uint32_t)(std::clamp(n, -8l, 7l) + 8) << 4 * (i % 8);
        }
        put(W, q), put(scale, scales);
        know(4. * (double)q.size() + 2. * (double)scales.size(),
             [&](size_t i) { return ((int)(q[i / 8] >> 4 * (i % 8) & 15) - 8) * scale_of(i); });
    }
    const __half* halves() const { return (const __half*)scale.p; }
};

template <int ROWS, class Format> void run(Gemv& p, Format W) {
    launch(gemv<ROWS, Format>, blocks_for((size_t)p.M * 32, ROWS * 256), 256, 0, W, p.x, p.y, p.M, p.K);
}
inline Laboratory laboratory() {
    Laboratory l("low_precision", "a product with W in 16, 8 and 4 bits: time, and error beside it", {65536, 4096, 1},
                 {37, 200, 1});
    const char *bytes = "dram__bytes_read.sum", *memory = "dram__throughput.avg.pct_of_peak_sustained_elapsed",
               *lines = "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",
               *issue = "sm__inst_executed.avg.pct_of_peak_sustained_elapsed";
    l.step<AsBf16>("bf16", "16 bits", [](AsBf16& p) { run<1>(p, Bf16{p.W}); }, READ, memory, "near 90%");
    l.step<AsInt8>("int8", "8 bits, a scale a row", [](AsInt8& p) { run<1>(p, Int8{p.W, p.scale}); }, READ, lines,
                   "the L1 cache is what works most");
    l.step<AsInt8>("int8, eight rows", "eight rows share x", [](AsInt8& p) { run<8>(p, Int8{p.W, p.scale}); }, READ,
                   memory, "the memory again");
    l.step<AsW8A8>("w8a8", "x in 8 bits too, dp4a", [](AsW8A8& p) {
        launch(gemv_w8a8, blocks_for((size_t)p.M * 32, 256), 256, 0, p.W, p.scale, p.x8, p.x_scale, p.y, p.M, p.K);
    }, READ, issue, "fewer instructions than in step 3");
    l.step<AsE4m3>("e4m3", "8 bits with an exponent", [](AsE4m3& p) { run<8>(p, E4m3{p.W, p.scale}); }, READ, issue,
                   "more than in step 3");
    l.step<AsMxfp8>("mxfp8", "one scale for 32, a power of two", [](AsMxfp8& p) { run<8>(p, Mxfp8{p.W, p.exponent}); },
                    READ, bytes, "8.25 bits a weight");
    l.step<AsInt4>("gemv_int4", "4 bits, a scale for 128", [](AsInt4& p) {
        launch(gemv_int4, blocks_for((size_t)p.M * 32, 256), 256, 0, p.W, p.halves(), p.x, p.y, p.M, p.K);
    }, READ, lines, "the L1 cache is what works most");
    l.step<AsInt4>("int4 by its bits", "no conversion, eight rows share x", [](AsInt4& p) {
        run<8>(p, Int4{p.W, p.halves()});
    }, READ, memory, "the memory again, for a quarter of bf16's bytes");
    l.exercise("596 million weights in INT4 with an FP16 scale for 32 each: how many GB (10^9 bytes)?",
               [] { return 0.596 * (4 + 16. / 32) / 8; });
    l.exercise("Which bound, in per cent, has the relative error of rounding a number that is not subnormal to the "
               "nearest E4M3?", [] { return 100. / 16; });
    l.exercise("A row's largest weight is 1, it has one scale, in INT8. By how many per cent is a weight of "
               "0.001 wrong?", [] { return 100.; });
    return l;
}
} // namespace lab::low_precision

#ifndef LAB_NO_MAIN
int main(int argc, char** argv) { return lab::low_precision::laboratory().main(argc, argv); }
#endif
