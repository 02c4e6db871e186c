// scheduler.h: selects the jobs that run, plans a step, and processes the sampled tokens.
//
//   scheduler.cpp    a step, and the figures            lines.cpp       waiting jobs, turns, preemption
//   plan.cpp         the rows of a step                 admit.cpp       slots, pages, the prefix cache
//   disk_prefix.cpp  prompts' pages from the disk and to it
//   proposals.cpp    tokens of prompt lookup            forced.cpp      forms: masks, and forced tokens
//   draw.cpp         sampling on the CPU                hand_out.cpp    delivers sampled tokens
#pragma once
#include "form/automaton.h"
#include "model/lookup.h"
#include "model/pace.h"
#include "model/tokenizer.h"
#include "qwen3.cu"
#include "server/engine/desk.h"
#include "server/engine/disk_pages.h"
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

struct DiskPrefix; // disk_prefix.h

// An engine without its computation. One thread calls run() or step(); all others use the Desk.
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

    // Runs until the desk is closed and all jobs are done.
    void run(ThreadPace& pace);

    // One step: takes new jobs, computes, hands out tokens. On a GPU these are the tokens of the previous step: the GPU
    // computes this one while the host processes them.
    // Returns the value of save_pages.
    double step();

    // After a fault of this engine: moves all unfinished jobs to other engines, as if preempted here. False: there is
    // no other engine, and their replies are cancelled. (With adapters there is none: they are on one GPU.)
    bool hand_over();

  protected:
    // ---- The computation, see Engine
    virtual void compute(Step& s) = 0;
    virtual void collect(Step& s) = 0;     // ... fetches the sampled tokens, if compute did not wait
    virtual void draw_masked(Step& s) = 0; // the draws that `compute` left out
    virtual void describe_to_gpu(Sequence& q) = 0;
    virtual size_t page_bytes() const = 0;
    // Copies a page's keys and values to `bytes` (out) or from there. `then` is called when that is done, perhaps later
    // and by another thread.
    virtual void copy_page(int page, uint8_t* bytes, bool out, std::function<void()> then) = 0;

    Figures figures;
    int pages = 0, max_rows, max_pages;
    int* table = nullptr;      // (max_seqs + texts, max_pages)
    float* logits = nullptr;   // (max_logits(), V) of the step
    PagePool pool;
    std::vector<int> free_slots[2];          // for answers, for pooled texts
    Running running;                         // by rank: in the order of their first admission
    std::map<uint64_t, Line> waiting;        // a line for each API key
    std::vector<std::unique_ptr<Sequence>> later; // of `waiting`: they wait for pages, and add_prompts goes on
    size_t in_lines = 0, most_in_lines = 0;  // waiting jobs; their maximum since memory was last trimmed
    std::pair<uint64_t, Place> looked_at{};  // how far the lines have been scanned for cancelled jobs
    std::map<uint64_t, uint64_t> service;    // by key: tokens computed for it, see next_line()
    std::vector<std::pair<uint64_t, size_t>> ended; // since tell(): lines of ended jobs, tokens of their prompts
    std::vector<std::pair<std::shared_ptr<Reply>, Piece>> outbox;
    std::deque<Step> under_way;
    uint64_t arrivals = 0, ranks = 0, admissions = 0;
    bool odd = false;                        // see plan_step
    PromptPace prompt_pace;
    double handed_out = 0;                   // time of the last one
    uint64_t looked_up = 0;                  // admission of the answer that `lookup` holds
    double prompts_took = 0;                 // s of steps that were not `alone`, since then
    int expected = -1;                       // the proposed id for the token in flight, or -1

    std::unique_ptr<DiskPrefix> disk;        // null: no cache on disk

    bool busy() const;
    size_t max_draws() const { return (size_t)std::max(options.max_seqs, options.lookup + 1); }
    // Rows that go through the head at once: more where few answers run, since a prompt has many targets.
    size_t max_logits() const { return std::max<size_t>(max_draws(), 64); }

    // Copies to the memory where the engine computes.
    template <class U> void give(U* to, const U* from, size_t n) { copy_in(ctx, to, from, n); }

    // ---- The schedule
    void take_jobs();

    // A key that was absent gets no credit: its service starts at the level of the others.
    void catch_up(uint64_t key);
    void join_line(std::unique_ptr<Sequence> q);
    std::unique_ptr<Sequence> leave_line(uint64_t key, Line::iterator it);
    std::map<uint64_t, size_t> at_work() const; // running answers, by key

    // Order: one token of every running answer; then chunks of prompts in progress; then waiting jobs, in turn, as
    // long as slots and pages last. If a running answer needs a page and none is free, the last running one is
    // preempted: the first always advances, and so all do in the end.
    // Pooled texts have slots of their own. If both texts and answers have prompt tokens, each gets half of the step,
    // and the rest of the other's half. Answers come first; but pages that an answer gave up for a text are the text's.
    Step plan_step();

    // If one answer's next token is all there is to compute, adds proposed tokens of prompt lookup. (An answer with a
    // form has forced tokens instead, see jump.)
    void add_proposal(Step& s);

    // On a GPU, where steps are launched ahead: whether the next step must wait for those in flight. They may hold
    // proposed tokens, or there is something to propose behind the token in flight.
    bool awaits_proposal();
    // (On a GPU, not if a row's draw needs more than its logits.)
    bool may_propose(const Sequence& q) const;
    void know(const Sequence& q) {
        if (looked_up != q.admission) lookup.begin(q.ids, std::exchange(prompts_took, 0)), looked_up = q.admission;
    }

    // Makes rows with the same adapter adjacent: first those of one token (see Batch), then the others.
    void group_rows(Step& s);

    // Prompt tokens of texts or answers that could run now, up to `most`: those with a slot and pages.
    size_t wanted(bool texts, size_t most) const;

    // Pages that new texts must leave: those of the next answer; none if they are missing and no text runs.
    size_t reserved();

    // Adds chunks of their prompts, `budget` tokens at most in all; new jobs leave `kept` pages free. Returns the
    // number of tokens.
    size_t add_prompts(Step& s, bool texts, const size_t budget, const size_t kept);

    // The next turn goes to the key with the fewest running answers (or texts), of these to the one with least service.
    // Within a line: first come, first served; preempted jobs precede those that have not begun.
    std::map<uint64_t, Line>::iterator next_line(bool texts);

    // No key waits for another key's whole answers. If the next in turn finds no room, the last answer of the key with
    // the most is preempted: if that leaves it no fewer than the other then has, or if keys must share a slot and it
    // has had its QUANTUM of tokens. Preempted jobs are recomputed, mostly from the cache. (For a text, which has a
    // slot soon, answers are preempted by QUANTUM only.) A text whose rows are all computed or in flight is not
    // preempted: its pages are free within a step. Returns whether something was preempted.
    bool yield(bool texts);

    void drop_cancelled();
    void leave(Running::iterator it);

    // Adds the next n rows of q; if they are the last, its next token is sampled.
    void add(Step& s, Sequence& q, size_t n);

    // Adds the targets among these rows of a prompt, before they are counted as computed.
    void add_targets(Step& s, Sequence& q, size_t n);

    // Takes a slot, and pages for all tokens and the next one. Cached tokens are not recomputed, except the last, whose
    // logits are needed, and those in pages that do not know log-probabilities, if the job reports these. False: not
    // enough pages. One free page remains for each running job.
    bool admit(Sequence& q);

    // The cached pages that a sequence can begin with.
    std::vector<int> cached_pages(const Sequence& q) const;

    // Whether running prompts are computing log-probabilities that q could share: a question's answers begin alike.
    bool awaits_pages(const Sequence& q) const;

    // ---- The prefix cache on disk
    void open_disk();

    // Whether q has to wait for pages that come from the disk; may begin to read them. Pages are restored under their
    // names, so that admit() finds them as if they had never left. One prompt's pages are read at a time; prompts that
    // need none of them do not wait.
    bool awaits_disk(Sequence& q);

    // Restores the pages that have come.
    void read_pages();

    // Sends pages of prompts to the disk: those that a second prompt began with always, the others if nothing else is
    // to do. (So a server under load writes only pages that are worth it.) Returns the seconds until the next call; 0:
    // none is left.
    double save_pages();
    void find_keys(Sequence& q) const;
    void may_save(Sequence& q); // its last named page
    void used_pages(Sequence& q, size_t found); // that were in memory

    void give_back_pages(Sequence& q) { // last page first: a page is useless without those before it
        for (; !q.pages.empty(); q.pages.pop_back()) pool.release(q.pages.back());
    }
    void vacate(Sequence& q);
    void preempt(Running::iterator it);

    // Names the full pages computed so far. (Not earlier: rows of one batch cannot read each other's pages.)
    void remember(Sequence& q);

    // ---- Results
    void hand_out(Step& s);

    // Gives the log-probabilities of a prompt's targets to the sequences, and to the pages that they complete.
    void take_targets(Step& s);

    // The prompt's tokens with their texts, which joined are its text.
    void tell_prompt(Sequence& q, Piece& piece) const;

    // While the sampled token equals the proposed one, its logits are there, and the next token is sampled. True if a
    // token was the answer's last.
    bool take_proposed(Step& s, Sequence& q);

    // Adds one token to an answer. True if it was the last.
    bool accept(Sequence& q, TokenInfo&& info);

    // If the form allows only one text, queues its tokens as the tokenizer makes them. The last is left to the model,
    // since it may merge with the text that follows. (This saves model steps, and the model sees the usual tokens.)
    void foresee(Sequence& q);
    bool ends(const Sequence& q, int id) const;

    // Takes the forced tokens, if there are enough; they are computed together, as a prompt's are. Results in flight
    // for q are void. True if the last one ended the answer. Takes none with penalties or log-probabilities.
    bool jump(Sequence& q);

    void tell();

    // Called after tell(): a client that has its answer finds it counted, and its place free.
    void deliver();

    // ---- Sampling
    Sequence& drawn_for(const Step& s, size_t i) const { return *running.find(s.draws[i].rank)->second; }

    // Whether the token being sampled may not end the answer.
    bool restrained(const Sequence& q) const { return q.answered() - 1 < q.job.min_tokens; }

    // Each id once: GPU threads add them in parallel.
    std::map<int, float> biases(const Sequence& q, bool restrained) const;

    // Whether a form constrains the next token, and the tokens that it allows. False: all tokens.
    bool has_form(const Sequence& q) const;
    bool tokens_of_form(Sequence& q, Allowed& tokens);
    size_t mask_words() const { return ((size_t)tokenizer.size() + 31) / 32; }

    // The row of `bits` (., words) with the allowed tokens, or -1: all. Draws with the same set, mostly those with the
    // same form, share a row: `rows` maps sets to rows.
    int mask_row(Sequence& q, std::map<Allowed, int>& rows, uint32_t* bits);

    // On the CPU:
    // Samples q's next token from its logits, which are modified; mask: the allowed tokens, or null.
    TokenInfo draw_row(const Sequence& q, float* row, const uint32_t* mask) const;
    // Samples as if all other logits were -infinity, without visiting them.
    int draw_of(const float* row, const uint32_t* bits, const Sequence& q) const;
};

} // namespace server
