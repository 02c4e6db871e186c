// engine.h: computes jobs: a model, its cache and the memory of a step, on the CPU or on a GPU.
#pragma once
#include "base/arena.h"
#include "model/adapters.h"
#include "qwen3.cu"
#include "server/engine/adapters.h"
#include "server/engine/mixed.h"
#include "server/engine/scheduler.h"
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace server {

struct GpuStep; // gpu_step.h
constexpr int USUAL_CONTEXT = 4096; // longer than most prompts with their answers

// Computes jobs.
template <class T> struct Engine : Scheduler {
    const Weights<T>& weights;

    Engine(const Config& c, const Weights<T>& w, const Tokenizer& t, Desk& d, const EngineOptions& o,
           const Context& where, Window* own = nullptr); // own: the window of one of several engines; null: the desk's
    ~Engine() override;

    // Memory for adapters loaded later: as configured, otherwise a share of the free memory. (On a GPU that is little,
    // since the cache has nearly all.)
    size_t room_for_adapters() const;
    // Thread-safe: loads an adapter for this engine.
    AdapterPtr attach(const AdapterFile& file, const std::string& name);

    std::unique_ptr<GpuStep> on_gpu; // null: on the CPU

  protected:
    friend struct StepOnGpu;
    Arena arena;
    Activations<T> activations;
    KVCache<T> cache;
    T* picked;
    T* last_hidden;              // (pages, C) of each page's last token, if Page::told is known
    acc<T>* rope;
    int* input;                  // on a GPU: a step's StepNumbers
    std::vector<uint32_t> masks; // (., words) of a step's draws
    std::mutex recording;        // held while a graph is captured

    size_t input_size() const { return 4 * (size_t)max_rows + 3 * max_draws(); }
    void plan();

    // Chooses the number of pages. If the context may shrink (at_most), also chooses the longest one whose keys and
    // values fit, and whose tables (a GPU's attention scratch grows with it) leave 7/8 of the memory to the cache.
    void choose_sizes();

    // As configured. Otherwise on a GPU the free memory, minus a sixteenth of all memory and the share of adapters
    // loaded later (those of the start are there already); on a CPU enough for one sequence of the whole context and
    // for max_seqs of USUAL_CONTEXT tokens, but no more than a quarter of the memory.
    size_t choose_kv_bytes([[maybe_unused]] size_t others) const;

    // ---- A step
    void compute(Step& s) override;
    void collect(Step& s) override;
    void draw_masked(Step& s) override;
    void describe_to_gpu(Sequence& q) override;
    size_t page_bytes() const override { return KVCache<T>::bytes(config, 1, ctx.kv_fp8); }
    void copy_page(int page, uint8_t* bytes, bool out, std::function<void()> then) override;
    void compute_on_cpu(Step& s);
    void tell_targets(Step& s);
    // Between `forward` and the targets' logits: copies hidden states from pages to unused rows of activations.normed,
    // and to pages. (There are such rows: a sequence's first rows have one, and max_rows counts all sequences.)
    template <class F> void move_hidden(Step& s, F copy) {
        const size_t C = (size_t)config.C;
        int unused = (int)s.token.size();
        for (auto& t : s.targets) {
            if (t.row < 0) copy(activations.normed + (size_t)(t.row = unused++) * C, last_hidden + (size_t)t.from * C);
            if (t.to >= 0) copy(last_hidden + (size_t)t.to * C, activations.normed + (size_t)t.row * C);
        }
    }
    // mixed: on a GPU, the first rows, of one token each, use kernels that take any mix of adapters.
    void forward_step(const Step& s, const Batch& batch, const MixedRows& mixed = {});
    void keep_hidden(Step& s, const T* row) {
        for (int i = 0; i < config.C; i++) s.hidden.push_back((float)to_acc(row[i]));
    }
};

} // namespace server
