// search/embedder.cpp: packs texts into batches and computes them; see embedder.h.
#include "qwen3.cu"
#include "base/stop_flag.h"
#include "search/embedder.h"
#include "base/error.h"
#include "model/instances.h"
#include "model/session.h" // the sizes of chunks
#include "search/embed.h"
#include <algorithm>

template <class T>
Embedder<T>::Embedder(const Config& c, const Weights<T>& w, int longest, const Context& where)
    : ctx(where), config(c), weights(w), capacity(longest) {
    arena.gpu = ctx.gpu != nullptr;
    chunk = ctx.gpu ? Session<T>::GPU_CHUNK : Session<T>::CHUNK;
    max_pages = (capacity + PAGE - 1) / PAGE;
    plan();
    arena.allocate(format("texts of up to %d tokens", capacity).c_str());
    plan();
    std::vector<acc<T>> angles((size_t)capacity * c.D);
    fill_rope(angles.data(), capacity, c.D, c.rope_theta, c.rope_scaling);
    copy_in(ctx, rope, angles.data(), angles.size());
}

template <class T>
void Embedder<T>::run(const std::vector<std::vector<int>>& texts, const StopFlag* stop, const Each& f) {
    for (auto& ids : texts) {
        if (ids.empty() || ids.size() > (size_t)capacity)
            DIE("a text of %zu tokens; there is room for %d", ids.size(), capacity);
        for (int id : ids)
            if (id < 0 || id >= config.V) DIE("id %d is not in the vocabulary of %d", id, config.V);
    }
    std::vector<T> row((size_t)config.C);
    std::vector<float> hidden((size_t)config.C);
    for (size_t next = 0, done = 0; next < texts.size() && !(stop && *stop);) {
        const std::vector<Last> lasts = compute(texts, next, done, stop);
        if (stop && *stop) return;
        for (auto [i, n] : lasts) {
            copy_out(ctx, row.data(), activations.normed + (size_t)n * row.size(), row.size());
            for (size_t k = 0; k < row.size(); k++) hidden[k] = (float)to_acc(row[k]);
            f(i, hidden);
        }
    }
}

// Text 0 of a batch, which may be a continued one, uses the first max_pages pages; the others have what they need.
template <class T> void Embedder<T>::plan() {
    cache.plan(arena, config, (size_t)max_pages + (size_t)chunk / PAGE + MOST);
    activations.plan(arena, config, chunk, !ctx.gpu);
    rope = arena.take<acc<T>>((size_t)capacity * config.D);
    for (int** list : {&token, &pos, &seq, &slot}) *list = arena.take<int>((size_t)chunk);
    table = arena.take<int>((size_t)MOST * max_pages);
    if constexpr (HAS_GPU<T>) if (ctx.gpu) plan_scratch(ctx, arena, config, chunk, 0, 1, 0);
}

// Computes one batch from texts[next] on, of which `done` tokens are computed; advances both.
template <class T>
auto Embedder<T>::compute(const std::vector<std::vector<int>>& texts, size_t& next, size_t& done,
                          const StopFlag* stop) -> std::vector<Last> {
    std::vector<int> tokens, positions, sequences, slots, pages;
    std::vector<Last> lasts;
    int B = 0, free = max_pages, longest = 0;
    for (; next < texts.size() && B < MOST; B++) {
        const std::vector<int>& ids = texts[next];
        const size_t room = (size_t)chunk - tokens.size(), n = std::min(ids.size() - done, room);
        if (n == 0 || (B > 0 && ids.size() > room)) break;
        const int first = B == 0 ? 0 : free, needed = B == 0 ? max_pages : (int)((n + PAGE - 1) / PAGE);
        if (B > 0) free += needed;
        for (int p = 0; p < max_pages; p++) pages.push_back(p < needed ? first + p : 0);
        for (const size_t end = done + n; done < end; done++) {
            tokens.push_back(ids[done]), positions.push_back((int)done), sequences.push_back(B);
            slots.push_back(first * PAGE + (int)done);
        }
        longest = std::max(longest, (int)done);
        if (done < ids.size()) { B++; break; }
        lasts.push_back({next++, (int)tokens.size() - 1});
        done = 0;
    }
    const int N = (int)tokens.size();
    copy_in(ctx, token, tokens.data(), tokens.size());
    copy_in(ctx, pos, positions.data(), tokens.size());
    copy_in(ctx, seq, sequences.data(), tokens.size());
    copy_in(ctx, slot, slots.data(), tokens.size());
    copy_in(ctx, table, pages.data(), pages.size());
    Batch batch = {N, B, token, pos, seq, slot, table, max_pages};
    batch.longest = longest;
    ctx.stop = stop;
    forward(ctx, config, weights, batch, activations, cache, rope);
    return lasts;
}

template <class T>
std::vector<std::vector<float>> embed_texts(Embedder<T>& model, const Tokenizer& tokenizer,
                                            const std::vector<std::string>& texts, const std::string& task) {
    std::vector<std::vector<int>> ids;
    for (auto& text : texts)
        ids.push_back(embedding_ids(tokenizer, task.empty() ? text : with_task(task, text), (size_t)model.capacity));
    std::vector<std::vector<float>> vectors;
    model.run(ids, nullptr, [&](size_t, const std::vector<float>& hidden) {
        vectors.push_back(unit_vector(hidden, hidden.size()));
    });
    return vectors;
}

#define INSTANTIATE(T) \
    template struct Embedder<T>; \
    template std::vector<std::vector<float>> embed_texts(Embedder<T>&, const Tokenizer&, \
                                                         const std::vector<std::string>&, const std::string&);
QWEN3_INSTANCES(INSTANTIATE)
#undef INSTANTIATE
