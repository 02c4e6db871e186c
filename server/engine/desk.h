// desk.h: what passes between the threads of HTTP and those of engines: jobs, pieces of answers, figures; and the
// memory that waits. Part of serve.cu.
#pragma once

inline uint64_t random_bits() {
    static std::mutex mutex; // some random_devices are files
    std::lock_guard lock(mutex);
    static std::random_device device;
    return (uint64_t)device() << 32 | device();
}

struct Alternative {
    int id;
    float logprob;
};

// What is told of a token when log-probabilities are asked for. Texts joined are the answer.
struct TokenInfo {
    int id;
    float logprob;
    std::string text;
    std::vector<Alternative> top;
};

// The next piece of one of a request's answers.
struct Piece {
    int choice = 0;
    bool thought = false; // what the model says to itself
    std::string text;
    std::vector<TokenInfo> tokens;
    std::vector<CallPart> calls{};
    const char* finish = nullptr;  // with the last piece: "stop", "length" or "tool_calls",
    size_t count = 0;              // tokens drawn for the answer, its end token too
    size_t cached = 0;             // tokens of the prompt from the cache,
    size_t thoughts = 0;           // ... of the thought,
    std::string stop{};            // ... and the stop string that ended it
    std::vector<float> hidden{};   // (C) of a pooled job, which has this one piece
};

inline size_t bytes_of(const Piece& piece) {
    size_t n = sizeof piece + piece.text.size() + piece.hidden.size() * sizeof(float);
    for (auto& t : piece.tokens) n += sizeof t + t.text.size() + t.top.size() * sizeof(Alternative);
    for (auto& c : piece.calls) n += sizeof c + c.name.size() + c.arguments.size();
    return n;
}

// Memory that all clients share, and who holds how much of it. When it is used up, whoever holds the most of it loses
// one of its shares: the one that has held most for longest. So nobody can keep it from the others.
struct Budget {
    struct Share {
        uint64_t who = 0;             // a key at an address
        size_t bytes = 0;
        double since = seconds();
        std::function<void()> drop{}; // called when it is lost, with `mutex` held
        std::atomic<bool> lost{false};
    };
    size_t limit;
    std::mutex mutex{};
    std::set<Share*> shares{};        // that are not lost
    size_t used = 0;
    std::atomic<size_t> lost{0};      // shares, so far

    // n more bytes. False: the share is lost, maybe just now.
    bool add(Share& share, size_t n) {
        std::lock_guard lock(mutex);
        return add_locked(share, n);
    }
    bool add_locked(Share& share, size_t n) {
        if (share.lost) return false;
        shares.insert(&share);
        share.bytes += n, used += n;
        while (used > limit) lose_one();
        return !share.lost;
    }
    void remove(Share& share, size_t n) {
        std::lock_guard lock(mutex);
        if (share.lost) return;
        share.bytes -= n, used -= n;
        if (share.bytes == 0) shares.erase(&share);
    }
    void remove(Share& share) {
        std::lock_guard lock(mutex);
        if (shares.erase(&share)) used -= std::exchange(share.bytes, 0);
    }

  private:
    void lose_one() {
        std::map<uint64_t, size_t> held;
        for (Share* s : shares) held[s->who] += s->bytes;
        const double now = seconds();
        auto rank = [&](const Share* s) { return std::pair(held[s->who], (double)s->bytes * (now - s->since)); };
        Share* worst = *std::max_element(shares.begin(), shares.end(),
                                         [&](Share* a, Share* b) { return rank(a) < rank(b); });
        shares.erase(worst);
        used -= worst->bytes, lost++;
        worst->lost = true;
        if (worst->drop) worst->drop();
    }
};

// Where the engine leaves pieces, and whoever asked takes them.
struct Reply {
    std::mutex mutex;
    std::vector<Piece> pieces;        // not yet taken
    bool whole = false;               // nobody looks before the end: an answer's pieces are joined
    int left = 0;                     // answers that are not finished
    std::atomic<bool> cancelled{false};
    std::shared_ptr<Budget::Share> share{}; // of what waits to be sent; none: it is not counted
    size_t kept = 0;                  // bytes of the request that wait with it, to be sent too
    double first = 0, last = 0;       // when pieces came
    std::function<void()> wake;       // called with `mutex` held after every piece

    void put(Piece&& piece) {
        auto joins = [&](const Piece& p) { return p.choice == piece.choice && p.thought == piece.thought; };
        const auto at = whole ? std::find_if(pieces.rbegin(), pieces.rend(), joins) : pieces.rend();
        const bool after_call = at != pieces.rend() && !at->calls.empty() && !piece.text.empty(); // (order stays)
        if (at == pieces.rend() || after_call) return pieces.push_back(std::move(piece));
        at->text += piece.text;
        std::move(piece.tokens.begin(), piece.tokens.end(), std::back_inserter(at->tokens));
        std::move(piece.calls.begin(), piece.calls.end(), std::back_inserter(at->calls));
        at->finish = piece.finish, at->count = piece.count, at->cached = piece.cached;
        at->thoughts = piece.thoughts, at->stop = std::move(piece.stop);
    }
};

constexpr float BAN = -1e30f;   // as a bias: never,
constexpr float ALLOW = 1000;   // ... and: these only. (Far above all logits, and still exact to 1e-4.)
constexpr size_t MAX_ENDS = 64; // ids that end an answer, of a request, and of a model

// One answer to be made.
struct Job {
    std::shared_ptr<Reply> reply;
    int choice = 0;
    std::vector<int> prompt;
    Sampling how;
    std::vector<std::pair<int, float>> bias; // ids and what is added to their logits, after the penalties
    std::vector<std::string> stops;
    std::vector<int> ends;            // ids that end it, beside the model's
    size_t max_tokens = 0, min_tokens = 0; // before min_tokens nothing ends it
    bool ignore_eos = false, thinking = false;
    bool specials = false;            // special tokens are told as text
    bool every = false;               // a piece for every token, even if nothing can be shown yet: a stream that lives
    int alternatives = -1;            // of each token that are told, -1: not even its own log-probability
    std::shared_ptr<Automaton> form{}; // that the answer keeps to, once its thought is over;
    bool form_of_calls = false;       // ... or, instead, what follows each <tool_call>
    std::shared_ptr<const std::set<std::string>> tools{}; // that may be called; none: <tool_call> is text
    bool sure_calls = false;          // calls are in form, and are told as they come
    bool one_call = false;            // the answer ends with it
    uint64_t salt = 1;                // its API key's number: keys take turns
    uint64_t space = 0;               // only prompts of one space share pages: its cache_salt's, or (0) the key's
    AdapterPtr adapter{};             // it is computed with
    int priority = 0;                 // within its key; the lowest first
    bool pooled = false;              // no answer: the hidden state of the prompt's last token
    double arrived = seconds();
    std::shared_ptr<void> counted{};  // as load of the engine that has it, see Window

    // Texts take their turns beside the answers of the same key.
    static constexpr uint64_t TEXTS = 1ull << 32;
    uint64_t line() const { return salt + (pooled ? TEXTS : 0); }
};
constexpr size_t MAX_TEXTS = 2048;               // of a request for vectors or a ranking: OpenAI's limit
constexpr size_t WAITING_TEXTS = 8 * MAX_TEXTS;  // ... and of all requests; they have no part in the queue of answers
constexpr size_t MAX_TEXT_TOKENS = 1 << 20, WAITING_TEXT_TOKENS = 32 << 20; // the same of their tokens

// The space of a key's requests with this cache_salt. Below 2^32 are the keys' own, then come the names of pages; two
// keys never have one in common.
inline uint64_t salted_space(uint64_t key, const std::string& salt) {
    static const uint64_t secret = random_bits();
    return 1ull << 63 | key << 40 | fnv1a(salt.data(), salt.size(), secret) >> 24;
}

// How long things took: counts in the buckets that Prometheus wants, each holding all below.
struct Histogram {
    static constexpr double BOUNDS[] = {.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120};
    static constexpr int N = sizeof BOUNDS / sizeof *BOUNDS;
    size_t buckets[N] = {}, count = 0;
    double sum = 0;
    void add(double x) {
        for (int i = 0; i < N; i++) buckets[i] += x <= BOUNDS[i];
        count++, sum += x;
    }
    void add(const Histogram& more) {
        for (int i = 0; i < N; i++) buckets[i] += more.buckets[i];
        count += more.count, sum += more.sum;
    }
};

// As Prometheus reads it.
inline std::string histogram_text(const char* name, const std::string& label, const Histogram& h) {
    std::string out;
    for (int i = 0; i < Histogram::N; i++)
        out += format("%s_bucket{%s,le=\"%g\"} %zu\n", name, label.c_str(), Histogram::BOUNDS[i], h.buckets[i]);
    out += format("%s_bucket{%s,le=\"+Inf\"} %zu\n", name, label.c_str(), h.count);
    return out + format("%s_sum{%s} %.9g\n", name, label.c_str(), h.sum) +
           format("%s_count{%s} %zu\n", name, label.c_str(), h.count);
}

struct Figures {
    size_t running = 0, waiting = 0, pages = 0, pages_used = 0; // now
    uint64_t prompt_tokens = 0, answer_tokens = 0, looked_up = 0, found = 0, preempted = 0;
    uint64_t stopped = 0, cut = 0, cancelled = 0; // answers, by how they ended
    uint64_t forced = 0; // tokens that were taken at once, since a form left no choice
    Histogram first_token, between_tokens, whole;

    void add(const Figures& f) {
        for (auto number : {&Figures::running, &Figures::waiting, &Figures::pages, &Figures::pages_used})
            this->*number += f.*number;
        for (auto number : {&Figures::prompt_tokens, &Figures::answer_tokens, &Figures::looked_up, &Figures::found,
                            &Figures::preempted, &Figures::stopped, &Figures::cut, &Figures::cancelled,
                            &Figures::forced})
            this->*number += f.*number;
        for (auto times : {&Figures::first_token, &Figures::between_tokens, &Figures::whole})
            (this->*times).add(f.*times);
    }
};

#include "server/engine/engines.h"

// Jobs go in here, from any thread, and the engine takes them out. It is the window of the first engine, too.
struct Desk : Window {
    std::mutex mutex;
    std::condition_variable news;
    std::vector<Window*> windows{this}; // of all engines
    Router router;
    size_t limit = 0;                 // most jobs there may be in all
    size_t keys = 1;                  // of API keys; when all is full, each may still have its share of the limit
    size_t texts = 0, text_tokens = 0; // of all jobs, those that are pooled, and the tokens of these
    size_t lookups = 0;               // requests whose documents are looked up, or will be: places for answers
    struct Held { size_t jobs = 0, tokens = 0; }; // that are not done, lookups too; tokens of texts
    std::map<uint64_t, Held> held;    // by line
    bool closed = false;              // nothing more will come
    Budget unsent{256 << 20};         // pieces and answers that nobody has taken yet

    // The jobs of one request. False: there is no room for them now.
    bool submit(std::vector<Job>&& jobs) {
        std::lock_guard lock(mutex);
        const bool pooled = jobs[0].pooled;
        Held& own = held[jobs[0].line()];
        const size_t all = pooled ? texts : answers(), most = pooled ? WAITING_TEXTS : limit;
        if (closed || (all + jobs.size() > most && own.jobs + jobs.size() > most / keys)) return false;
        size_t tokens = 0;
        for (const Job& job : jobs) tokens += pooled ? job.prompt.size() : 0;
        if (pooled && text_tokens + tokens > WAITING_TEXT_TOKENS && own.tokens + tokens > WAITING_TEXT_TOKENS / keys)
            return false;
        const Reply& reply = *jobs[0].reply;
        if (reply.share && reply.kept && !unsent.add(*reply.share, reply.kept)) return false;
        own.jobs += jobs.size(), own.tokens += tokens;
        texts += pooled ? jobs.size() : 0, text_tokens += tokens;
        for (Job& job : jobs) place(std::move(job));
        news.notify_all();
        return true;
    }
    void place(Job&& job) { // with `mutex` held
        Window& to = *windows[windows.size() > 1 ? (size_t)router.choose(job, windows) : 0];
        if (windows.size() > 1) to.count(job);
        to.inbox.push_back(std::move(job));
    }
    size_t answers() const { // `mutex` is held
        size_t there = 0;
        for (const Window* w : windows) there += w->inbox.size() + w->inside;
        return there - texts + lookups;
    }

    // A lookup keeps a place for the answer that comes of it, until leave. False: there is none.
    bool enter(uint64_t line) {
        std::lock_guard lock(mutex);
        if (closed || (answers() + 1 > limit && held[line].jobs + 1 > limit / keys)) return false;
        lookups++, held[line].jobs++;
        return true;
    }
    void leave(uint64_t line) {
        std::lock_guard lock(mutex);
        lookups--, held[line].jobs--;
    }
    void close() {
        std::lock_guard lock(mutex);
        closed = true;
        news.notify_all();
    }
    // Of each engine; of all. Nobody who asks for figures waits for an engine, nor for `mutex`: they are swapped whole.
    std::vector<Figures> look_at_each() const {
        std::vector<Figures> all;
        for (const Window* w : windows) all.push_back(*std::atomic_load(&w->figures));
        return all;
    }
    Figures look() const {
        Figures sum;
        for (const Figures& f : look_at_each()) sum.add(f);
        return sum;
    }
};
