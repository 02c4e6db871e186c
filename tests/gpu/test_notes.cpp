// The kernels in chapters 1 to 8 of the course's notes, as the reader sees them, against plain loops.
#include "tests/gpu/notes.h"
#include <doctest/doctest.h>
using std::vector;

static bool close(const std::vector<float>& a, const std::vector<float>& b, float tol) {
    if (a.size() != b.size()) return false;
    for (size_t i = 0; i < a.size(); i++)
        if (!(std::fabs(a[i] - b[i]) <= tol * (1 + std::fabs(b[i])))) {
            printf("  at %zu: %g, want %g\n", i, a[i], b[i]);
            return false;
        }
    return true;
}

TEST_CASE("notes: saxpy") {
    const int n = 1000003;
    const auto x = noise(n);
    const auto y = noise(n, 7);
    Dev<float> a(x), b(y);
    b_saxpy::saxpy<<<(n + 255) / 256, 256>>>(n, 2, a.p, b.p);
    auto w = y;
    for (int i = 0; i < n; i++) w[i] = 2 * x[i] + y[i];
    CHECK((b.get() == w));
}

TEST_CASE("notes: vec_add") {
    const int n = 1000003;
    const auto x = noise(n);
    const auto y = noise(n, 7);
    Dev<float> a(x), b(y), c(n);
    b_vec_add::vec_add<<<(n + 255) / 256, 256>>>(a.p, b.p, c.p, n);
    auto w = y;
    for (int i = 0; i < n; i++) w[i] += x[i];
    CHECK((c.get() == w));
}

TEST_CASE("notes: scale_on_gpu") {
    const int n = 1000003;
    const auto x = noise(n);
    auto h = x;
    b_vec_scale::scale_on_gpu(h.data(), 2, n);
    auto w = x;
    for (auto& v : w) v *= 2;
    CHECK((h == w));
}

TEST_CASE("notes: add_bias") {
    const int n = 1000003;
    const auto x = noise(n);
    Dev<float> a(x);
    b_add_bias::add_bias<<<37, 96>>>(a.p, 1, n);
    auto w = x;
    for (auto& v : w) v += 1;
    CHECK((a.get() == w));
}

TEST_CASE("notes: square_in_pieces") {
    const int n = 1000003;
    const auto x = noise(n);
    float* h;
    OK(cudaMallocHost(&h, n * 4));
    std::copy(x.begin(), x.end(), h);
    Dev<float> d(n);
    b_square::square_in_pieces(h, d.p, n, 7);
    bool ok = true;
    for (int i = 0; i < n; i++) ok &= h[i] == x[i] * x[i];
    CHECK(ok);
    cudaFreeHost(h);
}

TEST_CASE("notes: rgb_to_gray") {
    int w = 101, h = 67;
    vector<unsigned char> rgb(3 * w * h);
    for (size_t i = 0; i < rgb.size(); i++) rgb[i] = (unsigned char)(i * 37);
    Dev<unsigned char> a(rgb), g(w * h);
    b_rgb_to_gray::gray_on_gpu(a.p, g.p, w, h);
    auto r = g.get();
    bool ok = true;
    for (int i = 0; i < w * h; i++)
        ok &= std::abs(r[i] - (0.299f * rgb[3 * i] + 0.587f * rgb[3 * i + 1] + 0.114f * rgb[3 * i + 2])) <= 0.51f;
    CHECK(ok);
}

TEST_CASE("notes: box_blur") {
    const auto x = noise(1000003);
    int w = 101, h = 67, r = 3;
    Dev<float> a(x), o(w * h);
    b_box_blur::box_blur<<<dim3(4, 9), dim3(32, 8)>>>(a.p, o.p, w, h, r);
    vector<float> q(w * h);
    for (int j = 0; j < h; j++)
        for (int i = 0; i < w; i++) {
            float s = 0;
            int c = 0;
            for (int v = -r; v <= r; v++)
                for (int u = -r; u <= r; u++)
                    if (i + u >= 0 && i + u < w && j + v >= 0 && j + v < h) {
                        s += x[(j + v) * w + i + u];
                        c++;
                    }
            q[j * w + i] = s / c;
        }
    CHECK(close(o.get(), q, 1e-5f));
}

TEST_CASE("notes: reverse_256") {
    auto v = noise(512);
    Dev<float> a(v);
    b_reverse_256::reverse_256<<<2, 256>>>(a.p);
    std::reverse(v.begin(), v.begin() + 256);
    std::reverse(v.begin() + 256, v.end());
    CHECK((a.get() == v));
}

TEST_CASE("notes: matmul_naive, matmul_tiled, matmul_coarse") {
    for (int M : {64, 33}) {
        int N = M == 64 ? 128 : 70, K = M == 64 ? 48 : 29;
        auto A = noise(M * K), B = noise(K * N, 3);
        vector<float> w(M * N);
        for (int i = 0; i < M; i++)
            for (int j = 0; j < N; j++) {
                float s = 0;
                for (int k = 0; k < K; k++) s += A[i * K + k] * B[k * N + j];
                w[i * N + j] = s;
            }
        Dev<float> a(A), b(B), c(M * N);
        b_matmul_naive::matmul_naive<<<dim3((N + 15) / 16, (M + 15) / 16), dim3(16, 16)>>>(a.p, b.p, c.p, M, N, K);
        CHECK(close(c.get(), w, 1e-5f));
        c.zero();
        b_matmul_tiled::matmul_tiled<32><<<dim3((N + 31) / 32, (M + 31) / 32), dim3(32, 32)>>>(a.p, b.p, c.p, M, N, K);
        CHECK(close(c.get(), w, 1e-5f));
        c.zero();
        if (M == 64) {
            b_matmul_coarse::matmul_coarse<<<dim3(N / 64, M / 64), dim3(16, 16)>>>(a.p, b.p, c.p, M, N, K);
            CHECK(close(c.get(), w, 1e-5f));
        }
    }
}

TEST_CASE("notes: transpose") {
    const auto x = noise(1000003);
    int R = 45, C = 77;
    Dev<float> a(x), o(R * C);
    b_transpose::transpose<<<dim3(3, 2), dim3(32, 8)>>>(a.p, o.p, R, C);
    auto r = o.get();
    bool ok = true;
    for (int i = 0; i < R; i++)
        for (int j = 0; j < C; j++) ok &= r[j * R + i] == x[i * C + j];
    CHECK(ok);
}

TEST_CASE("notes: launch_stage takes 80,000 bytes and refuses 400,000") {
    const auto x = noise(1000003);
    int m = 20000;
    Dev<float> a(x), o(m);
    OK(b_stage::launch_stage(a.p, o.p, m));
    auto r = o.get();
    bool ok = true;
    for (int i = 0; i < m; i++) ok &= r[i] == x[m - 1 - i];
    CHECK(ok);
    CHECK(b_stage::launch_stage(a.p, o.p, 100000) != cudaSuccess);
    cudaGetLastError();
}

TEST_CASE("notes: copy_vec4") {
    auto v = noise(4096);
    Dev<float> a(v), o(4096);
    b_copy_vec4::copy_vec4<<<4, 256>>>((float4*)a.p, (float4*)o.p, 1024);
    CHECK((o.get() == v));
}

TEST_CASE("notes: float_to_bf16 against __float2bfloat16") {
    bool ok = true;
    unsigned s = 1;
    for (int i = 0; i < 2000000; i++) {
        s = s * 1664525u + 1013904223u;
        float f;
        memcpy(&f, &s, 4);
        unsigned short h = b_float_to_bf16::float_to_bf16(f);
        __nv_bfloat16 r = __float2bfloat16(f);
        unsigned short q;
        memcpy(&q, &r, 2);
        ok &= h == q || (f != f && (h & 0x7fff) > 0x7f80);
    }
    CHECK(ok);
}

TEST_CASE("notes: softmax_rows") {
    int rows = 5, C = 77;
    auto v = noise(rows * C);
    for (auto& t : v) t *= 60;
    Dev<float> a(v), o(rows * C);
    b_softmax_rows::softmax_rows<<<2, 96>>>(a.p, o.p, rows, C);
    vector<float> w(rows * C);
    for (int r = 0; r < rows; r++) {
        double m = -1e30, s = 0;
        for (int i = 0; i < C; i++) m = std::max(m, (double)v[r * C + i]);
        for (int i = 0; i < C; i++) s += std::exp(v[r * C + i] - m);
        for (int i = 0; i < C; i++) w[r * C + i] = (float)(std::exp(v[r * C + i] - m) / s);
    }
    CHECK(close(o.get(), w, 1e-6f));
    Dev<float> a1(v), o1(3);
    b_softmax_rows::softmax_rows<<<1, 32>>>(a1.p, o1.p, 1, 3);
    double s = 0;
    for (int i = 0; i < 3; i++) s += std::exp((double)v[i] - std::max({v[0], v[1], v[2]}));
    CHECK(std::fabs(o1.get()[0] - std::exp((double)v[0] - std::max({v[0], v[1], v[2]})) / s) < 1e-6);
}

TEST_CASE("notes: conv2d_const, conv2d_tiled, conv1d_dir twice") {
    const auto x = noise(1000003);
    int w = 101, h = 67;
    auto f = noise(25, 5);
    vector<float> q(w * h);
    for (int j = 0; j < h; j++)
        for (int i = 0; i < w; i++) {
            float s = 0;
            for (int v = 0; v < 5; v++)
                for (int u = 0; u < 5; u++) {
                    int X = i + u - 2, Y = j + v - 2;
                    if (X >= 0 && X < w && Y >= 0 && Y < h) s += x[Y * w + X] * f[v * 5 + u];
                }
            q[j * w + i] = s;
        }
    Dev<float> a(x), o(w * h);
    OK(cudaMemcpyToSymbol(b_conv2d_const::filt, f.data(), 100));
    OK(cudaMemcpyToSymbol(b_conv2d_tiled::taps, f.data(), 100));
    b_conv2d_const::conv2d_const<<<dim3(4, 9), dim3(32, 8)>>>(a.p, o.p, w, h);
    CHECK(close(o.get(), q, 1e-5f));
    o.zero();
    b_conv2d_tiled::conv2d_tiled<<<dim3(4, 3), dim3(32, 32)>>>(a.p, o.p, w, h);
    CHECK(close(o.get(), q, 1e-5f));
    vector<float> g(f.begin(), f.begin() + 5), e(w * h, 0);
    for (int j = 0; j < h; j++)
        for (int i = 0; i < w; i++) {
            float s = 0;
            for (int v = 0; v < 5; v++)
                for (int u = 0; u < 5; u++) {
                    int X = i + u - 2, Y = j + v - 2;
                    if (X >= 0 && X < w && Y >= 0 && Y < h) s += x[Y * w + X] * g[v] * g[u];
                }
            e[j * w + i] = s;
        }
    Dev<float> t(w * h), gd(g);
    b_conv1d_dir::conv1d_dir<<<dim3(4, 9), dim3(32, 8)>>>(a.p, t.p, gd.p, 2, w, h, false);
    b_conv1d_dir::conv1d_dir<<<dim3(4, 9), dim3(32, 8)>>>(t.p, o.p, gd.p, 2, w, h, true);
    CHECK(close(o.get(), e, 1e-4f));
}

TEST_CASE("notes: im2col") {
    const auto x = noise(1000003);
    int C = 3, H = 9, W = 11, K = 3, P = 1;
    Dev<float> a(x), c(C * K * K * H * W);
    b_im2col::im2col<<<(C * K * K * H * W + 255) / 256, 256>>>(a.p, c.p, C, H, W, K, P);
    auto r = c.get();
    bool ok = true;
    for (int k = 0; k < C; k++)
        for (int v = 0; v < K; v++)
            for (int u = 0; u < K; u++)
                for (int i = 0; i < H; i++)
                    for (int j = 0; j < W; j++) {
                        int X = j + u - P, Y = i + v - P;
                        float want = X >= 0 && X < W && Y >= 0 && Y < H ? x[(k * H + Y) * W + X] : 0;
                        ok &= r[(((k * K + v) * K + u) * H + i) * W + j] == want;
                    }
    CHECK(ok);
}

TEST_CASE("notes: winograd_f23") {
    float d[4] = {1, 2, -3, 5}, g[3] = {4, -6, 8}, o[2];
    b_winograd_f23::winograd_f23(d, g, o);
    CHECK((o[0] == d[0] * g[0] + d[1] * g[1] + d[2] * g[2] && o[1] == d[1] * g[0] + d[2] * g[1] + d[3] * g[2]));
}

TEST_CASE("notes: reduce_tree, reduce_warp, scan_kogge_stone, scan_brent_kung") {
    int m = 100001;
    auto v = noise(m);
    for (auto& t : v) t = std::floor(t);
    double want = 0;
    for (float t : v) want += t;
    Dev<float> a(v), o((m + 511) / 512);
    b_reduce_tree::reduce_tree<<<(m + 511) / 512, 256>>>(a.p, o.p, m);
    double s = 0;
    for (float t : o.get()) s += t;
    CHECK((s == want));
    Dev<float> p(50);
    b_warp_sum::reduce_warp<<<50, 160>>>(a.p, p.p, m);
    s = 0;
    for (float t : p.get()) s += t;
    CHECK((s == want));
    vector<float> w(m);
    for (int i = 0; i < m; i++) w[i] = v[i] + (i % 256 ? w[i - 1] : 0);
    Dev<float> q(m);
    b_scan_kogge_stone::scan_kogge_stone<<<(m + 255) / 256, 256>>>(a.p, q.p, m);
    CHECK((q.get() == w));
    q.zero();
    b_scan_brent_kung::scan_brent_kung<<<(m + 255) / 256, 128>>>(a.p, q.p, m);
    CHECK((q.get() == w));
}

TEST_CASE("notes: scan_lookback") {
    for (int m : {1, 256, 5000003}) {
        vector<unsigned> v(m), w(m);
        unsigned s = 1, t = 0;
        for (int i = 0; i < m; i++) {
            s = s * 1664525u + 1013904223u;
            v[i] = s;
            t += s;
            w[i] = t;
        }
        Dev<unsigned> a(v), o(m), ticket(1);
        int tiles = (m + 255) / 256;
        Dev<unsigned long long> st(tiles);
        b_scan_lookback::scan_lookback<<<tiles, 256>>>(a.p, o.p, m, st.p, ticket.p);
        CHECK((o.get() == w));
    }
}

TEST_CASE("notes: histogram") {
    const int n = 1000003;
    vector<unsigned char> v(n);
    vector<unsigned> w(256);
    for (int i = 0; i < n; i++) {
        v[i] = (unsigned char)((unsigned)i * i / 3);
        w[v[i]]++;
    }
    Dev<unsigned char> a(v);
    Dev<unsigned> b(256);
    b_histogram::histogram<<<40, 256>>>(a.p, b.p, n);
    CHECK((b.get() == w));
}
