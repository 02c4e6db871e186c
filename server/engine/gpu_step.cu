// gpu_step.cu: an engine's steps on a GPU.
#include "server/engine/gpu_step.h"
#ifdef QWEN3_GPU
#ifndef QWEN3_PORTABLE
#include "gpu/optional_products.h"
#endif
#include "model/graph.h"
#include "qwen3.cu"
#include "server/engine/engine.h"
#include "server/engine/gpu_kernels.h"
#include <algorithm>
#include <climits>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

namespace server {

// A step on the GPU: inputs to the GPU, forward, head, sampling, results back; nothing waits until collect. If all rows
// are singles (and with `invariant` have no adapter), forward to sampling is one CUDA graph, cached by size: rows are
// padded to 1, 2, 4, ..., max_seqs, the key splits of the longest sequence to 1, 2, ...
// A step by `road` is one graph from its inputs to its ids (without forms), without padding; there is one for each
// number of rows and each of the two buffers.
struct StepOnGpu final : GpuStep {
    Engine<bf16>& engine;
    Context& ctx;
    const Config& config;
    const Weights<bf16>& weights;
    const Tokenizer& tokenizer;
    const EngineOptions& options;
    Activations<bf16>& activations;
    KVCache<bf16>& cache;
    Arena& arena;
    std::unique_ptr<OneKernelStep> road; // if not null, a step of few answers is one kernel

    Slots slots;
    int *drawn, *unused;             // (max_draws) the ids; sink for outputs of sample_kernel that only a Session needs
    Draw* draws;                     // (max_draws) of the step's rows
    unsigned long long* best;
    int *mask_rows, *pinned_masks = nullptr; // (max_seqs), then (max_seqs, words): see Masks
    Likeliest* told;                 // (max_seqs) of the rows that report something,
    float* told_logits;              // (max_seqs) ... and the logits of the sampled tokens
    int* target_numbers;             // (4, max_rows) of a step's targets: rows, ids, alternatives; positions in a part
    Likeliest* target_told;          // (max_rows)
    float* target_logits;            // (max_rows) of the targets
    const Adapter<bf16>** adapted;   // (max_seqs) adapters of a step's first rows,
    float* adapter_sums;             // (max_seqs, the most rows of a product) ... and scratch for their products
    int* pinned_input[2] = {};       // used in turn: a step's inputs are read while the next one's are written
    int* pinned_drawn[2] = {};
    bf16* pinned_hidden[2] = {};     // (texts, C)
    Likeliest* pinned_told[2] = {};
    float* pinned_logits[2] = {};
    int* pinned_targets[2] = {};
    Likeliest* pinned_target_told[2] = {};
    float* pinned_target_logits[2] = {};
    const Adapter<bf16>** pinned_adapted[2] = {};
    cudaEvent_t done[2] = {}, masks_there = {};
    cudaStream_t mask_stream = {}, page_stream = {};               // page_stream: copies of pages, beside the steps
    cudaEvent_t launched = {}, copied = {};                        // the last step; the last page
    std::vector<bool> leaving;                                     // (pages) perhaps still being copied out
    enum Part { PLAIN, ADJUSTED, BEFORE_MASKS, AFTER_MASKS };      // the part of a step that a graph computes
    struct GraphKey {
        int rows, splits;
        Part part;
        bool tells, adapts;
        int turn = -1;       // from 0 on: by `road`, with the buffers of this turn,
        bool greedy = false; // ... including sampling
        bool operator<(const GraphKey& k) const {
            return std::tie(rows, splits, part, tells, adapts, turn, greedy) <
                   std::tie(k.rows, k.splits, k.part, k.tells, k.adapts, k.turn, k.greedy);
        }
    };
    std::map<GraphKey, cudaGraphExec_t> graphs;
    uint64_t steps = 0;

    void plan() override;
    void open() override;

    void describe(Sequence& q) override;
    void describe_biases(Sequence& q, bool restrained);

    void compute(Step& s) override;
    // Enters the adapters of a step's first n rows, padding included.
    void give_adapters(const Step& s, int n);
    template <class F> void launch_part(bool graph, const GraphKey& key, F f) {
        if (!graph) return f();
        cudaGraphExec_t& ready = graphs[key];
        if (!ready) {
            std::lock_guard lock(engine.recording);
            ready = record_graph(ctx, f);
        }
        CUDA_CHECK(cudaGraphLaunch(ready, ctx.gpu->stream));
    }
    void bring_back(Step& s);

    // The log-probabilities of a step's targets, max_logits() rows at a time, before `logits` gets those of the draws.
    void tell_targets(Step& s);
    // out[r]: the model's own logit of ids[r] in row rows[r] of `normed`, where it is reported.
    void logits_of(float* out, const int* ids, const int* seq, const int* wanted, const int* rows, int R);

    // Computes the logits. If each block kept its likeliest ids, returns how the head's rows were dealt to blocks.
    RowsDealt head_all(Step& s, const StepNumbers& gpu, int R, bool adjusted);
    DrawState draw_state(const StepNumbers& gpu, int* to, bool adjusted) const;
    // (Of an answer's several draws, of proposals, the last to finish is kept; the next step names its token itself.)
    void draw_all(const Step& s, const StepNumbers& gpu, int R, bool adjusted, const RowsDealt& dealt,
                  const Masks& masks);

    // The draws of a step whose forms are known only now: copies masks, then the rest of compute. (The previous masks
    // have been read: the tokens sampled with them are here.)
    void draw_masked(Step& s) override;

    void collect(Step& s) override;

    void copy_page(int page, uint8_t* bytes, bool out, std::function<void()> then) override;
    // Before a step: pages that are copied out are not overwritten. (Only full pages are, so only a page that another
    // sequence has taken meanwhile can be among the step's rows.)
    void await_copies(const Step& s);

    explicit StepOnGpu(Engine<bf16>& e)
        : engine(e), ctx(e.ctx), config(e.config), weights(e.weights), tokenizer(e.tokenizer), options(e.options),
          activations(e.activations), cache(e.cache), arena(e.arena) {
        if (!ctx.invariant)
            road = Optional::one_kernel(ctx, config, weights, 10, options.kv_bytes + options.adapter_bytes);
    }
    ~StepOnGpu() override;
    int most_tokens() const override { return road ? road->most : 1; }
    const uint32_t* kernel_steps() const override { return road ? road->steps() : nullptr; }
    size_t more_page_bytes() const override { return ctx.kv_fp8 ? widened_numbers(config, 1) * sizeof(bf16) : 0; }
};

void StepOnGpu::plan() {
    const size_t S = (size_t)options.max_seqs, V = (size_t)config.V, R = engine.max_draws();
    plan_scratch(ctx, arena, config, engine.max_rows, options.max_seqs, options.context, engine.pages);
    slots = {arena.take<int>(S), arena.take<Draw>(S), arena.take<uint32_t>(S * V), arena.take<int>(S),
             arena.take<int>(S * MAX_BIAS), arena.take<float>(S * MAX_BIAS), arena.take<int>(S)};
    drawn = arena.take<int>(R);
    unused = arena.take<int>(R);
    draws = arena.take<Draw>(R);
    best = arena.take<unsigned long long>((size_t)STREAM_TOKENS * BEST_BLOCKS);
    mask_rows = arena.take<int>(S * (1 + engine.mask_words()));
    told = arena.take<Likeliest>(S);
    told_logits = arena.take<float>(S);
    const size_t N = (size_t)engine.max_rows;
    target_numbers = arena.take<int>(4 * N);
    target_told = arena.take<Likeliest>(N);
    target_logits = arena.take<float>(N);
    adapted = arena.take<const Adapter<bf16>*>(S);
    adapter_sums = arena.take<float>(options.adapters ? S * (size_t)std::max({config.C, 2 * config.F,
                                     (config.H + 2 * config.K) * config.D}) : 1);
}

void StepOnGpu::open() {
    CUDA_CHECK(cudaStreamCreateWithFlags(&mask_stream, cudaStreamNonBlocking));
    CUDA_CHECK(cudaStreamCreateWithFlags(&page_stream, cudaStreamNonBlocking));
    leaving.assign((size_t)engine.pages, false);
    for (cudaEvent_t* event : {&masks_there, &launched, &copied})
        CUDA_CHECK(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
    for (int i = 0; i < 2; i++) {
        CUDA_CHECK(cudaMallocHost(&pinned_input[i], engine.input_size() * sizeof(int)));
        CUDA_CHECK(cudaMallocHost(&pinned_drawn[i], engine.max_draws() * sizeof(int)));
        CUDA_CHECK(cudaMallocHost(&pinned_hidden[i], (size_t)(options.texts + 1) * config.C * sizeof(bf16)));
        CUDA_CHECK(cudaMallocHost(&pinned_told[i], (size_t)options.max_seqs * sizeof(Likeliest)));
        CUDA_CHECK(cudaMallocHost(&pinned_logits[i], (size_t)options.max_seqs * sizeof(float)));
        CUDA_CHECK(cudaMallocHost(&pinned_adapted[i], (size_t)options.max_seqs * sizeof(void*)));
        CUDA_CHECK(cudaMallocHost(&pinned_targets[i], 4 * (size_t)engine.max_rows * sizeof(int)));
        CUDA_CHECK(cudaMallocHost(&pinned_target_told[i], (size_t)engine.max_rows * sizeof(Likeliest)));
        CUDA_CHECK(cudaMallocHost(&pinned_target_logits[i], (size_t)engine.max_rows * sizeof(float)));
        CUDA_CHECK(cudaEventCreateWithFlags(&done[i], cudaEventDisableTiming));
    }
}

StepOnGpu::~StepOnGpu() {
    if (!done[1]) return; // it was never opened
    cudaStreamSynchronize(ctx.gpu->stream);
    for (auto& [key, graph] : graphs) cudaGraphExecDestroy(graph);
    for (cudaStream_t stream : {mask_stream, page_stream}) cudaStreamSynchronize(stream), cudaStreamDestroy(stream);
    for (cudaEvent_t event : {masks_there, launched, copied}) cudaEventDestroy(event);
    if (pinned_masks) cudaFreeHost(pinned_masks);
    for (int i = 0; i < 2; i++)
        cudaFreeHost(pinned_input[i]), cudaFreeHost(pinned_drawn[i]), cudaFreeHost(pinned_hidden[i]),
            cudaFreeHost(pinned_told[i]), cudaFreeHost(pinned_logits[i]), cudaFreeHost(pinned_adapted[i]),
            cudaFreeHost(pinned_targets[i]), cudaFreeHost(pinned_target_told[i]),
            cudaFreeHost(pinned_target_logits[i]), cudaEventDestroy(done[i]);
}

void StepOnGpu::describe(Sequence& q) {
    const size_t s = (size_t)q.slot;
    const Draw draw = {q.job.how, tokenizer.size()};
    engine.give(slots.draw + s, &draw, 1);
    engine.give(slots.wanted + s, &q.job.alternatives, 1);
    if (has_penalties(q.job.how))
        engine.give(slots.seen + s * (size_t)config.V, seen_counts(q.ids, q.prompt, config.V).data(), (size_t)config.V);
    describe_biases(q, q.answered() < q.job.min_tokens);
}

void StepOnGpu::describe_biases(Sequence& q, bool restrained) {
    const size_t s = (size_t)q.slot;
    std::vector<int> ids;
    std::vector<float> more;
    for (auto [id, x] : engine.biases(q, restrained)) ids.push_back(id), more.push_back(x);
    const int n = (int)ids.size();
    q.restrained = restrained;
    engine.give(slots.biases + s, &n, 1);
    if (n == 0) return;
    engine.give(slots.bias_id + s * MAX_BIAS, ids.data(), ids.size());
    engine.give(slots.bias + s * MAX_BIAS, more.data(), more.size());
}

void StepOnGpu::compute(Step& s) {
    const int turn = s.turn = (int)(steps++ % 2);
    await_copies(s);
    bool adjusted = false;
    for (size_t i = 0; i < s.draws.size(); i++) {
        Sequence& q = engine.drawn_for(s, i);
        if (q.restrained && !engine.restrained(q)) describe_biases(q, false);
        adjusted = adjusted || has_penalties(q.job.how) || !q.job.bias.empty() || q.restrained;
        s.masked = s.masked || q.matcher;
    }
    int longest = 0, N = (int)s.token.size(), R = (int)s.draws.size();
    for (int n = 0; n < s.singles; n++) longest = std::max(longest, s.pos[n]);
    const int splits = splits_for_graph(longest, options.context);
    longest = s.singles == N ? 0 : 1 + *std::max_element(s.pos.begin() + s.singles, s.pos.end());
    const bool adapts = !s.parts.empty() && s.singles > 0 && !ctx.invariant; // one kernel for all singles
    const bool several = !s.proposed.empty(); // rows of one answer, one draw each
    const bool graph = s.graph = several || (s.singles == N && (s.parts.empty() || adapts));
    // (The one kernel leaves nothing in `activations`, and samples for every row.)
    s.one_kernel = several || (road && graph && N <= road->most && s.draws.size() == (size_t)N && s.parts.empty() &&
                               !s.tells && s.kept.empty());
    if (s.one_kernel) R = N;
    else if (graph) {
        const int rows = N;
        for (N = 1; N < rows; N *= 2) {}
        R = N = std::min(N, options.max_seqs);
    }

    s.rows = N, s.drawn = R;
    // Padding rows have no sequence. A draw names its row.
    const StepNumbers host(pinned_input[turn], N, R), gpu(engine.input, N, R);
    for (int n = 0; n < N; n++) {
        const bool there = n < (int)s.token.size();
        host.token[n] = there ? s.token[n] : 0, host.pos[n] = there ? s.pos[n] : 0;
        host.seq[n] = there ? s.seq[n] : -1, host.slot[n] = there ? s.slot[n] : 0;
    }
    for (int r = 0; r < R; r++) {
        const bool there = several || r < (int)s.draws.size();
        const int row = host.draw_row[r] = several ? r : there ? s.draws[r].row : 0;
        host.draw_seq[r] = there ? s.seq[row] : -1, host.draw_pos[r] = there ? s.pos[row] : 0;
    }
    const Batch batch = {N, options.max_seqs + options.texts, gpu.token, gpu.pos, gpu.seq, gpu.slot, engine.table,
                         engine.max_pages, graph ? N : s.singles, splits, longest};
    if (adapts) give_adapters(s, graph ? N : s.singles);
    const auto prepare = [&] {
        launch_kernel(ctx, false, prepare_kernel, (unsigned)((std::max(N, R) + 255) / 256), 256, 0, gpu, host, N, R,
                      engine.table, engine.max_pages, draws, slots);
    };
    // (forward starts after prepare_kernel has completed: attention reads the batch early, see launch_kernel.)
    const Part part = s.masked ? BEFORE_MASKS : adjusted ? ADJUSTED : PLAIN;
    if (s.one_kernel) { // all in one graph; ids go directly to the CPU's memory
        bool greedy = part == PLAIN;
        for (size_t i = 0; i < s.draws.size(); i++) greedy = greedy && engine.drawn_for(s, i).job.how.temperature == 0;
        s.straight = part != BEFORE_MASKS;
        launch_part(true, {N, 0, part, false, false, turn, greedy}, [&] {
            prepare();
            road->use(batch, cache, engine.rope, engine.logits, draws, best);
            road->draw_to(greedy, draw_state(gpu, pinned_drawn[turn], false), nullptr);
            road->launch_step();
            if (!greedy && s.straight)
                draw_all(s, gpu, R, part != PLAIN, part == PLAIN ? road->dealt() : RowsDealt(), {});
        });
    } else {
        prepare();
        launch_part(graph, {N, splits, part, s.tells, adapts}, [&] {
            engine.forward_step(s, batch, adapts ? MixedRows{batch.singles, adapted, adapter_sums} : MixedRows());
            tell_targets(s); // (a step with targets has rows that are not singles, so it is no graph)
            if (R == 0) return;
            const RowsDealt dealt = head_all(s, gpu, R, part != PLAIN);
            if (part != BEFORE_MASKS) draw_all(s, gpu, R, part != PLAIN, dealt, {});
        });
    }
    const size_t C = (size_t)config.C;
    for (size_t i = 0; i < s.kept.size(); i++) // the next step overwrites `normed` only after these copies
        CUDA_CHECK(cudaMemcpyAsync(pinned_hidden[turn] + i * C, activations.normed + (size_t)s.kept[i].row * C,
                                   C * sizeof(bf16), cudaMemcpyDeviceToHost, ctx.gpu->stream));
    if (!s.masked) bring_back(s);
}

void StepOnGpu::give_adapters(const Step& s, int n) {
    const Adapter<bf16>** const of = pinned_adapted[s.turn];
    std::fill_n(of, n, nullptr);
    for (auto& p : s.parts)
        if (p.adapter)
            for (int i = p.first; i < std::min(n, p.first + p.rows); i++)
                of[i] = static_cast<const AdaptedModel<bf16>*>(p.adapter.get())->on_gpu;
    CUDA_CHECK(cudaMemcpyAsync(adapted, of, (size_t)n * sizeof *of, cudaMemcpyHostToDevice, ctx.gpu->stream));
}

void StepOnGpu::bring_back(Step& s) {
    auto copy = [&](auto* to, const auto* from) {
        CUDA_CHECK(cudaMemcpyAsync(to, from, (size_t)s.drawn * sizeof *from, cudaMemcpyDeviceToHost,
                                   ctx.gpu->stream));
    };
    if (s.drawn > 0 && !s.straight) copy(pinned_drawn[s.turn], drawn);
    if (s.drawn > 0 && s.tells) copy(pinned_told[s.turn], told), copy(pinned_logits[s.turn], told_logits);
    if (const size_t R = s.targets.size(); R > 0) {
        CUDA_CHECK(cudaMemcpyAsync(pinned_target_told[s.turn], target_told, R * sizeof(Likeliest),
                                   cudaMemcpyDeviceToHost, ctx.gpu->stream));
        CUDA_CHECK(cudaMemcpyAsync(pinned_target_logits[s.turn], target_logits, R * sizeof(float),
                                   cudaMemcpyDeviceToHost, ctx.gpu->stream));
    }
    CUDA_CHECK(cudaEventRecord(done[s.turn], ctx.gpu->stream));
}

void StepOnGpu::tell_targets(Step& s) {
    const int R = (int)s.targets.size(), most = (int)engine.max_logits();
    if (R == 0) return;
    engine.move_hidden(s, [&](bf16* to, const bf16* from) {
        CUDA_CHECK(cudaMemcpyAsync(to, from, (size_t)config.C * sizeof(bf16), cudaMemcpyDeviceToDevice,
                                   ctx.gpu->stream));
    });
    int* const host = pinned_targets[s.turn];
    for (int r = 0; r < R; r++) {
        const Step::Target& t = s.targets[(size_t)r];
        host[r] = t.row, host[R + r] = t.id, host[2 * R + r] = t.alternatives, host[3 * R + r] = r % most;
    }
    CUDA_CHECK(cudaMemcpyAsync(target_numbers, host, 4 * (size_t)R * sizeof(int), cudaMemcpyHostToDevice,
                               ctx.gpu->stream));
    for (int first = 0; first < R; first += most) {
        const int n = std::min(most, R - first);
        const int *rows = target_numbers + first, *ids = rows + R, *wanted = ids + R, *seq = wanted + R;
        head_gpu(ctx, engine.logits, engine.picked, activations.normed, rows, weights.head, n);
        likeliest_gpu(ctx, target_told + first, engine.logits, (size_t)config.V, tokenizer.size(), seq, wanted, n);
        logits_of(target_logits + first, ids, seq, wanted, rows, n);
    }
}

void StepOnGpu::logits_of(float* out, const int* ids, const int* seq, const int* wanted, const int* rows, int R) {
    const auto tell = [&](auto W) {
        launch(ctx, drawn_logit_kernel<decltype(W)>, (unsigned)R, 32, 0, out, ids, seq, wanted, activations.normed,
               rows, W, config.C);
    };
    if (!Optional::packed_rows(weights.head, tell)) tell(PlainHead{weights.head.w[0]});
}

RowsDealt StepOnGpu::head_all(Step& s, const StepNumbers& gpu, int R, bool adjusted) {
    const size_t V = (size_t)config.V;
    RowsDealt dealt;
    if (R <= STREAM_TOKENS && !adjusted && !ctx.invariant) {
        dealt = draw_head_gpu(ctx, engine.logits, draws, nullptr, best, activations.normed, gpu.draw_row, weights.head,
                              R);
    } else {
        head_gpu(ctx, engine.logits, engine.picked, activations.normed, gpu.draw_row, weights.head, R);
    }
    if (s.tells) likeliest_gpu(ctx, told, engine.logits, V, tokenizer.size(), gpu.draw_seq, slots.wanted, R);
    return dealt;
}

DrawState StepOnGpu::draw_state(const StepNumbers& gpu, int* to, bool adjusted) const {
    return {to, gpu.draw_pos, unused, gpu.draw_seq, engine.table, engine.max_pages, adjusted ? slots.seen : nullptr,
            nullptr, 1, slots.last};
}

void StepOnGpu::draw_all(const Step& s, const StepNumbers& gpu, int R, bool adjusted, const RowsDealt& dealt,
                         const Masks& masks) {
    const size_t V = (size_t)config.V;
    // (With masks, a wait for a copy precedes it; step.h's kernel allows no early start.)
    const bool early = ctx.gpu->overlap && !masks.row && !s.one_kernel;
    if (adjusted)
        launch_kernel(ctx, early, adjust_kernel, (unsigned)R, 1024, 0, engine.logits, V, gpu.draw_seq, slots, masks);
    sample_gpu(ctx, adjusted ? ctx.gpu->overlap : early, engine.logits, V, draws, dealt.blocks ? best : nullptr, dealt,
               draw_state(gpu, s.straight ? pinned_drawn[s.turn] : drawn, adjusted), R);
    if (s.tells) logits_of(told_logits, drawn, gpu.draw_seq, slots.wanted, gpu.draw_row, R);
}

void StepOnGpu::draw_masked(Step& s) {
    const size_t S = (size_t)options.max_seqs, words = engine.mask_words();
    if (!pinned_masks) CUDA_CHECK(cudaMallocHost(&pinned_masks, S * (1 + words) * sizeof(int)));
    uint32_t* bits = (uint32_t*)pinned_masks + S;
    std::map<Allowed, int> rows_of;
    for (size_t r = 0; r < (size_t)s.drawn; r++) {
        pinned_masks[r] = -1;
        if (r >= s.draws.size()) continue;
        const auto it = engine.running.find(s.draws[r].rank); // the answer may have ended meanwhile
        if (it == engine.running.end() || it->second->admission != s.draws[r].admission) continue;
        pinned_masks[r] = engine.mask_row(*it->second, rows_of, bits);
    }
    const size_t rows = rows_of.size();
    auto copy = [&](size_t from, size_t n) { // overlaps `forward`, on its own stream
        CUDA_CHECK(cudaMemcpyAsync(mask_rows + from, pinned_masks + from, n * sizeof(int), cudaMemcpyHostToDevice,
                                   mask_stream));
    };
    const StepNumbers gpu(engine.input, s.rows, s.drawn);
    if (s.drawn > 0) {
        copy(0, (size_t)s.drawn);
        if (rows > 0) copy(S, rows * words);
        CUDA_CHECK(cudaEventRecord(masks_there, mask_stream));
        CUDA_CHECK(cudaStreamWaitEvent(ctx.gpu->stream, masks_there, 0));
        const Masks masks = {mask_rows, (const uint32_t*)mask_rows + S, (int)words};
        launch_part(s.graph, {s.rows, 0, AFTER_MASKS, s.tells, false},
                    [&] { draw_all(s, gpu, s.drawn, true, RowsDealt(), masks); });
    }
    bring_back(s);
}

// The logit of `id` as the head computed it, where the likeliest ids include it.
static float exact(const Likeliest& row, int id, float logit) {
    for (int k = 0; k < row.count; k++)
        if (row.id[k] == id) logit = row.logit[k];
    return logit;
}

void StepOnGpu::collect(Step& s) {
    CUDA_CHECK(cudaEventSynchronize(done[s.turn]));
    if (s.one_kernel) road->check();
    s.ids.assign(pinned_drawn[s.turn], pinned_drawn[s.turn] + s.draws.size() + s.proposed.size());
    if (s.tells) {
        s.rows_told.assign(pinned_told[s.turn], pinned_told[s.turn] + s.draws.size());
        s.logits.assign(pinned_logits[s.turn], pinned_logits[s.turn] + s.draws.size());
        for (size_t i = 0; i < s.ids.size(); i++)
            if (s.wanted[i] >= 0) s.logits[i] = exact(s.rows_told[i], s.ids[i], s.logits[i]);
    }
    for (size_t i = 0; i < s.targets.size(); i++) {
        const Likeliest& row = pinned_target_told[s.turn][i];
        const int id = s.targets[i].id;
        const float logit = exact(row, id, pinned_target_logits[s.turn][i]);
        s.targets_told.push_back(server::describe(row, id, logit));
    }
    for (size_t i = 0; i < s.kept.size(); i++) engine.keep_hidden(s, pinned_hidden[s.turn] + i * (size_t)config.C);
}

void StepOnGpu::copy_page(int page, uint8_t* bytes, bool out, std::function<void()> then) {
    CUDA_CHECK(cudaEventRecord(launched, ctx.gpu->stream)); // it computes the page, or reads what was there before
    CUDA_CHECK(cudaStreamWaitEvent(page_stream, launched, 0));
    const size_t layers = (size_t)config.L, part = engine.page_bytes() / (2 * layers);
    const size_t pitch = cache.layer_size * sizeof(bf16), rows = pitch > INT_MAX ? 1 : layers; // 2D copies' limit
    for (bf16* numbers : {cache.keys, cache.values})
        for (size_t l = 0; l < layers; l += rows, bytes += rows * part) {
            uint8_t* const there = (uint8_t*)numbers + l * pitch + (size_t)page * part;
            if (out) CUDA_CHECK(cudaMemcpy2DAsync(bytes, part, there, std::min(pitch, (size_t)INT_MAX), part, rows,
                                                  cudaMemcpyDeviceToHost, page_stream));
            else CUDA_CHECK(cudaMemcpy2DAsync(there, std::min(pitch, (size_t)INT_MAX), bytes, part, part, rows,
                                              cudaMemcpyHostToDevice, page_stream));
        }
    CUDA_CHECK(cudaEventRecord(copied, page_stream));
    if (out) leaving[(size_t)page] = true;
    else CUDA_CHECK(cudaStreamWaitEvent(ctx.gpu->stream, copied, 0));
    CUDA_CHECK(cudaLaunchHostFunc(page_stream, [](void* p) { // (on a thread of CUDA's)
        const std::unique_ptr<std::function<void()>> then((std::function<void()>*)p);
        (*then)();
    }, new std::function<void()>(std::move(then))));
}

void StepOnGpu::await_copies(const Step& s) {
    bool reused = false;
    for (int slot : s.slot) {
        const size_t page = (size_t)(slot / PAGE);
        if (leaving[page]) reused = true, leaving[page] = false;
    }
    if (reused) CUDA_CHECK(cudaStreamWaitEvent(ctx.gpu->stream, copied, 0)); // (also for copies that are over)
}

std::unique_ptr<GpuStep> make_gpu_step(Engine<bf16>& engine) { return std::make_unique<StepOnGpu>(engine); }

} // namespace server
#endif // QWEN3_GPU
