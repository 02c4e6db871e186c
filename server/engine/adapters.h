// adapters.h: several LoRA adapters beside one model, each with a name of its own that requests give as their model.
// Included by serve.cu before the engine.
//
//   LoadedAdapter   one of them, as requests, pages and figures know it
//   Adapters        those that can be asked for, by name: loaded and unloaded while the engine computes
//   AdaptedModel    one of them, as the engine computes with it
//   mixed_forward   Book I's forward for a batch whose rows have different adapters
#pragma once
#include <array>
#include <atomic>
#include <map>
#include <mutex>
#ifdef __CUDACC__
#include "server/engine/segmented.h"
#endif

// Whoever holds it keeps its matrices: unloading takes its name away, and what runs with it comes to its end.
struct LoadedAdapter {
    const std::string name, folder;
    const uint64_t number; // from 1 on. No other one ever has it, also if it has the same name
    const uint64_t hash;   // of its matrices
    const size_t bytes;    // ... in its file
    const long created = (long)time(nullptr);
    mutable std::atomic<size_t> waiting{0}, running{0}; // answers (and texts) of the engine,
    mutable std::atomic<uint64_t> tokens{0};            // ... and all tokens drawn for them

    LoadedAdapter(const std::string& name, const std::string& folder, uint64_t hash, size_t bytes)
        : name(name), folder(folder), number(next()), hash(hash), bytes(bytes) { alive()++, alive_bytes() += bytes; }
    LoadedAdapter(const LoadedAdapter&) = delete;
    virtual ~LoadedAdapter() { alive()--, alive_bytes() -= bytes; }

    static std::atomic<size_t>& alive() { // all that hold memory, also those that have no name any more
        static std::atomic<size_t> n{0};
        return n;
    }
    static std::atomic<size_t>& alive_bytes() {
        static std::atomic<size_t> n{0};
        return n;
    }

  private:
    static uint64_t next() {
        static std::atomic<uint64_t> last{0};
        return ++last;
    }
};
using AdapterPtr = std::shared_ptr<const LoadedAdapter>; // null: the model as it is
using AdapterHashes = std::map<std::string, uint64_t>;   // by name

constexpr size_t MAX_ADAPTERS = 256; // that hold memory

// A name goes into paths, labels and lists: hence few characters.
inline void check_adapter_name(const std::string& name) {
    auto plain = [](char c) { return isalnum((unsigned char)c) || (c && strchr("._-/:@+", c)); };
    if (name.empty() || name.size() > 128 || !std::all_of(name.begin(), name.end(), plain))
        DIE("an adapter's name has 1 to 128 letters, digits and ._-/:@+");
}

class Adapters {
    mutable std::mutex mutex;
    std::map<std::string, AdapterPtr> all; // null: it is being loaded

  public:
    std::function<AdapterPtr(const std::string& name, const std::string& folder)> open{}; // reads one

    AdapterPtr find(const std::string& name) const {
        std::lock_guard lock(mutex);
        const auto it = all.find(name);
        return it == all.end() ? nullptr : it->second;
    }
    std::map<std::string, AdapterPtr> now() const { // those that are there
        std::lock_guard lock(mutex);
        std::map<std::string, AdapterPtr> there;
        for (auto& [name, one] : all)
            if (one) there.emplace(name, one);
        return there;
    }
    void add(const AdapterPtr& one) {
        std::lock_guard lock(mutex);
        all[one->name] = one;
    }
    // May take long. Where it throws, all is as it was.
    AdapterPtr load(const std::string& name, const std::string& folder) {
        check_adapter_name(name);
        {
            std::lock_guard lock(mutex);
            if (all.count(name)) DIE("%s: there is an adapter of this name", name.c_str());
            if (all.size() >= MAX_ADAPTERS || LoadedAdapter::alive() >= MAX_ADAPTERS)
                DIE("there are %zu adapters already, some maybe until their last answers end", MAX_ADAPTERS);
            all[name] = nullptr;
        }
        AdapterPtr one;
        try {
            one = open(name, folder);
        } catch (...) {
            std::lock_guard lock(mutex);
            all.erase(name);
            throw;
        }
        add(one);
        return one;
    }
    bool unload(const std::string& name) {
        AdapterPtr last; // its memory is given back outside of the lock
        std::lock_guard lock(mutex);
        const auto it = all.find(name);
        if (it == all.end() || !it->second) return false;
        last = std::move(it->second);
        all.erase(it);
        return true;
    }
};

// ---- The engine's side

// A layer's products, in the order of RowAdapters.
template <class T> std::array<const Linear<T>*, 4> products_of(const Layer<T>& l) {
    return {&l.qkv, &l.o, &l.gate_up, &l.down};
}

// The model's layers with the adapter: the matrices themselves are the model's. For batches of up to `tokens`.
template <class T> struct AdaptedModel : LoadedAdapter {
    std::vector<Layer<T>> layers;
    AttachedAdapter<T> attached;
    Arena table;
    Adapter<T>* on_gpu = nullptr; // (4 L) of qkv, o, gate_up and down of each layer: see RowAdapters

    AdaptedModel(Context ctx, const Weights<T>& w, const AdapterFile& file, const std::string& name, int tokens)
        : LoadedAdapter(name, file.path, adapter_hash(file, 1), file.map.size), layers(w.layers),
          attached(ctx, *this, file, tokens) {
        if (!ctx.gpu) return;
        std::vector<Adapter<T>> all;
        for (auto& layer : layers)
            for (const Linear<T>* product : products_of(layer)) all.push_back(product->adapter);
        table.gpu = true;
        table.take<Adapter<T>>(all.size());
        table.allocate("the adapter");
        on_gpu = table.take<Adapter<T>>(all.size());
        copy_in(ctx, on_gpu, all.data(), all.size());
    }
};

// Rows first .. first + rows - 1 of a batch, which are computed with the same adapter. Null: with none.
template <class T> struct Segment {
    int first, rows;
    const AdaptedModel<T>* with;
};
template <class T> using Segments = std::vector<Segment<T>>; // all rows of a batch, in order

// On a GPU: the first `rows` of a batch, which its kernels compute all at once, whatever the mix (see RowAdapters).
struct MixedRows {
    int rows = 0;
    const Adapter<bf16>* const* of = nullptr; // (rows) in its memory
    float* sums = nullptr;                    // (rows, the most rows of a product) scratch
};

// One layer, computed as layer_forward does. The bits of a row are those that it has where all rows have its adapter,
// but on a GPU without --invariant.
//
// By the definitions each op is called for each segment, so that the matrices are read once a segment. On a GPU that
// is so for prompts, and with `invariant` for all rows (an answer that gave way is computed again as a prompt).
template <class T> struct MixedLayer {
    Context& ctx;
    const Config& c;
    const Layer<T>& base;
    const int l;
    const Segments<T>& segments;
    const int N;
    const MixedRows mixed;
    using Which = Linear<T> Layer<T>::*;

    void forward(const Batch& b, typename Activations<T>::PerLayer& s, T* keys, T* values, const acc<T>* rope) {
        norm_product(s.qkv, s.norm1, s.in, base.norm1, &Layer<T>::qkv);
        RUN(attend, s.attention, s.lse, s.q, keys, values, s.qkv, base.q_norm, base.k_norm, rope, b, c.H, c.K, c.D,
            c.eps);
        add_product(s.mid, s.in, s.attention, &Layer<T>::o);
        swiglu_product(s.hidden, s.gate_up, s.norm2, s.mid, base.norm2, &Layer<T>::gate_up);
        add_product(s.out, s.mid, s.hidden, &Layer<T>::down);
    }

  private:
    bool one_by_one() const { return ctx.gpu || ctx.plain; }
    const Linear<T>& linear(const Segment<T>& s, Which which) const {
        const Layer<T>& layer = s.with ? s.with->layers[(size_t)l] : base;
        return layer.*which;
    }
    // op(first row, rows, W with the adapter) for each segment, but for the mixed rows
    template <class Op> void each(Which which, Op op) {
        for (const Segment<T>& s : segments) {
            const int first = std::max(s.first, mixed.rows), rows = s.first + s.rows - first;
            if (rows > 0) op((size_t)first, rows, linear(s, which));
        }
    }
#ifdef __CUDACC__
    RowAdapters adapters(Which which) const {
        const auto all = products_of(base);
        const auto product = std::find(all.begin(), all.end(), &(base.*which)) - all.begin();
        return {mixed.of, 4 * l + (int)product, mixed.sums};
    }
#endif

    void norm_product(T* out, T* normed, const acc<T>* x, const T* w, Which which) {
        const size_t ld = (base.*which).out(), C = c.C;
#ifdef __CUDACC__
        if constexpr (HAS_GPU<T>) if (mixed.rows) {
            rmsnorm_gpu(ctx, normed, x, w, mixed.rows, c.C, c.eps);
            rows_linear_gpu(ctx, out, normed, base.*which, adapters(which), mixed.rows);
        }
#endif
        if (one_by_one()) return each(which, [&](size_t n, int rows, const Linear<T>& W) {
            RUN(norm_linear, out + n * ld, normed + n * C, x + n * C, w, W, rows, c.eps);
        });
        rmsnorm_cpu(ctx, normed, x, w, N, c.C, c.eps);
        rows_linear_cpu(ctx, out, normed, base.*which, rows_adapters(normed, which).data(), N);
    }
    void add_product(acc<T>* out, const acc<T>* residual, const T* x, Which which) {
        const size_t ld = (base.*which).out(), in = (base.*which).in;
#ifdef __CUDACC__
        if constexpr (HAS_GPU<T>) if (mixed.rows) {
            rows_linear_add_gpu(ctx, out, residual, x, base.*which, adapters(which), mixed.rows);
        }
#endif
        if (one_by_one()) return each(which, [&](size_t n, int rows, const Linear<T>& W) {
            RUN(linear_add, out + n * ld, residual + n * ld, x + n * in, W, rows);
        });
        rows_linear_add_cpu(ctx, out, residual, x, base.*which, rows_adapters(x, which).data(), N);
    }
    void swiglu_product(T* out, T* gate_up, T* normed, const acc<T>* x, const T* w, Which which) {
        const size_t F = c.F, C = c.C;
#ifdef __CUDACC__
        if constexpr (HAS_GPU<T>) if (mixed.rows) {
            rmsnorm_gpu(ctx, normed, x, w, mixed.rows, c.C, c.eps);
            rows_linear_swiglu_gpu(ctx, out, normed, base.*which, adapters(which), mixed.rows);
        }
#endif
        if (one_by_one()) return each(which, [&](size_t n, int rows, const Linear<T>& W) {
            T* both = gate_up ? gate_up + n * 2 * F : nullptr; // (the GPU's op does without)
            RUN(norm_linear_swiglu, out + n * F, both, normed + n * C, x + n * C, w, W, rows, c.eps);
        });
        norm_product(gate_up, normed, x, w, which);
        swiglu_cpu(ctx, out, gate_up, N, c.F);
    }

    // Each row's adapter, or null, for a product of all segments at once: W is read once. Makes their h.
    std::vector<const Adapter<T>*> rows_adapters(const T* x, Which which) {
        std::vector<const Adapter<T>*> of((size_t)N, nullptr);
        for (const Segment<T>& s : segments)
            if (const Adapter<T>& a = linear(s, which).adapter; a.rank)
                std::fill_n(of.begin() + s.first, s.rows, &a);
        lora_down_all(x, which);
        return of;
    }
    // h of all segments: those of few rows side by side, a thread each; the others one after another, by all threads.
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

// Tokens to vectors, as `forward` does; `w` has no adapter of its own.
template <class T>
void mixed_forward(Context& ctx, const Config& c, const Weights<T>& w, const Segments<T>& segments, const Batch& batch,
                   Activations<T>& a, KVCache<T>& kv, const acc<T>* rope, const MixedRows& mixed = {}) {
    const Batch b = kv.of(batch);
    const int N = b.N, C = c.C;
    RUN(embed, a.layer[0].in, w.embed, b, C);
    for (int l = 0; l < c.L; l++) {
        T *keys = kv.keys + l * kv.layer_size, *values = kv.values + l * kv.layer_size;
        MixedLayer<T>{ctx, c, w.layers[l], l, segments, N, mixed}.forward(b, a.layer[l], keys, values, rope);
    }
    RUN(rmsnorm, a.normed, a.layer[c.L - 1].out, w.norm, N, C, c.eps);
}
