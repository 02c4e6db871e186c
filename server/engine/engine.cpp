// engine.cpp: plans an engine's memory and attaches adapters.
#include "model/device.h"
#include "model/instances.h"
#include "server/engine/engine.h"
#include "server/engine/gpu_step.h"
#include <algorithm>

namespace server {

template <class T>
Engine<T>::Engine(const Config& c, const Weights<T>& w, const Tokenizer& t, Desk& d, const EngineOptions& o,
                  const Context& where, Window* own)
    : Scheduler(c, t, d, o, where, own), weights(w) {
    arena.gpu = ctx.gpu != nullptr;
    if constexpr (HAS_GPU<T>) if (ctx.gpu) on_gpu = make_gpu_step(*this);
    if (on_gpu) options.lookup = std::min(options.lookup, on_gpu->most_tokens() - 1);
    choose_sizes();
    arena.used = 0;
    plan();
    arena.allocate(format("a KV cache of %d pages for %d sequences", pages, o.max_seqs).c_str());
    plan();
    pool = PagePool(pages);
    lookup.most = options.lookup;
    if (c.end_tokens.size() > MAX_ENDS) DIE("the model has more than %zu end tokens", MAX_ENDS);
    std::vector<acc<T>> angles((size_t)options.context * c.D);
    fill_rope(angles.data(), options.context, c.D, c.rope_theta, c.rope_scaling);
    give(rope, angles.data(), angles.size());
    if (on_gpu) on_gpu->open();
    open_disk();
    figures.pages = (size_t)pages;
    tell();
}
template <class T>
Engine<T>::~Engine() { on_gpu.reset(); } // waits for work in flight

template <class T>
void Engine<T>::plan() {
    cache.plan(arena, config, (size_t)pages, false, ctx.kv_fp8);
    activations.plan(arena, config, max_rows, !ctx.gpu);
    rope = arena.take<acc<T>>((size_t)options.context * config.D);
    logits = arena.take<acc<T>>(max_logits() * config.V);
    picked = arena.take<T>(max_logits() * config.C);
    last_hidden = arena.take<T>((size_t)pages * config.C);
    input = arena.take<int>(input_size());
    table = arena.take<int>((size_t)(options.max_seqs + options.texts) * max_pages);
    if (on_gpu) on_gpu->plan();
}

template <class T>
void Engine<T>::choose_sizes() {
    size_t page_bytes = KVCache<T>::bytes(config, 1, ctx.kv_fp8);
    if (on_gpu) page_bytes += on_gpu->more_page_bytes();
    if (ctx.gpu && !options.kv_bytes) page_bytes += (size_t)config.C * sizeof(T); // last_hidden, outside --kv-memory
    auto room_with = [&](int context) { // bytes for the cache
        options.context = context, max_pages = (context + PAGE - 1) / PAGE;
        arena.used = 0, pages = 0;
        plan();
        return choose_kv_bytes(arena.used);
    };
    const int asked = options.context, usual = std::min(asked, USUAL_CONTEXT);
    const size_t most = options.at_most ? room_with(usual) : 0;
    size_t room = room_with(asked);
    while (options.context > usual && room < most - most / 8)
        room = room_with(std::max(usual, options.context / 2));
    const size_t whole = room / page_bytes * PAGE;
    if (options.at_most && whole >= PAGE && whole < (size_t)options.context)
        room = std::max(room, room_with((int)whole)); // free memory may have shrunk meanwhile
    pages = (int)std::min(room / page_bytes, (size_t)1 << 26);
    if (pages < max_pages)
        DIE("a context of %d tokens needs %.2f GB for keys and values, and there are %.2f GB (--kv-memory, --ctx)",
            options.context, (double)max_pages * (double)page_bytes / 1e9, (double)room / 1e9);
}

template <class T>
size_t Engine<T>::choose_kv_bytes([[maybe_unused]] size_t others) const {
    if (options.kv_bytes) return options.kv_bytes;
    if constexpr (WITH_GPU)
        if (ctx.gpu) {
            const size_t have = gpu_free_memory();
            return have - std::min(have, others + gpu_all_memory() / 16 + options.adapter_bytes);
        }
    const int each = std::min(max_pages, USUAL_CONTEXT / PAGE);
    return std::min(KVCache<T>::bytes(config, (size_t)std::max(max_pages, options.max_seqs * each),
                                      ctx.kv_fp8), available_memory() / 4);
}

template <class T>
size_t Engine<T>::room_for_adapters() const {
    if (options.adapter_bytes) return options.adapter_bytes;
    if constexpr (WITH_GPU) if (ctx.gpu) return gpu_free_memory() / 2;
    return available_memory() / 4;
}

template <class T>
AdapterPtr Engine<T>::attach(const AdapterFile& file, const std::string& name) {
    Context own = ctx;
    std::unique_lock lock(recording, std::defer_lock);
    if constexpr (WITH_GPU)
        // A stream of its own: the engine's may be capturing a graph, and allocation is not allowed in a capture.
        if (ctx.gpu) lock.lock(), own = with_own_stream(ctx);
    auto one = std::make_shared<AdaptedModel<T>>(own, weights, file, name, max_rows);
    if constexpr (WITH_GPU) if (ctx.gpu) gpu_synchronize(own);
    return one;
}

#define INSTANTIATE(T) \
    template Engine<T>::Engine(const Config&, const Weights<T>&, const Tokenizer&, Desk&, const EngineOptions&, \
                               const Context&, Window*); \
    template Engine<T>::~Engine(); \
    template size_t Engine<T>::room_for_adapters() const; \
    template AdapterPtr Engine<T>::attach(const AdapterFile&, const std::string&);
QWEN3_INSTANCES(INSTANTIATE)
#undef INSTANTIATE

} // namespace server
