// model/ceilings.h: the read bandwidth and the multiply rate of this machine.
#pragma once
#include "model/session.h"
#include "model/weights.h"
#include <array>

// What this machine could do, measured by loops that do nothing else: reading memory, and multiplying out of registers.
// A figure of ours is then a share of one of them.

// The sum of n words, of which a thread reads `streams` pieces side by side; n is a multiple of 8 * streams.
template <int STREAMS> uint64_t read_streams(const uint64_t* data, size_t n) {
    typedef uint64_t Words __attribute__((vector_size(64), may_alias));
    const size_t piece = n / STREAMS;
    Words sum[STREAMS] = {};
    for (size_t i = 0; i < piece; i += 8)
        UNROLL for (int s = 0; s < STREAMS; s++) sum[s] += *(const Words*)(data + s * piece + i);
    uint64_t all = 0;
    for (const Words& s : sum)
        for (int l = 0; l < 8; l++) all += s[l];
    return all;
}

// Reads 1 GB of memory with all threads and does nothing else. How many streams a CPU's prefetchers follow best differs
// by 1.5 times between makes: the best of 1, 2, 4 and 8 a thread, five passes of each.
class ReadTest {
    static constexpr size_t WORDS = (size_t)1 << 27, TASKS = 64;
    static constexpr std::array READ = {read_streams<1>, read_streams<2>, read_streams<4>, read_streams<8>};
    Arena arena;
    uint64_t* data;
    size_t best = 0; // of READ

    double pass(size_t kind) {
        uint64_t sum = 0;
        const double start = seconds();
        #pragma omp parallel for schedule(static) reduction(+ : sum)
        for (size_t task = 0; task < TASKS; task++) sum += READ[kind](data + task * (WORDS / TASKS), WORDS / TASKS);
        const double rate = (double)(WORDS * 8) / (seconds() - start);
        if (sum == 1) fprintf(stderr, " "); // the sum is used: no compiler drops the loop
        return rate;
    }

  public:
    double ceiling = 0; // bytes a second
    ReadTest() {
        arena.take<uint64_t>(WORDS);
        arena.allocate("the bandwidth test");
        data = arena.take<uint64_t>(WORDS);
        #pragma omp parallel for schedule(static)
        for (size_t i = 0; i < WORDS; i++) data[i] = i;
        for (size_t i = 0; i < 5 * READ.size(); i++)
            if (const double rate = pass(i % READ.size()); rate > ceiling) ceiling = rate, best = i % READ.size();
    }
    double pass() { return pass(best); }
};

// A burst of multiply-adds on registers alone, one function for each instruction set; returns how many flops it was.
// Sums enough to hide the latency of one, few enough for the registers; the compiler does not know that they are equal.
typedef float Block __attribute__((vector_size(64), may_alias));
inline double multiply_plain(Block* memory) {
    Block a = memory[14], b = memory[15], s0 = memory[0], s1 = memory[1];
    for (int k = 0; k < 4000; k++) s0 = s0 * a + b, s1 = s1 * a + b;
    memory[0] = s0, memory[1] = s1;
    return 2. * 16 * 2 * 4000;
}
#ifdef HAVE_SIMD
TARGET_AVX2 inline double multiply_avx2(Block* memory) {
    __m256 a = _mm256_set1_ps(1), s[10];
    for (int i = 0; i < 10; i++) memcpy(s + i, memory + i, 32);
    for (int k = 0; k < 4000; k++)
        UNROLL for (int i = 0; i < 10; i++) s[i] = _mm256_fmadd_ps(a, a, s[i]);
    for (int i = 0; i < 10; i++) memcpy(memory + i, s + i, 32);
    return 2. * 8 * 10 * 4000;
}
TARGET_AVX512 inline double multiply_avx512(Block* memory) {
    __m512 a = _mm512_set1_ps(1), s[12];
    for (int i = 0; i < 12; i++) memcpy(s + i, memory + i, 64);
    for (int k = 0; k < 4000; k++)
        UNROLL for (int i = 0; i < 12; i++) s[i] = _mm512_fmadd_ps(a, a, s[i]);
    for (int i = 0; i < 12; i++) memcpy(memory + i, s + i, 64);
    return 2. * 16 * 12 * 4000;
}
TARGET_AVX512_BF16 inline double multiply_bf16(Block* memory) {
    __m512bh a = (__m512bh)_mm512_set1_epi16(0x3f80);
    __m512 s[12];
    for (int i = 0; i < 12; i++) memcpy(s + i, memory + i, 64);
    for (int k = 0; k < 4000; k++)
        UNROLL for (int i = 0; i < 12; i++) s[i] = _mm512_dpbf16_ps(s[i], a, a);
    for (int i = 0; i < 12; i++) memcpy(memory + i, s + i, 64);
    return 2. * 32 * 12 * 4000;
}
// vpdpbusd for INT8 weights: three of them, one a plane of x, are one multiplication each of 64 pairs.
TARGET_AVX512_BF16 inline double multiply_vnni(Block* memory) {
    __m512i a = _mm512_set1_epi8(1), s[12];
    for (int i = 0; i < 12; i++) memcpy(s + i, memory + i, 64);
    for (int k = 0; k < 4000; k++)
        UNROLL for (int i = 0; i < 12; i++) s[i] = _mm512_dpbusd_epi32(s[i], a, a);
    for (int i = 0; i < 12; i++) memcpy(memory + i, s + i, 64);
    return 2. * 64 / 3 * 12 * 4000;
}
TARGET_AMX inline double multiply_amx(Block* memory) {
    amx_configure(64);
    _tile_loadd(4, memory, 64);
    _tile_loadd(5, memory, 64);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int k = 0; k < 500; k++) {
        _tile_dpbf16ps(0, 4, 5);
        _tile_dpbf16ps(1, 4, 5);
        _tile_dpbf16ps(2, 4, 5);
        _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, memory, 64);
    _tile_release();
    return 2. * 16 * 16 * 32 * 4 * 500;
}
// tdpbssd takes the same time, and is twice as deep; but three planes of x want one each.
TARGET_AMX inline double multiply_amx_int8(Block* memory) { return multiply_amx(memory) * 2 / 3; }
#endif

// Flops a second that all threads reach in `time` seconds, with the instructions that products of T use (or of INT8
// and T).
template <class T> double cpu_multiply_ceiling([[maybe_unused]] bool int8, double time) {
    [[maybe_unused]] const bool narrow = std::is_same_v<T, bf16>;
    auto multiply = multiply_plain;
#ifdef HAVE_SIMD
    if (instruction_set >= ISA_AVX2) multiply = multiply_avx2;
    if (instruction_set >= ISA_AVX512) multiply = multiply_avx512;
    if (narrow && instruction_set >= ISA_AVX512_BF16) multiply = int8 ? multiply_vnni : multiply_bf16;
    if (narrow && instruction_set >= ISA_AMX) multiply = int8 ? multiply_amx_int8 : multiply_amx;
#endif
    double rate = 0;
    #pragma omp parallel reduction(+ : rate)
    {
        Block memory[16];
        for (auto& v : memory) v = Block{} + 1;
        double flops = 0, took = 0; // each thread's own: they take their time to start
        for (const double start = seconds(); took < time; took = seconds() - start) flops += multiply(memory);
        rate += flops / took;
    }
    return rate;
}

// gpu/ceilings.cu: flops a second by mma.sync, which every GPU from sm_80 on has, in some milliseconds; bytes a second of
// reading 2 GB, less if there is less.
double gpu_multiply_ceiling(const Context& ctx);
double gpu_read_ceiling(const Context& ctx);

// Flops a second: on a CPU as above, in `time` seconds; on a GPU by mma.sync, which every GPU from sm_80 on has, in
// some milliseconds.
template <class T> double multiply_ceiling([[maybe_unused]] const Context& ctx, bool int8, double time) {
    if constexpr (WITH_GPU) if (ctx.gpu) return gpu_multiply_ceiling(ctx);
    return cpu_multiply_ceiling<T>(int8, time);
}

struct Ceilings { double read, multiply; }; // bytes, flops a second

// Of the GPU, which reads 2 GB, less if there is less; else of the CPU, whose memory was tested before.
template <class T>
Ceilings measure_ceilings([[maybe_unused]] const Context& ctx, bool int8, const ReadTest* memory = nullptr) {
    if constexpr (WITH_GPU) if (ctx.gpu) return {gpu_read_ceiling(ctx), gpu_multiply_ceiling(ctx)};
    return {memory->ceiling, cpu_multiply_ceiling<T>(int8, 0.3)};
}

// The first n tokens in a session's KV cache: block_bytes(n) from the start of each of 2 L blocks, in whole pages of a
// layer's keys, then of its values. With `ids` this is all there is to save and restore. f may read and write.
template <class T> size_t block_bytes(const Session<T>& s, size_t n) {
    return (n + PAGE - 1) / PAGE * s.config.K * KVCache<T>::block_bytes(s.config, s.cache.fp8);
}
template <class T, class F> void each_block(Session<T>& s, size_t n, F f) {
    std::vector<T> copy(s.ctx.gpu ? block_bytes(s, n) / sizeof(T) : 0);
    T* const both[] = {s.cache.keys, s.cache.values}; // (nvcc cannot walk a braced list here)
    for (T* all : both)
        for (int l = 0; l < s.config.L; l++) {
            T* block = all + l * s.cache.layer_size;
            if (!s.ctx.gpu) { // host memory itself
                f(block);
                continue;
            }
            copy_out(s.ctx, copy.data(), block, copy.size());
            f(copy.data());
            copy_in(s.ctx, block, copy.data(), copy.size());
        }
}

// Bytes of a product's weights, and of all that one token's step reads.
template <class T> size_t weight_bytes(const Linear<T>& W) {
    if (W.format == Format::PLAIN) return (size_t)W.out() * W.in * sizeof(T);
    const size_t scale = W.format == Format::FP8 ? 4 : W.zero[0] ? 3 : 2, each = (size_t)W.group_rows;
    return (size_t)W.out() * W.row_bytes() + ((size_t)W.out() + each - 1) / each * (size_t)W.groups() * scale;
}
template <class T> size_t step_bytes(const Weights<T>& w) {
    size_t n = weight_bytes(w.head);
    for (auto& l : w.layers)
        for (const Linear<T>* W : {&l.qkv, &l.o, &l.gate_up, &l.down}) n += weight_bytes(*W);
    return n;
}
