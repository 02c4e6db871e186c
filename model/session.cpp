// model/session.cpp: a conversation: tokens in, logits and draws out; answers.
#include "model/session.h"
#include "base/stop_flag.h"
#include "model/instances.h"
#include "model/stop_filter.h"
#include "model/utf8.h"
#include <algorithm>
#include <numeric>
#include <utility>

template <class T>
Session<T>::Session(const Config& c, const Weights<T>& w, int context, const Context& where)
    : ctx(where), config(c), weights(w), capacity(context) {
    if constexpr (HAS_GPU<T>) if (ctx.gpu) draws = gpu_draws(*this);
    arena.gpu = ctx.gpu != nullptr;
    chunk = std::min(ctx.gpu ? GPU_CHUNK : CHUNK, capacity);
    plan();
    arena.allocate(format("a context of %d tokens", context).c_str());
    plan();
    std::vector<acc<T>> angles((size_t)capacity * c.D);
    fill_rope(angles.data(), context, c.D, c.rope_theta, c.rope_scaling);
    copy_in(ctx, rope, angles.data(), angles.size());
    std::vector<int> identity(pages);
    std::iota(identity.begin(), identity.end(), 0);
    copy_in(ctx, table, identity.data(), identity.size());
    if constexpr (HAS_GPU<T>)
        if (ctx.gpu) host_logits = gpu_host_memory<acc<T>>((size_t)std::min(chunk, ROWS) * c.V);
    logits = ctx.gpu ? host_logits.get() : row_logits;
}

template <class T>
void Session<T>::plan() {
    pages = capacity / PAGE + (capacity % PAGE != 0);
    cache.plan(arena, config, pages, false, ctx.kv_fp8);
    activations.plan(arena, config, chunk, !ctx.gpu);
    rope = arena.take<acc<T>>((size_t)capacity * config.D);
    row_logits = arena.take<acc<T>>((size_t)std::min(chunk, ROWS) * config.V);
    picked = arena.take<T>((size_t)std::min(chunk, ROWS) * config.C);
    for (int** list : {&token, &pos, &seq, &slot}) *list = arena.take<int>(chunk);
    table = arena.take<int>(pages);
    named = arena.take<int>(ROWS);
    if constexpr (HAS_GPU<T>) if (draws) draws->plan();
}

template <class T>
void Session<T>::feed(const std::vector<int>& tokens, const StopFlag* stop,
                      const std::function<void(const acc<T>*)>& rows) {
    if (tokens.size() > (size_t)capacity - ids.size())
        DIE("%zu tokens do not fit: the context holds %d and %zu are in it", tokens.size(), capacity, ids.size());
    for (int id : tokens)
        if (id < 0 || id >= config.V) DIE("id %d is not in the vocabulary of %d", id, config.V);
    ahead.clear();
    fed -= seconds();
    for (size_t done = 0; done < tokens.size() && !(stop && *stop);) {
        const int N = (int)std::min(tokens.size() - done, (size_t)chunk);
        std::vector<int> positions(N), zero(N);
        std::iota(positions.begin(), positions.end(), (int)ids.size());
        copy_in(ctx, token, &tokens[done], N);
        copy_in(ctx, pos, positions.data(), N);
        copy_in(ctx, seq, zero.data(), N);
        copy_in(ctx, slot, positions.data(), N); // the identity table: page p holds positions 16 p ..
        Batch batch = {N, 1, token, pos, seq, slot, table, pages, N == 1};
        batch.splits = positions.back() / SPLIT + 1, batch.longest = positions.back() + 1;
        ctx.stop = stop;
        forward(ctx, config, weights, batch, activations, cache, rope);
        if (stop && *stop) break;
        ids.insert(ids.end(), &tokens[done], &tokens[done] + N);
        done += N;
        const bool last = done == tokens.size();
        for (int n = rows ? 0 : last ? N - 1 : N, R; n < N; n += R) {
            R = std::min(N - n, ROWS);
            take_logits(n, R);
            for (int r = 0; r < R; r++) {
                logits = (ctx.gpu ? host_logits.get() : row_logits) + (size_t)r * config.V;
                if (rows) rows(logits);
            }
        }
    }
    fed += seconds();
}

template <class T>
void Session<T>::take_logits(int n, int R) {
    int wanted[ROWS];
    std::iota(wanted, wanted + R, n);
    copy_in(ctx, named, wanted, R);
    last_row = named + R - 1;
    RUN(head, row_logits, picked, activations.normed, named, weights.head, R);
    if (ctx.gpu) copy_out(ctx, host_logits.get(), row_logits, (size_t)R * config.V);
}

template <class T>
void Session<T>::begin_draws(const Sampling& how, int exist, size_t answer, size_t most) {
    if (lookup.most && !can_look_up()) DIE("prompt lookup on a GPU needs --one-kernel's steps, or --invariant");
    drawing = {how, exist, answer, most};
    ahead.clear();
    if (lookup.most) lookup.begin(ids, std::exchange(fed, 0));
    if constexpr (HAS_GPU<T>) if (draws_ahead()) draws->begin(most);
}

template <class T>
int Session<T>::draw() {
    if constexpr (HAS_GPU<T>) if (draws_ahead()) return draws->next();
    if constexpr (std::is_same_v<T, double>) DIE("the sampler takes float logits");
    else {
        penalize(logits, drawing.how, ids, drawing.answer, config.V);
        if constexpr (HAS_CPU<T>)
            if (!ctx.plain) return sample_cpu(ctx, logits, drawing.exist, drawing.how, ids.size());
        return sample(logits, drawing.exist, drawing.how, ids.size());
    }
}

template <class T>
void Session<T>::accept(int id) {
    if (draws_ahead()) ids.push_back(id); // the GPU has already continued with it
    else if (!lookup.most) feed({id});
    else if (!was_proposed(id)) feed_with_proposal(id);
}

template <class T>
int Session<T>::step_tokens() const {
    if constexpr (HAS_GPU<T>) return draws->tokens();
    return 1;
}

template <class T>
bool Session<T>::was_proposed(int id) {
    if (ahead.empty()) return false;
    const bool right = ahead.front() == id;
    lookup.judged(right);
    if (!right) return false;
    ahead.erase(ahead.begin());
    ids.push_back(id);
    logits += config.V;
    return true;
}

template <class T>
void Session<T>::feed_with_proposal(int id) {
    ids.push_back(id);
    const size_t drawn = ids.size() - drawing.answer, draws_left = drawing.most - std::min(drawing.most, drawn);
    const size_t room = std::min((size_t)capacity - ids.size(), std::max(draws_left, (size_t)1) - 1);
    std::vector<int> proposal = lookup.propose(ids, room), step = {id};
    ids.pop_back();
    step.insert(step.end(), proposal.begin(), proposal.end());
    const double before = fed;
    const auto keep = [](const acc<T>*) {}; // all rows of logits
    feed(step, nullptr, keep);
    lookup.computed(step.size(), std::exchange(fed, before) - before);
    ids.resize(ids.size() - proposal.size());
    logits -= proposal.size() * (size_t)config.V;
    ahead.swap(proposal);
}

template <class T>
void generate(Session<T>& session, const Tokenizer* tokenizer, Generation& g,
              const std::function<void(std::string_view)>& show) {
    const Config& c = session.config;
    const int exist = tokenizer ? tokenizer->size() : c.V;
    const size_t answer = session.ids.size();
    Utf8Stream characters;
    StopFilter filter{g.stops, "", false};
    const int open = tokenizer && tokenizer->chat.thinks ? tokenizer->id("<think>") : -1;
    const int close = open >= 0 ? tokenizer->id("</think>") : -1;
    bool thought = g.in_thought;
    auto emit = [&](std::string_view s) {
        std::string out = thought ? std::string(s) : filter.feed(s);
        g.text += out;
        if (!out.empty()) show(out);
    };
    if (thought) emit("<think>\n");
    g.finish = "length";
    session.begin_draws(g.sampling, exist, answer, g.max_tokens);
    while (g.ids.size() < g.max_tokens) {
        if (g.interrupt && *g.interrupt) { g.finish = "interrupt"; break; }
        const int id = session.draw();
        if (std::find(c.end_tokens.begin(), c.end_tokens.end(), id) != c.end_tokens.end()) { g.finish = "stop"; break; }
        g.ids.push_back(id);
        thought |= id == open && g.ids.size() == 1;
        if (!tokenizer) emit(format(g.ids.size() > 1 ? " %d" : "%d", id));
        else if (!tokenizer->is_special(id)) emit(characters.feed(tokenizer->bytes(id)));
        thought &= id != close;
        if (filter.stopped) { g.finish = "stop"; break; }
        if (session.full()) break;
        if (g.ids.size() < g.max_tokens) session.accept(id);
    }
    emit(characters.flush());
    std::string rest = filter.flush();
    g.text += rest;
    if (!rest.empty()) show(rest);
}

#define INSTANTIATE(T) \
    template struct Session<T>; \
    template void generate(Session<T>&, const Tokenizer*, Generation&, const std::function<void(std::string_view)>&);
QWEN3_INSTANCES(INSTANTIATE)
#undef INSTANTIATE
