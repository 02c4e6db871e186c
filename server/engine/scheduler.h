// scheduler.h: which jobs run, what a step computes, and what becomes of what it drew.
//
//   scheduler.cpp    a step, and what is told of it     lines.cpp       jobs that wait, whose turn it is, who gives way
//   plan.cpp         the rows of a step                 admit.cpp       slots, pages, the prefix cache
//   proposals.cpp    tokens that are looked up          forced.cpp      forms: masks, and tokens without a choice
//   draw.cpp         draws on the CPU                   hand_out.cpp    what was drawn goes to whoever asked
#pragma once
#include "form/automaton.h"
#include "model/lookup.h"
#include "model/pace.h"
#include "model/tokenizer.h"
#include "qwen3.cu"
#include "server/engine/desk.h"
#include "server/engine/engine_options.h"
#include "server/engine/figures.h"
#include "server/engine/pace.h"
#include "server/engine/pages.h"
#include "server/engine/sequence.h"
#include "server/engine/step.h"
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace server {

// The tokens that a form allows next.
struct Allowed {
    std::shared_ptr<const Automaton::Mask> mask{}; // null: none,
    std::vector<int> also{};                       // ... and these
    bool operator<(const Allowed& o) const { return std::tie(mask, also) < std::tie(o.mask, o.also); }
};

// All of an engine but what it computes with. Its thread calls run() or step(); all others talk to the Desk.
struct Scheduler {
    Context ctx;
    const Config& config;
    const Tokenizer& tokenizer;
    Desk& desk;
    Window& window;
    EngineOptions options;
    LookUp lookup;

    Scheduler(const Config& c, const Tokenizer& t, Desk& d, const EngineOptions& o, const Context& where, Window* own);
    Scheduler(const Scheduler&) = delete;
    virtual ~Scheduler();

    // Until the desk is closed and all that was asked is done.
    void run(ThreadPace& pace);

    // One step: takes what is new, computes, hands out what was drawn. On a GPU that is what the step before this one
    // drew: the GPU computes while we look at it.
    void step();

    // After a fault of this engine: all that is not done goes to others, as if it had given way here. False: there is
    // no other. (With adapters there is none: they are on one GPU.)
    bool hand_over();

  protected:
    // ---- The computation, see Engine
    virtual void compute(Step& s) = 0;
    virtual void collect(Step& s) = 0;     // ... what it drew, where that was not waited for
    virtual void draw_masked(Step& s) = 0; // what `compute` has left
    virtual void describe_to_gpu(Sequence& q) = 0;

    Figures figures;
    int pages = 0, max_rows, max_pages;
    int* table = nullptr;      // (max_seqs + texts, max_pages)
    float* logits = nullptr;   // (max_draws(), V) of the step
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
    uint64_t arrivals = 0, ranks = 0, admissions = 0;
    bool odd = false;                        // see plan_step
    PromptPace prompt_pace;
    double handed_out = 0;                   // when the last step was
    uint64_t looked_up = 0;                  // admission of the answer that `lookup` knows
    double prompts_took = 0;                 // s of steps that were not `alone`, since it knows it
    int expected = -1;                       // the proposed id for the token under way, if any

    bool busy() const { return !running.empty() || !waiting.empty() || !under_way.empty(); }
    size_t max_draws() const { return (size_t)std::max(options.max_seqs, options.lookup + 1); }

    // To where the engine computes.
    template <class U> void give(U* to, const U* from, size_t n) { copy_in(ctx, to, from, n); }

    // ---- The schedule
    void take_jobs();

    // Whoever was not here gets no credit for it: its service begins where that of the others is.
    void catch_up(uint64_t key);
    void join_line(std::unique_ptr<Sequence> q);
    std::unique_ptr<Sequence> leave_line(uint64_t key, Line::iterator it);
    std::map<uint64_t, size_t> at_work() const; // answers, by key

    // First a token of every answer that runs, in order; then chunks of prompts that have been begun; then those that
    // wait, in their turn, as long as there are slots and pages for them. Where a running answer needs a page and there
    // is none, the last one that runs gives way: the first always gets on, and so everyone does.
    // Texts have slots of their own. Where texts and answers want a step's part for prompts, each has half, and what
    // the other leaves. Answers come first; but the pages that an answer gave up for a text are that text's.
    Step plan_step();

    // One answer's next token is all there is to compute: beside it what may follow, by lookup. (An answer that keeps
    // to a form has tokens without a choice instead, see jump.)
    void add_proposal(Step& s);

    // On a GPU, where steps are launched ahead: whether the next one has to wait until those under way have come. They
    // may have tokens that were proposed, or there is something to propose behind the token that is under way.
    bool awaits_proposal();
    // (On a GPU neither where a row's draw needs more than its logits.)
    bool may_propose(const Sequence& q) const;
    void know(const Sequence& q) {
        if (looked_up != q.admission) lookup.begin(q.ids, std::exchange(prompts_took, 0)), looked_up = q.admission;
    }

    // Makes rows with the same adapter neighbours: those of one token (which come first, see Batch), then the others.
    void group_rows(Step& s);

    // Tokens of texts' or answers' prompts that could come now, up to `most`: what has a slot, and pages.
    size_t wanted(bool texts, size_t most) const;

    // Pages that new texts leave alone: those that the next answer wants, unless answers alone have them.
    size_t reserved();

    // Chunks of their prompts, together of `budget` tokens at most; those that wait leave `kept` pages alone. Returns
    // how many tokens there are.
    size_t add_prompts(Step& s, bool texts, const size_t budget, const size_t kept);

    // The next turn is that of the key with the fewest answers (or texts) at work; of these the one for which least was
    // computed. Within a line: first come, first served; whoever gave way came before those that have not begun.
    std::map<uint64_t, Line>::iterator next_line(bool texts);

    // Nobody waits for another key's whole answers. If the next in turn finds no room, the last answer of the key with
    // the most of them gives way: if that leaves it no fewer than the other then has, or if keys must share a slot and
    // it has had its QUANTUM of tokens. What has given way is computed again, mostly from the cache. (For a text, which
    // has a slot soon, answers give way for tokens only.) A text whose rows are all computed or under way is not
    // stopped: its pages are free within a step. Returns whether something gave way.
    bool yield(bool texts);

    void drop_cancelled();
    void leave(Running::iterator it);

    // The next n rows of q; if they are the last, its next token is drawn.
    void add(Step& s, Sequence& q, size_t n);

    // A slot and the pages for all its tokens and the next one; what the cache has of them need not be computed, but
    // for the last token, whose logits are wanted. False: not enough pages. Each that runs keeps the chance of another.
    bool admit(Sequence& q);

    void give_back_pages(Sequence& q) { // the last one first: a page is of no use without those before it
        for (; !q.pages.empty(); q.pages.pop_back()) pool.release(q.pages.back());
    }
    void vacate(Sequence& q);
    void preempt(Running::iterator it);

    // Names the whole pages that are computed by now. (Only now: rows of one batch cannot read each other's pages.)
    void remember(Sequence& q);

    // ---- Results
    void hand_out(Step& s);

    // As long as what was drawn is what was proposed, its logits are there, and the next token is drawn. True if one
    // was the answer's last.
    bool take_proposed(Step& s, Sequence& q);

    // One more token of an answer. True if it was the last.
    bool accept(Sequence& q, TokenInfo&& info);

    // Where the form allows one text only, its tokens are those that the tokenizer makes of it, of which the last one is
    // left to the model: what follows may belong to it. (No model need be asked then, and none is surprised.)
    void foresee(Sequence& q);
    bool ends(const Sequence& q, int id) const;

    // Takes these tokens, if they are many; they are computed together, as a prompt's are. What is under way for q is
    // void. True if the last of them was the answer's. (What a draw would count or tell of them is not known here.)
    bool jump(Sequence& q);

    void tell();

    // After tell(), so that whoever has got an answer finds it counted, and its place free.
    void deliver();

    // ---- Draws
    Sequence& drawn_for(const Step& s, size_t i) const { return *running.find(s.draws[i].rank)->second; }

    // Whether the token that is drawn now may not end the answer.
    bool restrained(const Sequence& q) const { return q.answered() - 1 < q.job.min_tokens; }

    // Each id once: a GPU's threads add them side by side.
    std::map<int, float> biases(const Sequence& q, bool restrained) const;

    // Whether the next token must keep to a form, and which tokens do. False: all may come.
    bool has_form(const Sequence& q) const;
    bool tokens_of_form(Sequence& q, Allowed& tokens);
    size_t mask_words() const { return ((size_t)tokenizer.size() + 31) / 32; }

    // The row of `bits` (., words) with the tokens that may be drawn next, or -1: all. Draws with the same ones, most
    // of those that keep to one form, share a row: `rows` says which there are.
    int mask_row(Sequence& q, std::map<Allowed, int>& rows, uint32_t* bits);

    // ... on the CPU
    // Draws q's next token from its logits, which change; `mask`: of the tokens that may come, or null.
    TokenInfo draw_row(const Sequence& q, float* row, const uint32_t* mask) const;
    // What would be drawn if all other logits were -infinity, without a look at each of them.
    int draw_of(const float* row, const uint32_t* bits, const Sequence& q) const;
};

} // namespace server
