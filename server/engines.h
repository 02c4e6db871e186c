// engines.h: several engines, one per GPU (or all on the CPU), and their threads.
#pragma once
#include "model/adapters.h"
#include "model/model_file.h"
#include "qwen3.cu"
#include "server/engine/engine.h"
#include "server/options.h"
#include <memory>
#include <thread>
#include <vector>

namespace server {


// Engines 1, 2, .. beside the first, one per GPU, and the threads of all.
template <class T> struct Engines {
    struct One {
        Context ctx;
        Weights<T> weights;
        std::unique_ptr<AttachedAdapter<T>> attached{};
        Window window{};
        std::unique_ptr<Engine<T>> engine{};
    };
    Desk& desk;
    Engine<T>& first;
    std::vector<std::unique_ptr<One>> others;
    std::vector<std::thread> threads;

    Engines(Options o, const ModelFile& file, const AdapterFile* adapter, Engine<T>& zero);
    ~Engines();
    void start(const Options& o);

  private:
    void use_device(int k); // for this thread
    void compute(const Options& o, int k, Engine<T>& engine);
};

} // namespace server
