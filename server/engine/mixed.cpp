// mixed.cpp: runs each op on the rows of each adapter.
#include "model/cpu.h"
#include "model/instances.h"
#include "qwen3.cu"
#include "server/engine/mixed.h"
#include "server/engine/row_products.h"
#include <algorithm>
#include <array>
#include <vector>

namespace server {

// One layer, computed as layer_forward does. A row gets the same bits as in a batch where all rows have its adapter,
// except on a GPU without --invariant.
//
// Book I's ops are called once per segment, so the matrices are read once per segment. A GPU does so for prompts, and
// with `invariant` for all rows (a preempted answer is recomputed as a prompt).
template <class T> struct MixedLayer {
    Context& ctx;
    const Config& c;
    const Layer<T>& base;
    const int l;
    const Segments<T>& segments;
    const int N;
    const MixedRows mixed;
    using Which = Linear<T> Layer<T>::*;

    void forward(const Batch& b, typename Activations<T>::PerLayer& s, const LayerCache<T>& cache, const acc<T>* rope) {
        norm_product(s.qkv, s.norm1, s.in, base.norm1, &Layer<T>::qkv);
        RUN(attend, s.attention, s.lse, s.q, cache, s.qkv, base.norms(rope), b, c.heads());
        add_product(s.mid, s.in, s.attention, &Layer<T>::o);
        if (!base.experts.empty()) return each_experts(b, s);
        swiglu_product(s.hidden, s.gate_up, s.norm2, s.mid, base.norm2, &Layer<T>::gate_up);
        add_product(s.out, s.mid, s.hidden, &Layer<T>::down);
    }

  private:
    bool one_by_one() const { return ctx.gpu || ctx.plain; }
    const Linear<T>& linear(const Segment<T>& s, Which which) const {
        const Layer<T>& layer = s.with ? s.with->layers[(size_t)l] : base;
        return layer.*which;
    }
    // op(first row, rows, W with the adapter) for each segment, except the mixed rows
    template <class Op> void each(Which which, Op op) {
        for (const Segment<T>& s : segments) {
            const int first = std::max(s.first, mixed.rows), rows = s.first + s.rows - first;
            if (rows > 0) op((size_t)first, rows, linear(s, which));
        }
    }
    RowAdapters adapters(Which which) const {
        const auto all = products_of(base);
        const auto product = std::find(all.begin(), all.end(), &(base.*which)) - all.begin();
        return {mixed.of, 4 * l + (int)product, mixed.sums};
    }

    // The experts of one segment's layer after another's.
    void each_experts(const Batch& b, typename Activations<T>::PerLayer s) {
        const auto adapted = [&](const Segment<T>& segment) {
            const Expert<T>& one = (segment.with ? segment.with->layers[(size_t)l] : base).experts[0];
            return one.gate_up.adapter.rank || one.down.adapter.rank;
        };
        if (std::none_of(segments.begin(), segments.end(), adapted)) return mlp_forward(ctx, c, base, b, s);
        acc<T> *const mid = s.mid, *const out = s.out;
        for (const Segment<T>& segment : segments) {
            Batch part = b;
            part.N = segment.rows, part.seq = b.seq + segment.first;
            s.mid = mid + (size_t)segment.first * c.C, s.out = out + (size_t)segment.first * c.C;
            mlp_forward(ctx, c, segment.with ? segment.with->layers[(size_t)l] : base, part, s);
        }
    }

    void norm_product(T* out, T* normed, const acc<T>* x, const T* w, Which which) {
        const size_t ld = (base.*which).out(), C = c.C;
        if constexpr (HAS_GPU<T>) if (mixed.rows) {
            rmsnorm_gpu(ctx, normed, x, w, mixed.rows, c.C, c.eps);
            rows_linear_gpu(ctx, out, normed, base.*which, adapters(which), mixed.rows);
        }
        if (one_by_one()) return each(which, [&](size_t n, int rows, const Linear<T>& W) {
            RUN(norm_linear, out + n * ld, normed + n * C, x + n * C, w, W, rows, c.eps);
        });
        rmsnorm_cpu(ctx, normed, x, w, N, c.C, c.eps);
        rows_linear_cpu(ctx, out, normed, base.*which, rows_adapters(normed, which).data(), N);
    }
    void add_product(acc<T>* out, const acc<T>* residual, const T* x, Which which) {
        const size_t ld = (base.*which).out(), in = (base.*which).in;
        if constexpr (HAS_GPU<T>) if (mixed.rows) {
            rows_linear_add_gpu(ctx, out, residual, x, base.*which, adapters(which), mixed.rows);
        }
        if (one_by_one()) return each(which, [&](size_t n, int rows, const Linear<T>& W) {
            RUN(linear_add, out + n * ld, residual + n * ld, x + n * in, W, rows);
        });
        rows_linear_add_cpu(ctx, out, residual, x, base.*which, rows_adapters(x, which).data(), N);
    }
    void swiglu_product(T* out, T* gate_up, T* normed, const acc<T>* x, const T* w, Which which) {
        const size_t F = c.F, C = c.C;
        if constexpr (HAS_GPU<T>) if (mixed.rows) {
            rmsnorm_gpu(ctx, normed, x, w, mixed.rows, c.C, c.eps);
            rows_linear_swiglu_gpu(ctx, out, normed, base.*which, adapters(which), mixed.rows);
        }
        if (one_by_one()) return each(which, [&](size_t n, int rows, const Linear<T>& W) {
            T* both = gate_up ? gate_up + n * 2 * F : nullptr; // the GPU's op does not need it
            RUN(norm_linear_swiglu, out + n * F, both, normed + n * C, x + n * C, w, W, rows, c.eps);
        });
        norm_product(gate_up, normed, x, w, which);
        swiglu_cpu(ctx, out, gate_up, N, c.F);
    }

    // Each row's adapter, or null, for one product over all segments, which reads W once. Computes their h.
    std::vector<const Adapter<T>*> rows_adapters(const T* x, Which which) {
        std::vector<const Adapter<T>*> of((size_t)N, nullptr);
        for (const Segment<T>& s : segments)
            if (const Adapter<T>& a = linear(s, which).adapter; a.rank)
                std::fill_n(of.begin() + s.first, s.rows, &a);
        lora_down_all(x, which);
        return of;
    }
    // h of all segments: short segments side by side, one thread each; the others one after another, on all threads.
    void lora_down_all(const T* x, Which which) {
        constexpr int FEW = 4;
        const size_t in = (base.*which).in;
        auto down = [&](const Segment<T>& s) {
            const Linear<T>& W = linear(s, which);
            lora_down_cpu(ctx, W.adapter.h + s.first * W.adapter.width(), x + s.first * in, W, s.rows);
        };
        std::vector<const Segment<T>*> small;
        for (const Segment<T>& s : segments)
            if (linear(s, which).adapter.rank == 0) continue;
            else if (s.rows > FEW) down(s);
            else small.push_back(&s);
        #pragma omp parallel for schedule(static) if (small.size() > 1)
        for (size_t i = 0; i < small.size(); i++) down(*small[i]);
    }
};

// From tokens to hidden states, as `forward`; `w` has no adapter of its own.
template <class T>
void mixed_forward(Context& ctx, const Config& c, const Weights<T>& w, const Segments<T>& segments, const Batch& batch,
                   Activations<T>& a, KVCache<T>& kv, const acc<T>* rope, const MixedRows& mixed) {
    const Batch b = kv.of(batch);
    const int N = b.N, C = c.C;
    RUN(embed, a.layer[0].in, w.embed, b, C);
    for (int l = 0; l < c.L; l++)
        MixedLayer<T>{ctx, c, w.layers[l], l, segments, N, mixed}.forward(b, a.layer[l], kv.layer(l), rope);
    RUN(rmsnorm, a.normed, a.layer[c.L - 1].out, w.norm, N, C, c.eps);
}

#define INSTANTIATE(T) \
    template void mixed_forward(Context&, const Config&, const Weights<T>&, const Segments<T>&, const Batch&, \
                                Activations<T>&, KVCache<T>&, const acc<T>*, const MixedRows&);
QWEN3_INSTANCES(INSTANTIATE)
#undef INSTANTIATE

} // namespace server
