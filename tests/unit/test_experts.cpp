// model/experts.h by emulation (tests/emulate/emulate.h): the choice of experts, their pairs, the rows of a block and the
// sums are their definitions', with the threads one after the other from the first to the last and from the last to the
// first.
#include "lab/ptx.h"
#include <doctest/doctest.h>

[[maybe_unused]] static void let_next_start() {}
[[maybe_unused]] static void wait_for_previous() {}
static constexpr float LOG2E = 1.44269504f;
static float exp2_fast(float x) { return std::exp2(x); }
static float warp_sum(float x) {
    for (int lane = 16; lane; lane /= 2) x += __shfl_xor_sync(~0u, x, lane);
    return x;
}
#define SHARED_FLOATS(name) float* name = (float*)dynamic_shared
#include "model/experts.h"

struct Routes { // what the kernels use of Routed
    float* p;
    int* expert;
    float* share;
    int *first, *pair;
};
template <int EACH> __global__ void places_kernel(ExpertRows* out, const int* first, int E) {
    const ExpertRows rows = expert_rows<EACH>(first, E);
    if (threadIdx.x == 5) out[blockIdx.y] = rows;
}

TEST_CASE("experts' kernels: choice, pairs, places and sums, in both orders of threads") {
    uint32_t seed = 1;
    const struct { int E, k, N; } shapes[] = {{8, 2, 1}, {7, 7, 3}, {128, 8, 21}, {40, 3, 9}, {33, 32, 5}, {200, 1, 70}};
    for (auto& shape : shapes)
        for (bool order : {false, true})
            for (bool normed : {false, true}) {
                const int E = shape.E, k = shape.k, N = shape.N, C = 136;
                INFO("E " << E << " k " << k << " N " << N << " backwards " << order);
                std::vector<float> scores = lab::random_numbers((size_t)N * E, seed++), p = scores;
                if (N > 2) p[(size_t)2 * E + 1] = scores[(size_t)2 * E + 1] = p[(size_t)2 * E]; // equal ones
                if (N > 4) for (int e = 0; e < E; e++) p[(size_t)4 * E + e] = NAN;
                std::vector<int> seq((size_t)N, 0), expert((size_t)N * k, -7), first((size_t)E + 1, -7), pair((size_t)N * k, -7);
                if (N > 1) seq.back() = -1;
                std::vector<float> share((size_t)N * k, NAN);
                const Routes to = {p.data(), expert.data(), share.data(), first.data(), pair.data()};
                backwards = order;
                lab::launch(choose_kernel<Routes>, dim3((unsigned)N), dim3(128), ((size_t)E + 3) / 4 * 32, to, seq.data(), E, k, normed);
                if (N > 1) lab::launch(group_kernel<Routes>, dim3((unsigned)E), dim3(N > 20 ? 1024 : 256), 0, to, N * k, E);
                size_t wrong = 0;
                for (int n = 0; n < N; n++) {
                    std::vector<int> want;
                    double all = 0, sum = 0, top = *std::max_element(&scores[(size_t)n * E], &scores[(size_t)n * E] + E);
                    const bool none = n == 4 && N > 4;
                    for (int e = 0; e < E; e++) all += std::exp(scores[(size_t)n * E + e] - top);
                    for (int e = 0; e < E; e++) {
                        int ahead = 0;
                        for (int f = 0; f < E; f++)
                            ahead += scores[(size_t)n * E + f] > scores[(size_t)n * E + e] || (scores[(size_t)n * E + f] == scores[(size_t)n * E + e] && f < e);
                        if (none ? e < k : ahead < k) want.push_back(e), sum += std::exp(scores[(size_t)n * E + e] - top);
                    }
                    REQUIRE((int)want.size() == k);
                    for (int j = 0; j < k; j++) {
                        wrong += expert[(size_t)n * k + j] != (seq[(size_t)n] < 0 ? -1 : want[(size_t)j]);
                        const double its = std::exp(scores[(size_t)n * E + want[(size_t)j]] - top) / (normed ? sum : all);
                        wrong += !none && !(std::fabs(share[(size_t)n * k + j] - its) < 1e-5);
                    }
                }
                CHECK(wrong == 0);
                int at = 0;
                for (int e = 0; e < E; e++) {
                    wrong += first[(size_t)e] != at;
                    for (int i = 0; i < N * k; i++)
                        if (expert[(size_t)i] == e) wrong += pair[(size_t)at++] != i;
                }
                CHECK((wrong == 0 && first[(size_t)E] == at));
                // Places of 4 rows: each row of each expert once, and no more.
                const int most = std::min(N * k, std::min(N * k, E) + N * k / 4) + 2;
                std::vector<ExpertRows> places((size_t)most, {-1, -1, -1});
                lab::launch(places_kernel<4>, dim3(1, (unsigned)most), dim3(128), 0, places.data(), first.data(), E);
                std::vector<int> seen((size_t)N * k, 0);
                for (auto& rows : places) {
                    wrong += rows.n < 0 || rows.n > 4;
                    for (int i = rows.first; i < rows.first + rows.n; i++) seen[(size_t)i]++, wrong += expert[(size_t)pair[(size_t)i]] != rows.e;
                }
                for (int i = 0; i < at; i++) wrong += seen[(size_t)i] != 1;
                ExpertPlaces<4> walk = {first.data(), E};
                for (int i = 0; i < most; i++) {
                    const ExpertRows rows = walk.at(i), &want = places[(size_t)i];
                    wrong += rows.n != want.n || (rows.n && (rows.e != want.e || rows.first != want.first));
                }
                CHECK((wrong == 0 && places.back().n == 0));
                // x in the order of the pairs.
                std::vector<uint16_t> x((size_t)N * C), gathered((size_t)N * k * C, 9);
                for (size_t i = 0; i < x.size(); i++) x[i] = (uint16_t)(10 + i);
                lab::launch(gather_pairs_kernel<uint16_t>, dim3((unsigned)(N * k + 7) / 8), dim3(256), 0, gathered.data(), x.data(), &first[(size_t)E], pair.data(), k, C);
                for (int i = 0; i < N * k; i++)
                    for (int c = 0; c < C; c++)
                        wrong += gathered[(size_t)(i * C + c)] != (i < at ? x[(size_t)(pair[(size_t)i] / k * C + c)] : 9);
                CHECK(wrong == 0);
                // Sums, of columns 8 to 103.
                const std::vector<float> residual = lab::random_numbers((size_t)N * C, seed), y = lab::random_numbers((size_t)N * k * 96, seed + 7);
                for (float& x : share) if (std::isnan(x)) x = 1;
                std::vector<float> out((size_t)N * C, -3);
                lab::launch(add_shares_kernel<Routes>, dim3((unsigned)N, 1), dim3(128), 0, out.data(), residual.data(), y.data(), to, k, C, 8, 96);
                backwards = false;
                for (int n = 0; n < N; n++)
                    for (int c = 0; c < C; c++) {
                        float want = residual[(size_t)n * C + c];
                        for (int j = 0; j < k && seq[(size_t)n] >= 0 && c >= 8 && c < 104; j++)
                            want += share[(size_t)n * k + j] * y[((size_t)n * k + j) * 96 + (size_t)c - 8];
                        wrong += out[(size_t)n * C + c] != (c >= 8 && c < 104 ? want : -3);
                    }
                CHECK(wrong == 0);
            }
}
