// cpu_step.cpp: a step on the CPU; on a GPU, the calls to GpuStep.
#include "qwen3.cu"
#include "model/cpu.h"
#include "model/instances.h"
#include "server/engine/engine.h"
#include "server/engine/gpu_step.h"
#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <utility>

namespace server {

template <class T>
void Engine<T>::compute(Step& s) {
    for (size_t i = 0; i < s.draws.size(); i++) {
        s.wanted.push_back(drawn_for(s, i).job.alternatives);
        s.tells = s.tells || s.wanted.back() >= 0;
    }
    if (on_gpu) return on_gpu->compute(s);
    compute_on_cpu(s);
}

template <class T>
void Engine<T>::compute_on_cpu(Step& s) {
    const int N = (int)s.token.size(), R = (int)s.draws.size();
    for (int n = 0; n < N; n++) table[(size_t)s.seq[n] * max_pages + s.pos[n] / PAGE] = s.slot[n] / PAGE;
    std::vector<int> rows;
    for (auto& d : s.draws) rows.push_back(d.row);
    for (size_t i = 0; i < s.proposed.size(); i++) rows.push_back((int)i + 1);
    const Batch batch = {N, options.max_seqs + options.texts, s.token.data(), s.pos.data(), s.seq.data(),
                         s.slot.data(), table, max_pages, s.singles};
    forward_step(s, batch);
    tell_targets(s);
    for (auto& k : s.kept) keep_hidden(s, activations.normed + (size_t)k.row * config.C);
    if (R) head_cpu(ctx, logits, picked, activations.normed, rows.data(), weights.head, (int)rows.size());
    s.told.resize((size_t)R);
    std::vector<int> masked((size_t)R, -1); // per draw: row of masks
    std::map<Allowed, int> mask_rows;
    for (int r = 0; r < R; r++) {
        Sequence& q = drawn_for(s, (size_t)r);
        if (q.matcher && masks.empty()) masks.resize((size_t)options.max_seqs * mask_words());
        if (q.matcher) masked[(size_t)r] = mask_row(q, mask_rows, masks.data());
    }
    #pragma omp parallel for schedule(dynamic) if (R > 1)
    for (int r = 0; r < R; r++) {
        const uint32_t* mask = masked[(size_t)r] < 0 ? nullptr : &masks[(size_t)masked[(size_t)r] * mask_words()];
        s.told[(size_t)r] = draw_row(drawn_for(s, (size_t)r), logits + (size_t)r * config.V, mask);
    }
}

template <class T>
void Engine<T>::tell_targets(Step& s) {
    const size_t C = (size_t)config.C, V = (size_t)config.V;
    T* const normed = activations.normed;
    move_hidden(s, [&](T* to, const T* from) { std::copy_n(from, C, to); });
    s.targets_told.resize(s.targets.size());
    for (size_t first = 0; first < s.targets.size(); first += max_logits()) {
        const Step::Target* const targets = &s.targets[first];
        const int R = (int)std::min(max_logits(), s.targets.size() - first);
        std::vector<int> rows;
        for (int r = 0; r < R; r++) rows.push_back(targets[r].row);
        head_cpu(ctx, logits, picked, normed, rows.data(), weights.head, R);
        #pragma omp parallel for schedule(dynamic) if (R > 1)
        for (int r = 0; r < R; r++) {
            const float* row = logits + (size_t)r * V;
            Likeliest told;
            likeliest_cpu(ctx, told, row, tokenizer.size(), targets[r].alternatives);
            s.targets_told[first + (size_t)r] = describe(told, targets[r].id, row[targets[r].id]);
        }
    }
}

template <class T>
void Engine<T>::forward_step(const Step& s, const Batch& batch, const MixedRows& mixed) {
    if (s.parts.empty()) return forward(ctx, config, weights, batch, activations, cache, rope);
    Segments<T> segments;
    for (auto& p : s.parts)
        segments.push_back({p.first, p.rows, static_cast<const AdaptedModel<T>*>(p.adapter.get())});
    mixed_forward(ctx, config, weights, segments, batch, activations, cache, rope, mixed);
}

template <class T>
void Engine<T>::collect(Step& s) {
    if (on_gpu) on_gpu->collect(s);
}

template <class T>
void Engine<T>::draw_masked(Step& s) {
    if (on_gpu) on_gpu->draw_masked(s);
}

template <class T>
void Engine<T>::describe_to_gpu(Sequence& q) {
    if (on_gpu) on_gpu->describe(q);
}

template <class T>
void Engine<T>::copy_page(int page, uint8_t* bytes, bool out, std::function<void()> then) {
    if (on_gpu) return on_gpu->copy_page(page, bytes, out, std::move(then));
    const size_t part = page_bytes() / (2 * (size_t)config.L); // of a layer's keys or values
    for (T* numbers : {cache.keys, cache.values})
        for (int l = 0; l < config.L; l++, bytes += part) {
            uint8_t* const there = (uint8_t*)(numbers + (size_t)l * cache.layer_size) + (size_t)page * part;
            if (out) memcpy(bytes, there, part);
            else memcpy(there, bytes, part);
        }
    then();
}

#define INSTANTIATE(T) \
    template void Engine<T>::compute(Step&); \
    template void Engine<T>::collect(Step&); \
    template void Engine<T>::draw_masked(Step&); \
    template void Engine<T>::describe_to_gpu(Sequence&); \
    template void Engine<T>::copy_page(int, uint8_t*, bool, std::function<void()>); \
    template void Engine<T>::forward_step(const Step&, const Batch&, const MixedRows&);
QWEN3_INSTANCES(INSTANTIATE)
#undef INSTANTIATE

} // namespace server
