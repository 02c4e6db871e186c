// engines.cpp: creates and runs engines; a failed engine's jobs move to the others.
#include "base/error.h"
#include "base/unfinished.h"
#include "model/device.h"
#include "model/instances.h"
#include "model/pace.h"
#include "model/weights.h"
#include "server/engines.h"
#include <algorithm>
#include <exception>
#include <unistd.h>

namespace server {

template <class T>
Engines<T>::Engines(Options o, const ModelFile& file, const AdapterFile* adapter, Engine<T>& zero)
    : desk(zero.desk), first(zero) {
    EngineOptions e = zero.options; // the context that the first engine chose
    e.at_most = false;
    for (o.gpu = 1; o.gpu < o.gpus; o.gpu++) {
        const Context ctx = choose_device(o, file);
        auto one = std::unique_ptr<One>(new One{ctx, Weights<T>(file, made_format(o), keeps_packed<T>(o, o.ctx))});
        to_device(one->ctx, file, one->weights);
        const int rows = e.max_seqs + std::max(e.chunk, e.burst);
        if (adapter) one->attached = std::make_unique<AttachedAdapter<T>>(one->ctx, one->weights, *adapter, rows);
        one->engine = std::make_unique<Engine<T>>(file.config, one->weights, zero.tokenizer, desk, e, one->ctx,
                                                  &one->window);
        others.push_back(std::move(one));
    }
    std::lock_guard lock(desk.mutex);
    for (auto& one : others) desk.windows.push_back(&one->window);
    use_device(0);
}

template <class T>
Engines<T>::~Engines() {
    desk.close();
    for (std::thread& thread : threads) thread.join();
}

template <class T>
void Engines<T>::start(const Options& o) {
    for (int k = 0; k < o.gpus; k++)
        threads.emplace_back([this, &o, k] { compute(o, k, k ? *others[(size_t)k - 1]->engine : first); });
}

template <class T>
void Engines<T>::use_device([[maybe_unused]] int k) {
    if constexpr (WITH_GPU) if (first.ctx.gpu) gpu_use(k);
}

template <class T>
void Engines<T>::compute(const Options& o, int k, Engine<T>& engine) {
    o.use_threads();
#ifdef _OPENMP
    if (o.gpus > 1 && !o.threads) omp_set_num_threads(std::max(1, omp_get_max_threads() / o.gpus));
#endif
    try {
        use_device(k);
        ThreadPace pace(o, engine.ctx);
        engine.run(pace);
    } catch (const std::exception& fault) { // a GPU fault, or out of memory
        bool others = false;
        try {
            others = engine.hand_over();
        } catch (const std::exception&) {} // out of memory: the first fault is reported
        const char* text = dynamic_cast<const std::bad_alloc*>(&fault) ? "out of memory" : fault.what();
        const char* then = others ? "the other engines finish its answers" : "no engine is left";
        print_error("serve", o.gpus > 1 ? format("engine %d: %s; %s", k, text, then) : text);
        if (!others && !(desk.failed && o.batch.empty())) leave(1); // (a server still answers that it has failed)
    }
}

#define INSTANTIATE(T) \
    template struct Engines<T>;
QWEN3_INSTANCES(INSTANTIATE)
#undef INSTANTIATE

} // namespace server
