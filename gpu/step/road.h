// gpu/step/road.h: a session's steps by one kernel a token, for its host.
#pragma once
#include "gpu/step/plan.h"
#include "qwen3.cu"
#include <memory>

// ---- A session's steps by this kernel: packed weights and its other arrays in the GPU's memory. If the head has
// another format than the layers, a step is two launches: phases before the head, and the head; a kernel before them
// converts packed embeddings. Steps of several tokens exist only for bf16 weights without experts; both kernels read
// the same copy.
struct StepRoad : OneKernelStep {
    using Kernel = void (*)(const StepArgs, int, int);
    struct Part { // of the step: phases `first` .. `last` - 1
        Kernel kernel = nullptr;
        StepArgs args = {};
        int first = 0, last = 0, chunk = 0;
    };
    Context ctx;
    Part layers, head; // head.kernel null: it is in `layers`
    Part several[3];   // the whole step, of up to 2, 4 and 8 tokens
    StepArgs& args = layers.args;
    int blocks = 0, threads = 0;
    bool by_phase = false;
    Arena arena;
    Linear<bf16> embed; // if it is packed
    int* fault = nullptr; // in the CPU's memory

    // Throws Error if this GPU or this model cannot run it, or (WHERE_FASTER) if its copy of the weights takes more
    // than 1 / share of the memory that is free and not `spoken_for`.
    StepRoad(const Context& where, const Config& c, const Weights<bf16>& w, size_t share = 2, size_t spoken_for = 0);
    StepRoad(const StepRoad&) = delete;
    ~StepRoad() override;
    // The kernel variant, or null; an explicit request prints the reason once. WHERE_FASTER: where measurements show
    // that it is faster (on Hopper), except with ctx.invariant: its sums have another order than a prompt's.
    static std::unique_ptr<StepRoad> find(const Context& ctx, const Config& c, const Weights<bf16>& w,
                                          size_t share = 2, size_t spoken_for = 0);
    // Sets the step's batch, of up to `most` rows, and its cache; where logits go, and each block's likeliest id.
    void use(const Batch& batch, const KVCache<bf16>& cache, const float* rope, float* logits, const Draw* draw,
             unsigned long long* best) override;
    void draw_to(bool greedy, const DrawState& next, const uint32_t* seen) override {
        args.greedy = greedy, args.next = next, args.seen = seen;
    }
    // On the context's stream; part of a graph, if one is being recorded.
    void launch_step() override;
    // Distributed as step_deal distributes the head's tiles.
    RowsDealt dealt() const override { return {blocks, 8, args.C / 8 % blocks}; }
    const uint32_t* steps() const override { return args.steps; }
    void check() const override;

  private:
    // The kernel and its plan, for weights packed as W.
    void choose(Part& part, const Config& c, const Linear<bf16>& W, bool experts);
    // The largest number of tokens that leaves room for the ring: their inputs are in shared memory.
    void choose_several(const Config& c);
    template <int TOKENS> void choose_tokens(Part& part, const Config& c);
    template <int TOKENS, class P, bool EXPERTS> // gpu/step/shapes.h
    void choose_shape(Part& part, const Config& c, int N);
    static int most_shared(); // shared memory limit of a block
    bool all_resident(const Part& part) const;
    void launch_part(const Part& part);
    void plan();
    void pack(const Weights<bf16>& w);
    template <class P> // W to `to`; `second`: for a unit of two tiles, the row where the second begins
    void pack_matrix(unsigned char* to, const Linear<bf16>& W, P packed, const StepProduct& q, size_t second);
};
