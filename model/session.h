// model/session.h: one conversation of a model and its cache, and the generation of an answer in it.
#pragma once
#include "base/stop_flag.h"
#include "model/lookup.h"
#include "model/tokenizer.h"
#include "qwen3.cu"
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

// On a GPU: sampling, partly launched ahead of the caller. model/draw_ahead.h has the implementation.
struct DrawsAhead {
    virtual ~DrawsAhead() = default;
    virtual void plan() = 0;              // the session's memory that only a GPU needs, from its arena
    virtual void begin(size_t most) = 0;  // an answer of up to `most` draws, see Session::begin_draws
    virtual int next() = 0;               // the next token
    virtual int tokens() = 0;             // that a step by one kernel has, at most; 1: no step is one kernel
};
template <class T> struct Session;
std::shared_ptr<DrawsAhead> gpu_draws(Session<bf16>& session);

// One conversation: a model, its KV cache, and the ids in it. On the GPU if `ctx` says so; the weights are there too.
template <class T> struct Session {
    static constexpr int CHUNK = 512;      // tokens of a prompt that go through `forward` at once
    static constexpr int GPU_CHUNK = 8192; // ... on a GPU
    static constexpr int ROWS = 16;        // of them that go through the head at once, where all logits are wanted

    Context ctx;
    const Config& config;
    const Weights<T>& weights;
    int capacity;             // tokens
    std::vector<int> ids;     // of the rows in the cache
    acc<T>* logits;           // (V) after the last id that was fed, in the CPU's memory

    // Where it computes. The rest is for DrawsAhead.
    Arena arena;
    Activations<T> activations;
    KVCache<T> cache;
    T* picked;                              // (ROWS,C) scratch of `head`
    acc<T> *rope, *row_logits;              // (capacity, D/2, 2), (ROWS,V)
    int chunk, pages, *token, *pos, *seq, *slot, *table, *named; // a Batch; the rows that go through the head
    int* last_row;                          // the one whose logits were taken last
    std::shared_ptr<acc<T>[]> host_logits;  // on a GPU: row_logits in the CPU's memory
    struct { Sampling how; int exist; size_t answer, most; } drawing; // see begin_draws
    std::shared_ptr<DrawsAhead> draws;      // on a GPU
    LookUp lookup;                          // may be asked for, see can_look_up
    std::vector<int> ahead;                 // its proposals after ids, as far as they have not been judged: in the
                                            // cache; the logits of each lie in the row after `logits`
    double fed = 0;                         // s that `feed` has taken for prompts, since an answer began

    // Plans all memory for `context` tokens. Throws Error if there is not enough.
    Session(const Config& c, const Weights<T>& w, int context, const Context& where = {});
    Session(const Session&) = delete;

    void plan();

    bool full() const { return (int)ids.size() == capacity; }

    // Appends tokens; afterwards `logits` are the last one's. `rows` (if given) receives the logits of every token in
    // turn. Stops early, keeping the tokens done so far, when *stop becomes non-zero. Throws Error if they do not fit
    // or one is not in the vocabulary.
    void feed(const std::vector<int>& tokens, const StopFlag* stop = nullptr,
              const std::function<void(const acc<T>*)>& rows = nullptr);

    // The logits of R rows of the last batch, from row n on.
    void take_logits(int n, int R);

    // ---- Sampling an answer, token by token. `exist`: only lower ids are allowed; `answer`: ids[answer] on belong to
    // the answer (see penalized); `most`: at most this many draws follow.
    void begin_draws(const Sampling& how, int exist, size_t answer, size_t most);
    // The next token: it enters the session only when it is accepted.
    int draw();
    // Appends the sampled token to the session.
    void accept(int id);
    // On a GPU: whether it samples ahead of the caller; then it also handles proposals.
    bool draws_ahead() const { return ctx.gpu && (!lookup.most || step_tokens() > 1); }
    // Whether a token has the same bits in steps of several tokens as in one of its own.
    bool can_look_up() const { return !ctx.gpu || ctx.invariant || step_tokens() > 1; }
    // On a GPU: that one kernel computes.
    int step_tokens() const;

    // Accepts the token if it is the next proposed one: then its logits are already computed.
    bool was_proposed(int id);
    // Feeds the token and its proposed successors; of these the cache holds keys, but the session no ids yet.
    void feed_with_proposal(int id);

    // Forgets all but the first n ids.
    void rewind(size_t n) { if (n < ids.size()) ids.resize(n); }
};

// Parameters of an answer, and its result.
struct Generation {
    Sampling sampling;
    size_t max_tokens = SIZE_MAX;
    std::vector<std::string> stops;
    const StopFlag* interrupt = nullptr;
    bool in_thought = false;      // the prompt opens a thought (opens_thought): the answer's text begins with its mark

    std::vector<int> ids;         // the answer, without the end token
    std::string text;
    const char* finish = "";      // "stop", "length" or "interrupt"
};

// Answers from the session's logits on, until an end token, a stop string outside a thought, max_tokens or a full
// context; every token of the answer but the last is then in the session. `show` receives the text as it is generated,
// in whole characters. Without a tokenizer the text is the ids.
template <class T>
void generate(Session<T>& session, const Tokenizer* tokenizer, Generation& g,
              const std::function<void(std::string_view)>& show);
