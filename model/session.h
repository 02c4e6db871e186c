// model/session.h: one conversation of a model and its cache, and how an answer is made in it.
#pragma once
#include "model/lookup.h"
#include "model/tokenizer.h"
#include "qwen3.cu"
#include <csignal>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

// On a GPU: draws, some of which are launched ahead of the caller. model/draw_ahead.h has the implementation.
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
    std::vector<int> ids;     // what the cache holds
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
    std::vector<int> ahead;                 // what it proposed after ids, as far as it has not been judged: in the
                                            // cache; the logits of each lie in the row after `logits`
    double fed = 0;                         // s that `feed` has taken for prompts, since an answer began

    // Plans all memory for `context` tokens. Throws Error if it is more than there is.
    Session(const Config& c, const Weights<T>& w, int context, const Context& where = {});
    Session(const Session&) = delete;

    void plan();

    bool full() const { return (int)ids.size() == capacity; }

    // Appends tokens; afterwards `logits` are the last one's. `rows` (if given) is handed the logits of every token in
    // turn. Stops early, with what it has, when *stop becomes non-zero.
    // Throws Error if they do not fit or one is not in the vocabulary.
    void feed(const std::vector<int>& tokens, const volatile sig_atomic_t* stop = nullptr,
              const std::function<void(const acc<T>*)>& rows = nullptr);

    // The logits of R rows of the last batch, from row n on.
    void take_logits(int n, int R);

    // ---- Drawing an answer, token by token. `exist`: only ids below may be drawn; `answer`: ids[answer] on belong to
    // the answer (see penalized); `most`: no more draws than these will follow.
    void begin_draws(const Sampling& how, int exist, size_t answer, size_t most);
    // The next token: not in the session until it is accepted.
    int draw();
    // Takes the token just drawn into the session.
    void accept(int id);
    // On a GPU: whether it draws, and is ahead of the caller; then it sees to proposals, too.
    bool draws_ahead() const { return ctx.gpu && (!lookup.most || step_tokens() > 1); }
    // Whether a token has the same bits in steps of several tokens as in one of its own.
    bool can_look_up() const { return !ctx.gpu || ctx.invariant || step_tokens() > 1; }
    // On a GPU: that one kernel computes.
    int step_tokens() const;

    // Takes the token if it is the next one that was proposed: then its logits are there.
    bool was_proposed(int id);
    // Feeds the token and what is proposed to follow it, of which no more is in the session yet than in the cache.
    void feed_with_proposal(int id);

    // Forgets all but the first n ids.
    void rewind(size_t n) { if (n < ids.size()) ids.resize(n); }
};

// How one answer is made, and what came of it.
struct Generation {
    Sampling sampling;
    size_t max_tokens = SIZE_MAX;
    std::vector<std::string> stops;
    const volatile sig_atomic_t* interrupt = nullptr;
    bool in_thought = false;      // the prompt has opened one (opens_thought): the answer's text begins with its mark

    std::vector<int> ids;         // the answer, without the end token
    std::string text;
    const char* finish = "";      // "stop", "length" or "interrupt"
};

// Answers from the session's logits on, until an end token, a stop string outside a thought, max_tokens or a full
// context; every token of the answer but the last is then in the session. `show` is handed the text as it comes, in whole
// characters. Without a tokenizer the text is the ids.
template <class T>
void generate(Session<T>& session, const Tokenizer* tokenizer, Generation& g,
              const std::function<void(std::string_view)>& show);
