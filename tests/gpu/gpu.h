// Shared by the GPU's suites: arrays in its memory, a context with scratch, a Linear on both sides.
#pragma once
#ifdef QWEN3_PORTABLE // what tests of optional kernels need is left out, as those tests are
#include "model/device.h"
#include "model/draw_ahead.h"
#include "model/upload.h"
#include "qwen3.cu"
#else
#include "gpu/gpu.h"
#endif
#include "cpu/ops.h"
#include "tests/common.h"
#include "tests/packed.h"
#include <numeric>

inline Context& gpu() {
    static Context ctx = open_gpu(0);
    return ctx;
}

// A session's sampling state.
inline GpuDraws& draws_of(Session<bf16>& s) { return dynamic_cast<GpuDraws&>(*s.draws); }

// An array in the GPU's memory.
template <class T> struct Device {
    T* data = nullptr;
    size_t n;
    explicit Device(size_t n) : n(n) {
        CUDA_CHECK(cudaMalloc(&data, std::max<size_t>(n, 1) * sizeof(T)));
        CUDA_CHECK(cudaMemset(data, 0xff, n * sizeof(T))); // poison: NaN
        CUDA_CHECK(cudaDeviceSynchronize());               // our stream does not wait for this one
    }
    Device(const std::vector<T>& v) : Device(v.size()) {
        CUDA_CHECK(cudaMemcpy(data, v.data(), n * sizeof(T), cudaMemcpyHostToDevice));
        CUDA_CHECK(cudaDeviceSynchronize());
    }
    Device(const Device&) = delete;
    ~Device() { cudaFree(data); }
    void replace(const std::vector<T>& v) { // by as many numbers, or in place of none
        if (!n && v.size()) cudaFree(data), CUDA_CHECK(cudaMalloc(&data, v.size() * sizeof(T))), n = v.size();
        REQUIRE(n == v.size());
        CUDA_CHECK(cudaStreamSynchronize(gpu().gpu->stream));
        CUDA_CHECK(cudaMemcpy(data, v.data(), n * sizeof(T), cudaMemcpyHostToDevice));
        CUDA_CHECK(cudaDeviceSynchronize()); // (a small copy may return before it has arrived)
    }
    operator T*() const { return data; }
    std::vector<T> get() const {
        std::vector<T> v(n);
        CUDA_CHECK(cudaStreamSynchronize(gpu().gpu->stream));
        CUDA_CHECK(cudaMemcpy(v.data(), data, n * sizeof(T), cudaMemcpyDeviceToHost));
        return v;
    }
};

// A context with scratch of its own.
struct Scratchpad {
    Device<float> partial, attention;
    Device<int> arrived, attention_arrived;
    Context ctx;
    Scratchpad(size_t attention_numbers = 1, int heads = 1)
        : partial(PARTIAL_BYTES / sizeof(float)), attention(attention_numbers), arrived(std::vector<int>(MAX_TILES)), attention_arrived(std::vector<int>(heads)), ctx(gpu()) {
        ctx.gpu = std::make_shared<Gpu>(*ctx.gpu);
        ctx.gpu->partial = partial, ctx.gpu->arrived = arrived;
        ctx.gpu->attention = attention, ctx.gpu->attention_arrived = attention_arrived;
    }
};

// A Linear on both sides; its blocks lie one behind the other, as upload leaves them.
struct Matrix {
    std::vector<bf16> w;
    Device<bf16> copy;
    Linear<bf16> host, device;
    Matrix(Random& random, std::vector<int> rows, int in)
        : w(random.fill<bf16>((size_t)std::accumulate(rows.begin(), rows.end(), 0) * in)), copy(w) {
        host.in = device.in = in;
        size_t at = 0;
        for (size_t b = 0; b < rows.size(); b++) {
            host.rows[b] = device.rows[b] = rows[b];
            host.w[b] = w.data() + at, device.w[b] = copy + at;
            at += (size_t)rows[b] * in;
        }
    }
};

// The error a row of a product may have: its output's rounding, and the sum's.
template <class T, class A> int differences(const std::vector<T>& got, const std::vector<A>& want, double sum_size) {
    return wrong(got, as_double(want), [&](size_t i) { return 2.2 * rounding<T>(to_acc(want[i])) + sum_error<float>(sum_size) * 4; });
}

// A packed Linear on the GPU as upload leaves it, and its numbers as bf16 on both sides; scratch for `numbers` of them.
struct PackedMatrix {
    PackedLinear<bf16> host;
    std::vector<bf16> rounded;
    Device<bf16> copy, scratch;
    Linear<bf16> plain, plain_device, device;
    Arena arena;
    PackedMatrix(Random& random, const PackedKind& kind, std::vector<int> rows, int in, size_t numbers, int high = 5)
        : host(random, kind.format, kind.group, kind.zeros, rows, in, high), rounded(numbers_of(host)), copy(rounded),
          scratch(numbers), device(host) {
        plain.in = plain_device.in = in;
        for (int b = 0; b < 3 && host.rows[b]; b++) {
            plain.rows[b] = plain_device.rows[b] = host.rows[b];
            const size_t first = (size_t)host.first_row(b) * in;
            plain.w[b] = rounded.data() + first, plain_device.w[b] = copy + first;
        }
        std::vector<UploadPiece> pieces;
        std::vector<std::vector<uint8_t>> made;
        arena.gpu = true;
        place_packed(arena, device, nullptr, made);
        arena.allocate("a matrix");
        place_packed(arena, device, &pieces, made);
        for (auto& p : pieces) CUDA_CHECK(cudaMemcpy(arena.base + p.to, p.from, p.bytes, cudaMemcpyHostToDevice));
    }
    static std::vector<bf16> numbers_of(const Linear<bf16>& W) {
        std::vector<bf16> all;
        for (int r = 0; r < W.out(); r++)
            for (int i = 0; i < W.in; i++) all.push_back(to_bf16(W.at(r, i)));
        return all;
    }
    void use(Context& ctx) { ctx.gpu->unpacked = scratch, ctx.gpu->unpacked_numbers = scratch.n; }
};
