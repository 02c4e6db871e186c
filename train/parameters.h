// train/parameters.h: the trained numbers: their places in memory, in the model and on several ranks; AdamW.
#pragma once
#include "base/arena.h"
#include "model/adapters.h"
#include "model/moments.h"
#include "qwen3.cu"
#include "train/buckets.h"
#include "train/options.h"
#include <functional>
#include <vector>

template <class T> struct Parameters {
    using A = acc<T>;
    const TrainOptions& o;
    Ranks& ranks;
    Context& ctx;
    const ModelFile& file;
    const Config& c;
    Weights<T>& w;

    Parameters(const TrainOptions& options, Context& where, const ModelFile& f, Weights<T>& weights)
        : o(options), ranks(*o.ranks), ctx(where), file(f), c(f.config), w(weights) {}

    // In this order: `measure` (the model has its adapters), `divide`, the two plans, `begin`.
    // The size of the array, and the kind of its numbers.
    void measure();
    void divide();
    void plan_copies(Arena& arena);
    void plan_gradients(Arena& arena);
    // The first parameters: an adapter's initialised as in PEFT (A uniform in +-1 / sqrt(in), B zero), or read from a
    // file; with --full the model's own. first_stored: receives copies too, or is null.
    void begin(T* first_stored);
    // With DoRA, once the adapters have their memory: the first m, the lengths of W's rows, unless a file has it; norm
    // and c. Then these again, of other parameters.
    void begin_dora();
    void find_norms();

    // ---- Trained parameters: one array of numbers, cut into segments with the same AdamW settings.
    struct Segment { size_t first, n; double decay; float copy; double rate = 1; }; // rate: times the learning rate
    std::vector<Segment> segments;
    size_t count = 0;
    size_t saved = 0;        // with --modules-to-save: place of the embedding or head, behind the adapter's numbers
    size_t score = 0;        // with --reward-model: place of the head (C), behind the adapter's numbers
    int rank = 0;            // of adapters in this layout
    A *p, *m, *v;            // (own) master parameters, AdamW's moments
    Moments8 moments;        // (own) ... in 8 bits, with --moments 8
    A* first_m = nullptr;    // DoRA's first m, for first_stored
    A *gradient;             // (padded) of this rank's rows, then of all ranks'
    A *own_gradient;         // (own) of all ranks' rows
    T* stored;               // (padded) the products' operands: the parameters as T, those of B times s
    double* partial;         // scratch of the gradient's norm
    size_t own = 0, padded = 0; // one rank: count
    Gradients<T> g;          // where `backward` puts them

    // The number of trained parameters; an adapter's array also holds zeros.
    size_t trained() const {
        return o.full ? count : adapter_parameters(c, o.lora) + (o.scores() ? (size_t)c.C : 0);
    }

    // ---- Several ranks: gradients are summed in buckets.
    Buckets buckets;
    bool last_batch = false; // of the step: when a layer's gradients are complete
    bool sharded() const { return o.full && ranks.size > 1; } // each rank has its pieces of p, m and v
    void clear_gradient() { clear(ctx, gradient, count), buckets_done = 0; }
    // Sums over all ranks the buckets that are complete when `backward` has done a layer; -1: all that are left.
    void add_up(int layer);

    // Calls f(first, at, n) for this rank's parts of p, m and v: n numbers from `first` of the whole array on are its
    // own from `at` on.
    void each_own(const std::function<void(size_t first, size_t at, size_t n)>& f) const;
    // each: numbers of the array that an entry is for, 1 or MOMENT_BLOCK.
    template <class U> void keep(U* to, const std::vector<U>& all, size_t each = 1);
    // Gathers a divided array: p or a moment. Every rank calls it, and rank 0 gets the numbers. (`gradient` is free
    // between steps.)
    template <class U> std::vector<U> host(const U* from, size_t each = 1);

    // ---- Places
    // With --full: calls f(tensor, at) for each tensor of the model, which is the tensor.size() numbers from `at` on.
    // Matrices come before vectors, since AdamW decays only matrices; results and states have the same order. Blocks of
    // a Linear are neighbours.
    void each_tensor(const std::function<void(const ModelTensor& tensor, size_t at)>& f) const;
    // With --modules-to-save: calls f(tensor, at) for the embedding and the head that are trained as a whole.
    template <class F> void each_saved(F f) const {
        size_t at = saved;
        for (const ModelTensor& t : saved_tensors(c, o.full ? AdapterConfig() : o.lora)) f(t, at), at += t.size();
    }
    // Calls f(first, n) for each range of an array of parameters that files hold: all but the padding zeros.
    void each_range(const std::function<void(size_t first, size_t n)>& f);
    // Where `backward` finds the gradient of a module's Linear; of any tensor (of a block: of its Linear).
    typename Gradients<T>::OfLinear& gradient_of_module(const ModuleOf& m);
    A*& gradient_of(const ModelTensor& t);

    // Makes the products' copies of loaded parameters. (For parameters that AdamW computes, AdamW makes them.)
    void give_copies(T* to, const std::vector<A>& from);
    // Points the model at its parameters there.
    void use(T* copies);

    // AdamW in step 0, 1, ..; norm: the gradient's norm, in the context's memory.
    void update(const double* norm, double lr, int64_t step);

  private:
    std::vector<int> lowest;              // (buckets) layer of its numbers; -1: numbers in no layer
    std::vector<size_t> order_of_buckets; // highest layer first
    size_t buckets_done = 0;

    template <class U, class F> void gather(U* all, F piece, size_t each = 1);
    std::vector<A> first_numbers();
};
