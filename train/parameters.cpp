// train/parameters.cpp: the trained parameters, their places, their division among ranks, and AdamW.
#include "train/parameters.h"
#include "base/progress.h"
#include "model/adapters.h"
#include "model/instances.h"
#include <algorithm>
#include <cmath>
#include <numeric>

// ---- Trained parameters

template <class T> void Parameters<T>::measure() {
    if (!o.full) {
        const AdapterPlace end = each_adapter(w, [](Linear<T>&, AdapterPlace) {});
        count = end.m;
        segments = {{0, end.A, o.weight_decay, 1},
                    {end.A, end.B - end.A, o.weight_decay, (float)o.lora.scale(), o.loraplus}};
        if (o.lora.dora) segments.push_back({end.B, end.m - end.B, o.weight_decay, 1, o.loraplus});
        saved = count;
        each_saved([&](const ModelTensor& t, size_t) { count += t.size(); });
        if (count > saved) segments.push_back({saved, count - saved, o.weight_decay, 1});
        if (!o.scores()) return;
        score = count, count += c.C;
        segments.push_back({score, (size_t)c.C, o.weight_decay, 1});
        return;
    }
    size_t matrices = 0;
    each_tensor([&](const ModelTensor& t, size_t at) {
        count = at + t.size();
        if (t.columns) matrices = count;
    });
    segments = {{0, matrices, o.weight_decay, 1}, {matrices, count - matrices, 0, 1}}; // as transformers' Trainer
}

template <class T> void Parameters<T>::plan_copies(Arena& arena) {
    p = arena.take<A>(own), stored = arena.take<T>(padded);
}
template <class T> void Parameters<T>::plan_gradients(Arena& arena) {
    const size_t full = o.moments == "8" ? 0 : own, own8 = own - full;
    gradient = arena.take<A>(padded), m = arena.take<A>(full), v = arena.take<A>(full);
    moments.m = arena.take<uint8_t>(own8), moments.root = arena.take<uint8_t>(own8);
    for (float** scale : {&moments.scale_m, &moments.scale_root})
        *scale = arena.take<float>((own8 + MOMENT_BLOCK - 1) / MOMENT_BLOCK);
    own_gradient = sharded() ? arena.take<A>(own) : gradient;
    partial = arena.take<double>((own + NORM_PIECE - 1) / NORM_PIECE);
}

template <class T> std::vector<acc<T>> Parameters<T>::first_numbers() {
    std::vector<A> first(count, 0);
    auto copy = [&](const Tensor& from, size_t at, size_t n) {
        if (!from.is_float()) DIE("%s: --modules-to-save: the matrix is quantised", from.file.c_str());
        for (size_t i = 0; i < n; i++) first[at + i] = number(from, i);
    };
    if (o.full) {
        Progress progress;
        each_tensor([&](const ModelTensor& t, size_t at) { // as they are stored, not as T
            const Tensor& from = file.tensors.at(t.name());
            #pragma omp parallel for schedule(static)
            for (size_t i = 0; i < t.size(); i++) first[at + i] = number(from, i);
            if (ranks.rank == 0) progress.show(at + t.size(), count, [&](double) {
                return format("%.2f of %.2f G parameters read", (double)(at + t.size()) / 1e9, (double)count / 1e9);
            });
        });
    } else if (!o.adapter_init.empty()) {
        const AdapterFile adapter(o.adapter_init, c);
        first = adapter_numbers(w, adapter);
        first.resize(count, 0);
        each_saved([&](const ModelTensor& t, size_t at) { copy(adapter.tensors.at(saved_name(t)), at, t.size()); });
    } else {
        size_t drawn = 0; // the same numbers however the rank is rounded up
        each_adapter_tensor(w, [&](const std::string&, size_t rows, size_t in, size_t at, size_t) {
            const float bound = 1 / std::sqrt((float)in);
            for (size_t i = 0; i < rows * in && at < segments[0].n; i++) { // segments[0]: every A
                const uint32_t bits = philox(o.seed, drawn++, STREAM_INIT).v[0] >> 8;
                first[at + i] = bound * ((float)bits * (1.f / 8388608) - 1); // 2^23
            }
        });
        each_saved([&](const ModelTensor& t, size_t at) { // a tied model's head begins as its embedding
            const ModelTensor from = t.kind == HEAD && c.tied ? ModelTensor{EMBED, -1, c.V, c.C} : t;
            copy(file.tensors.at(from.name()), at, t.size());
        });
    }
    return first;
}

template <class T> void Parameters<T>::begin(T* first_stored) {
    const std::vector<A> first = first_numbers();
    keep(p, first);
    give_copies(stored, first);
    if (first_stored) give_copies(first_stored, first);
    g.layer.resize(c.L);
    for (int l = 0; l < c.L; l++)
        if (c.sparse(l)) g.layer[l].experts.resize(c.E);
    use(stored);
    if (o.full) {
        each_tensor([&](const ModelTensor& t, size_t at) {
            if (place_of(w, t).block == 0) gradient_of(t) = gradient + at;
        });
        if (c.tied) g.head = g.embed;
    } else {
        each_adapter(w, [&](Linear<T>& linear, AdapterPlace at) {
            const Adapter<T>& adapter = linear.adapter;
            auto& to = gradient_of_module(module_numbered(adapter.module[0], c.L));
            to.A = gradient + at.A, to.B = gradient + at.B, to.m = gradient + at.m;
        });
        each_saved([&](const ModelTensor& t, size_t at) { gradient_of(t) = gradient + at; });
    }
}

template <class T> void Parameters<T>::give_copies(T* to, const std::vector<A>& from) {
    std::vector<T> copies(count);
    for (const Segment& s : segments) {
        #pragma omp parallel for schedule(static)
        for (size_t i = s.first; i < s.first + s.n; i++) copies[i] = to_stored<T>(from[i] * (A)s.copy);
    }
    copy_in(ctx, to, copies.data(), count);
}

template <class T> void Parameters<T>::use(T* copies) {
    if (o.full) each_tensor([&](const ModelTensor& t, size_t at) { place_of(w, t).numbers() = copies + at; });
    else each_adapter(w, [&](Linear<T>& linear, AdapterPlace at) {
        linear.adapter.A = copies + at.A, linear.adapter.B = copies + at.B;
        linear.adapter.dora.m = copies == stored ? p + at.m : first_m + at.u;
    });
    each_saved([&](const ModelTensor& t, size_t at) { saved_in(w, t) = saved_linear<T>(t, copies + at); });
    if (o.full && c.tied) w.head = w.embed;
}

template <class T> void Parameters<T>::find_norms() {
    if (!o.full && o.lora.dora) each_adapter(w, [&](Linear<T>& linear, AdapterPlace) { dora_norm(ctx, linear); });
}
template <class T> void Parameters<T>::begin_dora() {
    if (o.full || !o.lora.dora) return;
    find_norms();
    each_adapter(w, [&](Linear<T>& linear, AdapterPlace at) {
        std::vector<A> lengths(linear.out());
        copy_out(ctx, lengths.data(), o.adapter_init.empty() ? linear.adapter.dora.norm : p + at.m, lengths.size());
        for (size_t r = 0; r < lengths.size(); r++)
            if (linear.module_of((int)r) < 0) lengths[r] = 0;
        copy_in(ctx, p + at.m, lengths.data(), lengths.size());
        if (first_m) copy_in(ctx, first_m + at.u, lengths.data(), lengths.size());
    });
    find_norms();
}

// ---- Places

template <class T>
void Parameters<T>::each_tensor(const std::function<void(const ModelTensor& tensor, size_t at)>& f) const {
    size_t at = 0;
    const std::vector<ModelTensor> tensors = model_tensors(c);
    for (bool matrices : {true, false})
        for (const ModelTensor& t : tensors)
            if (matrices == (t.columns > 0)) f(t, at), at += t.size();
}

template <class T> void Parameters<T>::each_range(const std::function<void(size_t first, size_t n)>& f) {
    if (o.full) return f((size_t)0, count);
    each_adapter_tensor(w, [&](const std::string&, size_t rows, size_t columns, size_t at, size_t stride) {
        for (size_t r = 0; r < rows; r++) f(at + r * stride, columns);
    });
    each_saved([&](const ModelTensor& t, size_t at) { f(at, t.size()); });
    if (o.scores()) f(score, (size_t)c.C);
}

template <class T> typename Gradients<T>::OfLinear& Parameters<T>::gradient_of_module(const ModuleOf& m) {
    auto& layer = g.layer[m.layer];
    if (m.kind <= O_PROJ) return m.kind == O_PROJ ? layer.o : layer.qkv;
    if (m.expert < 0) return m.kind == DOWN_PROJ ? layer.down : layer.gate_up;
    return m.kind == DOWN_PROJ ? layer.experts[m.expert].down : layer.experts[m.expert].gate_up;
}

template <class T> acc<T>*& Parameters<T>::gradient_of(const ModelTensor& t) {
    switch (t.kind) {
        case EMBED: return g.embed;
        case HEAD: return g.head;
        case FINAL_NORM: return g.norm;
        case INPUT_NORM: return g.layer[t.layer].norm1;
        case Q_NORM: return g.layer[t.layer].q_norm;
        case K_NORM: return g.layer[t.layer].k_norm;
        case POST_NORM: return g.layer[t.layer].norm2;
        case ROUTER: return g.layer[t.layer].router.W;
        default: return gradient_of_module({t.layer, t.kind, t.expert}).W;
    }
}

// ---- Several ranks

template <class T> void Parameters<T>::divide() {
    buckets = Buckets(count, ranks.size);
    own = sharded() ? buckets.n * buckets.piece : count;
    padded = ranks.size > 1 ? buckets.padded() : count;
    lowest.assign(buckets.n, c.L);
    auto is_in = [&](size_t first, size_t n, int layer) {
        for (size_t b = first / buckets.bucket; b * buckets.bucket < first + n; b++)
            lowest[b] = std::min(lowest[b], layer);
    };
    if (o.full) each_tensor([&](const ModelTensor& t, size_t at) { is_in(at, t.size(), t.layer); });
    else each_adapter(w, [&](Linear<T>& linear, AdapterPlace at) {
        const int layer = module_numbered(linear.adapter.module[0], c.L).layer;
        is_in(at.A, linear.adapter.width() * linear.in, layer);
        is_in(at.B, linear.adapter.width() * linear.out(), layer);
        if (linear.adapter.dora.on) is_in(at.m, linear.out(), layer);
    });
    each_saved([&](const ModelTensor& t, size_t at) { is_in(at, t.size(), -1); });
    if (o.scores()) is_in(score, (size_t)c.C, -1);
    order_of_buckets.resize(buckets.n);
    std::iota(order_of_buckets.begin(), order_of_buckets.end(), (size_t)0);
    std::stable_sort(order_of_buckets.begin(), order_of_buckets.end(),
                     [&](size_t a, size_t b) { return lowest[a] > lowest[b]; });
    if (ranks.size > 1)
        g.done = [this](int layer) { if (last_batch && o.overlap) add_up(layer); };
}

template <class T> void Parameters<T>::add_up(int layer) {
    size_t end = buckets_done;
    while (end < buckets.n && lowest[order_of_buckets[end]] >= layer) end++;
    if (end > buckets_done) ranks.together([&] {
        for (; buckets_done < end; buckets_done++) {
            const size_t b = order_of_buckets[buckets_done], first = b * buckets.bucket;
            if (sharded()) ranks.add_up_pieces(own_gradient + b * buckets.piece, gradient + first, buckets.piece);
            else ranks.add_up(gradient + first, std::min(buckets.bucket, count - first));
        }
    });
}

template <class T>
void Parameters<T>::each_own(const std::function<void(size_t first, size_t at, size_t n)>& f) const {
    if (sharded()) buckets.each_piece(ranks.rank, f);
    else f((size_t)0, (size_t)0, count);
}

template <class T> template <class U> void Parameters<T>::keep(U* to, const std::vector<U>& all, size_t each) {
    each_own([&](size_t first, size_t at, size_t n) {
        copy_in(ctx, to + at / each, &all[first / each], (n + each - 1) / each);
    });
}

// With shards: `all` (padded) from each rank's pieces, which piece(b) points to.
template <class T> template <class U, class F> void Parameters<T>::gather(U* all, F piece, size_t each) {
    ranks.together([&] {
        for (size_t b = 0; b < buckets.n; b++)
            ranks.gather(all + b * buckets.bucket / each, piece(b), buckets.piece / each * sizeof(U));
    });
    ranks.finish();
}

template <class T> template <class U> std::vector<U> Parameters<T>::host(const U* from, size_t each) {
    if (sharded()) {
        gather((U*)gradient, [&](size_t b) { return from + b * buckets.piece / each; }, each);
        from = (const U*)gradient;
    }
    if (ranks.rank > 0) return {};
    std::vector<U> numbers((count + each - 1) / each);
    copy_out(ctx, numbers.data(), from, numbers.size());
    return numbers;
}

// ---- AdamW

template <class T> void Parameters<T>::update(const double* norm, double lr, int64_t step) {
    AdamW how;
    how.clip = (float)o.clip, how.step = step + 1;
    if (o.moments == "8") {
        how.lr = (float)lr, how.decay = (float)segments[0].decay;
        each_own([&](size_t first, size_t at, size_t n) {
            const size_t decayed = segments[0].n - std::min(first, segments[0].n); // (matrices come first)
            RUN(adamw8, stored + first, p + at, moments.at(at), own_gradient + at, norm, n, decayed, how);
        });
    } else for (const Segment& s : segments) {
        how.lr = (float)(lr * s.rate), how.decay = (float)s.decay, how.copy = s.copy;
        each_own([&](size_t first, size_t at, size_t n) {
            const size_t from = std::max(first, s.first), to = std::min(first + n, s.first + s.n);
            if (from >= to) return;
            at += from - first;
            RUN(adamw, stored + from, p + at, m + at, v + at, own_gradient + at, norm, to - from, how);
        });
    }
    find_norms();
    const T* mine = stored + ranks.rank * buckets.piece;
    if (sharded()) gather(stored, [&](size_t b) { return mine + b * buckets.bucket; });
}

#define INSTANTIATE(T) \
    template struct Parameters<T>; \
    template void Parameters<T>::keep(acc<T>*, const std::vector<acc<T>>&, size_t); \
    template void Parameters<T>::keep(uint8_t*, const std::vector<uint8_t>&, size_t); \
    template std::vector<acc<T>> Parameters<T>::host(const acc<T>*, size_t); \
    template std::vector<uint8_t> Parameters<T>::host(const uint8_t*, size_t);
QWEN3_INSTANCES(INSTANTIATE)
#undef INSTANTIATE
