// server/segmented.h by emulation (tests/emulate/emulate.h): every number of h and of the sums is what its definition
// says, for any mix of adapters, with the threads one after the other from the first to the last and from the last to
// the first. The numbers are such that float32 adds them up exactly.
#include "lab/ptx.h"
#include <doctest/doctest.h>

using bf16 = __nv_bfloat16;
[[maybe_unused]] static void let_next_start() {}
[[maybe_unused]] static void wait_for_previous() {}
static bf16 round_bf16(float x) { return __float2bfloat16(x); }
static void mma_32(float (&d)[4], const uint4& a0, const uint4& a1, const uint4& b) { // as qwen3.cu has it
    mma(d, {a0.x, a1.x, a0.y, a1.y}, b.x, b.y);
    mma(d, {a0.z, a1.z, a0.w, a1.w}, b.z, b.w);
}
#include "server/engine/segmented.h"

struct OneAdapter { // what the kernels read of an Adapter
    int rank, modules, block[3];
    bf16 *A, *B, *h;
};
struct SomeRows { // ... and of RowAdapters
    const OneAdapter* const* of;
    float* sums;
    const OneAdapter* at(int n) const { return of[n]; }
};
struct Numbers { // of an adapter
    std::vector<bf16> A, B, h;
    OneAdapter adapter;
    Numbers(uint32_t seed, int rank, std::vector<int> blocks, const std::vector<int>& first, int in, int N) {
        const int out = first[3], width = rank * (int)blocks.size();
        for (float x : lab::random_numbers((size_t)width * in, seed)) A.push_back(round_bf16(x > 0 ? 1.f : -0.5f));
        B.assign((size_t)out * width, bf16{});
        const std::vector<float> b = lab::random_numbers(B.size(), seed + 1);
        for (size_t j = 0; j < blocks.size(); j++)
            for (int r = first[blocks[j]]; r < first[blocks[j] + 1]; r++)
                for (size_t i = (size_t)r * width + j * rank, end = i + rank; i < end; i++) B[i] = round_bf16(b[i] > 0 ? 0.5f : -1.f);
        h.assign((size_t)N * width, bf16{0xffff}); // NaN
        adapter = {rank, (int)blocks.size(), {}, A.data(), B.data(), h.data()};
        std::copy(blocks.begin(), blocks.end(), adapter.block);
    }
};

TEST_CASE("segmented adapters: any mix of them, to the bit, in both orders of threads") {
    struct Shape { std::vector<int> first; int in; std::vector<int> blocks; }; // where W's blocks begin and end
    uint32_t seed = 1;
    auto below = [&](uint32_t n) { return seed = seed * 1664525u + 1013904223u, (seed >> 8) % n; };
    size_t shared = 0;
    for (const Shape& shape : {Shape{{0, 64, 96, 136}, 72, {0, 2}}, Shape{{0, 40, 60, 84}, 264, {0, 1, 2}}, Shape{{0, 200, 200, 200}, 40, {0}},
                               Shape{{0, 24, 48, 48}, 8, {1}}})
        for (int N : {1, 7, 8, 21}) {
            const int out = shape.first[3], in = shape.in;
            std::vector<std::unique_ptr<Numbers>> all;
            for (int rank : {8, 16, 40}) all.push_back(std::make_unique<Numbers>(seed + (uint32_t)rank, rank, shape.blocks, shape.first, in, N));
            std::vector<const OneAdapter*> of;
            for (int n = 0; n < N; n++) { // runs of some rows; some have none
                const uint32_t pick = below(4);
                of.push_back(n && below(3) ? of.back() : pick < all.size() ? &all[pick]->adapter : nullptr);
                shared += n && of[(size_t)n] && of[(size_t)n] == of[(size_t)n - 1];
            }
            std::vector<bf16> x;
            for (float f : lab::random_numbers((size_t)N * in, seed)) x.push_back(round_bf16(f > 0.3f ? 1.f : f > -0.3f ? 0.f : -1.f));
            const std::vector<float> residual = lab::random_numbers((size_t)N * out, seed);
            for (bool order : {false, true})
                for (bool adds : {false, true}) {
                    backwards = order;
                    for (auto& one : all) std::fill(one->h.begin(), one->h.end(), bf16{0xffff});
                    std::vector<float> sums((size_t)N * out, NAN);
                    const SomeRows rows = {of.data(), sums.data()};
                    lab::launch(segment_down_kernel<SomeRows>, dim3(2, (unsigned)N), dim3(256), 0, x.data(), rows, N, in);
                    lab::launch(segment_up_kernel<SomeRows>, dim3((unsigned)(out + 127) / 128, (unsigned)(N + 7) / 8), dim3(256), 0,
                                adds ? residual.data() : (const float*)nullptr, rows, N, out, shape.first[1], shape.first[2]);
                    backwards = false;
                    size_t wrong = 0;
                    for (int n = 0; n < N; n++) {
                        const OneAdapter* a = of[(size_t)n];
                        const int width = a ? a->rank * a->modules : 0;
                        std::vector<float> h((size_t)width);
                        for (int c = 0; c < width; c++) {
                            for (int i = 0; i < in; i++) h[(size_t)c] += __bfloat162float(a->A[(size_t)c * in + i]) * __bfloat162float(x[(size_t)n * in + i]);
                            h[(size_t)c] = __bfloat162float(round_bf16(h[(size_t)c]));
                            wrong += __bfloat162float(a->h[(size_t)n * width + c]) != h[(size_t)c];
                        }
                        for (int r = 0; r < out; r++) {
                            float sum = adds ? residual[(size_t)n * out + r] : 0;
                            for (int c = 0; c < width; c++) sum += __bfloat162float(a->B[(size_t)r * width + c]) * h[(size_t)c];
                            wrong += sums[(size_t)n * out + r] != sum;
                        }
                    }
                    INFO("out " << out << " in " << in << " N " << N << " backwards " << order << " adds " << adds);
                    CHECK(wrong == 0);
                    // Rows of others, and of none, are left alone.
                    for (auto& one : all)
                        for (int n = 0; n < N; n++)
                            if (of[(size_t)n] != &one->adapter) CHECK(one->h[(size_t)n * one->adapter.rank * one->adapter.modules].bits == 0xffff);
                }
        }
    CHECK(shared > 20);
}
