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

   Contents
   1 Between the threads   Job, Piece, Budget, Reply, Desk, figures; several engines (engines.h)
   2 Speech                ids to text: characters, stop strings, thoughts, log-probabilities
   3 Engine                pages and prefix cache, schedule, step; on the CPU and on a GPU
   4 API                   from JSON to jobs (request.h), from pieces to JSON; vectors and rankings (embed_api.h); two
                           other dialects (dialects.h)
   5 Batch                 a file of requests; over HTTP (batches.h)
   6 HTTP                  libmicrohttpd: log, workers, connections, deadlines, routes
   7 main
*/
#define QWEN3_NO_MAIN
#include "qwen3.cu"
#include "hybrid.h"
#include "tools.h"
#include <atomic>
#include <condition_variable>
#include <deque>
#include <malloc.h>
#include <mutex>
#include <sys/file.h>
#include <thread>
#include <tuple>
#include <unordered_map>
#include "server/adapters.h"
#include "server/pace.h"

// ======================================================================================= 1 Between the threads

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
    size_t used = 0, losses = 0;

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
    size_t lost() {
        std::lock_guard lock(mutex);
        return losses;
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
        used -= worst->bytes, losses++;
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
    return out + format("%s_sum{%s} %.9g\n%s_count{%s} %zu\n", name, label.c_str(), h.sum, name, label.c_str(), h.count);
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

#include "server/engines.h"

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
    // Of all engines; of each.
    Figures look() {
        std::lock_guard lock(mutex);
        Figures sum = figures;
        for (const Window* w : windows)
            if (w != this) sum.add(w->figures);
        return sum;
    }
    std::vector<Figures> look_at_each() {
        std::lock_guard lock(mutex);
        std::vector<Figures> all;
        for (const Window* w : windows) all.push_back(w->figures);
        return all;
    }
};

// =================================================================================================== 2 Speech

// The text of one answer. Characters are complete, what may become a stop string is held back, and so are a thought's
// last newlines; the markers around a thought are ids, never text that looks like them.
struct Speech {
    const Tokenizer& tokenizer;
    bool informed;                    // log-probabilities are wanted
    StopFilter filter;
    enum { BEGIN, THOUGHT, ANSWER, CALL } state;
    int open, close;                  // ids of <think> and </think>,
    int call_open, call_close;        // ... <tool_call> and </tool_call>
    std::shared_ptr<const std::set<std::string>> tools;
    bool sure_calls;
    CallText call{};                  // that is being said
    size_t calls = 0;                 // said
    Utf8Stream characters{};
    bool skipping = false;            // newlines after a marker
    std::string newlines{};           // at the end of a thought so far, or of what may come before a call
    bool specials;                    // they are text
    std::deque<TokenInfo> held{};     // their texts begin in the answer at byte `given`, or later
    size_t given = 0, shown = 0;      // bytes of the answer

    Speech(const Tokenizer& t, const Job& job)
        : tokenizer(t), informed(job.alternatives >= 0), filter{job.stops, "", false},
          state(job.thinking ? BEGIN : ANSWER), open(t.id("<think>")), close(t.id("</think>")),
          call_open(t.id(CALL_OPEN)), call_close(t.id(CALL_CLOSE)), tools(job.tools), sure_calls(job.sure_calls),
          specials(job.specials) {
        if (job.min_tokens) filter.stops.clear(); // until then
    }

    // Takes a token; `piece` gets what can be shown because of it.
    void feed(Piece& piece, TokenInfo&& info) {
        const int id = info.id;
        if (state == BEGIN) {
            state = id == open ? THOUGHT : ANSWER;
            if (state == THOUGHT) { skipping = true; return; }
        }
        piece.thought = state == THOUGHT;
        if (state == THOUGHT && id == close) {
            show(piece, filter.feed(characters.flush()));
            if (filter.stopped) return;
            show(piece, filter.flush());
            newlines.clear();
            state = ANSWER, skipping = true;
            return;
        }
        if (state == CALL) return say_call(piece, id);
        if (state == ANSWER && tools && id == call_open) {
            show(piece, filter.feed(characters.flush()));
            if (filter.stopped) return;
            show(piece, filter.flush());
            state = CALL, call = {};
            return;
        }
        info.text = tokenizer.is_special(id) && !specials ? "" : skip(characters.feed(tokenizer.bytes(id)));
        const std::string out = filter.feed(info.text);
        if (informed && state == ANSWER) held.push_back(std::move(info));
        show(piece, out);
    }

    // The answer is over: all that is left.
    void finish(Piece& piece) {
        piece.thought = state == THOUGHT;
        if (state == CALL) { // cut off
            if (!sure_calls) take_as_text(piece, "");
            else characters.flush();
            state = ANSWER;
        }
        const std::string tail = skip(characters.flush());
        if (!held.empty()) held.back().text += tail;
        show(piece, filter.feed(tail));
        show(piece, filter.flush());
        for (TokenInfo& t : held) { // what a stop string has cut off is not told
            if (filter.stopped && given >= shown) break;
            const size_t length = std::min(t.text.size(), shown - given);
            given += length, t.text.resize(length);
            piece.tokens.push_back(std::move(t));
        }
        held.clear();
        if (state != THOUGHT && !filter.stopped) piece.text += std::exchange(newlines, {});
    }

  private:
    // A token of a call. The line breaks before and after it are not said.
    void say_call(Piece& piece, int id) {
        if (id != call_close) {
            call.text += characters.feed(tokenizer.bytes(id));
            if (sure_calls) call.tell(piece.calls);
            return;
        }
        call.text += characters.flush();
        state = ANSWER;
        if (!sure_calls && !call.read(*tools, piece.calls)) return take_as_text(piece, CALL_CLOSE);
        newlines.clear(), skipping = true;
        calls++;
    }
    // What should have been a call and is none.
    void take_as_text(Piece& piece, const char* end) {
        state = ANSWER;
        show(piece, filter.feed(CALL_OPEN + call.text + end));
    }
    std::string skip(std::string text) {
        if (skipping) text.erase(0, std::min(text.find_first_not_of('\n'), text.size()));
        skipping = skipping && text.empty();
        return text;
    }
    void show(Piece& piece, std::string text) {
        if (state == THOUGHT || tools) {
            text.insert(0, std::exchange(newlines, {}));
            const size_t end = text.find_last_not_of('\n') + 1; // 0 if there is nothing else
            newlines = text.substr(end);
            piece.text += text.substr(0, end);
            return;
        }
        piece.text += text;
        shown += text.size();
        // Tokens whose text is out; those that may get some more, from a character that is not complete, wait.
        size_t end = given, ready = 0, sure = held.size() - (!held.empty() && !characters.held.empty());
        for (size_t i = 0; i < sure && (end += held[i].text.size()) <= shown; i++)
            if (!held[i].text.empty()) ready = i + 1;
        for (; ready > 0; ready--) {
            given += held.front().text.size();
            piece.tokens.push_back(std::move(held.front()));
            held.pop_front();
        }
    }
};

// A token and the likeliest ones in its place, with their log-probabilities. `logit`: its own, as the model made it.
inline TokenInfo describe(const Likeliest& row, int id, float logit) {
    auto logprob = [&](float logit) { // OpenAI's number for "never" keeps it JSON
        const float l = usable(logit) - row.log_sum;
        return l > -9999 ? l : -9999.f;
    };
    TokenInfo info{id, logprob(logit), "", {}};
    for (int i = 0; i < row.count; i++) info.top.push_back({row.id[i], logprob(row.logit[i])});
    return info;
}

// =================================================================================================== 3 Engine

// Who has which page of the KV cache. A page is in use by `users` sequences, or idle; a whole page may also be known by
// name. Its name stands for all tokens up to its end: it is given once, to the triple (name of the page before, these
// 16 ids, number of the adapter or 0), and never again, so that comparing it compares the content from the first token
// on. (The name before the first page is the salt.) An idle page keeps its name until it is taken for something else,
// the longest idle first.
struct PagePool {
    struct Page {
        int users = 0, ids[PAGE];
        uint64_t name = 0, before = 0; // 0: no name
        uint64_t adapter = 0;
        uint64_t idle_since = 0;
    };
    std::vector<Page> pages;
    std::map<uint64_t, int> idle;      // by idle_since
    std::unordered_multimap<uint64_t, int> named;
    uint64_t clock, last_name = 1ull << 32; // salts are below

    explicit PagePool(int n) : pages(n), clock(n) {
        for (int p = 0; p < n; p++) idle[pages[p].idle_since = p] = p;
    }
    size_t available() const { return idle.size(); }

    int take() {
        const int p = idle.begin()->second;
        idle.erase(idle.begin());
        if (pages[p].name) {
            auto [at, end] = named.equal_range(hash(pages[p].before, pages[p].ids, pages[p].adapter));
            while (at->second != p) ++at;
            named.erase(at);
            pages[p].name = 0;
        }
        pages[p].users = 1;
        return p;
    }
    void use(int p) {
        if (pages[p].users++ == 0) idle.erase(pages[p].idle_since);
    }
    void release(int p) { // pages without a name are the first to be taken again
        if (--pages[p].users) return;
        pages[p].idle_since = pages[p].name ? ++clock : p;
        idle[pages[p].idle_since] = p;
    }
    // The page that holds these ids after that one, or -1.
    int find(uint64_t before, const int* ids, uint64_t adapter = 0) const {
        for (auto [at, end] = named.equal_range(hash(before, ids, adapter)); at != end; ++at) {
            const Page& page = pages[at->second];
            const bool same = page.before == before && page.adapter == adapter;
            if (same && !memcmp(page.ids, ids, sizeof page.ids)) return at->second;
        }
        return -1;
    }
    // Page p now holds these ids. Returns their name: if another page has it already, p stays without.
    uint64_t name(int p, uint64_t before, const int* ids, uint64_t adapter = 0) {
        if (const int other = find(before, ids, adapter); other >= 0) return pages[other].name;
        Page& page = pages[p];
        memcpy(page.ids, ids, sizeof page.ids);
        page.before = before, page.adapter = adapter, page.name = ++last_name;
        named.emplace(hash(before, ids, adapter), p);
        return page.name;
    }

  private:
    uint64_t start = random_bits(); // so that nobody can prepare texts that fall on each other
    uint64_t hash(uint64_t before, const int* ids, uint64_t adapter) const {
        return fnv1a(ids, PAGE * sizeof(int), fnv1a(&before, sizeof before, start ^ adapter));
    }
};

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
};

constexpr int USUAL_CONTEXT = 4096; // more than most answers and their prompts take

#ifdef __CUDACC__
constexpr int MAX_BIAS = 1024 + 1 + 2 * MAX_ENDS; // ids a job may name, <tool_call>, and those that may not end it yet

// What the GPU knows of the sequence in each slot.
struct Slots {
    int* last;        // (slots) the token drawn last
    Draw* draw;       // (slots)
    uint32_t* seen;   // (slots,V) for the penalties
    int* biases;      // (slots) how many ids have a bias
    int* bias_id;     // (slots, MAX_BIAS)
    float* bias;      // (slots, MAX_BIAS)
    int* wanted;      // (slots) alternatives to tell, or -1
};

// Completes a step's numbers, a thread a row or draw: tokens that the host has not seen yet, the block table, how to
// draw.
__global__ void prepare_kernel(Batch b, int* token, int* table, const int* draw_seq, Draw* draws, int R, Slots slots) {
    wait_for_previous();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < b.N && b.seq[i] >= 0) {
        if (token[i] < 0) token[i] = slots.last[b.seq[i]];
        table[(size_t)b.seq[i] * b.max_pages + b.pos[i] / PAGE] = b.slot[i] / PAGE;
    }
    if (i < R && draw_seq[i] >= 0) draws[i] = slots.draw[draw_seq[i]];
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

// Keeps what was drawn for the next step, a thread a draw.
__global__ void keep_kernel(const int* drawn, const int* draw_seq, int R, size_t V, Slots slots) {
    let_next_start();
    wait_for_previous();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= R || draw_seq[i] < 0) return;
    slots.last[draw_seq[i]] = drawn[i];
    if (has_penalties(slots.draw[draw_seq[i]].how)) slots.seen[draw_seq[i] * V + drawn[i]]++;
}

// The logits of what was drawn, as the model made them, where they are told: in `logits` they may have been adjusted. A
// warp a draw.
__global__ void drawn_logit_kernel(float* out, const int* drawn, const int* draw_seq, const int* wanted, const bf16* x,
                                   const int* draw_row, const bf16* W, int C) {
    let_next_start();
    wait_for_previous();
    const int r = blockIdx.x, s = draw_seq[r];
    if (s < 0 || wanted[s] < 0) return;
    const bf16 *row = W + (size_t)drawn[r] * C, *token = x + (size_t)draw_row[r] * C;
    float y = 0;
    for (int i = threadIdx.x; i < C; i += 32) y += to_acc(row[i]) * to_acc(token[i]);
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

    Engine(const Config& c, const Weights<T>& w, const Tokenizer& t, Desk& d, const EngineOptions& o,
           const Context& where, Window* own = nullptr) // of several; none: the desk's
        : ctx(where), config(c), weights(w), tokenizer(t), desk(d), window(own ? *own : d), options(o),
          max_rows(o.max_seqs + std::max(o.chunk, o.burst)), max_pages((o.context + PAGE - 1) / PAGE), pool(0) {
        arena.gpu = ctx.gpu != nullptr;
        choose_sizes();
        arena.used = 0;
        plan();
        arena.allocate(format("a KV cache of %d pages for %d sequences", pages, o.max_seqs).c_str());
        plan();
        pool = PagePool(pages);
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
            compute(next);
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
        std::vector<int> ids;      // what was drawn,
        std::vector<float> logits; // ... the logits of these, as the model made them,
        std::vector<Likeliest> rows_told; // ... and what else is told; of the draws that tell something
        int turn = 0;              // which of the two buffers is its own
        int rows = 0, drawn = 0;   // of the batch and the draws, with spare ones
        bool masked = false;       // some draws may have to keep to a form: they come after `forward`, as draw_masked
        bool graph = false;
        double begun = seconds();
    };

    Figures figures;
    Arena arena;
    Activations<T> activations;
    KVCache<T> cache;
    T* picked;
    acc<T> *rope, *logits;
    int pages, max_rows, max_pages;
    int *input, *table;        // a step's numbers, see arrays(); (max_seqs + texts, max_pages)
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

    bool busy() const { return !running.empty() || !waiting.empty() || !under_way.empty(); }

    void plan() {
        cache.plan(arena, config, (size_t)pages, false, ctx.kv_fp8);
        activations.plan(arena, config, max_rows, !ctx.gpu);
        rope = arena.take<acc<T>>((size_t)options.context * config.D);
        logits = arena.take<acc<T>>((size_t)options.max_seqs * config.V);
        picked = arena.take<T>((size_t)options.max_seqs * config.C);
        input = arena.take<int>(input_size());
        table = arena.take<int>((size_t)(options.max_seqs + options.texts) * max_pages);
#ifdef __CUDACC__
        if (ctx.gpu) plan_device();
#endif
    }

    // The number of pages; and, where the context may be less than it is (at_most), the longest whose keys and values
    // fit, and whose tables (a GPU's scratch for attention grows with it) leave 7/8 of the memory to the cache.
    void choose_sizes() {
        const size_t page_bytes = KVCache<T>::bytes(config, 1, ctx.kv_fp8);
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

    // The arrays of a step of N rows and R draws, one after the other in `input`.
    struct Arrays {
        int *token, *pos, *seq, *slot;         // (N)
        int *draw_row, *draw_seq, *draw_pos;   // (R) row of the batch; of the block table; position of that row's token
        Arrays(int* at, int N, int R)
            : token(at), pos(at + N), seq(at + 2 * N), slot(at + 3 * N),
              draw_row(at + 4 * N), draw_seq(draw_row + R), draw_pos(draw_seq + R) {}
    };
    size_t input_size() const { return 4 * (size_t)max_rows + 3 * (size_t)options.max_seqs; }

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
        group_rows(s);
        return s;
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
        prompt_pace.learn((size_t)s.singles, s.token.size() - (size_t)s.singles,
                          handed_out - std::max(before, s.begun));
        for (size_t i = 0; i < s.draws.size(); i++) {
            const auto it = running.find(s.draws[i].rank);
            const bool valid = it != running.end() && it->second->admission == s.draws[i].admission;
            if (!valid) continue;
            TokenInfo info{s.ids[i], 0, "", {}};
            if (s.wanted[i] >= 0) info = describe(s.rows_told[i], s.ids[i], s.logits[i]);
            if (accept(*it->second, std::move(info)) || jump(*it->second)) leave(it);
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
        std::lock_guard lock(desk.mutex);
        window.inside = figures.running + figures.waiting;
        for (auto [line, tokens] : ended) {
            Desk::Held& held = desk.held[line];
            held.jobs--;
            if (line >= Job::TEXTS) held.tokens -= tokens, desk.texts--, desk.text_tokens -= tokens;
        }
        ended.clear();
        window.figures = figures;
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
        const Batch batch = {N, options.max_seqs + options.texts, s.token.data(), s.pos.data(), s.seq.data(),
                             s.slot.data(), table, max_pages, s.singles};
        forward_step(s, batch);
        for (auto& k : s.kept) keep_hidden(s, activations.normed + (size_t)k.row * config.C);
        if (R) head_cpu(ctx, logits, picked, activations.normed, rows.data(), weights.head, R);
        s.ids.resize(R), s.logits.resize(R), s.rows_told.resize(R);
        std::vector<int> masked((size_t)R, -1); // row of masks
        std::map<Allowed, int> mask_rows;
        for (int r = 0; r < R; r++) {
            Sequence& q = drawn_for(s, (size_t)r);
            if (q.matcher && masks.empty()) masks.resize((size_t)options.max_seqs * mask_words());
            if (q.matcher) masked[(size_t)r] = mask_row(q, mask_rows, masks.data());
        }
        #pragma omp parallel for schedule(dynamic) if (R > 1)
        for (int r = 0; r < R; r++) {
            const Sequence& q = drawn_for(s, (size_t)r);
            float* row = logits + (size_t)r * config.V;
            std::vector<float> before; // the row's logits
            if (s.wanted[(size_t)r] >= 0) {
                likeliest_cpu(ctx, s.rows_told[(size_t)r], row, tokenizer.size(), s.wanted[(size_t)r]);
                before = std::vector<float>(row, row + config.V);
            }
            penalize(row, q.job.how, q.ids, q.prompt, config.V);
            for (auto [id, more] : biases(q, restrained(q))) row[id] += more;
            s.ids[r] = masked[(size_t)r] < 0 ? sample_cpu(ctx, row, tokenizer.size(), q.job.how, q.ids.size())
                                             : draw_of(row, &masks[(size_t)masked[(size_t)r] * mask_words()], q);
            if (!before.empty()) s.logits[(size_t)r] = before[(size_t)s.ids[r]];
        }
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
    Slots slots;
    int *drawn, *unused;             // (max_seqs) the ids; where sample_kernel puts what only a Session needs
    Draw* draws;                     // (max_seqs) of the step's rows
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
        bool operator<(const GraphKey& k) const {
            return std::tie(rows, splits, part, tells, adapts) < std::tie(k.rows, k.splits, k.part, k.tells, k.adapts);
        }
    };
    std::map<GraphKey, cudaGraphExec_t> graphs;
    std::mutex recording;                                          // held meanwhile

    void plan_device() {
        const size_t S = (size_t)options.max_seqs, V = (size_t)config.V;
        ctx.gpu = std::make_shared<Gpu>(*ctx.gpu); // with scratch of its own
        ctx.gpu->partial = arena.take<float>(PARTIAL_BYTES / sizeof(float));
        ctx.gpu->arrived = arena.take<int>(MAX_TILES);
        ctx.gpu->attention = arena.take<float>(attention_scratch(ctx, options.max_seqs,
            (options.context - 1) / SPLIT + 1, config.H, config.D));
        ctx.gpu->attention_arrived = arena.take<int>(S * config.H);
        slots = {arena.take<int>(S), arena.take<Draw>(S), arena.take<uint32_t>(S * V), arena.take<int>(S),
                 arena.take<int>(S * MAX_BIAS), arena.take<float>(S * MAX_BIAS), arena.take<int>(S)};
        drawn = arena.take<int>(S);
        unused = arena.take<int>(S);
        draws = arena.take<Draw>(S);
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
            CUDA_CHECK(cudaMallocHost(&pinned_drawn[i], (size_t)options.max_seqs * sizeof(int)));
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
        const bool graph = s.graph = s.singles == N && (s.parts.empty() || adapts);
        if (graph) {
            const int rows = N;
            for (N = 1; N < rows; N *= 2) {}
            R = N = std::min(N, options.max_seqs);
        }

        s.rows = N, s.drawn = R;
        // Spare rows: no sequence. Draws name the row that they are for.
        const Arrays host(pinned_input[turn], N, R), gpu(input, N, R);
        for (int n = 0; n < N; n++) {
            const bool there = n < (int)s.token.size();
            host.token[n] = there ? s.token[n] : 0, host.pos[n] = there ? s.pos[n] : 0;
            host.seq[n] = there ? s.seq[n] : -1, host.slot[n] = there ? s.slot[n] : 0;
        }
        for (int r = 0; r < R; r++) {
            const bool there = r < (int)s.draws.size();
            const int row = host.draw_row[r] = there ? s.draws[r].row : 0;
            host.draw_seq[r] = there ? s.seq[row] : -1, host.draw_pos[r] = there ? s.pos[row] : 0;
        }
        const size_t bytes = (4 * (size_t)N + 3 * (size_t)R) * sizeof(int);
        CUDA_CHECK(cudaMemcpyAsync(input, host.token, bytes, cudaMemcpyHostToDevice, ctx.gpu->stream));
        const Batch batch = {N, options.max_seqs + options.texts, gpu.token, gpu.pos, gpu.seq, gpu.slot, table,
                             max_pages, graph ? N : s.singles, splits, longest};
        if (adapts) give_adapters(s, graph ? N : s.singles);
        launch(ctx, prepare_kernel, (unsigned)((N + 255) / 256), 256, 0, batch, gpu.token, table, gpu.draw_seq, draws,
               R, slots);
        // (forward begins when prepare_kernel has completed: attention reads the batch early, see launch_kernel.)
        const Part part = s.masked ? BEFORE_MASKS : adjusted ? ADJUSTED : PLAIN;
        launch_part(graph, {N, splits, part, s.tells, adapts}, [&] {
            forward_step(s, batch, adapts);
            if (R == 0) return;
            const int best_blocks = head_all(s, gpu, R, part != PLAIN);
            if (part != BEFORE_MASKS) draw_all(s, gpu, R, part != PLAIN, best_blocks, {});
        });
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
        if (s.drawn > 0) copy(pinned_drawn[s.turn], drawn);
        if (s.drawn > 0 && s.tells) copy(pinned_told[s.turn], told), copy(pinned_logits[s.turn], told_logits);
        CUDA_CHECK(cudaEventRecord(done[s.turn], ctx.gpu->stream));
    }

    // The logits, and where the likeliest of each block is wanted, how many blocks there are.
    int head_all(Step& s, const Arrays& gpu, int R, bool adjusted) {
        const size_t V = (size_t)config.V;
        int best_blocks = 0;
        if (R <= STREAM_TOKENS && !adjusted && !ctx.invariant) {
            const StreamArgs head = {activations.normed, gpu.draw_row, nullptr, nullptr, 0, weights.head.w[0], R,
                                     config.C, config.V};
            best_blocks = stream_product(ctx, head, DrawEpilogue{logits, V, draws, nullptr, best});
        } else {
            head_gpu(ctx, logits, picked, activations.normed, gpu.draw_row, weights.head, R);
        }
        if (s.tells) likeliest_gpu(ctx, told, logits, V, tokenizer.size(), gpu.draw_seq, slots.wanted, R);
        return best_blocks;
    }
    void draw_all(const Step& s, const Arrays& gpu, int R, bool adjusted, int best_blocks, const Masks& masks) {
        const size_t V = (size_t)config.V;
        // (What comes before it with masks is a wait for a copy.)
        if (adjusted)
            launch_kernel(ctx, ctx.gpu->overlap && !masks.row, adjust_kernel, (unsigned)R, 1024, 0, logits, V,
                          gpu.draw_seq, slots, masks);
        const DrawState state = {drawn, gpu.draw_pos, unused, gpu.draw_seq, table, max_pages, nullptr, nullptr, 1};
        launch(ctx, sample_kernel, (unsigned)R, 1024, 0, logits, V, draws, best_blocks ? best : nullptr, best_blocks,
               state);
        launch(ctx, keep_kernel, (unsigned)((R + 255) / 256), 256, 0, drawn, gpu.draw_seq, R, V, slots);
        if (s.tells)
            launch(ctx, drawn_logit_kernel, (unsigned)R, 32, 0, told_logits, drawn, gpu.draw_seq, slots.wanted,
                   activations.normed, gpu.draw_row, weights.head.w[0], config.C);
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
        const Arrays gpu(input, s.rows, s.drawn);
        if (s.drawn > 0) {
            copy(0, (size_t)s.drawn);
            if (rows > 0) copy(S, rows * words);
            CUDA_CHECK(cudaEventRecord(masks_there, mask_stream));
            CUDA_CHECK(cudaStreamWaitEvent(ctx.gpu->stream, masks_there, 0));
            const Masks masks = {mask_rows, (const uint32_t*)mask_rows + S, (int)words};
            launch_part(s.graph, {s.rows, 0, AFTER_MASKS, s.tells, false},
                        [&] { draw_all(s, gpu, s.drawn, true, 0, masks); });
        }
        bring_back(s);
    }

    void collect_gpu(Step& s) {
        CUDA_CHECK(cudaEventSynchronize(done[s.turn]));
        s.ids.assign(pinned_drawn[s.turn], pinned_drawn[s.turn] + s.draws.size());
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
#include "server/request.h"
#include "server/embed_api.h"

inline std::string error_json(int status, const std::string& message, const std::string& param = "",
                              const std::string& code = "") {
    std::string valid;
    utf8_repair(valid, message, true); // it may name what it complains of, cut anywhere
    sj::Writer w;
    w.object().key("error").object().field("message", valid);
    w.field("type", status == 401 ? "authentication_error" : status == 429 ? "rate_limit_error"
                    : status < 500 ? "invalid_request_error" : "server_error");
    if (param.empty()) w.field("param", nullptr);
    else w.field("param", param);
    if (code.empty()) w.field("code", nullptr);
    else w.field("code", code);
    return w.end().end().text;
}
inline std::string error_json(const Refusal& r) { return error_json(r.status, r.what(), r.param, r.code); }

// A token by itself: its text and its bytes. (One that is not whole characters is U+FFFD, but its bytes are its own.)
inline std::string token_text(const Tokenizer& t, int id) {
    std::string text;
    utf8_repair(text, t.bytes(id), true);
    return text;
}

// One request's answers as JSON: whole, in parts as they can be sent, or in chunks as they come.
struct Answer {
    const Tokenizer& tokenizer;
    std::string id, model;
    bool chat, usage, logprobs;
    size_t prompt_tokens, each;
    long created = (long)time(nullptr);
    struct Choice {
        std::string text, thought;
        std::vector<TokenInfo> tokens;
        std::vector<CallPart> calls{}; // whole
        size_t calls_begun = 0;        // of a stream
        bool begun = false;
        size_t offset = 0, count = 0, cached = 0, thoughts = 0;
        std::string stop{};
        const char* finish = nullptr;
    };
    std::vector<Choice> choices;
    std::vector<std::string> echo;         // of each prompt, or none
    bool documents;                        // sources are told,
    std::vector<Source> sources;           // ... of a stream with its first event
    std::shared_ptr<const Pooled> how;     // of `pooled`
    std::unique_ptr<PooledAnswer> pooled;  // vectors or a ranking; null: text
    uint64_t call_seed = random_bits();
    static constexpr size_t PART = 1 << 16; // bytes, about

    Answer(const Service& service, const Ask& ask)
        : tokenizer(*service.tokenizer), id(ask.id), model(ask.adapter ? ask.adapter->name : service.name),
          chat(ask.chat), usage(ask.usage), logprobs(ask.logprobs), prompt_tokens(ask.prompt_tokens), each(ask.each),
          choices(ask.jobs.size()),
          echo(ask.echo), documents(ask.documents), sources(ask.sources), how(ask.pooled),
          pooled(how ? std::make_unique<PooledAnswer>(*how, ask.jobs.size()) : nullptr) {}
    virtual ~Answer() = default;

    bool complete() const {
        return std::all_of(choices.begin(), choices.end(), [](const Choice& c) { return c.finish; });
    }
    size_t count() const {
        size_t n = 0;
        for (auto& c : choices) n += c.count;
        return n;
    }
    const char* broken() const { return pooled ? pooled->broken : nullptr; } // why it cannot be told
    size_t cached() const { // of each prompt, by the first of its answers
        size_t n = 0;
        for (size_t i = 0; i < choices.size(); i += each) n += choices[i].cached;
        return n;
    }

    // Takes a piece, to be told as a whole later.
    virtual void add(Piece&& piece) {
        Choice& c = note(piece);
        if (pooled) return pooled->add((size_t)piece.choice, piece.hidden);
        (piece.thought ? c.thought : c.text) += piece.text;
        std::move(piece.tokens.begin(), piece.tokens.end(), std::back_inserter(c.tokens));
        for (CallPart& part : piece.calls)
            if (!part.name.empty()) c.calls.push_back(std::move(part));
            else c.calls.back().arguments += part.arguments;
    }
    std::string whole() {
        std::string all;
        while (!told()) all += part();
        return all;
    }

    // The whole in parts: what comes next, until all is told. What has been told of log-probabilities is let go.
    virtual bool told() const { return place.told; }
    virtual std::string part() {
        sj::Writer& w = writer;
        if (pooled) {
            pooled->write_part(w, id, model, created, prompt_tokens, PART);
            place.told = w.open.empty();
            return std::exchange(w.text, {});
        }
        if (w.open.empty()) begin(w, chat ? "chat.completion" : "text_completion");
        while (w.text.size() < PART && place.choice < choices.size()) {
            Choice& c = choices[place.choice];
            if (!place.column && !place.token) {
                w.object().field("index", place.choice);
                if (chat) {
                    w.key("message").object().field("role", "assistant");
                    if (c.calls.empty() || !c.text.empty()) w.field("content", c.text);
                    else w.field("content", nullptr);
                    if (!c.thought.empty()) w.field("reasoning_content", c.thought);
                    write_calls(w, c, place.choice);
                    w.end();
                } else {
                    w.field("text", echo_of(place.choice) + c.text);
                }
                w.key("logprobs");
            }
            if (tells(c.tokens)) {
                write_some(w, c, c.tokens);
                if (place.column < columns()) continue;
            } else {
                w.value(nullptr);
            }
            w.field("finish_reason", c.finish).end();
            std::vector<TokenInfo>().swap(c.tokens);
            place.choice++, place.column = place.token = 0;
        }
        if (place.choice == choices.size()) {
            w.end();
            write_usage(w);
            if (documents) write_sources(w, sources);
            w.end();
            place.told = true;
        }
        return std::exchange(w.text, {});
    }

    // A piece as server-sent events; after the last, what closes the stream.
    virtual std::string events(const Piece& piece) {
        Choice& c = note(piece);
        std::string out;
        auto event = [&](auto delta, const std::vector<TokenInfo>& tokens, const char* finish) {
            sj::Writer w;
            begin(w, chat ? "chat.completion.chunk" : "text_completion");
            w.object().field("index", piece.choice);
            if (chat) delta(w.key("delta").object()), w.end();
            else w.field("text", (std::exchange(c.begun, true) ? "" : echo_of((size_t)piece.choice)) + piece.text);
            write_logprobs(w, c, tokens);
            if (finish) w.field("finish_reason", finish);
            else w.field("finish_reason", nullptr);
            w.end().end();
            if (usage) w.field("usage", nullptr);
            if (std::exchange(documents, false)) write_sources(w, sources);
            out += "data: " + w.end().text + "\n\n";
        };
        if (chat && !std::exchange(c.begun, true))
            event([](sj::Writer& w) { w.field("role", "assistant").field("content", ""); }, {}, nullptr);
        if (chat && ((!piece.finish && piece.calls.empty()) || !piece.text.empty() || !piece.tokens.empty()))
            event([&](sj::Writer& w) { w.field(piece.thought ? "reasoning_content" : "content", piece.text); },
                  piece.tokens, nullptr);
        for (const CallPart& part : piece.calls)
            event([&](sj::Writer& w) {
                if (!part.name.empty()) c.calls_begun++;
                const size_t index = c.calls_begun - 1;
                w.key("tool_calls").array().object().field("index", index);
                if (!part.name.empty()) w.field("id", call_id((size_t)piece.choice, index)).field("type", "function");
                w.key("function").object();
                if (!part.name.empty()) w.field("name", part.name);
                w.field("arguments", part.arguments).end().end().end();
            }, {}, nullptr);
        if (chat && piece.finish) event([](sj::Writer&) {}, {}, piece.finish);
        if (!chat) event([](sj::Writer&) {}, piece.tokens, piece.finish);
        if (complete()) {
            if (usage) {
                sj::Writer w;
                begin(w, chat ? "chat.completion.chunk" : "text_completion");
                w.end();
                write_usage(w);
                out += "data: " + w.end().text + "\n\n";
            }
            out += "data: [DONE]\n\n";
        }
        return out;
    }

  protected:
    Choice& note(const Piece& piece) {
        Choice& c = choices[(size_t)piece.choice];
        if (!piece.finish) return c;
        c.finish = piece.finish, c.count = piece.count, c.cached = piece.cached;
        c.thoughts = piece.thoughts, c.stop = piece.stop;
        return c;
    }

  private:
    // Theirs alone, since a client may keep calls of many answers in one list.
    std::string call_id(size_t choice, size_t index) const {
        return format("call_%016llx", (unsigned long long)(call_seed + (choice << 32) + index));
    }
    void write_calls(sj::Writer& w, const Choice& c, size_t choice) const {
        if (c.calls.empty()) return;
        w.key("tool_calls").array();
        for (size_t i = 0; i < c.calls.size(); i++) {
            w.object().field("id", call_id(choice, i)).field("type", "function").key("function").object();
            w.field("name", c.calls[i].name).field("arguments", c.calls[i].arguments).end().end();
        }
        w.end();
    }
    void begin(sj::Writer& w, const char* object) const {
        w.object().field("id", id).field("object", object).field("created", created).field("model", model);
        w.key("choices").array();
    }
    void write_usage(sj::Writer& w) const {
        w.key("usage").object().field("prompt_tokens", prompt_tokens).field("completion_tokens", count());
        w.field("total_tokens", prompt_tokens + count());
        w.key("prompt_tokens_details").object().field("cached_tokens", cached()).end().end();
    }
    const std::string& echo_of(size_t choice) const {
        static const std::string none;
        return echo.empty() ? none : echo[choice / each];
    }

    // Log-probabilities: an object of lists with an entry a token. A chat has one list, a completion has four.
    bool tells(const std::vector<TokenInfo>& tokens) const { return logprobs && !(chat && tokens.empty()); }
    size_t columns() const { return chat ? 1 : 4; }
    void write_logprobs(sj::Writer& w, Choice& c, const std::vector<TokenInfo>& tokens) {
        w.key("logprobs");
        if (!tells(tokens)) {
            w.value(nullptr);
            return;
        }
        for (place.column = place.token = 0; place.column < columns();) write_some(w, c, tokens);
        place.column = 0;
    }
    // From `place` on, about a PART of them.
    void write_some(sj::Writer& w, Choice& c, const std::vector<TokenInfo>& tokens) {
        static const char* NAMES[] = {"tokens", "token_logprobs", "top_logprobs", "text_offset"};
        if (!place.column && !place.token) w.object();
        for (; place.column < columns(); place.column++, place.token = 0) {
            if (!place.token) w.key(chat ? "content" : NAMES[place.column]).array();
            for (; place.token < tokens.size(); place.token++) {
                if (w.text.size() >= PART && place.token) return;
                write_entry(w, c, tokens[place.token]);
            }
            w.end();
        }
        w.end();
    }
    void write_entry(sj::Writer& w, Choice& c, const TokenInfo& t) const {
        auto entry = [&](const std::string& text, int id, float logprob) -> sj::Writer& {
            w.object().field("token", text).field("logprob", logprob).key("bytes").array();
            for (char byte : tokenizer.bytes(id)) w.value((int)(uint8_t)byte);
            return w.end();
        };
        if (chat) {
            entry(t.text, t.id, t.logprob).key("top_logprobs").array();
            for (auto& a : t.top) entry(token_text(tokenizer, a.id), a.id, a.logprob).end();
            w.end().end();
        } else if (place.column == 0) {
            w.value(t.text);
        } else if (place.column == 1) {
            w.value(t.logprob);
        } else if (place.column == 2) {
            w.object();
            for (auto& a : t.top) w.field(token_text(tokenizer, a.id), a.logprob);
            w.end();
        } else {
            w.value(c.offset);
            for (char byte : t.text) c.offset += ((uint8_t)byte & 0xC0) != 0x80; // in characters
        }
    }

    sj::Writer writer{};
    struct { size_t choice = 0, column = 0, token = 0; bool told = false; } place; // of what is told next
};

#include "server/dialects.h"

// ==================================================================================================== 5 Batch
// OpenAI's Batch format: {"custom_id", "method", "url", "body"} a line in, {"id", "custom_id", "response", "error"} a
// line out. Answers go to FILE.partial as they come, and to FILE in the order of the requests when all are there.
// Whoever stops it loses what was under way: the same command goes on with what has no answer yet.

static std::atomic<bool> stopping{false}; // a signal came (to any thread: `interrupted` of options.h is for one)

struct BatchRow {
    std::string_view line;
    std::string custom_id;
    bool answered = false; // in the partial file of an earlier run
};

// No batch, or not the one that was begun: unlike where the system fails, trying again does not help.
struct Unfit : Error {
    using Error::Error;
};

// models: gets the names of those that are asked.
inline std::vector<BatchRow> read_batch(const MappedFile& file, size_t most, std::set<std::string>& models) try {
    std::vector<BatchRow> rows;
    std::set<std::string> seen;
    each_json_line(file, [&](size_t line, std::string_view text, sj::Value request) {
        const std::string id = request["custom_id"].str();
        if (id.empty()) DIE("%s: line %zu: no custom_id", file.path.c_str(), line);
        if (!seen.insert(id).second) DIE("%s: line %zu: its custom_id is taken", file.path.c_str(), line);
        if (rows.size() == most) DIE("%s: more than %zu requests", file.path.c_str(), most);
        rows.push_back({text, id});
        models.insert(request["body"]["model"].str());
    });
    if (rows.empty()) DIE("%s: no request in it", file.path.c_str());
    return rows;
} catch (const Error& e) {
    throw Unfit(e.what());
}

inline std::string batch_line(const std::string& custom_id, int status, const std::string& body) {
    const std::string id = format("%016llx", (unsigned long long)random_bits());
    sj::Writer w;
    w.object().field("id", "batch_req_" + id).field("custom_id", custom_id).key("response").object();
    w.field("status_code", status).field("request_id", "req_" + id).key("body").separate();
    w.text += body; // JSON already
    return w.end().field("error", nullptr).end().text + "\n";
}

static const char* const BATCHED = "/v1/chat/completions, /v1/completions, /v1/responses or /v1/embeddings";
inline bool is_batched(const std::string& url) {
    return url == CHAT || url == COMPLETION || url == RESPONSES || url == EMBEDDINGS;
}

// How a batch's requests are to be answered.
struct BatchHow {
    uint64_t salt = 1;        // of the key that asks
    int priority = 0;
    size_t most;              // answers in the engine's hands at once, about
    std::string endpoint{};   // the url of all; none: any
};

inline Asked read_batch_line(const Service& service, std::string_view line, const BatchHow& how) {
    sj::Doc doc;
    sj::parse(doc, line);
    const std::string url = doc.root()["url"].str(), method = doc.root()["method"].str("POST");
    if (method != "POST") throw Refusal(405, "method must be POST", "method");
    if (!is_batched(url)) throw Refusal(404, format("url must be %s", BATCHED), "url");
    if (!how.endpoint.empty() && url != how.endpoint) throw Refusal(400, "url is not the batch's endpoint", "url");
    const sj::Value body = doc.root()["body"];
    if (body["stream"].is(sj::True)) throw Refusal(400, "stream is not for batches", "stream"); // before a form is read
    Asked asked = read_asked(service, url, body.raw(), how.salt);
    for (Job& job : asked.ask.jobs)
        if (how.priority) job.priority = how.priority;
    return asked;
}

// A batch between its two files.
struct Batcher {
    const std::string out, partial;
    const MappedFile requests;
    std::set<std::string> models;           // that the rows name
    std::vector<BatchRow> rows;
    const std::string header;               // the partial file's first line: what the answers depend on
    std::unordered_map<std::string, size_t> by_id;
    std::unique_ptr<FILE, int (*)(FILE*)> file{nullptr, fclose};
    size_t have = 0, failed = 0, bytes = 0; // answers in the partial file; those that are errors; of all
    size_t tokens = 0;                      // of this run

    // `depends`: a JSON object of what the answers depend on, but for the requests and the adapters that they name, of
    // which `adapters` has the hashes.
    Batcher(const std::string& in, const std::string& out, const std::string& depends,
            const AdapterHashes& adapters = {}, size_t most = SIZE_MAX)
        : out(out), partial(out + ".partial"), requests(in), rows(read_batch(requests, most, models)),
          header(header_of(depends, adapters)) {
        for (size_t i = 0; i < rows.size(); i++) by_id[rows[i].custom_id] = i;
        auto exists = [&] { return access(out.c_str(), F_OK) == 0; };
        if (exists()) DIE("%s: exists; remove it or name another file", out.c_str());
        file.reset(fopen(partial.c_str(), "a+b"));
        struct stat st;
        if (!file) DIE("%s: %s", partial.c_str(), strerror(errno));
        if (flock(fileno(file.get()), LOCK_EX | LOCK_NB)) DIE("%s: another run is at work on it", partial.c_str());
        if (fstat(fileno(file.get()), &st)) DIE("%s: %s", partial.c_str(), strerror(errno));
        if (exists()) DIE("%s: exists; another run has just ended", out.c_str());
        if (st.st_size > 0) take_up();
        else append(header);
    }

    // Answers what has no answer yet, until all have one or `note`, which is called now and then, says to end.
    template <class Note> void answer(const Service& service, Desk& desk, const BatchHow& how, Note note) {
        // So many requests are in the engine's hands that it never runs dry; they come back by `finished`.
        struct Open { std::shared_ptr<Reply> reply; std::unique_ptr<Answer> answer; };
        std::mutex mutex;
        std::condition_variable news;
        std::vector<size_t> finished;
        struct OpenOnes : std::map<size_t, Open> { // however we leave, the engine must not call us any more
            ~OpenOnes() {
                for (auto& [index, o] : *this) {
                    std::lock_guard lock(o.reply->mutex);
                    o.reply->wake = nullptr, o.reply->cancelled = true;
                }
            }
        } open;
        constexpr double PATIENCE = 600; // seconds until 503 is an answer, while nothing of ours is under way
        size_t next = 0, jobs = 0;
        double refused = 0;              // since when the next row gets a 503, which is of the moment
        auto keep = [&](const BatchRow& row, int status, const std::string& body) {
            append(batch_line(row.custom_id, status, body));
            have++, failed += status != 200;
        };
        auto begin = [&](size_t index) { // false: there is no room for it now
            auto [ask, answer] = read_batch_line(service, rows[index].line, how);
            if (!ask.pooled && ask.jobs.size() > desk.limit)
                throw Refusal(400, format("the queue has room for %zu answers", desk.limit), "n");
            const size_t n = ask.jobs.size();
            Open o = {ask.jobs[0].reply, std::move(answer)};
            o.reply->wake = [&mutex, &finished, &news, index, reply = o.reply.get()] {
                if (reply->left) return;
                std::lock_guard lock(mutex);
                finished.push_back(index);
                news.notify_one();
            };
            const std::shared_ptr<Reply> reply = o.reply;
            open[index] = std::move(o);
            if (!desk.submit(std::move(ask.jobs))) return open.erase(index), false;
            jobs += n;
            return true;
        };
        auto some_finished = [&] {
            std::lock_guard lock(mutex);
            return !finished.empty();
        };
        while (have < rows.size() && !note()) {
            // (Thousands may be refused, each after a while, or looked up in documents. What is finished does not wait.)
            while (next < rows.size() && jobs < how.most && !some_finished() && !note()) {
                const size_t index = next++;
                if (rows[index].answered) continue;
                bool begun = false;
                try {
                    begun = begin(index);
                } catch (const Refusal& r) {
                    if (r.status == 503 && refused == 0) refused = seconds();
                    begun = r.status != 503 || (open.empty() && !interrupted && seconds() - refused > PATIENCE);
                    if (begun) keep(rows[index], r.status, error_json(r));
                }
                if (!begun) { // later
                    next = index;
                    break;
                }
                refused = 0;
            }
            std::vector<size_t> ready;
            if (have < rows.size()) {
                std::unique_lock lock(mutex);
                news.wait_for(lock, std::chrono::milliseconds(200), [&] { return !finished.empty(); });
                ready.swap(finished);
            }
            for (size_t index : ready) {
                Open& o = open[index];
                {
                    std::lock_guard lock(o.reply->mutex); // until the engine is back from the call that woke us
                    o.reply->wake = nullptr;
                    for (Piece& piece : o.reply->pieces) o.answer->add(std::move(piece));
                }
                jobs -= o.answer->choices.size(), tokens += o.answer->count();
                if (o.answer->broken()) keep(rows[index], 500, error_json(500, o.answer->broken()));
                else keep(rows[index], 200, o.answer->whole());
                open.erase(index);
            }
        }
    }

    // f(line, whether it is an answer) for all that are there, in the order of the requests.
    template <class F> void collect(F f) {
        const MappedFile map(partial);
        std::vector<std::pair<std::string_view, bool>> answers(rows.size());
        each_answer(map, [&](BatchRow& row, std::string_view line, bool ok) {
            answers[(size_t)(&row - rows.data())] = {line, ok};
        });
        for (auto& [line, ok] : answers)
            if (!line.empty()) f(line, ok);
    }

    // A run of --batch. Returns the exit status.
    int run(const Service& service, Desk& desk) {
        const size_t before = have, failed_before = failed;
        const bool terminal = isatty(2);
        const double start = seconds();
        double told = start;
        auto show = [&] {
            const double spent = seconds() - start, share = (double)have / (double)rows.size();
            const double left = have > before ? spent * (double)(rows.size() - have) / (double)(have - before) : 0;
            const std::string bar((size_t)(share * 24), '=');
            fprintf(stderr, "%s[%-24s] %zu of %zu, %.0f tok/s, %.0f s left   %s", terminal ? "\r" : "", bar.c_str(),
                    have, rows.size(), (double)desk.look().answer_tokens / spent, left, terminal ? "" : "\n");
            told = seconds();
        };
        answer(service, desk, {1, 0, desk.limit / 2}, [&] { // (`limit` is made for that)
            if (seconds() - told >= (terminal ? 1 : 30)) show();
            return stopping.load();
        });
        const double spent = seconds() - start;
        show();
        if (terminal) fputc('\n', stderr);
        if (have < rows.size()) {
            fprintf(stderr, "%s: %zu of %zu answers; the same command goes on\n", partial.c_str(), have, rows.size());
            return 130;
        }
        finish();
        fprintf(stderr, "%s: %zu answers, %zu errors among those of this run; %zu tokens in %.2f s, %.1f tok/s\n",
                out.c_str(), rows.size(), failed - failed_before, tokens, spent, (double)tokens / spent);
        return 0;
    }

  private:
    std::string header_of(const std::string& depends, const AdapterHashes& adapters) const {
        sj::Writer w;
        w.object();
        for (auto& [name, hash] : adapters)
            if (models.count(name)) w.field(name, hash);
        const std::string used = w.end().text;
        if (used == "{}") return depends + "\n";
        return depends.substr(0, depends.size() - 1) + ", \"adapters\": " + used + "}\n";
    }
    void append(const std::string& line) {
        if (fwrite(line.data(), 1, line.size(), file.get()) != line.size() || fflush(file.get()))
            DIE("%s: %s", partial.c_str(), strerror(errno));
        bytes += line.size();
    }
    // f(row, line, whether it is an answer) for every whole line of the partial file but the first. Returns where the
    // last of them ends.
    template <class F> size_t each_answer(const MappedFile& map, F f) {
        const size_t whole = map.text().rfind('\n') + 1;
        if (map.text().substr(0, std::min(whole, header.size())) != header.substr(0, whole))
            throw Unfit(partial + ": begun with another model, other requests or options; remove it to start anew");
        for (size_t at = header.size(); at < whole;) {
            const std::string_view line = map.text().substr(at, map.text().find('\n', at) + 1 - at);
            at += line.size();
            sj::Doc doc;
            sj::parse(doc, line);
            const auto row = by_id.find(doc.root()["custom_id"].str());
            if (row == by_id.end()) throw Unfit(partial + ": a damaged line; remove the file to start anew");
            f(rows[row->second], line, doc.root()["response"]["status_code"].number() == 200);
        }
        return whole;
    }
    void take_up() {
        const size_t whole = each_answer(MappedFile(partial), [&](BatchRow& row, std::string_view line, bool ok) {
            bytes += line.size();
            if (std::exchange(row.answered, true)) return;
            have++, failed += !ok;
        });
        // Half a line is asked again.
        if (ftruncate(fileno(file.get()), (off_t)whole)) DIE("%s: %s", partial.c_str(), strerror(errno));
        if (whole == 0) append(header);
        fprintf(stderr, "%s: %zu of %zu answers are there\n", partial.c_str(), have, rows.size());
    }
    void finish() {
        OutputFile whole(out);
        collect([&](std::string_view line, bool) { whole.write(line); });
        whole.commit();
        unlink(partial.c_str());
    }
};

#include "server/batches.h"

#ifndef SERVE_NO_MAIN // (tests of the parts above need neither HTTP nor main)
// ===================================================================================================== 6 HTTP
// By libmicrohttpd: small, GNU, in every distribution, and made for this: a few threads with epoll, and connections
// that are suspended while there is nothing to send. It parses, times out what is idle and limits headers to 32 KB. A
// request's framing, of which it takes too much, is looked at in check_framing. watch() does the rest: whole requests
// and answers have a deadline, however evenly their bytes trickle, and a suspended connection is looked at, since its
// peer may be gone.
#include <arpa/inet.h>
#include <microhttpd.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>

constexpr size_t ALL_BODIES = 256 << 20; // bytes of requests that are being read
constexpr size_t SMALL_BODY = 16 << 10;  // is tokenized where it was read: within a millisecond
constexpr double PROBE = 2;              // seconds from one question to a silent client to the next
constexpr double DRAIN_FETCH = 10;       // seconds to fetch an answer that is complete, while the server shuts down

struct ApiKey {
    std::string key, name; // the name is for the log
};

struct ServerOptions {
    std::string host = "127.0.0.1";
    int port = 8000;
    std::vector<ApiKey> keys;               // none: open to all
    std::vector<std::string> origins;       // web sites whose scripts may call
    int deadline = 60;                      // seconds for a request line, and then for headers and body
    int drain = 300;                        // ... and for what is under way when a signal comes
    std::string title = "Warp";             // of the page to chat on
    std::string files;                      // folder of Files and Batches; none: they are not offered
    int think = 0;                          // whether its switch for thoughts is on at first
    bool docs = false;                      // whether it has one for documents
    bool swaps = false;                     // whether clients may load and unload adapters
    unsigned idle() const { return (unsigned)(deadline + 1) / 2; } // without a byte
    double fetch() const { return 5. * deadline; }                 // to read an answer that is complete
    double quiet() const { return deadline / 6.; }                 // of a stream, until a comment shows that it lives
};

// What a request is told, and then the log.
struct Response {
    int status;
    std::string body;
    const char* type = "application/json";
    std::vector<std::pair<const char*, std::string>> headers{};
    std::string file{};                    // its body, instead
};

// Lines for stdout. Whoever has one never waits: a thread of its own writes them, and where stdout takes no more they
// are dropped and counted.
struct Log {
    static constexpr size_t MOST = 1 << 20; // bytes that wait
    Log() : thread([this] { write_all(); }) {}
    ~Log() {
        {
            std::lock_guard lock(mutex);
            closing = seconds();
        }
        news.notify_one();
        thread.join();
    }
    void write(std::string line) { // of less than PIPE_BUF bytes
        std::lock_guard lock(mutex);
        if (bytes + line.size() > MOST) { dropped++; return; }
        bytes += line.size();
        lines.push_back(std::move(line));
        news.notify_one();
    }
    size_t lost() {
        std::lock_guard lock(mutex);
        return dropped;
    }

  private:
    std::mutex mutex;
    std::condition_variable news;
    std::deque<std::string> lines;
    size_t bytes = 0, dropped = 0, told = 0; // told: of those dropped
    double closing = 0;                      // since when; a second later what cannot be written is left
    std::thread thread;

    void write_all() {
        std::unique_lock lock(mutex);
        for (;;) {
            news.wait(lock, [&] { return closing > 0 || !lines.empty(); });
            if (lines.empty()) return;
            std::string some;
            while (!lines.empty() && some.size() + lines.front().size() <= PIPE_BUF) {
                bytes -= lines.front().size();
                some += lines.front();
                lines.pop_front();
            }
            if (dropped > told && lines.empty()) {
                lines.push_back(format("{\"lines_dropped\": %zu}\n", dropped - std::exchange(told, dropped)));
                bytes += lines[0].size();
            }
            lock.unlock();
            const bool written = put(some);
            lock.lock();
            if (!written) return;
        }
    }
    bool put(const std::string& some) { // a pipe that is ready takes PIPE_BUF bytes at once
        for (pollfd out = {STDOUT_FILENO, POLLOUT, 0}; poll(&out, 1, 100) == 0;) {
            std::lock_guard lock(mutex);
            if (closing > 0 && seconds() > closing + 1) return false;
        }
        (void)!::write(STDOUT_FILENO, some.data(), some.size());
        return true;
    }
};

// Threads for what takes long. Tasks wait in a line for each of those who asked, who take turns; none of them has all
// threads.
struct Workers {
    explicit Workers(size_t n) : most(std::max<size_t>(1, n - 1)) {
        for (size_t i = 0; i < n; i++) threads.emplace_back([this] { work(); });
    }
    ~Workers() {
        {
            std::lock_guard lock(mutex);
            closing = true;
        }
        news.notify_all();
        for (auto& t : threads) t.join();
    }
    void add(uint64_t who, std::function<void()> task) {
        std::lock_guard lock(mutex);
        lines[who].push_back(std::move(task));
        news.notify_one();
    }

  private:
    const size_t most; // threads that work for one
    std::mutex mutex;
    std::condition_variable news;
    std::map<uint64_t, std::deque<std::function<void()>>> lines;
    std::map<uint64_t, size_t> busy;
    uint64_t last = 0; // whose turn it was
    bool closing = false;
    std::vector<std::thread> threads;

    auto next() {
        auto it = lines.upper_bound(last);
        for (size_t n = lines.size(); n > 0; n--, ++it) {
            if (it == lines.end()) it = lines.begin();
            if (busy[it->first] < most) return it;
        }
        return lines.end();
    }
    void work() {
        std::unique_lock lock(mutex);
        for (;;) {
            auto line = lines.end();
            news.wait(lock, [&] { return (line = next()) != lines.end() || (closing && lines.empty()); });
            if (line == lines.end()) return;
            const uint64_t who = last = line->first;
            const std::function<void()> task = std::move(line->second.front());
            line->second.pop_front();
            if (line->second.empty()) lines.erase(line);
            busy[who]++;
            lock.unlock();
            task();
            lock.lock();
            if (--busy[who] == 0) busy.erase(who);
            news.notify_all();
        }
    }
};

// What has been answered, by route and status, for /metrics.
struct Traffic {
    void add(const std::string& method, const std::string& route, int status, double seconds) {
        std::lock_guard lock(mutex);
        requests[{method, route, status}]++;
        times[route].add(seconds);
    }
    std::string text() {
        std::lock_guard lock(mutex);
        std::string out = "# TYPE http_requests_total counter\n";
        for (auto& [what, n] : requests) {
            auto& [method, route, status] = what;
            out += format("http_requests_total{method=\"%s\",handler=\"%s\",status=\"%d\"} %zu\n", method.c_str(),
                          route.c_str(), status, n);
        }
        out += "# TYPE http_request_duration_seconds histogram\n";
        for (auto& [route, h] : times)
            out += histogram_text("http_request_duration_seconds", format("handler=\"%s\"", route.c_str()), h);
        return out;
    }

  private:
    std::mutex mutex;
    std::map<std::tuple<std::string, std::string, int>, size_t> requests; // status 0: the client went before the answer
    std::map<std::string, Histogram> times;
};

// A connection, for watch(). `mutex` of the Server guards `exchange` and `probed`.
struct Exchange;
struct Peer {
    int fd;
    uint64_t address;                                    // a name for it; for IPv6, of its network
    enum Phase { WAITING, READING, WORKING, ANSWERING }; // WORKING: we are, on what it sent; it waits
    std::atomic<Phase> phase{WAITING};
    std::atomic<double> since{seconds()};
    Exchange* exchange = nullptr; // one that the engine works for,
    Exchange* looking = nullptr;  // ... or one that is looked up in documents
    double probed = 0;            // when it was last asked whether it is there, since it will send nothing more
};

#include "server/openapi.h"

// The page to chat on: chat.html, which the Makefile makes a string of.
static const char CHAT_PAGE[] =
#include "build/chat_page.inc"
    ;

inline std::string escape_html(const std::string& text) {
    std::string out;
    for (char c : text)
        if (strchr("&<>\"'", c)) out += format("&#%d;", c); // (a NUL, too)
        else out += c;
    return out;
}

// The page as it is sent, and the policy that goes with it: nothing but what is in the page, and this server, by a number
// that only this answer has. Text can never become HTML in it (trusted types).
struct ChatPage {
    std::string html, policy;
    ChatPage(const std::string& title, bool think, bool docs) {
        const std::string nonce = format("%016llx%016llx", (unsigned long long)random_bits(), (unsigned long long)random_bits());
        const std::pair<std::string_view, std::string> values[] = {
            {"{{nonce}}", nonce}, {"{{title}}", escape_html(title)}, {"{{think}}", think ? "1" : "0"},
            {"{{docs}}", docs ? "1" : "0"}};
        const std::string_view page = CHAT_PAGE;
        for (size_t at = 0, next; at < page.size(); at = next) {
            next = std::min(page.find("{{", at + 1), page.size());
            std::string_view part = page.substr(at, next - at);
            for (auto& [name, value] : values)
                if (part.substr(0, name.size()) == name) html += value, part.remove_prefix(name.size());
            html += part;
        }
        policy = "default-src 'none'; script-src 'nonce-" + nonce + "'; style-src 'nonce-" + nonce + "'; connect-src 'self'; "
                 "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
                 "require-trusted-types-for 'script'; trusted-types 'none'";
    }
};

static const char *const LOAD_ADAPTER = "/v1/load_lora_adapter", *const UNLOAD_ADAPTER = "/v1/unload_lora_adapter";

struct Server {
    const ServerOptions options;
    Desk& desk;
    Service service;                       // not to be touched before `ready`
    std::atomic<bool> ready{false}, draining{false};
    double drained_since = 0;              // main's, as watch() is
    std::atomic<size_t> answering{0};      // requests that came before the drain
    Budget bodies{ALL_BODIES};
    std::unique_ptr<Filing> filing;        // of --files
    Log log;
    Traffic traffic;
    Workers workers{std::min(4u, std::max(2u, std::thread::hardware_concurrency() / 2))};
    MHD_Daemon* daemon = nullptr;
    std::mutex mutex;
    std::set<Peer*> peers;

    Server(const ServerOptions& o, Desk& d) : options(o), desk(d) {
        std::vector<std::string> keys;
        for (auto& k : options.keys) keys.push_back(k.key);
        if (!options.files.empty()) filing = std::make_unique<Filing>(options.files, keys);
    }
    ~Server() { if (daemon) stop(); }
    void start();
    void stop();
    void watch();
    void drain();
    void abandon();

    bool loopback() const { return options.host.compare(0, 4, "127.") == 0 || options.host == "::1"; }
};

inline std::string lower(std::string s) {
    for (char& c : s) c = (char)tolower((unsigned char)c);
    return s;
}

// One request and its answer.
struct Exchange {
    Server& server;
    MHD_Connection* connection;
    Peer& peer;
    const double start = seconds();
    std::string method, path, body;
    const bool newest;                     // HTTP/1.1: its client knows of 1xx
    uint64_t caller = 0;                   // the number of its key
    std::string request_id;                // the client's, or ours
    Budget::Share upload{};                // of server.bodies, whose mutex guards `body` while it is read
    std::shared_ptr<Budget::Share> unsent = std::make_shared<Budget::Share>();
    std::unique_ptr<Refusal> refusal;      // found before the body was there
    bool begun = false, counted = false, stream = false;
    Response prepared{};
    int status = 0;
    std::string swapped;                   // the adapter that it has loaded or unloaded
    std::unique_ptr<Answer> answer;
    std::shared_ptr<Reply> reply;
    bool suspended = false, probed = false; // guarded by reply->mutex
    volatile sig_atomic_t gone = 0;        // the peer, while its question is looked up in documents
    bool entered = false;                  // it has a place at the desk meanwhile
    std::string out;                       // what is being sent; of a stream, up to `sent`
    size_t sent = 0;
    std::atomic<double> spoke{start};      // when a stream last sent something
    double first_token = 0;

    Exchange(Server& s, MHD_Connection* c, Peer& p, const char* url, const char* m, const char* version)
        : server(s), connection(c), peer(p), method(m), path(url), newest(strcmp(version, "HTTP/1.1") == 0) {
        request_id = header("X-Request-Id");
        auto plain = [](char c) { return isalnum((unsigned char)c) || strchr("._-", c); };
        if (request_id.empty() || request_id.size() > 64 || !std::all_of(request_id.begin(), request_id.end(), plain))
            request_id = format("%016llx", (unsigned long long)random_bits());
        upload.who = unsent->who = peer.address;
        upload.drop = [this] { std::string().swap(body); };
    }
    Exchange(const Exchange&) = delete;

    ~Exchange() {
        {
            std::lock_guard lock(server.mutex); // from now on watch() does not know it
            peer.exchange = nullptr;
        }
        if (reply) {
            std::lock_guard lock(reply->mutex);
            reply->wake = nullptr;
            if (reply->left) reply->cancelled = true;
            first_token = reply->first;
        }
        server.bodies.remove(upload);
        server.desk.unsent.remove(*unsent);
        log();
        server.traffic.add(known(method, {"GET", "POST", "DELETE", "OPTIONS"}), route_name(), status,
                           seconds() - start);
        peer.phase = Peer::WAITING, peer.since = seconds();
        if (counted) server.answering--;
    }

    const char* header(const char* name) const {
        const char* value = MHD_lookup_connection_value(connection, MHD_HEADER_KIND, name);
        return value ? value : "";
    }
    std::vector<std::string> headers(const char* name) const { // all that have this name
        struct Wanted { const char* name; std::vector<std::string> values; } wanted = {name, {}};
        auto take = [](void* self, MHD_ValueKind, const char* name, const char* value) {
            Wanted& w = *(Wanted*)self;
            if (strcasecmp(name, w.name) == 0) w.values.push_back(value ? value : "");
            return MHD_YES;
        };
        MHD_get_connection_values(connection, MHD_HEADER_KIND, take, &wanted);
        return wanted.values;
    }

    // The request's head. What is wrong with it is said once its body has been read, so that the connection can go on;
    // but not if that is too long, or if it is not clear where it ends.
    MHD_Result head() {
        try {
            check_framing();
        } catch (const Refusal& r) {
            return respond({r.status, fault(r), "application/json", {{"Connection", "close"}}});
        }
        try {
            check_head();
        } catch (const Refusal& r) {
            refusal = std::make_unique<Refusal>(r);
        }
        return MHD_YES;
    }

    // RFC 9112, 6: a proxy before us must find the same end of a request as the library does.
    void check_framing() const {
        const auto lengths = headers("Content-Length"), encodings = headers("Transfer-Encoding");
        if (!encodings.empty() && (encodings.size() > 1 || lower(encodings[0]) != "chunked"))
            throw Refusal(501, "Transfer-Encoding: only chunked is supported");
        if (!encodings.empty() && (!lengths.empty() || !newest))
            throw Refusal(400, "Transfer-Encoding does not go with Content-Length, nor with HTTP/1.0");
        if (lengths.size() > 1 || headers("Host").size() > 1)
            throw Refusal(400, "more than one Content-Length or Host");
        if (!lengths.empty() && strtoull(lengths[0].c_str(), nullptr, 10) > most_body())
            throw Refusal(413, format("a request may have %zu bytes", most_body()));
    }
    bool filed() const { // Files and Batches
        auto under = [&](const std::string& root) { return (path + "/").compare(0, root.size(), root) == 0; };
        return server.filing && (under("/v1/files/") || under("/v1/batches/"));
    }
    bool looks_up() const { // in documents
        const bool chat = path == CHAT || path == RESPONSES || path == MESSAGES || path == COUNT_TOKENS;
        return chat && server.service.documents;
    }
    bool swaps() const { // loads or unloads an adapter
        return server.options.swaps && (path == LOAD_ADAPTER || path == UNLOAD_ADAPTER);
    }
    bool models() const { return (path + "/").compare(0, 11, "/v1/models/") == 0; }
    bool takes_no_post() const {
        const bool cancel = path.size() > 7 && path.compare(path.size() - 7, 7, "/cancel") == 0;
        return models() || (filed() && !cancel && path != "/v1/files" && path != "/v1/batches");
    }
    size_t most_body() const { return filed() && path == "/v1/files" ? MAX_UPLOAD + SMALL_BODY : MAX_BODY; }

    void check_head() {
        if (server.loopback()) { // a web page whose own name was made to point here must not get in
            std::string host = lower(header("Host"));
            const size_t colon = host.rfind(':');
            if (colon != std::string::npos && host.find(']', colon) == std::string::npos) host.resize(colon);
            if (host != "localhost" && host != "127.0.0.1" && host != "[::1]" && host != server.options.host &&
                !host.empty())
                throw Refusal(403, "this server answers to localhost only (--host makes it public)");
        }
        const std::string encoding = header("Content-Encoding");
        if (!encoding.empty() && encoding != "identity") throw Refusal(415, "Content-Encoding is not supported");
        const bool open = known(path, {"/", "/health", "/ping", "/version", "/openapi.json", "/metrics"}) == path;
        if (method == "POST" && !open && !takes_no_post()) { // (what does not is told so first)
            std::string type = header("Content-Type");
            type.resize(std::min(type.find(';'), type.size()));
            while (!type.empty() && type.back() == ' ') type.pop_back();
            const char* wanted = filed() && path == "/v1/files" ? "multipart/form-data" : "application/json";
            if (strcasecmp(type.c_str(), wanted)) throw Refusal(415, format("Content-Type must be %s", wanted));
            const std::string origin = header("Origin"); // a page of any site can send a form without asking first
            const auto& known = server.options.origins;
            if (*wanted == 'm' && !origin.empty() && std::find(known.begin(), known.end(), origin) == known.end())
                throw Refusal(403, "files are not taken from web pages of other sites (--cors names those that may)");
        }
        if (open || method == "OPTIONS") return;
        caller = key();
        upload.who = unsent->who = fnv1a(&caller, sizeof caller, peer.address);
    }

    // The number of the caller's key, from 1 on: one space of shared prompts each. Every key is compared to its end.
    uint64_t key() const {
        if (server.options.keys.empty()) return 1;
        const std::string given_there = header("Authorization"), given_here = header("X-Api-Key"); // (Anthropic's)
        const std::string_view scheme = "bearer ";
        const std::string given = given_there.empty() && !given_here.empty() ? "bearer " + given_here : given_there;
        const std::string own = lower(std::string(given.substr(0, scheme.size())));
        uint64_t found = 0;
        for (size_t k = 0; k < server.options.keys.size(); k++) {
            const std::string& wanted = server.options.keys[k].key;
            const std::string_view token = std::string_view(given).substr(std::min(scheme.size(), given.size()));
            unsigned differ = token.size() != wanted.size() || own != scheme;
            for (size_t i = 0; i < wanted.size() && !token.empty(); i++)
                differ |= (unsigned)(wanted[i] ^ token[i % token.size()]);
            if (!differ) found = k + 1;
        }
        if (!found) throw Refusal(401, "the API key is missing or wrong", "", "invalid_api_key");
        return found;
    }

    void read(const char* bytes, size_t n) {
        if (refusal) return;
        std::lock_guard lock(server.bodies.mutex);
        if (body.size() + n > most_body())
            refusal = std::make_unique<Refusal>(413, format("a request may have %zu bytes", most_body()));
        else if (server.bodies.add_locked(upload, n))
            return (void)body.append(bytes, n);
        std::string().swap(body);
    }

    size_t body_size() { // 0 if it has been dropped
        std::lock_guard lock(server.bodies.mutex);
        return body.size();
    }

    // The request is complete.
    MHD_Result answer_it() {
        if (!begun) {
            begun = counted = true;
            server.answering++;
            const bool open = server.ready && !server.draining;
            if (!open) counted = false, server.answering--; // it will be refused
            peer.phase = Peer::WORKING;
            auto takes_long = [&] {
                return body_size() > SMALL_BODY || filed() || swaps() || asks_for_form() || looks_up();
            };
            if (open && !refusal && method == "POST" && looks_up()) {
                entered = server.desk.enter(caller);
                if (!entered) refusal = std::make_unique<Refusal>(queue_is_full());
            }
            if (open && !refusal && takes_long()) {
                if (entered) look_for(this);
                MHD_suspend_connection(connection);
                server.workers.add(server.options.keys.empty() ? peer.address : caller, [this] {
                    lookup_stop = &gone;
                    prepare();
                    MHD_resume_connection(connection);
                });
                return MHD_YES;
            }
            prepare();
        }
        if (prepared.status) return respond(std::move(prepared));
        return stream ? begin_stream() : finish();
    }

    Refusal queue_is_full() const {
        return {server.draining ? 503 : 429, "too many requests are waiting", "", "rate_limit_exceeded"};
    }
    void look_for(Exchange* one) { // (watch() does, from now on)
        std::lock_guard lock(server.mutex);
        peer.looking = one;
    }
    void leave_desk() {
        if (std::exchange(entered, false)) server.desk.leave(caller);
    }

    // Grammars take longer than their text to read. (Of a field's name, letters may be escaped.)
    bool asks_for_form() {
        std::lock_guard lock(server.bodies.mutex);
        for (const char* word : {"\"tools\"", "\"response_format\"", "\"structured_outputs\"", "\"guided_",
                                 "\"format\"", "\\u00"})
            if (body.find(word) != std::string::npos) return true;
        return false;
    }

    void prepare() {
        server.bodies.remove(upload); // from now on it is not dropped
        if (upload.lost && !refusal) refusal = std::make_unique<Refusal>(503, "too many requests are coming in");
        prepared = response();
        leave_desk();
        look_for(nullptr);
        std::string().swap(body); // the answer may take long, and others need the room
    }

    std::string fault(const Refusal& r) const { // as the route's clients know it
        const bool message = path == MESSAGES || path == COUNT_TOKENS;
        return message ? message_error_json(r, request_id) : error_json(r);
    }
    Response response() {
        try {
            if (refusal) throw *refusal;
            return route();
        } catch (const Refusal& r) {
            Response told{r.status, fault(r)};
            if (r.status == 401) told.headers.push_back({"WWW-Authenticate", "Bearer"});
            if (r.status == 405) told.headers.push_back({"Allow", r.param});
            if (r.status == 429 || r.status == 503) told.headers.push_back({"Retry-After", "1"});
            return told;
        } catch (const std::bad_alloc&) {
            return {503, fault({503, "out of memory"})};
        }
    }

    // Which of a few it is: a client may send anything.
    static std::string known(const std::string& what, std::initializer_list<const char*> all) {
        return std::find(all.begin(), all.end(), what) == all.end() ? "other" : what;
    }
    std::string route_name() const {
        if (path.compare(0, 11, "/v1/models/") == 0) return "/v1/models/{id}";
        if (filed()) return path[4] == 'f' ? "/v1/files" : "/v1/batches";
        if (swaps()) return path;
        return known(path, {"/", "/health", "/ping", "/version", "/openapi.json", "/metrics", "/tokenize",
                            "/detokenize", "/v1/models", COMPLETION, CHAT, RESPONSES, MESSAGES, COUNT_TOKENS,
                            EMBEDDINGS, "/v1/rerank", "/v2/rerank", "/rerank"});
    }

    // Status 0: the answer is on its way.
    Response route() {
        auto only = [&](const char* allowed) {
            if (method != allowed) throw Refusal(405, format("%s takes %s only", path.c_str(), allowed), allowed);
        };
        const bool ready = server.ready && !server.draining;
        if (method == "OPTIONS") return {204, ""};
        if (path == "/") { // also before the model is there: the page waits for it
            only("GET");
            ChatPage page(server.options.title, server.options.think, server.options.docs);
            return {200, std::move(page.html), "text/html; charset=utf-8", {{"Content-Security-Policy", page.policy},
                    {"Cache-Control", "no-store"}, {"Referrer-Policy", "no-referrer"}}};
        }
        if (path == "/version") {
            only("GET");
            return {200, format("{\"version\": \"%d\"}", QWEN3_VERSION)};
        }
        if (path == "/openapi.json") {
            only("GET");
            return {200, openapi_document()};
        }
        if (path == "/health" || path == "/ping") {
            only("GET");
            const char* status = ready ? "ok" : server.ready ? "draining" : "loading";
            return {ready ? 200 : 503, format("{\"status\": \"%s\"}", status)};
        }
        if (path == "/metrics") {
            only("GET");
            return {200, metrics(), "text/plain; version=0.0.4"};
        }
        const bool tokenize = path == "/tokenize", detokenize = path == "/detokenize", count = path == COUNT_TOKENS;
        if (filed()) {
            if (!ready) throw Refusal(503, server.ready ? "the server is shutting down" : "the model is loading");
            auto argument = [&](const char* name) -> std::optional<std::string> {
                const char* value = MHD_lookup_connection_value(connection, MHD_GET_ARGUMENT_KIND, name);
                if (!value) return {};
                return value;
            };
            Filed told = server.filing->handle(caller, method, path, header("Content-Type"), body, argument);
            const char* type = told.path.empty() ? "application/json" : "application/octet-stream";
            return {200, std::move(told.json), type, {}, std::move(told.path)};
        }
        if (!is_asked(path) && !models() && !tokenize && !detokenize && !count && !swaps())
            throw Refusal(404, "there is nothing here; / and /v1/chat/completions are");
        only(models() ? "GET" : "POST");
        if (!ready) throw Refusal(503, server.ready ? "the server is shutting down" : "the model is loading");
        const Service& service = server.service;
        if (models()) return list_models();
        if (swaps()) return {200, path == LOAD_ADAPTER ? load_adapter(service) : unload_adapter(service)};
        if (tokenize) return {200, tokens_of(service)};
        if (detokenize) return {200, text_of(service)};
        if (count) return {200, count_message_tokens(service, body)};

        auto [ask, told] = read_asked(service, path, body, caller);
        if (!ask.pooled && ask.jobs.size() > server.desk.limit)
            throw Refusal(400, format("the queue has room for %zu answers", server.desk.limit), "n");
        answer = std::move(told);
        stream = ask.stream;
        const std::shared_ptr<Reply> r = ask.jobs[0].reply;
        r->share = unsent;
        r->wake = [this, reply = r.get()] { // the engine's thread, or watch()'s; reply->mutex is held
            if (!suspended || !(stream || reply->left == 0 || reply->cancelled)) return;
            suspended = false;
            MHD_resume_connection(connection);
        };
        leave_desk();
        if (!server.desk.submit(std::move(ask.jobs))) {
            r->left = 0;
            throw queue_is_full();
        }
        reply = r;
        std::lock_guard lock(server.mutex);
        peer.exchange = this;
        return {0, ""};
    }

    // The model itself, then its adapters, of which it is the parent.
    Response list_models() const {
        const Service& service = server.service;
        const std::string one = path.size() > 11 ? path.substr(11) : "";
        sj::Writer w;
        if (path.size() == 10) w.object().field("object", "list").key("data").array();
        size_t told = 0;
        auto write = [&](const std::string& name, const std::string& root, long created, bool adapter) {
            if (path.size() > 10 && name != one) return;
            write_model(w, service, name, root, created, adapter);
            told++;
        };
        write(service.name, service.path, 0, false);
        for (auto& [name, adapter] : service.adapters->now()) write(name, adapter->folder, adapter->created, true);
        if (!told) throw Refusal(404, "no such model", "model", "model_not_found");
        if (path.size() == 10) w.end().end();
        return {200, w.text};
    }
    static void write_model(sj::Writer& w, const Service& service, const std::string& name, const std::string& root,
                            long created, bool adapter) {
        w.object().field("id", name).field("object", "model").field("created", created).field("owned_by", "qwen3.cu");
        w.field("root", root);
        if (adapter) w.field("parent", service.name);
        else w.field("parent", nullptr);
        w.field("max_model_len", service.context).end();
    }

    // {"lora_name", "lora_path"} and {"lora_name"}, as vLLM has them. What answers with an adapter that is unloaded
    // comes to its end with it.
    std::string load_adapter(const Service& service) {
        sj::Doc doc;
        const Fields f(parse_body(doc, body));
        refuse_others(f, {"lora_name", "lora_path", "load_inplace"});
        refuse_values(f, {{"load_inplace", {"false"}}});
        const std::string name = adapter_name(f), folder = f.text("lora_path");
        if (folder.empty()) throw Refusal(400, "lora_path is missing", "lora_path");
        if (folder.find('\0') != std::string::npos) throw Refusal(400, "lora_path is no path", "lora_path");
        if (name == service.name) throw Refusal(400, "lora_name is the model's own name", "lora_name");
        const AdapterPtr one = blame("lora_name", [&] { return service.adapters->load(name, folder); });
        swapped = name;
        sj::Writer w;
        write_model(w, service, name, folder, one->created, true);
        return w.text;
    }
    std::string unload_adapter(const Service& service) {
        sj::Doc doc;
        const Fields f(parse_body(doc, body));
        refuse_others(f, {"lora_name"});
        const std::string name = adapter_name(f);
        if (!service.adapters->unload(name))
            throw Refusal(404, "there is no such adapter", "lora_name", "model_not_found");
        swapped = name;
        sj::Writer w;
        return w.object().field("id", name).field("object", "model").field("deleted", true).end().text;
    }
    static std::string adapter_name(const Fields& f) {
        const std::string name = f.text("lora_name");
        if (name.empty()) throw Refusal(400, "lora_name is missing", "lora_name");
        return name;
    }

    // {"prompt": "..."} or {"messages": [...]}
    std::string tokens_of(const Service& service) const {
        sj::Doc doc;
        const Fields f(parse_body(doc, body));
        std::vector<int> ids;
        PromptOptions any;
        any.truncate = SIZE_MAX; // whether it fits or not
        if (f["messages"]) any.chat = chat_options_from_json(service, f), ids = chat_prompt(service, f, any);
        else ids = service.tokenizer->encode(f.text("prompt"), false);
        if (!f["messages"] && !f["prompt"]) throw Refusal(400, "neither prompt nor messages", "prompt");
        sj::Writer w;
        w.object().field("count", ids.size()).field("max_model_len", service.context).key("tokens").array();
        for (int id : ids) w.value(id);
        return w.end().end().text;
    }
    std::string text_of(const Service& service) const {
        sj::Doc doc;
        const Fields f(parse_body(doc, body));
        if (!f["tokens"].is(sj::Array)) throw Refusal(400, "tokens must be a list of token ids", "tokens");
        const std::vector<int> ids = ids_from_json(service, f["tokens"], "tokens");
        size_t bytes = 0;
        for (int id : ids) bytes += service.tokenizer->bytes(id).size();
        if (bytes > MAX_BODY) throw Refusal(400, format("the text has more than %zu bytes", MAX_BODY), "tokens");
        sj::Writer w;
        return w.object().field("prompt", service.tokenizer->decode(ids, false)).end().text;
    }

    // vLLM's names; of HTTP, those of the instrumentation that it uses.
    std::string metrics() {
        const Figures f = server.desk.look();
        const std::string label = format("model_name=\"%s\"", server.ready ? server.service.name.c_str() : "");
        std::string out;
        auto one = [&](const char* name, const char* type, double value, const char* more = "") {
            if (out.find(format("# TYPE vllm:%s ", name)) == std::string::npos)
                out += format("# TYPE vllm:%s %s\n", name, type);
            out += format("vllm:%s{%s%s} %.17g\n", name, label.c_str(), more, value);
        };
        auto histogram = [&](const char* name, const Histogram& h) {
            out += format("# TYPE vllm:%s histogram\n", name) + histogram_text(format("vllm:%s", name).c_str(), label, h);
        };
        one("num_requests_running", "gauge", (double)f.running);
        one("num_requests_waiting", "gauge", (double)f.waiting);
        one("kv_cache_usage_perc", "gauge", f.pages ? (double)f.pages_used / (double)f.pages : 0);
        one("num_preemptions_total", "counter", (double)f.preempted);
        one("prompt_tokens_total", "counter", (double)f.prompt_tokens);
        one("generation_tokens_total", "counter", (double)f.answer_tokens);
        one("forced_tokens_total", "counter", (double)f.forced);
        one("prefix_cache_queries_total", "counter", (double)f.looked_up);
        one("prefix_cache_hits_total", "counter", (double)f.found);
        one("request_success_total", "counter", (double)f.stopped, ",finished_reason=\"stop\"");
        one("request_success_total", "counter", (double)f.cut, ",finished_reason=\"length\"");
        one("request_success_total", "counter", (double)f.cancelled, ",finished_reason=\"abort\"");
        one("dropped_answers_total", "counter", (double)server.desk.unsent.lost());
        one("dropped_requests_total", "counter", (double)server.bodies.lost());
        one("dropped_log_lines_total", "counter", (double)server.log.lost());
        histogram("time_to_first_token_seconds", f.first_token);
        histogram("inter_token_latency_seconds", f.between_tokens);
        histogram("e2e_request_latency_seconds", f.whole);
        const std::vector<Figures> each = server.desk.look_at_each();
        auto by_engine = [&](const char* name, const char* type, auto value) {
            for (size_t k = 0; k < each.size() && each.size() > 1; k++)
                one(name, type, (double)value(each[k]), format(",engine=\"%zu\"", k).c_str());
        };
        by_engine("engine_requests_running", "gauge", [](auto& e) { return e.running; });
        by_engine("engine_requests_waiting", "gauge", [](auto& e) { return e.waiting; });
        by_engine("engine_pages_used", "gauge", [](auto& e) { return e.pages_used; });
        by_engine("engine_prompt_tokens_total", "counter", [](auto& e) { return e.prompt_tokens; });
        by_engine("engine_generation_tokens_total", "counter", [](auto& e) { return e.answer_tokens; });
        by_engine("engine_prefix_cache_hits_total", "counter", [](auto& e) { return e.found; });
        if (server.ready) out += adapter_metrics(server.service.adapters->now());
        return out + server.traffic.text();
    }

    // vLLM's line, whose value is the time, and what each adapter has answered. (Their names need no escapes.)
    static std::string adapter_metrics(const std::map<std::string, AdapterPtr>& all) {
        if (all.empty()) return "";
        std::string running, waiting, tokens = "# TYPE vllm:lora_generation_tokens_total counter\n";
        for (auto& [name, one] : all) {
            if (one->running) running += (running.empty() ? "" : ",") + name;
            if (one->waiting) waiting += (waiting.empty() ? "" : ",") + name;
            tokens += format("vllm:lora_generation_tokens_total{lora_name=\"%s\"} %llu\n", name.c_str(),
                             (unsigned long long)one->tokens);
        }
        return format("# TYPE vllm:lora_requests_info gauge\nvllm:lora_requests_info{running_lora_adapters=\"%s\","
                      "waiting_lora_adapters=\"%s\",max_lora=\"%zu\"} %ld\n",
                      running.c_str(), waiting.c_str(), MAX_ADAPTERS, (long)time(nullptr)) + tokens;
    }

    // ---- The answer of an engine, whole or as a stream. Both may find nothing to do yet, and sleep until reply->wake.
    MHD_Result finish() {
        {
            std::lock_guard lock(reply->mutex);
            const char* dropped = unsent->lost ? "too much waits to be sent" : "the server is shutting down";
            if (unsent->lost || (reply->cancelled && server.draining)) return respond({503, fault({503, dropped})});
            if (reply->cancelled) return MHD_NO;
            if (reply->left) {
                suspended = true;
                MHD_suspend_connection(connection);
                return MHD_YES;
            }
            for (Piece& piece : reply->pieces) answer->add(std::move(piece));
            reply->pieces.clear();
        }
        if (answer->broken()) return respond({500, error_json(500, answer->broken())});
        out = answer->part();
        if (answer->told()) return respond({200, std::exchange(out, {})});
        MHD_Response* r = MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 16384, next_part, this, nullptr);
        return send(r, {200, ""});
    }
    static ssize_t next_part(void* self, uint64_t, char* buffer, size_t room) {
        Exchange& e = *(Exchange*)self;
        if (e.sent == e.out.size()) {
            if (e.answer->told()) return MHD_CONTENT_READER_END_OF_STREAM;
            try {
                e.out = e.answer->part(), e.sent = 0;
            } catch (const std::exception&) {
                return MHD_CONTENT_READER_END_WITH_ERROR;
            }
        }
        return e.copy_out(buffer, room);
    }
    ssize_t copy_out(char* buffer, size_t room) {
        const size_t n = std::min(room, out.size() - sent);
        memcpy(buffer, out.data() + sent, n);
        spoke = seconds();
        sent += n;
        return (ssize_t)n;
    }

    MHD_Result begin_stream() {
        MHD_Response* r = MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 16384, next_of_stream, this, nullptr);
        return send(r, {200, "", "text/event-stream; charset=utf-8", {{"Cache-Control", "no-cache"}}});
    }
    static ssize_t next_of_stream(void* self, uint64_t, char* buffer, size_t room) {
        Exchange& e = *(Exchange*)self;
        try {
            while (e.sent == e.out.size()) {
                e.out.clear(), e.sent = 0;
                std::vector<Piece> pieces;
                {
                    std::lock_guard lock(e.reply->mutex);
                    if (e.reply->cancelled) return MHD_CONTENT_READER_END_WITH_ERROR;
                    // A part of what is there: as JSON it is much larger.
                    const size_t n = std::min<size_t>(e.reply->pieces.size(), 64);
                    const auto end = e.reply->pieces.begin() + (ptrdiff_t)n;
                    std::move(e.reply->pieces.begin(), end, std::back_inserter(pieces));
                    e.reply->pieces.erase(e.reply->pieces.begin(), end);
                    if (pieces.empty() && e.answer->complete()) return MHD_CONTENT_READER_END_OF_STREAM;
                    if (pieces.empty() && std::exchange(e.probed, false)) e.out = ":\n\n"; // a comment
                    else if (pieces.empty()) {
                        e.suspended = true;
                        MHD_suspend_connection(e.connection);
                        return 0;
                    }
                }
                for (const Piece& piece : pieces) {
                    e.server.desk.unsent.remove(*e.unsent, bytes_of(piece));
                    e.out += e.answer->events(piece);
                }
            }
        } catch (const std::exception&) {
            return MHD_CONTENT_READER_END_WITH_ERROR;
        }
        return e.copy_out(buffer, room);
    }

    // The peer has said that it will send nothing more: it is gone, or it waits. What we send now will tell. Where the
    // answer has not begun that is an interim one, in a stream it is a comment.
    void probe_early() const {
        const std::string_view interim = "HTTP/1.1 100 Continue\r\n\r\n";
        (void)!::send(peer.fd, interim.data(), interim.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    }
    void probe() {
        std::lock_guard lock(reply->mutex);
        if (!suspended) return; // something is being sent anyway
        if (!stream) return probe_early();
        probed = true, suspended = false;
        MHD_resume_connection(connection);
    }

    MHD_Result respond(Response&& r) { // its body may be many MB: the library is lent it, until on_completion
        if (!r.file.empty()) { // sent as it is read
            struct stat st;
            const int fd = open(r.file.c_str(), O_RDONLY | O_CLOEXEC);
            if (fd >= 0 && fstat(fd, &st) == 0) return send(MHD_create_response_from_fd64((uint64_t)st.st_size, fd), r);
            if (fd >= 0) close(fd);
            r = {404, fault({404, "the file is gone"})};
        }
        out = std::move(r.body);
        if (out.size() > Answer::PART) server.desk.unsent.add(*unsent, out.size());
        return send(MHD_create_response_from_buffer(out.size(), out.data(), MHD_RESPMEM_PERSISTENT), r);
    }
    MHD_Result send(MHD_Response* out, const Response& r) {
        if (!out) return MHD_NO;
        status = r.status;
        peer.since = seconds(), peer.phase = Peer::ANSWERING; // from now on it can be fetched
        if (r.status != 204) MHD_add_response_header(out, "Content-Type", r.type);
        MHD_add_response_header(out, "X-Content-Type-Options", "nosniff");
        MHD_add_response_header(out, "X-Request-Id", request_id.c_str());
        for (auto& [name, value] : r.headers) MHD_add_response_header(out, name, value.c_str());
        if (server.draining) MHD_add_response_header(out, "Connection", "close");
        const std::string origin = header("Origin");
        if (!origin.empty()) MHD_add_response_header(out, "Vary", "Origin");
        for (auto& allowed : server.options.origins)
            if (origin == allowed) {
                MHD_add_response_header(out, "Access-Control-Allow-Origin", allowed.c_str());
                MHD_add_response_header(out, "Access-Control-Allow-Headers", allowed_headers().c_str());
                MHD_add_response_header(out, "Access-Control-Allow-Methods",
                                        server.filing ? "GET, POST, DELETE" : "GET, POST");
                MHD_add_response_header(out, "Access-Control-Max-Age", "600");
                MHD_add_response_header(out, "Access-Control-Expose-Headers", "X-Request-Id");
            }
        const MHD_Result result = MHD_queue_response(connection, (unsigned)r.status, out);
        MHD_destroy_response(out);
        return result;
    }

    // What a script may send. OpenAI's package adds x-stainless-* of many kinds: those that are asked for are named.
    std::string allowed_headers() const {
        std::string all = "Authorization, Content-Type";
        const std::string asked = lower(header("Access-Control-Request-Headers"));
        for (size_t at = 0, end; at < asked.size(); at = end + 1) {
            end = std::min(asked.find(',', at), asked.size());
            std::string name = asked.substr(at, end - at);
            name.erase(std::remove(name.begin(), name.end(), ' '), name.end());
            auto plain = [](char c) { return isalnum((unsigned char)c) || c == '-'; };
            const bool known = name.compare(0, 12, "x-stainless-") == 0 || name.compare(0, 7, "openai-") == 0 ||
                               name.compare(0, 10, "anthropic-") == 0 || name == "x-api-key" || name == "x-request-id";
            if (known && std::all_of(name.begin(), name.end(), plain)) all += ", " + name;
        }
        return all;
    }

    // One line of JSON, without a word of what was said.
    void log() const {
        sj::Writer w;
        const auto now = std::chrono::system_clock::now().time_since_epoch();
        w.object().field("time", (double)std::chrono::duration_cast<std::chrono::milliseconds>(now).count() / 1e3);
        auto plain = [](const std::string& s) { // a client may send anything
            auto plain = [](char c) { return isalpha((unsigned char)c) || strchr("/_.12", c); };
            const bool good = s.size() < 32 && std::all_of(s.begin(), s.end(), plain);
            return good ? s : "other";
        };
        w.field("method", plain(method)).field("path", filed() ? route_name() : plain(path));
        w.field("status", status).field("seconds", seconds() - start).field("request_id", request_id);
        if (caller && !server.options.keys.empty()) w.field("key", server.options.keys[caller - 1].name);
        if (!swapped.empty()) w.field("adapter", swapped);
        if (answer) {
            w.field("id", answer->id).field("model", answer->model).field("prompt_tokens", answer->prompt_tokens);
            w.field("cached_tokens", answer->cached());
            w.field("completion_tokens", answer->count()).field("complete", answer->complete());
            if (first_token > 0) w.field("first_token_seconds", first_token - start);
        }
        server.log.write(w.end().text + "\n");
    }
};

static Peer& peer_of(MHD_Connection* c) {
    return *(Peer*)MHD_get_connection_info(c, MHD_CONNECTION_INFO_SOCKET_CONTEXT)->socket_context;
}

static uint64_t name_of(const sockaddr* address) {
    if (address->sa_family == AF_INET) return fnv1a(&((const sockaddr_in*)address)->sin_addr, 4);
    return fnv1a(&((const sockaddr_in6*)address)->sin6_addr, 8); // a network of 64 bits is one client's
}

// What the library calls. It is C: no exception may leave them.
static void on_connection(void* self, MHD_Connection* c, void** context, MHD_ConnectionNotificationCode what) {
    Server& server = *(Server*)self;
    std::lock_guard lock(server.mutex);
    if (what == MHD_CONNECTION_NOTIFY_STARTED) {
        Peer* peer = new Peer{MHD_get_connection_info(c, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd,
                              name_of(MHD_get_connection_info(c, MHD_CONNECTION_INFO_CLIENT_ADDRESS)->client_addr)};
        server.peers.insert(peer);
        *context = peer;
        // What the kernel holds of an answer for a slow reader: not the MBs that it likes to, of which it would say
        // nothing for minutes, so that the reader seemed idle.
        const int room = 1 << 17;
        setsockopt(peer->fd, SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
    } else {
        server.peers.erase((Peer*)*context);
        delete (Peer*)*context;
    }
}
// The library has room for a few hundred arguments after a `?`, and with more it neither answers nor closes. We need
// none.
static void* on_request_line(void*, const char* uri, MHD_Connection* c) {
    peer_of(c).since = seconds();
    peer_of(c).phase = Peer::READING;
    const char* end = uri + strlen(uri);
    if (std::count(uri, end, '&') > 64) {
        const std::string body = error_json(414, "too many query arguments");
        const std::string all = "HTTP/1.1 414 URI Too Long\r\nConnection: close\r\nContent-Type: application/json\r\n" +
                                format("Content-Length: %zu\r\n\r\n", body.size()) + body;
        (void)!::send(peer_of(c).fd, all.data(), all.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
        shutdown(peer_of(c).fd, SHUT_RDWR);
    }
    return nullptr;
}
static MHD_Result on_request(void* self, MHD_Connection* c, const char* url, const char* method, const char* version,
                             const char* bytes, size_t* n, void** own) {
    Exchange*& e = (Exchange*&)*own;
    try {
        if (!e) {
            e = new Exchange(*(Server*)self, c, peer_of(c), url, method, version);
            return e->head();
        }
        if (*n == 0) return e->answer_it();
        e->read(bytes, std::exchange(*n, 0));
        return MHD_YES;
    } catch (const std::exception&) {
        return MHD_NO; // closes the connection
    }
}
static void on_completion(void*, MHD_Connection*, void** own, MHD_RequestTerminationCode) {
    delete (Exchange*)std::exchange(*own, nullptr);
}

void Server::start() {
    rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    const rlim_t spare = std::min<rlim_t>(files.rlim_cur / 2, 128);
    const unsigned connections = (unsigned)std::min<rlim_t>(8192, files.rlim_cur - spare);
    const unsigned threads = std::min(8u, std::max(2u, std::thread::hardware_concurrency() / 2));

    sockaddr_in v4 = {};
    sockaddr_in6 v6 = {};
    const bool six = options.host.find(':') != std::string::npos;
    v4.sin_family = AF_INET, v4.sin_port = htons((uint16_t)options.port);
    v6.sin6_family = AF_INET6, v6.sin6_port = htons((uint16_t)options.port);
    if (inet_pton(six ? AF_INET6 : AF_INET, options.host.c_str(),
                  six ? (void*)&v6.sin6_addr : (void*)&v4.sin_addr) != 1)
        DIE("--host %s: not an address", options.host.c_str());

    const unsigned flags = MHD_USE_EPOLL_INTERNAL_THREAD | MHD_ALLOW_SUSPEND_RESUME | (six ? MHD_USE_IPv6 : 0);
    daemon = MHD_start_daemon(
        flags, (uint16_t)options.port, nullptr, nullptr, &on_request, this,
        MHD_OPTION_NOTIFY_CONNECTION, &on_connection, this,
        MHD_OPTION_URI_LOG_CALLBACK, &on_request_line, this, MHD_OPTION_NOTIFY_COMPLETED, &on_completion, this,
        MHD_OPTION_SOCK_ADDR, six ? (sockaddr*)&v6 : (sockaddr*)&v4, MHD_OPTION_CONNECTION_LIMIT, connections,
        MHD_OPTION_CONNECTION_TIMEOUT, options.idle(), MHD_OPTION_THREAD_POOL_SIZE, threads,
        MHD_OPTION_STRICT_FOR_CLIENT, 1, MHD_OPTION_END);
    if (!daemon) DIE("--port %d on %s: %s", options.port, options.host.c_str(), strerror(errno));
}

// The connections end first: while libmicrohttpd stops (0.9.75), a request that it refuses itself makes it read through a
// null pointer.
void Server::stop() {
    const MHD_socket listening = MHD_quiesce_daemon(daemon);
    int empty = 0; // times that nobody was there: a thread may just be accepting
    for (const double end = seconds() + 5; empty < 3 && seconds() < end; usleep(10'000)) {
        std::lock_guard lock(mutex);
        for (Peer* peer : peers) shutdown(peer->fd, SHUT_RDWR);
        empty = peers.empty() ? empty + 1 : 0;
    }
    MHD_stop_daemon(daemon);
    if (listening != MHD_INVALID_SOCKET) close(listening);
}

// To be called a few times a second: who is late, and who is gone?
void Server::watch() {
    std::vector<std::shared_ptr<Reply>> gone;
    {
        std::lock_guard lock(mutex);
        std::vector<pollfd> fds;
        std::vector<Peer*> at;
        const double now = seconds(), fetch = draining ? std::min(options.fetch(), DRAIN_FETCH) : options.fetch();
        auto late = [&](double since, double limit) { return now - std::max(since, drained_since) > limit; };
        for (Peer* peer : peers) {
            const Peer::Phase phase = peer->phase;
            if (peer->exchange || peer->looking) {
                fds.push_back({peer->fd, POLLRDHUP, 0});
                at.push_back(peer);
            } else if (phase == Peer::ANSWERING ? late(peer->since, fetch) : phase != Peer::WORKING) {
                const double limit = draining && phase == Peer::WAITING ? 1 : options.deadline;
                if (phase == Peer::ANSWERING || now - peer->since > limit) shutdown(peer->fd, SHUT_RDWR);
            }
        }
        poll(fds.data(), fds.size(), 0);
        for (size_t i = 0; i < fds.size(); i++) {
            Exchange& e = *(at[i]->exchange ? at[i]->exchange : at[i]->looking);
            const bool closed = fds[i].revents & ~POLLRDHUP, half = fds[i].revents & POLLRDHUP;
            if (!at[i]->exchange) {
                if (closed || (half && !e.newest)) e.gone = 1;
                else if (half && now - at[i]->probed > PROBE) at[i]->probed = now, e.probe_early();
                continue;
            }
            if (closed || (half && !e.newest) || e.unsent->lost) gone.push_back(e.reply);
            else if (half && now - at[i]->probed > PROBE) at[i]->probed = now, e.probe();
            else if (e.stream && now - e.spoke > options.quiet()) e.probe();
            std::lock_guard reply_lock(e.reply->mutex);
            const double there = std::max(e.reply->last, at[i]->since.load());
            if (at[i]->phase == Peer::ANSWERING && (e.unsent->lost || (e.reply->left == 0 && late(there, fetch))))
                shutdown(fds[i].fd, SHUT_RDWR);
        }
    }
    for (auto& reply : gone) {
        std::lock_guard lock(reply->mutex);
        if (reply->left == 0) continue;
        reply->cancelled = true;
        if (reply->wake) reply->wake();
    }
}

// New requests are refused, idle connections closed, and what is under way comes to its end within options.drain.
void Server::drain() {
    drained_since = seconds();
    draining = true;
    fprintf(stderr, "%zu requests to finish\n", answering.load());
    for (; answering > 0 && seconds() < drained_since + options.drain; usleep(50'000)) watch();
    if (answering == 0) return;
    fprintf(stderr, "%zu requests are abandoned\n", answering.load());
    for (const double end = seconds() + 5; answering > 0 && seconds() < end; usleep(50'000)) abandon();
    if (answering > 0) _exit(1); // (the library must not be stopped while it holds any)
}
void Server::abandon() {
    std::vector<std::shared_ptr<Reply>> replies;
    {
        std::lock_guard lock(mutex);
        for (Peer* peer : peers) {
            if (peer->exchange) replies.push_back(peer->exchange->reply);
            if (peer->looking) peer->looking->gone = 1;
            if (peer->phase == Peer::ANSWERING) shutdown(peer->fd, SHUT_RDWR);
        }
    }
    for (auto& reply : replies) {
        std::lock_guard lock(reply->mutex);
        reply->cancelled = true;
        if (reply->wake) reply->wake();
    }
}

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
    int max_queue = 1024, think = 0, jump = -1, gpus = 1;
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
    w.field("dtype", o.dtype).field("plain", o.ctx.plain).field("context", o.engine.context).field("think", o.think);
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
    const int port = MHD_get_daemon_info(server.daemon, MHD_DAEMON_INFO_BIND_PORT)->port;
    const bool six = o.server.host.find(':') != std::string::npos;
    const char* host = o.server.host.c_str();
    fprintf(stderr, "listening on http://%s%s%s:%d/v1; a page to chat on is at /\n", six ? "[" : "", host, six ? "]" : "",
            port);
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
            auto one = std::unique_ptr<One>(new One{ctx, Weights<T>(file, o.dtype == "int8")});
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
    Weights<T> weights(file, o.dtype == "int8");
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
    fprintf(stderr, "%s: %.1f M parameters, %s, %s%s, context %d%s, %d at once, %zu pages of %d tokens; "
            "ready in %.2f s\n", o.name.c_str(), (double)parameters(c) / 1e6, type_name(weights), several.c_str(),
            device_name(o.ctx).c_str(), context, why.c_str(), o.gpus * e.max_seqs, desk.look().pages, PAGE,
            seconds() - start);
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
