/* serve.cu: many conversations at once. An OpenAI-compatible HTTP server, and its Batch format without HTTP.

   Run:    ./serve model.bin                                         http://127.0.0.1:8000/v1
           ./serve model.bin --batch requests.jsonl -o responses.jsonl

   What happens to a request: a thread of the HTTP library reads and checks it, makes its ids, and hands a Job for each
   answer that is wanted to the Desk. The one thread of the Engine takes jobs from there and computes step after step:
   each step is one call of `forward` on a ragged batch, a token of every running answer and a chunk of the prompts that
   wait. What is drawn goes as a Piece of text to the request's Reply, where the HTTP thread is woken to send it.

   Contracts
   - A text depends on the request and its seed only, not on what runs beside it: draws go by (seed, position), and rows
     of a batch do not depend on each other (on a GPU: with --invariant). So an answer may be interrupted, its pages
     given to others, and computed anew later, and nobody sees it.
   - Keys and values lie in pages of 16 tokens. Whole pages stay where they are when their answer is done, and serve the
     next prompt that begins with the same tokens under the same API key, until their room is needed.
   - Everything that comes over the network is hostile: sizes, counts, ranges and times are limited, below and in
     request.h. What a client did wrong is thrown as Refusal, and answered in OpenAI's form.
   - Nobody can stall it: what waits in memory has a Budget, long texts are tokenized by Workers, the log has a thread
     of its own, and keys take turns by tokens.
   - A text of which only the last hidden state is wanted (`pooled`) is a prompt like any, in slots of its own.
   - Rows of one step may have different adapters (server/adapters.h). What a page holds depends on the adapter, too.

   Contents (the parts are in server/)
   1 Between the threads   desk.h: Job, Piece, Budget, Reply, Desk, figures; several engines (engines.h)
   2 Speech                speech.h: ids to text: characters, stop strings, thoughts, log-probabilities
   3 Engine                here: schedule, step; on the CPU and on a GPU. Pages and prefix cache (pages.h), adapters
                           (adapters.h, segmented.h), prompts beside answers (pace.h)
   4 API                   from JSON to jobs (request.h), from pieces to JSON (answer.h); vectors and rankings
                           (embed_api.h); two other dialects (dialects.h)
   5 Batch                 a file of requests (batch.h); over HTTP (batches.h)
   6 HTTP                  http.h: libmicrohttpd, connections, deadlines; exchange.h: a request, its checks, the routes;
                           log.h, workers.h, traffic.h, page.h, openapi.h
   7 main
*/
#include "base/json_lines.h"
#include "model/device.h"
#include "model/pace.h"
#include "model/session.h"
#include "qwen3.cu"
#include "search/hybrid.h"
#include "form/tools.h"
#include <atomic>
#include <condition_variable>
#include <deque>
#include <malloc.h>
#include <mutex>
#include <sys/file.h>
#include <thread>
#include <tuple>
#include <unordered_map>
#include "server/engine/adapters.h"
#include "server/engine/pace.h"

// ======================================================================================= 1 Between the threads
#include "server/engine/desk.h"

// =================================================================================================== 2 Speech
#include "server/engine/speech.h"

// =================================================================================================== 3 Engine

#include "server/engine/pages.h"

struct EngineOptions {
    int context = 0;      // tokens of a prompt and its answer
    int max_seqs = 0;     // answers at once
    int chunk = 0;        // tokens of prompts in a step that others wait for,
    int burst = 0;        // ... and in one that nobody waits for
    size_t kv_bytes = 0;  // of the KV cache; 0: as much as there is room for
    bool at_most = false; // the context may be less: what the cache holds
    int texts = 0;        // pooled jobs at once, beside the answers
    bool adapters = true; // there may be some
    int jump = 2;         // so many tokens that a form leaves no choice about are taken at once; 0: never, a step each
    size_t adapter_bytes = 0; // that adapters which clients load may take, all together; 0: some of what is free
    bool paced = false;   // `chunk` is the least; more where they keep the step short, see pace.h
    int lookup = 0;       // tokens that are looked up for an answer that runs alone, at most (lookup.h); on a GPU those
                          // that step.h's kernel has room for, if there is one
};

constexpr int USUAL_CONTEXT = 4096; // more than most answers and their prompts take

#ifdef __CUDACC__
constexpr int MAX_BIAS = 1024 + 1 + 2 * MAX_ENDS; // ids a job may name, <tool_call>, and those that may not end it yet

// What the GPU knows of the sequence in each slot.
struct Slots {
    int* last;        // (slots) the token drawn last
    Draw* draw;       // (slots)
    uint32_t* seen;   // (slots,V) for the penalties; undefined for slots without penalties
    int* biases;      // (slots) how many ids have a bias
    int* bias_id;     // (slots, MAX_BIAS)
    float* bias;      // (slots, MAX_BIAS)
    int* wanted;      // (slots) alternatives to tell, or -1
};

// A step's numbers: of N rows of the batch, and of R draws.
struct StepNumbers {
    int *token, *pos, *seq, *slot;       // (N)
    int *draw_row, *draw_seq, *draw_pos; // (R) row of the batch; of the block table; position of that row's token
    StepNumbers(int* at, int N, int R)
        : token(at), pos(at + N), seq(at + 2 * N), slot(at + 3 * N),
          draw_row(at + 4 * N), draw_seq(draw_row + R), draw_pos(draw_seq + R) {}
};
// Fetches them from the CPU's memory and completes them, a thread a row or draw: tokens that the host has not seen yet,
// the block table, how to draw.
__global__ void prepare_kernel(StepNumbers to, StepNumbers from, int N, int R, int* table, int max_pages, Draw* draws,
                               Slots slots) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < N) {
        const int token = from.token[i], pos = from.pos[i], seq = from.seq[i], slot = from.slot[i];
        to.token[i] = token < 0 && seq >= 0 ? slots.last[seq] : token;
        to.pos[i] = pos, to.seq[i] = seq, to.slot[i] = slot;
        if (seq >= 0) table[(size_t)seq * max_pages + pos / PAGE] = slot / PAGE;
    }
    if (i < R) {
        const int row = from.draw_row[i], seq = from.draw_seq[i], pos = from.draw_pos[i];
        to.draw_row[i] = row, to.draw_seq[i] = seq, to.draw_pos[i] = pos;
        if (seq >= 0) draws[i] = slots.draw[seq];
    }
}

// Which tokens may be drawn: as bits, for the draws of a step that must keep to a form.
struct Masks {
    const int* row;       // (R) of `bits`, or -1: any token; null: no draw of the step has a form
    const uint32_t* bits; // (rows, words)
    int words;
};

// Penalties, biases and masks as the CPU applies them, a block a draw.
__global__ void adjust_kernel(float* all_logits, size_t V, const int* draw_seq, Slots slots, Masks masks) {
    let_next_start();
    wait_for_previous();
    const int s = draw_seq[blockIdx.x];
    if (s < 0) return;
    float* logits = all_logits + blockIdx.x * V;
    const Sampling& how = slots.draw[s].how;
    if (has_penalties(how))
        for (size_t id = threadIdx.x; id < V; id += blockDim.x)
            logits[id] = penalized(logits[id], how, slots.seen[s * V + id]);
    __syncthreads();
    const int* ids = slots.bias_id + (size_t)s * MAX_BIAS;
    for (int i = threadIdx.x; i < slots.biases[s]; i += blockDim.x)
        logits[ids[i]] += slots.bias[(size_t)s * MAX_BIAS + i];
    if (!masks.row || masks.row[blockIdx.x] < 0) return;
    __syncthreads(); // a thread masks what another has added to
    const uint32_t* bits = masks.bits + (size_t)masks.row[blockIdx.x] * masks.words;
    for (size_t id = threadIdx.x; id < V; id += blockDim.x)
        if (id / 32 >= (size_t)masks.words || !(bits[id / 32] >> id % 32 & 1)) logits[id] = -INFINITY;
}

// The logits of what was drawn, as the model made them, where they are told: in `logits` they may have been adjusted. A
// warp a draw. W: const bf16*, or PackedArgs of format F.
template <class F, class Head>
__global__ void drawn_logit_kernel(float* out, const int* drawn, const int* draw_seq, const int* wanted, const bf16* x,
                                   const int* draw_row, Head W, int C) {
    constexpr bool PLAIN = std::is_pointer_v<Head>;
    constexpr int RUN = PLAIN ? 1 : 8;
    let_next_start();
    wait_for_previous();
    const int r = blockIdx.x, s = draw_seq[r];
    if (s < 0 || wanted[s] < 0) return;
    const bf16* token = x + (size_t)draw_row[r] * C;
    float y = 0;
    for (int k = threadIdx.x * RUN; k < C; k += 32 * RUN) {
        float row[RUN];
        if constexpr (PLAIN) row[0] = to_acc(W[(size_t)drawn[r] * C + k]);
        else unpack_run<F>(row, W, drawn[r], k);
        for (int i = 0; i < RUN; i++) y += row[i] * to_acc(token[k + i]);
    }
    y = warp_sum(y);
    if (threadIdx.x == 0) out[r] = y;
}
#endif

// Computes jobs. Its thread calls run() or step(); all others talk to the Desk.
template <class T> struct Engine {
    Context ctx;
    const Config& config;
    const Weights<T>& weights;
    const Tokenizer& tokenizer;
    Desk& desk;
    Window& window;
    EngineOptions options;
    LookUp lookup;
#ifdef __CUDACC__
    std::unique_ptr<StepRoad> road; // if not null, a step of few answers is one kernel
#endif

    Engine(const Config& c, const Weights<T>& w, const Tokenizer& t, Desk& d, const EngineOptions& o,
           const Context& where, Window* own = nullptr) // of several; none: the desk's
        : ctx(where), config(c), weights(w), tokenizer(t), desk(d), window(own ? *own : d), options(o),
          max_rows(o.max_seqs + std::max(o.chunk, o.burst)), max_pages((o.context + PAGE - 1) / PAGE), pool(0) {
        arena.gpu = ctx.gpu != nullptr;
#ifdef __CUDACC__
        if constexpr (HAS_GPU<T>)
            if (ctx.gpu && !ctx.invariant) road = StepRoad::find(ctx, c, w, 10, o.kv_bytes + o.adapter_bytes);
        if (ctx.gpu) options.lookup = std::min(options.lookup, road ? road->most - 1 : 0);
#endif
        choose_sizes();
        arena.used = 0;
        plan();
        arena.allocate(format("a KV cache of %d pages for %d sequences", pages, o.max_seqs).c_str());
        plan();
        pool = PagePool(pages);
        lookup.most = options.lookup;
        if (c.end_tokens.size() > MAX_ENDS) DIE("the model has more than %zu end tokens", MAX_ENDS);
        for (int s = o.max_seqs - 1; s >= 0; s--) free_slots[0].push_back(s);
        for (int s = o.max_seqs + o.texts - 1; s >= o.max_seqs; s--) free_slots[1].push_back(s);
        std::vector<acc<T>> angles((size_t)options.context * c.D);
        fill_rope(angles.data(), options.context, c.D, c.rope_theta);
        give(rope, angles.data(), angles.size());
#ifdef __CUDACC__
        if (ctx.gpu) open_device();
#endif
        figures.pages = (size_t)pages;
        tell();
    }
    Engine(const Engine&) = delete;
    ~Engine() {
#ifdef __CUDACC__
        if (ctx.gpu) close_device();
#endif
    }

    // Until the desk is closed and all that was asked is done.
    void run(ThreadPace& pace) {
        for (;;) {
            {
                std::unique_lock lock(desk.mutex);
                auto called = [&] { return !window.inbox.empty() || !window.handed.empty() || busy(); };
                desk.news.wait(lock, [&] { return desk.closed || called(); });
                if (!called()) return;
            }
            pace.begin();
            step();
            pace.end();
        }
    }

    // What adapters that are loaded later may take: what is asked for, else of what is free now. (On a GPU that is
    // little: the cache was given nearly all.)
    size_t room_for_adapters() const {
        if (options.adapter_bytes) return options.adapter_bytes;
#ifdef __CUDACC__
        if (ctx.gpu) {
            size_t have = 0, all = 0;
            CUDA_CHECK(cudaMemGetInfo(&have, &all));
            return have / 2;
        }
#endif
        return available_memory() / 4;
    }
    // Of any thread: an adapter for this engine.
    AdapterPtr attach(const AdapterFile& file, const std::string& name) {
        Context own = ctx;
#ifdef __CUDACC__
        // With a stream of its own, since the engine's may be recording a graph, which no memory may be taken beside.
        std::lock_guard lock(recording);
        std::unique_ptr<CUstream_st, cudaError_t (*)(cudaStream_t)> stream(nullptr, cudaStreamDestroy);
        if (ctx.gpu) {
            own.gpu = std::make_shared<Gpu>(*ctx.gpu);
            CUDA_CHECK(cudaStreamCreateWithFlags(&own.gpu->stream, cudaStreamNonBlocking));
            stream.reset(own.gpu->stream);
        }
#endif
        auto one = std::make_shared<AdaptedModel<T>>(own, weights, file, name, max_rows);
#ifdef __CUDACC__
        if (ctx.gpu) CUDA_CHECK(cudaStreamSynchronize(own.gpu->stream));
#endif
        return one;
    }

    // One step: takes what is new, computes, hands out what was drawn. On a GPU that is what the step before this one
    // drew: the GPU computes while we look at it.
    void step() {
        take_jobs();
        Step next = plan_step();
        if (!next.token.empty()) {
            const double begun = seconds();
            next.from_idle = under_way.empty();
            compute(next);
            if (!next.alone) prompts_took += seconds() - begun;
            else if (!ctx.gpu) lookup.computed(next.token.size(), seconds() - begun);
            for (auto& [rank, q] : running) remember(*q);
        }
        const size_t ahead = ctx.gpu && !next.token.empty();
        if (!next.token.empty()) under_way.push_back(std::move(next));
        for (; under_way.size() > ahead; under_way.pop_front()) hand_out(under_way.front());
#ifdef __CUDACC__
        // Where draws must keep to a form, the last tokens had to be seen first. The GPU is at `forward` meanwhile.
        if constexpr (HAS_GPU<T>) if (ahead && under_way.back().masked) draw_masked(under_way.back());
#endif
        tell();
        deliver();
    }

    // After a fault of this engine: all that is not done goes to others, as if it had given way here. False: there is
    // no other. (With adapters there is none: they are on one GPU.)
    bool hand_over() {
        deliver();
        under_way.clear();
        while (!running.empty()) preempt(running.begin());
        std::vector<std::unique_ptr<Sequence>> all;
        while (!waiting.empty()) all.push_back(leave_line(waiting.begin()->first, waiting.begin()->second.begin()));
        tell();
        std::lock_guard lock(desk.mutex);
        window.gone = true;
        auto stays = [](const Window* w) { return !w->gone; };
        if (std::none_of(desk.windows.begin(), desk.windows.end(), stays)) return false;
        for (Job& job : std::exchange(window.inbox, {})) desk.place(std::move(job));
        for (auto& q : all) {
            q->job.prompt = q->ids; // (what the router looks at)
            Window& to = *desk.windows[(size_t)desk.router.choose(q->job, desk.windows)];
            to.count(q->job);
            q->job.prompt.clear();
            to.handed.push_back({q.release(), [](void* p) { delete (Sequence*)p; }});
        }
        desk.news.notify_all();
        return true;
    }

  private:
    // An answer at work. Its tokens at 0 .. computed - 1 have their keys and values in its pages, or will have when the
    // steps under way are done; `pending` of its ids have been drawn and not yet looked at.
    struct Sequence {
        Job job;                   // (its prompt is in `ids`)
        Speech speech;
        std::vector<int> ids;      // prompt and answer
        const size_t prompt;       // tokens of the prompt
        uint64_t arrival, rank = 0; // counts all; all first admissions
        std::vector<int> pages{};
        size_t computed = 0, pending = 0;
        size_t known = 0;          // pages that have been named
        uint64_t chain = 0;        // the name of the last of these
        int slot = -1;             // row of the block table
        uint64_t admission = 0;    // counts all admissions: what was drawn before it was preempted is void
        size_t resumed = 0;        // tokens it had answered then
        bool restrained = false;   // the GPU knows it as one that may not end yet
        size_t cached = SIZE_MAX;
        size_t thoughts = 0;       // tokens of its thought
        double last = 0;           // when its last token came
        std::unique_ptr<Matcher> matcher{}; // of the job's form
        std::deque<int> forced{};  // the next tokens, about which it leaves no choice

        Sequence(Job&& j, const Tokenizer& t, uint64_t arrival)
            : job(std::move(j)), speech(t, job), ids(std::exchange(job.prompt, {})), prompt(ids.size()),
              arrival(arrival) {
            if (job.form) matcher = std::make_unique<Matcher>(job.form);
        }
        size_t total() const { return ids.size() + pending; }
        size_t left() const { return total() - computed; }
        size_t answered() const { return total() - prompt; }
        uint64_t adapter() const { return job.adapter ? job.adapter->number : 0; }
        size_t pages_needed() const { return job.pooled ? (ids.size() + PAGE - 1) / PAGE : ids.size() / PAGE + 1; }
    };
    using Place = std::pair<int, uint64_t>; // in a line: by priority, then as they came
    using Line = std::map<Place, std::unique_ptr<Sequence>>;
    using Running = std::map<uint64_t, std::unique_ptr<Sequence>>;

    struct Step {
        std::vector<int> token, pos, seq, slot; // the batch; token -1: the one that was just drawn on the GPU
        int singles = 0;
        struct Part { int first, rows; AdapterPtr adapter; };
        std::vector<Part> parts;   // its rows by sequence, then by adapter; none: no row has one
        struct Draw { uint64_t rank, admission; int row; };
        std::vector<Draw> draws;
        std::vector<Draw> kept;    // rows whose hidden states are wanted,
        std::vector<float> hidden; // ... and these: (., C)
        std::vector<int> wanted;   // of the draws: how many alternatives are told; -1: not even the log-probability
        bool tells = false;        // some are
        std::vector<TokenInfo> told; // what was drawn, on a CPU; on a GPU:
        std::vector<int> ids;      // what was drawn,
        std::vector<float> logits; // ... the logits of these, as the model made them,
        std::vector<Likeliest> rows_told; // ... and what else is told; of the draws that tell something
        int turn = 0;              // which of the two buffers is its own
        int rows = 0, drawn = 0;   // of the batch and the draws, with spare ones
        bool alone = false;        // one answer's next token, and what is
        std::vector<int> proposed; // ... proposed to follow it
        bool from_idle = false;    // no other was under way when it began
        bool masked = false;       // some draws may have to keep to a form: they come after `forward`, as draw_masked
        bool graph = false;
        bool one_kernel = false;   // by step.h's
        bool straight = false;     // its ids go straight to the CPU's memory
        double begun = seconds();
    };

    Figures figures;
    Arena arena;
    Activations<T> activations;
    KVCache<T> cache;
    T* picked;
    acc<T> *rope, *logits;
    int pages, max_rows, max_pages;
    int *input, *table;        // a step's StepNumbers; (max_seqs + texts, max_pages)
    PagePool pool;
    std::vector<int> free_slots[2];          // for answers, for texts
    Running running;                         // by rank: in the order of their first admission
    std::map<uint64_t, Line> waiting;        // a line for each API key
    size_t in_lines = 0, most_in_lines = 0;  // that wait; since memory was given back, at most
    std::pair<uint64_t, Place> looked_at{};  // how far the lines have been searched for cancelled ones
    std::map<uint64_t, uint64_t> service;    // by key: tokens computed for it, see next_line()
    std::vector<std::pair<uint64_t, size_t>> ended; // since the desk was told: lines of jobs, tokens of their prompts
    std::vector<std::pair<std::shared_ptr<Reply>, Piece>> outbox;
    std::deque<Step> under_way;
    std::vector<uint32_t> masks;             // (., words) of a step's draws
    uint64_t arrivals = 0, ranks = 0, admissions = 0, steps = 0;
    bool odd = false;                        // see plan_step
    PromptPace prompt_pace;
    double handed_out = 0;                   // when the last step was
    uint64_t looked_up = 0;                  // admission of the answer that `lookup` knows
    double prompts_took = 0;                 // s of steps that were not `alone`, since it knows it
    int expected = -1;                       // the proposed id for the token under way, if any

    bool busy() const { return !running.empty() || !waiting.empty() || !under_way.empty(); }

    void plan() {
        cache.plan(arena, config, (size_t)pages, false, ctx.kv_fp8);
        activations.plan(arena, config, max_rows, !ctx.gpu);
        rope = arena.take<acc<T>>((size_t)options.context * config.D);
        logits = arena.take<acc<T>>(max_draws() * config.V);
        picked = arena.take<T>(max_draws() * config.C);
        input = arena.take<int>(input_size());
        table = arena.take<int>((size_t)(options.max_seqs + options.texts) * max_pages);
#ifdef __CUDACC__
        if (ctx.gpu) plan_device();
#endif
    }

    // The number of pages; and, where the context may be less than it is (at_most), the longest whose keys and values
    // fit, and whose tables (a GPU's scratch for attention grows with it) leave 7/8 of the memory to the cache.
    void choose_sizes() {
        size_t page_bytes = KVCache<T>::bytes(config, 1, ctx.kv_fp8);
#ifdef __CUDACC__
        if (ctx.gpu && ctx.kv_fp8) page_bytes += widened_numbers(config, 1) * sizeof(bf16);
#endif
        auto room_with = [&](int context) { // for the cache
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
            room = std::max(room, room_with((int)whole)); // (what others left free may be less by now)
        pages = (int)std::min(room / page_bytes, (size_t)1 << 26);
        if (pages < max_pages)
            DIE("a context of %d tokens needs %.2f GB for keys and values, and there are %.2f GB (--kv-memory, --ctx)",
                options.context, (double)max_pages * (double)page_bytes / 1e9, (double)room / 1e9);
    }

    // What is asked for, else what is left of the GPU's memory but for a sixteenth and for what adapters that are loaded
    // later may take (those of the start are there already); on the CPU enough for one sequence
    // of the whole context, and for all of USUAL_CONTEXT tokens, but no more than a quarter of the memory.
    size_t choose_kv_bytes([[maybe_unused]] size_t others) const {
        if (options.kv_bytes) return options.kv_bytes;
#ifdef __CUDACC__
        if (ctx.gpu) {
            size_t have = 0, all = 0;
            CUDA_CHECK(cudaMemGetInfo(&have, &all));
            return have - std::min(have, others + all / 16 + options.adapter_bytes);
        }
#endif
        const int each = std::min(max_pages, USUAL_CONTEXT / PAGE);
        return std::min(KVCache<T>::bytes(config, (size_t)std::max(max_pages, options.max_seqs * each),
                                          ctx.kv_fp8), available_memory() / 4);
    }

    size_t max_draws() const { return (size_t)std::max(options.max_seqs, options.lookup + 1); }
    size_t input_size() const { return 4 * (size_t)max_rows + 3 * max_draws(); }

    // To where the engine computes.
    template <class U> void give(U* to, const U* from, size_t n) { copy_in(ctx, to, from, n); }

    // ---- The schedule
    void take_jobs() {
        std::vector<Job> jobs;
        std::vector<Window::Handed> handed;
        {
            std::lock_guard lock(desk.mutex);
            jobs.swap(window.inbox);
            handed.swap(window.handed);
            window.inside += jobs.size() + handed.size();
        }
        for (Job& job : jobs) {
            if (!waiting.count(job.line())) catch_up(job.line());
            join_line(std::make_unique<Sequence>(std::move(job), tokenizer, ++arrivals));
        }
        for (Window::Handed& one : handed) {
            std::unique_ptr<Sequence> q((Sequence*)one.release());
            q->rank = 0, q->arrival = ++arrivals, q->slot = -1, q->pending = 0; // as if it had never run
            q->pages.clear();
            if (!waiting.count(q->job.line())) catch_up(q->job.line());
            join_line(std::move(q));
        }
    }

    // Whoever was not here gets no credit for it: its service begins where that of the others is.
    void catch_up(uint64_t key) {
        const std::map<uint64_t, size_t> now = at_work();
        uint64_t least = UINT64_MAX;
        for (auto& [other, n] : now) least = std::min(least, service[other]);
        for (auto& [other, line] : waiting) least = std::min(least, service[other]);
        if (!now.count(key) && least != UINT64_MAX) service[key] = std::max(service[key], least);
    }
    void join_line(std::unique_ptr<Sequence> q) {
        const uint64_t key = q->job.line();
        const Place place = {q->job.priority, q->arrival};
        if (q->job.adapter) q->job.adapter->waiting++;
        waiting[key][place] = std::move(q);
        most_in_lines = std::max(most_in_lines, ++in_lines);
    }
    std::unique_ptr<Sequence> leave_line(uint64_t key, typename Line::iterator it) {
        auto q = std::move(it->second);
        if (q->job.adapter) q->job.adapter->waiting--;
        Line& line = waiting[key];
        line.erase(it), in_lines--;
        if (line.empty()) waiting.erase(key);
        return q;
    }
    std::map<uint64_t, size_t> at_work() const { // answers, by key
        std::map<uint64_t, size_t> n;
        for (auto& [rank, q] : running) n[q->job.line()]++;
        return n;
    }

    // First a token of every answer that runs, in order; then chunks of prompts that have been begun; then those that
    // wait, in their turn, as long as there are slots and pages for them. Where a running answer needs a page and there
    // is none, the last one that runs gives way: the first always gets on, and so everyone does.
    // Texts have slots of their own. Where texts and answers want a step's part for prompts, each has half, and what
    // the other leaves. Answers come first; but the pages that an answer gave up for a text are that text's.
    Step plan_step() {
        Step s;
        drop_cancelled();
        yield(false);
        const bool first = yield(true); // whose prompts come first: texts' or answers'
        if (awaits_proposal()) return s;
        for (auto it = running.begin(); it != running.end(); ++it) {
            Sequence& q = *it->second;
            if (q.job.pooled || q.left() != 1 || q.answered() == q.job.max_tokens) continue;
            if (q.computed / PAGE == q.pages.size()) {
                while (pool.available() == 0 && std::prev(running.end()) != it) preempt(std::prev(running.end()));
                if (pool.available() == 0) { preempt(it); break; }
                q.pages.push_back(pool.take());
            }
            add(s, q, 1);
        }
        s.singles = (int)s.token.size();
        size_t budget = (size_t)(s.singles ? options.chunk : options.burst);
        if (s.singles && options.paced) budget = prompt_pace.tokens(budget, (size_t)options.burst);
        odd = !odd; // (half of 1 is 1 and 0 in turn)
        const size_t part = std::max((budget + odd) / 2, budget - wanted(!first, budget));
        budget -= add_prompts(s, first, part, 0);
        add_prompts(s, !first, budget, first ? 0 : reserved());
        if (lookup.most && s.token.size() == 1 && s.draws.size() == 1) add_proposal(s);
        group_rows(s);
        return s;
    }

    // One answer's next token is all there is to compute: beside it what may follow, by lookup. (An answer that keeps
    // to a form has tokens without a choice instead, see jump.)
    void add_proposal(Step& s) {
        Sequence& q = drawn_for(s, 0);
        if (!may_propose(q)) return;
        s.alone = true;
        know(q);
        if (s.token[0] < 0) return;
        if (q.pages.size() * PAGE < q.computed + (size_t)lookup.most && pool.available() > running.size() &&
            q.pages.size() < (size_t)max_pages)
            q.pages.push_back(pool.take());
        const size_t end = std::min(q.pages.size() * PAGE, (size_t)options.context);
        const size_t room = std::min({q.job.max_tokens - q.answered(), (size_t)max_rows - 1, end - q.computed});
        s.proposed = lookup.propose(q.ids, room);
        size_t at = q.computed;
        for (int id : s.proposed) {
            s.token.push_back(id), s.pos.push_back((int)at), s.seq.push_back(q.slot);
            s.slot.push_back(q.pages[at / PAGE] * PAGE + (int)(at % PAGE)), at++;
        }
        if (!s.proposed.empty()) s.singles = 0; // no longer a row that is a sequence's only one
        s.parts.back().rows += (int)s.proposed.size();
        service[q.job.line()] += s.proposed.size();
    }

    // On a GPU, where steps are launched ahead: whether the next one has to wait until those under way have come. They
    // may have tokens that were proposed, or there is something to propose behind the token that is under way.
    bool awaits_proposal() {
        if (under_way.empty()) return false;
        if (!under_way.back().proposed.empty()) return true;
        if (!lookup.most || running.size() != 1 || in_lines > 0) return false;
        Sequence& q = *running.begin()->second;
        if (q.pending != 1 || q.answered() == q.job.max_tokens || !may_propose(q)) return false;
        know(q);
        const std::vector<int> next = lookup.propose(q.ids, q.job.max_tokens - q.answered() - 1);
        if (!next.empty()) expected = next[0];
        return !next.empty();
    }
    // (On a GPU neither where a row's draw needs more than its logits.)
    bool may_propose(const Sequence& q) const {
        if (q.matcher || !ctx.gpu) return !q.matcher;
        return !q.job.pooled && !q.job.adapter && q.job.alternatives < 0 && !has_penalties(q.job.how) &&
               q.job.bias.empty() && !q.restrained;
    }
    void know(const Sequence& q) {
        if (looked_up != q.admission) lookup.begin(q.ids, std::exchange(prompts_took, 0)), looked_up = q.admission;
    }

    // Makes rows with the same adapter neighbours: those of one token (which come first, see Batch), then the others.
    void group_rows(Step& s) {
        if (std::none_of(s.parts.begin(), s.parts.end(), [](auto& p) { return p.adapter; })) return s.parts.clear();
        auto place = [&](const auto& p) { return std::pair(p.first >= s.singles, p.adapter ? p.adapter->number : 0); };
        std::stable_sort(s.parts.begin(), s.parts.end(), [&](auto& a, auto& b) { return place(a) < place(b); });
        std::vector<int> from, to(s.token.size()); // rows, by their new places and by their old ones
        for (auto& p : s.parts) {
            const int old = std::exchange(p.first, (int)from.size());
            for (int i = 0; i < p.rows; i++) to[(size_t)(old + i)] = (int)from.size(), from.push_back(old + i);
        }
        for (auto* numbers : {&s.token, &s.pos, &s.seq, &s.slot}) {
            const std::vector<int> old = *numbers;
            for (size_t i = 0; i < from.size(); i++) (*numbers)[i] = old[(size_t)from[i]];
        }
        for (auto* rows : {&s.draws, &s.kept})
            for (auto& d : *rows) d.row = to[(size_t)d.row];
        std::vector<typename Step::Part> joined;
        for (auto& p : s.parts)
            if (!joined.empty() && joined.back().adapter == p.adapter) joined.back().rows += p.rows;
            else joined.push_back(p);
        s.parts.swap(joined);
    }

    // Tokens of texts' or answers' prompts that could come now, up to `most`: what has a slot, and pages.
    size_t wanted(bool texts, size_t most) const {
        size_t n = 0, slots = free_slots[texts].size(), needed = running.size();
        for (auto& [rank, q] : running)
            if (q->job.pooled == texts && q->left() > (texts ? 0 : 1)) n += q->left();
        for (auto line = waiting.lower_bound(texts ? Job::TEXTS : 0); line != waiting.end(); ++line) {
            if (!texts && line->first >= Job::TEXTS) break;
            for (auto& [place, q] : line->second) {
                needed += q->pages_needed();
                if (n >= most || slots-- == 0 || needed > pool.available()) return std::min(n, most);
                n += q->ids.size();
            }
        }
        return std::min(n, most);
    }

    // Pages that new texts leave alone: those that the next answer wants, unless answers alone have them.
    size_t reserved() {
        const auto line = next_line(false);
        if (line == waiting.end() || free_slots[0].empty()) return 0;
        const size_t needed = line->second.begin()->second->pages_needed();
        const bool there = pool.available() >= needed + running.size();
        return there || free_slots[1].size() < (size_t)options.texts ? needed : 0;
    }

    // Chunks of their prompts, together of `budget` tokens at most; those that wait leave `kept` pages alone. Returns
    // how many tokens there are.
    size_t add_prompts(Step& s, bool texts, const size_t budget, const size_t kept) {
        size_t left = budget;
        auto chunk = [&](Sequence& q) {
            const size_t n = std::min(q.left(), left);
            add(s, q, n);
            left -= n;
        };
        for (auto& [rank, q] : running)
            if (q->job.pooled == texts && q->left() > (texts ? 0 : 1) && left > 0) chunk(*q);
        while (left > 0 && !free_slots[texts].empty()) {
            const auto line = next_line(texts);
            if (line == waiting.end()) break;
            const auto first = line->second.begin();
            if (kept && pool.available() < kept + first->second->pages_needed() + running.size() + 1) break;
            if (!admit(*first->second)) break;
            auto q = leave_line(line->first, first);
            if (!q->rank) q->rank = ++ranks;
            chunk(*q);
            const uint64_t rank = q->rank;
            if (q->job.adapter) q->job.adapter->running++;
            running[rank] = std::move(q);
        }
        return budget - left;
    }

    // The next turn is that of the key with the fewest answers (or texts) at work; of these the one for which least was
    // computed. Within a line: first come, first served; whoever gave way came before those that have not begun.
    typename std::map<uint64_t, Line>::iterator next_line(bool texts) {
        std::map<uint64_t, size_t> n = at_work();
        auto rank = [&](uint64_t key) { return std::pair(n[key], service[key]); };
        auto before = [&](auto& a, auto& b) { return rank(a.first) < rank(b.first); };
        const auto first_text = waiting.lower_bound(Job::TEXTS);
        const auto begin = texts ? first_text : waiting.begin(), end = texts ? waiting.end() : first_text;
        return begin == end ? waiting.end() : std::min_element(begin, end, before);
    }

    // Nobody waits for another key's whole answers. If the next in turn finds no room, the last answer of the key with
    // the most of them gives way: if that leaves it no fewer than the other then has, or if keys must share a slot and
    // it has had its QUANTUM of tokens. What has given way is computed again, mostly from the cache. (For a text, which
    // has a slot soon, answers give way for tokens only.) A text whose rows are all computed or under way is not
    // stopped: its pages are free within a step. Returns whether something gave way.
    bool yield(bool texts) {
        constexpr uint64_t QUANTUM = 512, LEAST = 64; // LEAST: of an answer, so that each turn brings it on
        for (bool gave = false; ; gave = true) {
            const auto line = next_line(texts);
            if (line == waiting.end() || running.empty()) return gave;
            const uint64_t key = line->first;
            const size_t pages_wanted = line->second.begin()->second->pages_needed() + running.size();
            if ((texts || !free_slots[0].empty()) && pool.available() >= pages_wanted) return gave;
            std::map<uint64_t, size_t> n = at_work();
            const size_t own = n[key];
            if (!texts && free_slots[0].empty()) n.erase(n.lower_bound(Job::TEXTS), n.end()); // those have no such slot
            auto fewer = [&](auto& a, auto& b) {
                return std::pair(a.second, service[a.first]) < std::pair(b.second, service[b.first]);
            };
            const auto [most, answers] = *std::max_element(n.begin(), n.end(), fewer);
            auto last = running.end();
            for (auto it = running.begin(); it != running.end(); ++it)
                if (it->second->job.line() == most && (!it->second->job.pooled || it->second->left() > 0)) last = it;
            if (last == running.end()) return gave;
            const bool share = !texts && answers > own + 1;
            const bool turn = own == 0 && most != key && service[most] > service[key] + QUANTUM &&
                              last->second->answered() >= last->second->resumed + LEAST;
            if (!share && !turn) return gave;
            preempt(last);
        }
    }

    void drop_cancelled() {
        for (auto it = running.begin(); it != running.end();) {
            const auto here = it++;
            if (!here->second->job.reply->cancelled) continue;
            figures.cancelled++;
            leave(here);
        }
        // Those that wait hold nothing: they are looked at in portions, so that a step does not take longer for them.
        const Place front = {INT_MIN, 0};
        auto line = waiting.lower_bound(looked_at.first);
        if (line == waiting.end() || line->first != looked_at.first) looked_at.second = front;
        for (size_t n = std::min<size_t>(in_lines + waiting.size() + 1, 256); n > 0 && in_lines > 0; n--) {
            if (line == waiting.end()) line = waiting.begin(), looked_at.second = front;
            const uint64_t key = looked_at.first = line->first;
            const auto it = line->second.upper_bound(looked_at.second);
            if (it == line->second.end()) { // on to the next line
                ++line, looked_at = {key + 1, front};
                continue;
            }
            looked_at.second = it->first;
            if (!it->second->job.reply->cancelled) continue;
            figures.cancelled++;
            ended.push_back({key, it->second->prompt});
            leave_line(key, it);
            line = waiting.lower_bound(key);
            if (line == waiting.end() || line->first != key) looked_at.second = front;
        }
    }
    void leave(typename Running::iterator it) {
        Sequence& q = *it->second;
        vacate(q);
        if (q.job.adapter) q.job.adapter->running--;
        ended.push_back({q.job.line(), q.prompt});
        running.erase(it);
    }

    // The next n rows of q; if they are the last, its next token is drawn.
    void add(Step& s, Sequence& q, size_t n) {
        service[q.job.line()] += n;
        s.parts.push_back({(int)s.token.size(), (int)n, q.job.adapter});
        for (size_t i = 0; i < n; i++, q.computed++) {
            s.token.push_back(q.computed < q.ids.size() ? q.ids[q.computed] : -1);
            s.pos.push_back((int)q.computed);
            s.seq.push_back(q.slot);
            s.slot.push_back(q.pages[q.computed / PAGE] * PAGE + (int)(q.computed % PAGE));
        }
        if (q.left() > 0) return;
        (q.job.pooled ? s.kept : s.draws).push_back({q.rank, q.admission, (int)s.token.size() - 1});
        q.pending += !q.job.pooled;
    }

    // A slot and the pages for all its tokens and the next one; what the cache has of them need not be computed, but
    // for the last token, whose logits are wanted. False: not enough pages. Each that runs keeps the chance of another.
    bool admit(Sequence& q) {
        const size_t total = q.ids.size(), needed = q.pages_needed();
        q.chain = q.job.space ? q.job.space : q.job.salt;
        while ((q.pages.size() + 1) * PAGE < total) {
            const int p = pool.find(q.chain, &q.ids[q.pages.size() * PAGE], q.adapter());
            if (p < 0) break;
            pool.use(p);
            q.pages.push_back(p);
            q.chain = pool.pages[p].name;
        }
        const size_t found = q.pages.size();
        if (pool.available() < needed - found + running.size() && !running.empty()) {
            give_back_pages(q);
            return false;
        }
        q.known = found, q.computed = found * PAGE;
        while (q.pages.size() < needed) q.pages.push_back(pool.take());
        q.slot = free_slots[q.job.pooled].back();
        free_slots[q.job.pooled].pop_back();
        q.admission = ++admissions, q.resumed = q.answered();
        figures.looked_up += total, figures.found += q.computed;
        if (q.cached == SIZE_MAX) q.cached = q.computed, figures.prompt_tokens += total;
        if (found) // (a step's rows enter their own pages)
            give(table + (size_t)q.slot * max_pages, q.pages.data(), found);
#ifdef __CUDACC__
        if (ctx.gpu && !q.job.pooled) describe_to_gpu(q);
#endif
        return true;
    }

    void give_back_pages(Sequence& q) { // the last one first: a page is of no use without those before it
        for (; !q.pages.empty(); q.pages.pop_back()) pool.release(q.pages.back());
    }
    void vacate(Sequence& q) {
        give_back_pages(q);
        if (q.slot >= 0) free_slots[q.job.pooled].push_back(q.slot);
        q.slot = -1;
    }
    void preempt(typename Running::iterator it) {
        Sequence& q = *it->second;
        vacate(q);
        q.pending = 0; // what is under way for it is void; `computed` is set when it is admitted again
        figures.preempted++;
        auto back = std::move(it->second);
        if (q.job.adapter) q.job.adapter->running--;
        running.erase(it);
        join_line(std::move(back));
    }

    // Names the whole pages that are computed by now. (Only now: rows of one batch cannot read each other's pages.)
    void remember(Sequence& q) {
        for (; (q.known + 1) * PAGE <= std::min(q.computed, q.ids.size()); q.known++)
            q.chain = pool.name(q.pages[q.known], q.chain, &q.ids[q.known * PAGE], q.adapter());
    }

    // ---- Results
    void hand_out(Step& s) {
        collect(s);
        const double before = std::exchange(handed_out, seconds());
        if (s.proposed.empty())
            prompt_pace.learn((size_t)s.singles, s.token.size() - (size_t)s.singles,
                              handed_out - std::max(before, s.begun));
        const int hoped = std::exchange(expected, -1);
        if (ctx.gpu && s.alone) lookup.came(s.token.size(), handed_out, s.begun, s.from_idle);
        else lookup.paused();
        for (size_t i = 0; i < s.draws.size(); i++) {
            const auto it = running.find(s.draws[i].rank);
            const bool valid = it != running.end() && it->second->admission == s.draws[i].admission;
            if (!valid) continue;
            TokenInfo info{};
            if (!ctx.gpu) info = std::move(s.told[i]);
            else if (s.wanted[i] >= 0) info = describe(s.rows_told[i], s.ids[i], s.logits[i]);
            else info = {s.ids[i], 0, "", {}};
            if (hoped >= 0) lookup.foreseen(info.id == hoped);
            if (accept(*it->second, std::move(info)) || take_proposed(s, *it->second) || jump(*it->second)) leave(it);
        }
        for (size_t i = 0; i < s.kept.size(); i++) {
            const auto it = running.find(s.kept[i].rank);
            if (it == running.end() || it->second->admission != s.kept[i].admission) continue;
            const auto from = s.hidden.begin() + (ptrdiff_t)(i * (size_t)config.C);
            Piece piece;
            piece.choice = it->second->job.choice, piece.cached = it->second->cached, piece.finish = "stop";
            piece.hidden.assign(from, from + config.C);
            figures.stopped++, figures.whole.add(seconds() - it->second->job.arrived);
            outbox.push_back({it->second->job.reply, std::move(piece)});
            leave(it);
        }
    }

    // As long as what was drawn is what was proposed, its logits are there, and the next token is drawn. True if one
    // was the answer's last.
    bool take_proposed(Step& s, Sequence& q) {
        for (size_t i = 0; i < s.proposed.size(); i++) {
            const bool right = q.ids.back() == s.proposed[i];
            lookup.judged(right);
            if (!right) return false;
            q.computed++, q.pending++;
            if (accept(q, ctx.gpu ? TokenInfo{s.ids[i + 1], 0, "", {}}
                                  : draw_row(q, logits + (i + 1) * (size_t)config.V, nullptr))) return true;
        }
        return false;
    }

    // One more token of an answer. True if it was the last.
    bool accept(Sequence& q, TokenInfo&& info) {
        Job& job = q.job;
        const int id = info.id;
        Piece piece;
        q.pending--;
        const bool end = ends(q, id);
        if (job.min_tokens && q.ids.size() - q.prompt == job.min_tokens) q.speech.filter.stops = job.stops;
        const auto state = q.speech.state;
        const bool keeps = !end && has_form(q) && !(state == Speech::BEGIN && id == q.speech.open);
        const bool lost = keeps && !q.matcher->advance(id); // (only if it is nested without end)
        if (!q.forced.empty()) q.forced.pop_front();
        if (!end) {
            q.ids.push_back(id);
            remember(q);
            q.speech.feed(piece, std::move(info));
        }
        q.thoughts += state == Speech::THOUGHT || q.speech.state == Speech::THOUGHT;
        if (job.form_of_calls && state != Speech::CALL && q.speech.state == Speech::CALL) q.matcher->begin();
        const bool complete = (keeps && !lost && !job.form_of_calls && q.matcher->must_end()) ||
                              (job.one_call && q.speech.calls > 0);
        piece.count = q.ids.size() - q.prompt + end, piece.cached = q.cached;
        if (end || q.speech.filter.stopped || complete)
            piece.finish = q.speech.calls ? "tool_calls" : "stop", figures.stopped++;
        else if (lost || piece.count == job.max_tokens) piece.finish = "length", figures.cut++;
        if (piece.finish) q.speech.finish(piece), piece.thoughts = q.thoughts, piece.stop = q.speech.filter.found;

        const double now = seconds();
        figures.answer_tokens++;
        if (job.adapter) job.adapter->tokens++;
        if (q.last == 0) figures.first_token.add(now - job.arrived);
        else figures.between_tokens.add(now - q.last);
        if (piece.finish) figures.whole.add(now - job.arrived);
        q.last = now;
        const bool last = piece.finish;
        piece.choice = job.choice;
        if (last || job.every || !piece.text.empty() || !piece.tokens.empty() || !piece.calls.empty())
            outbox.push_back({job.reply, std::move(piece)});
        return last;
    }

    // Where the form allows one text only, its tokens are those that the tokenizer makes of it, of which the last one is
    // left to the model: what follows may belong to it. (No model need be asked then, and none is surprised.)
    void foresee(Sequence& q) {
        constexpr size_t FAR = 512; // bytes
        if (!q.forced.empty() || !has_form(q) || q.speech.state == Speech::BEGIN || !q.job.bias.empty()) return;
        bool over = false;
        const std::string text = q.matcher->forced(FAR, &over);
        std::vector<int> ids;
        if (text.size() > 1) ids = tokenizer.encode(text, false);
        if (!over && !ids.empty()) ids.pop_back();
        size_t at = 0;
        for (int id : ids) {
            const std::string_view bytes = tokenizer.bytes(id);
            if (text.compare(at, bytes.size(), bytes) || ends(q, id)) break; // (half a character; another form of it)
            q.forced.push_back(id), at += bytes.size();
        }
    }
    bool ends(const Sequence& q, int id) const {
        return std::count(q.job.ends.begin(), q.job.ends.end(), id) ||
               (!q.job.ignore_eos && std::count(config.end_tokens.begin(), config.end_tokens.end(), id));
    }

    // Takes these tokens, if they are many; they are computed together, as a prompt's are. What is under way for q is
    // void. True if the last of them was the answer's. (What a draw would count or tell of them is not known here.)
    bool jump(Sequence& q) {
        if (!q.matcher || !options.jump || q.job.alternatives >= 0 || has_penalties(q.job.how)) return false;
        foresee(q);
        const size_t n = std::min(q.forced.size(), q.prompt + q.job.max_tokens - q.ids.size());
        const size_t needed = (q.ids.size() + n + PAGE - 1) / PAGE;
        const size_t more = needed - std::min(needed, q.pages.size());
        if (n < (size_t)options.jump || (more && pool.available() < more + running.size())) return false;
        for (size_t i = 0; i < more; i++) q.pages.push_back(pool.take());
        if (std::exchange(q.pending, 0)) q.admission = ++admissions;
        figures.forced += n;
        for (size_t i = 0; i < n; i++) {
            q.pending++;
            if (accept(q, {q.forced.front(), 0, "", {}})) return true;
        }
        return false;
    }

    void tell() {
        figures.running = running.size(), figures.waiting = in_lines;
#ifdef __GLIBC__
        if (in_lines == 0 && std::exchange(most_in_lines, 0) > 4096) malloc_trim(0);
#endif
        figures.pages_used = (size_t)pages - pool.available();
        std::atomic_store(&window.figures, std::make_shared<const Figures>(figures));
        std::lock_guard lock(desk.mutex);
        window.inside = figures.running + figures.waiting;
        for (auto [line, tokens] : ended) {
            Desk::Held& held = desk.held[line];
            held.jobs--;
            if (line >= Job::TEXTS) held.tokens -= tokens, desk.texts--, desk.text_tokens -= tokens;
        }
        ended.clear();
    }

    // After tell(), so that whoever has got an answer finds it counted, and its place free.
    void deliver() {
        const double now = seconds();
        for (auto& [reply, piece] : outbox) {
            if (reply->share && !desk.unsent.add(*reply->share, bytes_of(piece))) reply->cancelled = true;
            std::lock_guard lock(reply->mutex);
            if (reply->first == 0) reply->first = now;
            reply->last = now;
            reply->left -= piece.finish != nullptr;
            reply->put(std::move(piece));
            if (reply->wake) reply->wake();
        }
        outbox.clear();
    }

    // ---- A step on the CPU
    Sequence& drawn_for(const Step& s, size_t i) const { return *running.find(s.draws[i].rank)->second; }

    // Whether the token that is drawn now may not end the answer.
    bool restrained(const Sequence& q) const { return q.answered() - 1 < q.job.min_tokens; }

    // Each id once: a GPU's threads add them side by side.
    std::map<int, float> biases(const Sequence& q, bool restrained) const {
        std::map<int, float> all;
        for (auto [id, more] : q.job.bias) all[id] += more;
        if (!restrained) return all;
        for (int id : q.job.ends) all[id] = BAN;
        if (!q.job.ignore_eos)
            for (int id : config.end_tokens) all[id] = BAN;
        return all;
    }

    // Whether the next token must keep to a form, and which tokens do. False: all may come.
    struct Allowed {
        std::shared_ptr<const Automaton::Mask> mask{}; // null: none,
        std::vector<int> also{};                       // ... and these
        bool operator<(const Allowed& o) const { return std::tie(mask, also) < std::tie(o.mask, o.also); }
    };
    bool has_form(const Sequence& q) const {
        return q.matcher && (q.job.form_of_calls ? q.speech.state == Speech::CALL : q.speech.state != Speech::THOUGHT);
    }
    bool tokens_of_form(Sequence& q, Allowed& tokens) {
        if (!has_form(q)) return false;
        foresee(q);
        if (!q.forced.empty()) return tokens.also = {q.forced.front()}, true;
        tokens.mask = q.matcher->mask();
        if (q.speech.state == Speech::BEGIN) tokens.also.push_back(q.speech.open);
        if (!q.matcher->may_end()) return true;
        tokens.also.insert(tokens.also.end(), q.job.ends.begin(), q.job.ends.end());
        if (!q.job.ignore_eos)
            tokens.also.insert(tokens.also.end(), config.end_tokens.begin(), config.end_tokens.end());
        return true;
    }
    size_t mask_words() const { return ((size_t)tokenizer.size() + 31) / 32; }

    // The row of `bits` (., words) with the tokens that may be drawn next, or -1: all. Draws with the same ones, most
    // of those that keep to one form, share a row: `rows` says which there are.
    int mask_row(Sequence& q, std::map<Allowed, int>& rows, uint32_t* bits) {
        Allowed tokens;
        if (!tokens_of_form(q, tokens)) return -1;
        const auto [known, fresh] = rows.try_emplace(std::move(tokens), (int)rows.size());
        if (!fresh) return known->second;
        uint32_t* row = bits + (size_t)known->second * mask_words();
        if (known->first.mask) std::copy_n(known->first.mask->begin(), mask_words(), row);
        else std::fill_n(row, mask_words(), 0);
        for (int id : known->first.also)
            if (id >= 0 && id < tokenizer.size()) row[id / 32] |= 1u << id % 32;
        return known->second;
    }

    void compute(Step& s) {
        for (size_t i = 0; i < s.draws.size(); i++) {
            s.wanted.push_back(drawn_for(s, i).job.alternatives);
            s.tells = s.tells || s.wanted.back() >= 0;
        }
#ifdef __CUDACC__
        if constexpr (HAS_GPU<T>) if (ctx.gpu) return compute_gpu(s);
#endif
        const int N = (int)s.token.size(), R = (int)s.draws.size();
        for (int n = 0; n < N; n++) table[(size_t)s.seq[n] * max_pages + s.pos[n] / PAGE] = s.slot[n] / PAGE;
        std::vector<int> rows;
        for (auto& d : s.draws) rows.push_back(d.row);
        for (size_t i = 0; i < s.proposed.size(); i++) rows.push_back((int)i + 1);
        const Batch batch = {N, options.max_seqs + options.texts, s.token.data(), s.pos.data(), s.seq.data(),
                             s.slot.data(), table, max_pages, s.singles};
        forward_step(s, batch);
        for (auto& k : s.kept) keep_hidden(s, activations.normed + (size_t)k.row * config.C);
        if (R) head_cpu(ctx, logits, picked, activations.normed, rows.data(), weights.head, (int)rows.size());
        s.told.resize((size_t)R);
        std::vector<int> masked((size_t)R, -1); // row of masks
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
    // Draws q's next token from its logits, which change; `mask`: of the tokens that may come, or null.
    TokenInfo draw_row(const Sequence& q, float* row, const uint32_t* mask) const {
        std::vector<float> before; // the row's logits
        Likeliest told;
        if (q.job.alternatives >= 0) {
            likeliest_cpu(ctx, told, row, tokenizer.size(), q.job.alternatives);
            before = std::vector<float>(row, row + config.V);
        }
        penalize(row, q.job.how, q.ids, q.prompt, config.V);
        for (auto [id, more] : biases(q, restrained(q))) row[id] += more;
        const int id = mask ? draw_of(row, mask, q) : sample_cpu(ctx, row, tokenizer.size(), q.job.how, q.ids.size());
        return before.empty() ? TokenInfo{id, 0, "", {}} : describe(told, id, before[(size_t)id]);
    }
    // What would be drawn if all other logits were -infinity, without a look at each of them.
    int draw_of(const float* row, const uint32_t* bits, const Sequence& q) const {
        std::vector<int> ids;
        std::vector<float> some;
        for (size_t w = 0; w < mask_words(); w++)
            for (uint32_t left = bits[w]; left; left &= left - 1) {
                ids.push_back((int)(32 * w) + __builtin_ctz(left));
                some.push_back(row[ids.back()]);
            }
        if (ids.empty()) return 0; // the form cannot be kept any more: the answer ends
        return ids[(size_t)sample_cpu(ctx, some.data(), (int)some.size(), q.job.how, q.ids.size())];
    }
    // adapts: on a GPU, the first rows, of one token each, are computed by kernels that take any mix of adapters.
    void forward_step(const Step& s, const Batch& batch, [[maybe_unused]] bool adapts = false) {
        if (s.parts.empty()) return forward(ctx, config, weights, batch, activations, cache, rope);
        Segments<T> segments;
        for (auto& p : s.parts)
            segments.push_back({p.first, p.rows, static_cast<const AdaptedModel<T>*>(p.adapter.get())});
        MixedRows mixed;
#ifdef __CUDACC__
        if (adapts) mixed = {batch.singles, adapted, adapter_sums};
#endif
        mixed_forward(ctx, config, weights, segments, batch, activations, cache, rope, mixed);
    }
    void keep_hidden(Step& s, const T* row) {
        for (int i = 0; i < config.C; i++) s.hidden.push_back((float)to_acc(row[i]));
    }
    void collect([[maybe_unused]] Step& s) {
#ifdef __CUDACC__
        if (ctx.gpu) collect_gpu(s);
#endif
    }

#ifdef __CUDACC__
    // ---- A step on the GPU: numbers there, forward, head, draws, numbers back; nothing waits until collect_gpu. If
    // all rows are singles (and with `invariant` have no adapter), forward to draws is one CUDA graph, kept for each
    // size: rows are filled up to 1, 2, 4, ..., max_seqs with spare ones, the pieces of the longest sequence to 1, 2, ...
    // A step by `road` is one graph from its numbers to its ids (without forms), without spare rows; there is one for
    // each number of rows and each of the two buffers.
    Slots slots;
    int *drawn, *unused;             // (max_draws) the ids; where sample_kernel puts what only a Session needs
    Draw* draws;                     // (max_draws) of the step's rows
    unsigned long long* best;
    int *mask_rows, *pinned_masks = nullptr; // (max_seqs), then (max_seqs, words): see Masks
    Likeliest* told;                 // (max_seqs) of the rows that tell something,
    float* told_logits;              // (max_seqs) ... and the logits of what was drawn
    const Adapter<bf16>** adapted;   // (max_seqs) adapters of a step's first rows,
    float* adapter_sums;             // (max_seqs, the most rows of a product) ... and scratch for their products
    int* pinned_input[2] = {};       // taken in turn: a step's numbers are read while the next one's are written
    int* pinned_drawn[2] = {};
    T* pinned_hidden[2] = {};        // (texts, C)
    Likeliest* pinned_told[2] = {};
    float* pinned_logits[2] = {};
    const Adapter<bf16>** pinned_adapted[2] = {};
    cudaEvent_t done[2] = {}, masks_there = {};
    cudaStream_t mask_stream = {};
    enum Part { PLAIN, ADJUSTED, BEFORE_MASKS, AFTER_MASKS };      // what of a step a graph computes
    struct GraphKey {
        int rows, splits;
        Part part;
        bool tells, adapts;
        int turn = -1;       // from 0 on: by `road`, with the buffers of this turn,
        bool greedy = false; // ... and it draws, too
        bool operator<(const GraphKey& k) const {
            return std::tie(rows, splits, part, tells, adapts, turn, greedy) <
                   std::tie(k.rows, k.splits, k.part, k.tells, k.adapts, k.turn, k.greedy);
        }
    };
    std::map<GraphKey, cudaGraphExec_t> graphs;
    std::mutex recording; // held meanwhile

    void plan_device() {
        const size_t S = (size_t)options.max_seqs, V = (size_t)config.V, R = max_draws();
        plan_scratch(ctx, arena, config, max_rows, options.max_seqs, options.context, pages);
        slots = {arena.take<int>(S), arena.take<Draw>(S), arena.take<uint32_t>(S * V), arena.take<int>(S),
                 arena.take<int>(S * MAX_BIAS), arena.take<float>(S * MAX_BIAS), arena.take<int>(S)};
        drawn = arena.take<int>(R);
        unused = arena.take<int>(R);
        draws = arena.take<Draw>(R);
        best = arena.take<unsigned long long>((size_t)STREAM_TOKENS * BEST_BLOCKS);
        mask_rows = arena.take<int>(S * (1 + mask_words()));
        told = arena.take<Likeliest>(S);
        told_logits = arena.take<float>(S);
        adapted = arena.take<const Adapter<bf16>*>(S);
        adapter_sums = arena.take<float>(options.adapters ? S * (size_t)std::max({config.C, 2 * config.F,
                                         (config.H + 2 * config.K) * config.D}) : 1);
    }
    void open_device() {
        CUDA_CHECK(cudaStreamCreateWithFlags(&mask_stream, cudaStreamNonBlocking));
        CUDA_CHECK(cudaEventCreateWithFlags(&masks_there, cudaEventDisableTiming));
        for (int i = 0; i < 2; i++) {
            CUDA_CHECK(cudaMallocHost(&pinned_input[i], input_size() * sizeof(int)));
            CUDA_CHECK(cudaMallocHost(&pinned_drawn[i], max_draws() * sizeof(int)));
            CUDA_CHECK(cudaMallocHost(&pinned_hidden[i], (size_t)(options.texts + 1) * config.C * sizeof(T)));
            CUDA_CHECK(cudaMallocHost(&pinned_told[i], (size_t)options.max_seqs * sizeof(Likeliest)));
            CUDA_CHECK(cudaMallocHost(&pinned_logits[i], (size_t)options.max_seqs * sizeof(float)));
            CUDA_CHECK(cudaMallocHost(&pinned_adapted[i], (size_t)options.max_seqs * sizeof(void*)));
            CUDA_CHECK(cudaEventCreateWithFlags(&done[i], cudaEventDisableTiming));
        }
    }
    void close_device() {
        cudaStreamSynchronize(ctx.gpu->stream);
        for (auto& [key, graph] : graphs) cudaGraphExecDestroy(graph);
        cudaStreamSynchronize(mask_stream), cudaStreamDestroy(mask_stream), cudaEventDestroy(masks_there);
        if (pinned_masks) cudaFreeHost(pinned_masks);
        for (int i = 0; i < 2; i++)
            cudaFreeHost(pinned_input[i]), cudaFreeHost(pinned_drawn[i]), cudaFreeHost(pinned_hidden[i]),
                cudaFreeHost(pinned_told[i]), cudaFreeHost(pinned_logits[i]), cudaFreeHost(pinned_adapted[i]),
                cudaEventDestroy(done[i]);
    }

    void describe_to_gpu(Sequence& q) {
        const size_t s = (size_t)q.slot;
        const Draw draw = {q.job.how, tokenizer.size()};
        give(slots.draw + s, &draw, 1);
        give(slots.wanted + s, &q.job.alternatives, 1);
        if (has_penalties(q.job.how))
            give(slots.seen + s * (size_t)config.V, seen_counts(q.ids, q.prompt, config.V).data(), (size_t)config.V);
        describe_biases(q, q.answered() < q.job.min_tokens);
    }
    void describe_biases(Sequence& q, bool restrained) {
        const size_t s = (size_t)q.slot;
        std::vector<int> ids;
        std::vector<float> more;
        for (auto [id, x] : biases(q, restrained)) ids.push_back(id), more.push_back(x);
        const int n = (int)ids.size();
        q.restrained = restrained;
        give(slots.biases + s, &n, 1);
        if (n == 0) return;
        give(slots.bias_id + s * MAX_BIAS, ids.data(), ids.size());
        give(slots.bias + s * MAX_BIAS, more.data(), more.size());
    }

    void compute_gpu(Step& s) {
        const int turn = s.turn = (int)(steps++ % 2);
        bool adjusted = false;
        for (size_t i = 0; i < s.draws.size(); i++) {
            Sequence& q = drawn_for(s, i);
            if (q.restrained && !restrained(q)) describe_biases(q, false);
            adjusted = adjusted || has_penalties(q.job.how) || !q.job.bias.empty() || q.restrained;
            s.masked = s.masked || q.matcher;
        }
        int longest = 0, N = (int)s.token.size(), R = (int)s.draws.size();
        for (int n = 0; n < s.singles; n++) longest = std::max(longest, s.pos[n]);
        const int splits = splits_for_graph(longest, options.context);
        longest = s.singles == N ? 0 : 1 + *std::max_element(s.pos.begin() + s.singles, s.pos.end());
        const bool adapts = !s.parts.empty() && s.singles > 0 && !ctx.invariant; // singles by one kernel for all
        const bool several = !s.proposed.empty(); // rows of one answer, each with a draw
        const bool graph = s.graph = several || (s.singles == N && (s.parts.empty() || adapts));
        // (It leaves nothing in `activations`, and takes the rows that draw to be all rows.)
        s.one_kernel = several || (road && graph && N <= road->most && s.draws.size() == (size_t)N && s.parts.empty() &&
                                   !s.tells && s.kept.empty());
        if (s.one_kernel) R = N;
        else if (graph) {
            const int rows = N;
            for (N = 1; N < rows; N *= 2) {}
            R = N = std::min(N, options.max_seqs);
        }

        s.rows = N, s.drawn = R;
        // Spare rows: no sequence. Draws name the row that they are for.
        const StepNumbers host(pinned_input[turn], N, R), gpu(input, N, R);
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
        const Batch batch = {N, options.max_seqs + options.texts, gpu.token, gpu.pos, gpu.seq, gpu.slot, table,
                             max_pages, graph ? N : s.singles, splits, longest};
        if (adapts) give_adapters(s, graph ? N : s.singles);
        const auto prepare = [&] {
            launch_kernel(ctx, false, prepare_kernel, (unsigned)((std::max(N, R) + 255) / 256), 256, 0, gpu, host, N, R,
                          table, max_pages, draws, slots);
        };
        // (forward begins when prepare_kernel has completed: attention reads the batch early, see launch_kernel.)
        const Part part = s.masked ? BEFORE_MASKS : adjusted ? ADJUSTED : PLAIN;
        if (s.one_kernel) { // all in one graph, and ids go straight to the CPU's memory
            bool greedy = part == PLAIN;
            for (size_t i = 0; i < s.draws.size(); i++) greedy = greedy && drawn_for(s, i).job.how.temperature == 0;
            s.straight = part != BEFORE_MASKS;
            launch_part(true, {N, 0, part, false, false, turn, greedy}, [&] {
                prepare();
                road->use(batch, cache, rope, logits, draws, best);
                road->args.greedy = greedy, road->args.next = draw_state(gpu, pinned_drawn[turn], false);
                road->launch_step();
                if (!greedy && s.straight)
                    draw_all(s, gpu, R, part != PLAIN, part == PLAIN ? road->dealt() : RowsDealt(), {});
            });
        } else {
            prepare();
            launch_part(graph, {N, splits, part, s.tells, adapts}, [&] {
                forward_step(s, batch, adapts);
                if (R == 0) return;
                const RowsDealt dealt = head_all(s, gpu, R, part != PLAIN);
                if (part != BEFORE_MASKS) draw_all(s, gpu, R, part != PLAIN, dealt, {});
            });
        }
        const size_t C = (size_t)config.C;
        for (size_t i = 0; i < s.kept.size(); i++) // (the next step overwrites `normed` after them)
            CUDA_CHECK(cudaMemcpyAsync(pinned_hidden[turn] + i * C, activations.normed + (size_t)s.kept[i].row * C,
                                       C * sizeof(T), cudaMemcpyDeviceToHost, ctx.gpu->stream));
        if (!s.masked) bring_back(s);
    }
    // The adapters of a step's first n rows, spare ones among them.
    void give_adapters(const Step& s, int n) {
        const Adapter<bf16>** const of = pinned_adapted[s.turn];
        std::fill_n(of, n, nullptr);
        for (auto& p : s.parts)
            if (p.adapter)
                for (int i = p.first; i < std::min(n, p.first + p.rows); i++)
                    of[i] = static_cast<const AdaptedModel<T>*>(p.adapter.get())->on_gpu;
        CUDA_CHECK(cudaMemcpyAsync(adapted, of, (size_t)n * sizeof *of, cudaMemcpyHostToDevice, ctx.gpu->stream));
    }
    template <class F> void launch_part(bool graph, const GraphKey& key, F f) {
        if (!graph) return f();
        cudaGraphExec_t& ready = graphs[key];
        if (!ready) {
            std::lock_guard lock(recording);
            ready = record_graph(ctx, f);
        }
        CUDA_CHECK(cudaGraphLaunch(ready, ctx.gpu->stream));
    }
    void bring_back(Step& s) {
        auto copy = [&](auto* to, const auto* from) {
            CUDA_CHECK(cudaMemcpyAsync(to, from, (size_t)s.drawn * sizeof *from, cudaMemcpyDeviceToHost,
                                       ctx.gpu->stream));
        };
        if (s.drawn > 0 && !s.straight) copy(pinned_drawn[s.turn], drawn);
        if (s.drawn > 0 && s.tells) copy(pinned_told[s.turn], told), copy(pinned_logits[s.turn], told_logits);
        CUDA_CHECK(cudaEventRecord(done[s.turn], ctx.gpu->stream));
    }

    // The logits; and if each block looked for its likeliest ids, how these were dealt.
    RowsDealt head_all(Step& s, const StepNumbers& gpu, int R, bool adjusted) {
        const size_t V = (size_t)config.V;
        RowsDealt dealt;
        if (R <= STREAM_TOKENS && !adjusted && !ctx.invariant) {
            const Linear<bf16>& W = weights.head;
            const StreamArgs head = {activations.normed, gpu.draw_row, nullptr, nullptr, 0, W.w[0], R, config.C,
                                     config.V};
            const DrawEpilogue epilogue{logits, V, draws, nullptr, best};
            dealt = W.format == Format::PLAIN ? stream_product(ctx, head, epilogue)
                                              : packed_product(ctx, epilogue, head.x, head.rows, W, R);
        } else {
            head_gpu(ctx, logits, picked, activations.normed, gpu.draw_row, weights.head, R);
        }
        if (s.tells) likeliest_gpu(ctx, told, logits, V, tokenizer.size(), gpu.draw_seq, slots.wanted, R);
        return dealt;
    }
    DrawState draw_state(const StepNumbers& gpu, int* to, bool adjusted) const {
        return {to, gpu.draw_pos, unused, gpu.draw_seq, table, max_pages, adjusted ? slots.seen : nullptr, nullptr, 1,
                slots.last};
    }
    // (Where an answer has several draws, of proposals, whichever comes last is kept; the next step names its token.)
    void draw_all(const Step& s, const StepNumbers& gpu, int R, bool adjusted, const RowsDealt& dealt,
                  const Masks& masks) {
        const size_t V = (size_t)config.V;
        // (What comes before it with masks is a wait for a copy; step.h's kernel lets nothing start early.)
        const bool early = ctx.gpu->overlap && !masks.row && !s.one_kernel;
        if (adjusted)
            launch_kernel(ctx, early, adjust_kernel, (unsigned)R, 1024, 0, logits, V, gpu.draw_seq, slots, masks);
        launch_kernel(ctx, adjusted ? ctx.gpu->overlap : early, sample_kernel, (unsigned)R, 1024, 0, logits, V, draws,
                      dealt.blocks ? best : nullptr, dealt,
                      draw_state(gpu, s.straight ? pinned_drawn[s.turn] : drawn, adjusted));
        if (!s.tells) return;
        const auto tell = [&](auto kernel, auto W) {
            launch(ctx, kernel, (unsigned)R, 32, 0, told_logits, drawn, gpu.draw_seq, slots.wanted, activations.normed,
                   gpu.draw_row, W, config.C);
        };
        if (weights.head.format == Format::PLAIN) return tell(drawn_logit_kernel<void, const bf16*>, weights.head.w[0]);
        with_packing(weights.head, [&](auto format) {
            tell(drawn_logit_kernel<decltype(format), PackedArgs>, packed_args(weights.head));
        });
    }

    // The draws of a step whose forms are known by now: masks there, and what compute_gpu has left. (The last masks
    // have been read: what was drawn with them is here.)
    void draw_masked(Step& s) {
        const size_t S = (size_t)options.max_seqs, words = mask_words();
        if (!pinned_masks) CUDA_CHECK(cudaMallocHost(&pinned_masks, S * (1 + words) * sizeof(int)));
        uint32_t* bits = (uint32_t*)pinned_masks + S;
        std::map<Allowed, int> rows_of;
        for (size_t r = 0; r < (size_t)s.drawn; r++) {
            pinned_masks[r] = -1;
            if (r >= s.draws.size()) continue;
            const auto it = running.find(s.draws[r].rank); // it may have ended since
            if (it == running.end() || it->second->admission != s.draws[r].admission) continue;
            pinned_masks[r] = mask_row(*it->second, rows_of, bits);
        }
        const size_t rows = rows_of.size();
        auto copy = [&](size_t from, size_t n) { // beside `forward`, on a stream of its own
            CUDA_CHECK(cudaMemcpyAsync(mask_rows + from, pinned_masks + from, n * sizeof(int), cudaMemcpyHostToDevice,
                                       mask_stream));
        };
        const StepNumbers gpu(input, s.rows, s.drawn);
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

    void collect_gpu(Step& s) {
        CUDA_CHECK(cudaEventSynchronize(done[s.turn]));
        if (s.one_kernel) road->check();
        s.ids.assign(pinned_drawn[s.turn], pinned_drawn[s.turn] + s.draws.size() + s.proposed.size());
        if (s.tells) {
            s.rows_told.assign(pinned_told[s.turn], pinned_told[s.turn] + s.draws.size());
            s.logits.assign(pinned_logits[s.turn], pinned_logits[s.turn] + s.draws.size());
            for (size_t i = 0; i < s.ids.size(); i++) // exactly where that is known
                for (int k = 0; s.wanted[i] >= 0 && k < s.rows_told[i].count; k++)
                    if (s.rows_told[i].id[k] == s.ids[i]) s.logits[i] = s.rows_told[i].logit[k];
        }
        for (size_t i = 0; i < s.kept.size(); i++) keep_hidden(s, pinned_hidden[s.turn] + i * (size_t)config.C);
    }
#endif
};

// ====================================================================================================== 4 API
// https://platform.openai.com/docs/api-reference, with vLLM's additions. server/request.h has the way in; here is the
// way out.
#include "server/api/request.h"
#include "server/api/embed_api.h"

#include "server/api/answer.h"
#include "server/api/dialects.h"

// ==================================================================================================== 5 Batch
#include "server/api/batch.h"
#include "server/api/batches.h"

#ifndef SERVE_NO_HTTP // (what needs no HTTP does without its library)
// ===================================================================================================== 6 HTTP
#include "server/http/http.h"
#endif // SERVE_NO_HTTP

#ifndef SERVE_NO_MAIN
// ===================================================================================================== 7 main

static std::vector<ApiKey> read_keys(const std::string& path) {
    const MappedFile file(path);
    std::vector<ApiKey> keys;
    std::set<std::string> seen;
    for (size_t at = 0, number = 1; at < file.size; number++) {
        std::string line(file.text().substr(at, file.text().find('\n', at) - at));
        at += line.size() + 1;
        while (!line.empty() && isspace((unsigned char)line.back())) line.pop_back();
        if (line.empty() || line[0] == '#') continue;
        const size_t end = std::min(line.find_first_of(" \t"), line.size());
        const size_t name = std::min(line.find_first_not_of(" \t", end), line.size());
        keys.push_back({line.substr(0, end), line.substr(name)});
        if (!seen.insert(keys.back().key).second) // (nothing of a key is shown)
            DIE("%s: line %zu: this key is there already", path.c_str(), number);
        if (keys.back().name.empty()) keys.back().name = format("key %zu", keys.size());
    }
    if (keys.empty()) DIE("%s: no key in it", path.c_str());
    return keys;
}

static const char* USAGE =
    "usage: serve MODEL [options]                          MODEL: a model.bin or a Hugging Face folder\n"
    "       serve MODEL --batch REQUESTS.jsonl -o RESPONSES.jsonl [options]\n"
    "       serve --version\n";

struct Options : ModelOptions {
    std::string name, system, key_file, batch, output;
    std::vector<std::string> tasks; // none: what the model's folder says
    std::vector<std::pair<std::string, std::string>> adapters; // names and folders
    ServerOptions server;
    EngineOptions engine;
    int max_queue = 1024, think = 0, jump = -1, gpus = 1, lookup = -1; // negative: as suits the device
    DocumentOptions documents{};
    Context ctx{};
};

// NAME=DIR; what is a folder as it stands (runs/lr=1e-4) is no name.
static void add_adapter(Options& o, const char* option, const std::string& value) {
    struct stat st;
    const size_t equals = value.find('=');
    if (equals == value.npos || stat(value.c_str(), &st) == 0) return file_name(o.adapter)(option, value.c_str());
    const std::string name = value.substr(0, equals), folder = value.substr(equals + 1);
    if (folder.empty()) DIE("%s %s: which folder?", option, value.c_str());
    check_adapter_name(name);
    for (auto& other : o.adapters)
        if (other.first == name) DIE("%s %s: the name is taken", option, value.c_str());
    o.adapters.push_back({name, folder});
}

static std::vector<Option> option_table(Options& o) {
    auto gigabytes = [](size_t& bytes) -> Setter {
        return [&bytes](const char* option, const char* v) {
            bytes = (size_t)(parse_number(option, v, 1e-6, 1e6) * 1e9);
        };
    };
    std::vector<Option> table = {
        {"", "--host", "ADDRESS", "default 127.0.0.1: this machine only", file_name(o.server.host)},
        {"-P", "--port", "N", "default 8000; 0 takes a free one", whole(o.server.port, 0, 65535)},
        {"", "--task", "NAME", "generate, embed or rerank; may be repeated (default: embed where the\n"
         "model's folder says so, else generate)", list(o.tasks)},
        {"", "--name", "NAME", "the model's, for requests (default: its file's)", text(o.name)},
        {"-c", "--ctx", "N", "tokens of a prompt and its answer (default: the model's limit, as\nfar as the KV cache holds it)",
         whole(o.engine.context, 2, INT_MAX)},
        {"", "--max-seqs", "N", "answers at once (default: CPU 16, GPU 256)", whole(o.engine.max_seqs, 1, 4096)},
        {"", "--max-queue", "N", "answers that may wait (default 1024); beyond it requests get status\n"
         "429, unless their API key has less than its share of the queue", whole(o.max_queue, 0, 1 << 20)},
        {"", "--kv-memory", "GB", "of the KV cache (default: CPU a quarter of the memory at most, GPU\nnearly all)",
         gigabytes(o.engine.kv_bytes)},
        {"", "--chunk", "N", "tokens of prompts in a step that others wait for (default: as many as\n"
         "keep it within 1.7 times a step without them)", whole(o.engine.chunk, 1, 65536)},
        {"", "--gpus", "N", "of this host: an engine each (with -d cpu N engines on the CPU)", whole(o.gpus, 1, 64)},
        o.one_kernel_option("on a GPU: a step of up to 8 answers is one kernel (default: on\n"
                            "Hopper, if a tenth of the free memory holds its copy of the weights)"),
        {"", "--lookup", "N", "of an answer that runs alone: what followed its latest words before\n"
         "is computed with the next token, N tokens at most (up to 7), while it\n"
         "pays; the answer is the same (default: 7; on a GPU only if a token\nis one kernel)",
         whole(o.lookup, 0, LookUp::MOST)},
        {"", "--jump-ahead", "N", "where a form leaves no choice about N tokens or more, they are taken at\n"
         "once (default: CPU 2, GPU 0; 0: never, they cost a step each)", whole(o.jump, 0, 512)},
        {"-y", "--system", "TEXT", "system prompt of conversations that have none", text(o.system)},
        {"-r", "--think", "0|1", "whether the model thinks first where a request does not say\n(default 0)",
         whole(o.think, 0, 1)},
        {"", "--docs", "PATH", "chats are answered from a file or a folder of text: with a question go\n"
         "the passages that it is about, unless a request says use_documents: false", file_name(o.documents.docs)},
    };
    add_document_options(table, o.documents);
    const std::vector<Option> more = {
        {"", "--api-key-file", "FILE", "a key a line, behind it maybe a name for the log; requests must\nhave one of them", file_name(o.key_file)},
        {"", "--deadline", "SECONDS", "for a request to come in (default 60); half of it without a byte, five\n"
         "times of it to fetch an answer: then the connection is closed", whole(o.server.deadline, 1, 86400)},
        {"", "--drain-seconds", "N", "for what is under way when a signal comes (default 300)",
         whole(o.server.drain, 0, 86400)},
        {"", "--cors", "ORIGIN", "a web site whose scripts may call; may be repeated", list(o.server.origins)},
        {"", "--files", "DIR", "offers OpenAI's Files and Batches, which are kept in this folder",
         file_name(o.server.files)},
        {"", "--allow-adapter-loading", "", "clients may load adapters from this machine's folders, and unload them",
         flag(o.server.swaps)},
        {"", "--adapter-memory", "GB", "of adapters' files, all together, when clients load more (default: of\n"
         "what is free at the start CPU a quarter, GPU half)", gigabytes(o.engine.adapter_bytes)},
        {"", "--title", "TEXT", "name of the page to chat on (default Warp)", text(o.server.title)},
        {"-b", "--batch", "FILE", "OpenAI's Batch format instead of HTTP; interrupted, the same command\ngoes on",
         file_name(o.batch)},
        {"-o", "--output", "FILE", "where the answers of --batch go", file_name(o.output)},
    };
    table.insert(table.end(), more.begin(), more.end());
    o.add_to(table, true);
    for (Option& row : table)
        if (strcmp(row.name, "--adapter") == 0)
            row = {"", "--adapter", "NAME=DIR", "a LoRA adapter in PEFT's format, which requests name as their\n"
                   "model; may be repeated. DIR alone: for all requests",
                   [&o](const char* option, const char* v) { add_adapter(o, option, v); }};
    return table;
}

static Options parse_options(int argc, char** argv) {
    Options o;
    const std::vector<Option> table = option_table(o);
    const std::vector<std::string> words = parse(table, argc, argv);
    if (o.help) return print_help(USAGE, table), o;
    if (words.empty()) DIE("no model named (--help lists the options)");
    if (words.size() > 1) DIE("one model, please: %s and %s", words[0].c_str(), words[1].c_str());
    o.model = words[0];
    if (o.batch.empty() != o.output.empty())
        DIE(o.output.empty() ? "--batch needs -o FILE, where the answers go" : "-o is for --batch");
    for (auto& task : o.tasks)
        if (task != "generate" && task != "embed" && task != "rerank")
            DIE("--task %s: generate, embed or rerank", task.c_str());
    o.server.think = o.think, o.server.docs = !o.documents.docs.empty();
    check_document_options(o.documents);
    if (!o.key_file.empty()) o.server.keys = read_keys(o.key_file);
    if (o.name.empty()) {
        while (o.model.size() > 1 && o.model.back() == '/') o.model.pop_back();
        o.name = o.model.substr(o.model.rfind('/') + 1);
    }
    for (auto& one : o.adapters)
        if (one.first == o.name) DIE("--adapter %s=%s: the model has this name", o.name.c_str(), one.second.c_str());
    if (o.name.find_first_of("\"\\\n") != std::string::npos) DIE("--name %s: no quotes or backslashes", o.name.c_str());
    return o;
}

static std::atomic<bool> loading{true};

// The first signal lets what is under way come to its end; a second one, or one before there is anything, ends all.
// Any thread may be the one that it stops: hence the atomics.
static void on_signal(int) {
    if (loading || stopping.exchange(true)) _exit(130);
    interrupted = 1; // lookups of batches; those of other requests come to their end, as these do
}

// Quantised weights, which else become bf16: a server's steps have many tokens, for which bf16 is faster, on CPUs too.
template <class T> bool stay_packed(const Options& o) {
    return o.packed && keeps_packed<T>(o, o.ctx);
}

// What the answers of a batch depend on, but for its requests: a JSON object.
static std::string batch_depends(const Options& o, const ModelFile& file, const AdapterFile* adapter,
                                 const Tokenizer& tokenizer, const Documents* documents) {
    sj::Writer w;
    w.object();
    if (!o.batch.empty()) {
        const MappedFile requests(o.batch);
        w.field("requests", fnv1a(requests.data, requests.size));
    }
    w.field("name", o.name).field("model", file.hash());
    w.field("adapter", adapter ? adapter_hash(*adapter, 1) : 0).field("tokenizer", tokenizer.hash());
    if (documents) w.field("documents", documents->hash());
    w.field("dtype", o.dtype);
    if (o.ctx.kv_fp8) w.field("kv", "fp8");
    if (o.ctx.fp8_activations) w.field("activations", "fp8");
    if (file.is_quantized() && stay_packed<bf16>(o)) w.field("packed", true);
    w.field("plain", o.ctx.plain).field("context", o.engine.context).field("think", o.think);
    return w.field("system", o.system).end().text;
}

// One adapter for all requests, or several to choose from.
static void check_adapters(const Options& o) {
    if (!o.adapter.empty() && (!o.adapters.empty() || o.server.swaps))
        DIE("--adapter %s is for all requests: it does not go with %s", o.adapter.c_str(),
            o.adapters.empty() ? "--allow-adapter-loading" : "--adapter NAME=DIR");
    if (o.engine.adapter_bytes && !o.server.swaps) DIE("--adapter-memory is for --allow-adapter-loading");
    const bool public_one = o.server.host.compare(0, 4, "127.") && o.server.host != "::1";
    if (o.server.swaps && public_one && o.server.keys.empty())
        DIE("--allow-adapter-loading needs --api-key-file where other machines can call (--host %s)",
            o.server.host.c_str());
}

// Takes requests until a signal comes, then answers what it has.
static int serve_http(const Options& o, Server& server, const std::string& depends) {
    server.ready = true;
    if (server.filing) server.filing->start(server.service, server.desk, depends);
    const bool six = o.server.host.find(':') != std::string::npos;
    const char* host = o.server.host.c_str();
    fprintf(stderr, "listening on http://%s%s%s:%d/v1; a page to chat on is at /\n", six ? "[" : "", host, six ? "]" : "",
            server.port());
    for (; !stopping; usleep(200'000)) server.watch();
    server.drain();
    if (server.filing) server.filing->stop();
    return 0;
}

static bool does(const Options& o, const char* task) {
    return std::find(o.tasks.begin(), o.tasks.end(), task) != o.tasks.end();
}

// Engines 1, 2, .. beside the first, each on a GPU of its own, and the threads of all.
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

    Engines(Options o, const ModelFile& file, const AdapterFile* adapter, Engine<T>& zero)
        : desk(zero.desk), first(zero) {
        EngineOptions e = zero.options; // (the context is what the first one has)
        e.at_most = false;
        for (o.gpu = 1; o.gpu < o.gpus; o.gpu++) {
            const Context ctx = choose_device(o, file);
            auto one = std::unique_ptr<One>(new One{ctx, Weights<T>(file, o.dtype == "int8", stay_packed<T>(o))});
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
    ~Engines() {
        desk.close();
        for (std::thread& thread : threads) thread.join();
    }
    void start(const Options& o) {
        for (int k = 0; k < o.gpus; k++)
            threads.emplace_back([this, &o, k] { compute(o, k, k ? *others[(size_t)k - 1]->engine : first); });
    }

  private:
    void use_device([[maybe_unused]] int k) { // of this thread
#ifdef __CUDACC__
        if (first.ctx.gpu) CUDA_CHECK(cudaSetDevice(k));
#endif
    }
    void compute(const Options& o, int k, Engine<T>& engine) {
        o.use_threads();
#ifdef _OPENMP
        if (o.gpus > 1 && !o.threads) omp_set_num_threads(std::max(1, omp_get_max_threads() / o.gpus));
#endif
        try {
            use_device(k);
            ThreadPace pace(o, engine.ctx);
            engine.run(pace);
        } catch (const std::exception& fault) { // the GPU, or memory
            print_error("serve", o.gpus > 1 ? format("engine %d: %s", k, fault.what()) : fault.what());
            if (!engine.hand_over()) _exit(1); // there is no way on
        }
    }
};

template <class T> int serve(Options& o, const ModelFile& file, double start) {
    const Config& c = file.config;
    const bool gpu = o.ctx.gpu != nullptr, http = o.batch.empty();
    EngineOptions& e = o.engine;
    if (does(o, "embed") || does(o, "rerank")) e.texts = gpu ? 256 : 64;
    e.adapters = !o.adapters.empty() || o.server.swaps;
    if (!e.context) e.context = c.max_positions, e.at_most = true;
    if (!e.max_seqs) e.max_seqs = gpu ? 256 : 16;
    e.burst = gpu ? 8192 : 512;
    if (!http) e.chunk = e.burst; // nobody waits for the next token
    e.paced = !e.chunk;
    if (!e.chunk) e.chunk = gpu ? 64 : 8; // (on a GPU that many hardly cost more than one)
    if (o.jump < 0) o.jump = gpu ? 0 : 2; // (a step of a GPU that is not all single tokens has no graph, and costs more)
    e.jump = o.jump;
    e.lookup = o.lookup >= 0 ? o.lookup : LookUp::MOST;
    if (e.context > c.max_positions) DIE("--ctx %d: the model's limit is %d", e.context, c.max_positions);

    Desk desk;
    desk.keys = std::max<size_t>(1, o.server.keys.size());
    desk.limit = (size_t)(http ? o.max_queue + o.gpus * e.max_seqs : 4 * o.gpus * e.max_seqs + 2 * MAX_CHOICES);
    Server server(o.server, desk);
    if (http) server.start(); // to say that it is loading

    const std::string path = tokenizer_path(o);
    const Tokenizer tokenizer(path);
    if (!fits(tokenizer, file)) not_its_tokenizer(path, tokenizer, file);
    std::unique_ptr<AdapterFile> adapter;
    if (!o.adapter.empty()) adapter = std::make_unique<AdapterFile>(o.adapter, c);
    std::vector<AdapterFile> named; // what is wrong with them is said before the model is read
    for (auto& one : o.adapters) named.emplace_back(one.second, c);
    std::shared_ptr<const Documents> documents;
    if (!o.documents.docs.empty())
        documents = std::make_shared<Documents>(o.documents, [](auto& line) { print_error("serve", line); },
                                                open_document_models(o, o.documents));
    std::unique_ptr<Batcher> batch;
    if (!http) {
        const std::string depends = batch_depends(o, file, adapter.get(), tokenizer, documents.get());
        AdapterHashes hashes;
        for (size_t i = 0; i < named.size(); i++) hashes[o.adapters[i].first] = adapter_hash(named[i], 1);
        batch = std::make_unique<Batcher>(o.batch, o.output, depends, hashes);
    }
    Weights<T> weights(file, o.dtype == "int8", stay_packed<T>(o));
    to_device(o.ctx, file, weights);
    decode_for_long(o.ctx, file, weights);
    std::unique_ptr<AttachedAdapter<T>> attached;
    const int rows = e.max_seqs + std::max(e.chunk, e.burst);
    if (adapter) attached = std::make_unique<AttachedAdapter<T>>(o.ctx, weights, *adapter, rows);
    std::vector<AdapterPtr> present; // before the engine takes what memory is left
    for (size_t i = 0; i < named.size(); i++)
        present.push_back(std::make_shared<AdaptedModel<T>>(o.ctx, weights, named[i], o.adapters[i].first, rows));
    named.clear();
    Engine<T> engine(c, weights, tokenizer, desk, e, o.ctx);
    if (o.lookup > 0 && !engine.lookup.most)
        DIE("--lookup %d: on a GPU it needs --one-kernel (bf16 weights and keys, room for a copy)", o.lookup);
    Engines<T> engines(o, file, adapter.get(), engine);

    const int context = engine.options.context;
    server.service = {&tokenizer, o.name, o.system, context, o.think == 1};
    server.service.path = o.model;
    Adapters& adapters = *server.service.adapters;
    const size_t room = engine.room_for_adapters(); // of those that clients load, all together
    adapters.open = [&, room](const std::string& name, const std::string& folder) {
        const AdapterFile from = blame("lora_path", [&] { return AdapterFile(folder, c, true); });
        if (LoadedAdapter::alive_bytes() + from.map.size > room)
            throw Refusal(503, format("adapters may take %.3g GB together, those that still answer included",
                                      (double)room / 1e9));
        try {
            return engine.attach(from, name);
        } catch (const Error& e) { // memory
            throw Refusal(503, e.what());
        }
    };
    for (auto& one : present) adapters.add(one);
    present.clear();
    server.service.documents = documents;
    server.service.generates = does(o, "generate");
    if (does(o, "embed")) end_of_text(tokenizer), server.service.dimensions = c.C;
    if (does(o, "rerank")) {
        server.service.rerank = std::make_shared<RerankPrompt>(tokenizer);
        server.service.relevance = std::make_shared<Relevance>(o.ctx, weights, *server.service.rerank);
    }
    const std::string why = context == c.max_positions ? " (the model's limit)"
                          : e.at_most ? format(" (what memory allows of the model's %d)", c.max_positions) : "";
    const std::string several = o.gpus > 1 ? format("%d x ", o.gpus) : "";
    fprintf(stderr, "%s: %.1f M parameters, %s, %s%s, context %d%s, %d at once, %zu %spages of %d tokens; "
            "ready in %.2f s\n", o.name.c_str(), (double)parameters(c) / 1e6, type_name(weights), several.c_str(),
            device_name(o.ctx).c_str(), context, why.c_str(), o.gpus * e.max_seqs, desk.look().pages,
            o.ctx.kv_fp8 ? "FP8 " : "", PAGE, seconds() - start);
    engines.start(o);
    loading = false;
    const std::string depends =
        o.server.files.empty() ? "" : batch_depends(o, file, adapter.get(), tokenizer, documents.get());
    return http ? serve_http(o, server, depends) : batch->run(server.service, desk);
}

static int run(int argc, char** argv) {
    const double start = seconds();
    if (told_version("serve", argc, argv)) return 0;
    Options o = parse_options(argc, argv);
    if (o.help) return 0;
    o.use_threads();
    open_adapter(o);
    check_adapters(o);
    if (o.gpus > 1 && (!o.adapters.empty() || o.server.swaps))
        DIE("--gpus %d: adapters by name are for one GPU", o.gpus);
    if (o.gpus > 1 && o.device.empty() && !WITH_GPU)
        DIE("--gpus %d: this program was built without nvcc (-d cpu: engines on the CPU)", o.gpus);
    if (o.gpus > 1 && o.device.empty()) o.device = "cuda";
    ModelFile file(o.model);
    if (o.tasks.empty()) o.tasks = {says_it_embeds(file) ? "embed" : "generate"};
    file.logits = does(o, "generate");
    o.ctx = choose_device(o, file);
    return wide(o, file) ? serve<float>(o, file, start) : serve<bf16>(o, file, start);
}

int main(int argc, char** argv) {
    take_signals({}, {SIGPIPE}); // and two of its own
    struct sigaction action = {};
    action.sa_handler = on_signal;
    sigaction(SIGINT, &action, nullptr);
    sigaction(SIGTERM, &action, nullptr);
    return run_program("serve", run, argc, argv);
}
#endif // SERVE_NO_MAIN
