// grpo.h: train_lora --grpo, group relative policy optimization (Shao et al., "DeepSeekMath", 2024), by itself.
//
//   advantages    from the rewards of a group, the answers to one prompt, what each is worth beside the others
//   token_loss    the loss of a token, and its slope by the token's log-probability
//   Groups        answers, what they were worth, and how probable each token was when it was drawn
//   AnswerEngine  draws answers: a paged cache, whose pages of a prompt all answers to it share
//
// rewards.h says what an answer is worth; train_lora.cu puts it all together.
#pragma once
#include "model/dataset.h"
#include "train/rewards.h"

struct GrpoOptions {
    std::vector<std::string> rewards; // see make_reward
    double timeout = 60;              // s for a program
    int group = 8, iterations = 1, max_tokens = 256;
    double kl_beta = 0, epsilon = 0.2, epsilon_high = -1; // -1: as epsilon
    std::string loss = "dapo", scale = "group";
    bool mask_truncated = false;
    double temperature = 1, top_p = 1;
};

// reward - mean, over the group's standard deviation (of a sample) where that is asked for. Equal rewards: zero.
struct Advantages { std::vector<double> of; double deviation; };
inline Advantages advantages(const double* reward, size_t n, bool scaled) {
    double mean = 0, squares = 0;
    for (size_t i = 0; i < n; i++) mean += reward[i] / (double)n;
    const bool equal = std::all_of(reward, reward + n, [&](double r) { return r == reward[0]; });
    for (size_t i = 0; i < n && !equal; i++) squares += (reward[i] - mean) * (reward[i] - mean);
    Advantages a = {{}, std::sqrt(squares / (double)std::max<size_t>(n - 1, 1))};
    for (size_t i = 0; i < n; i++)
        a.of.push_back(equal ? 0 : (reward[i] - mean) / (scaled ? a.deviation + 1e-4 : 1));
    return a;
}

// The loss of a token with log-probability p now, `old` when it was drawn, `ref` by the reference; r = e^(p - old):
//   loss = -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A) + beta kl,  kl = e^(ref - p) - (ref - p) - 1
// (equations 3 and 4 there; two limits: DAPO, Yu et al., 2025). `slope` is its derivative by p.
struct TokenLoss { double loss, slope, kl; bool low, high; };
inline TokenLoss token_loss(double p, double old, double ref, double A, const GrpoOptions& o) {
    const double r = std::exp(p - old), d = ref - p;
    TokenLoss t = {};
    t.low = r < 1 - o.epsilon && A < 0, t.high = r > 1 + o.epsilon_high && A > 0; // clipped: a constant
    t.kl = std::exp(d) - d - 1;
    t.loss = -A * (t.low ? 1 - o.epsilon : t.high ? 1 + o.epsilon_high : r) + o.kl_beta * t.kl;
    t.slope = (t.low || t.high ? 0 : -A * r) + o.kl_beta * (1 - std::exp(d));
    return t;
}

// The answers of some prompts, `group` to each, as rows of a dataset: prompt, then the answer, which is trained.
struct Groups {
    size_t size = 1; // of a group
    std::vector<std::vector<uint32_t>> rows;
    std::vector<bool> ended;                     // by an end token, and not by the limit
    std::vector<double> reward, advantage, each; // each: the sum of each kind of reward, without its weight
    std::vector<std::vector<float>> old, reference; // log-probabilities of the answers' tokens; empty: not known
    std::vector<size_t> places;                  // of the groups in their step

    size_t group() const { return size; }
    DatasetRow row(size_t i) const { return {rows[i].data(), rows[i].data() + rows[i].size()}; }
    size_t length(size_t i) const { // of an answer
        return (size_t)std::count_if(rows[i].begin(), rows[i].end(), [](uint32_t word) { return word & TRAIN; });
    }
    bool counts(size_t i, const GrpoOptions& o) const { return ended[i] || !o.mask_truncated; }

    std::string json() const {
        sj::Writer w;
        w.object().key("rows").array();
        for (auto& row : rows) {
            w.array();
            for (uint32_t word : row) w.value((int64_t)word);
            w.end();
        }
        w.end().key("ended").array();
        for (bool e : ended) w.value(e);
        for (auto [name, list] : {std::pair("reward", &reward), {"advantage", &advantage}, {"each", &each}}) {
            w.end().key(name).array();
            for (double x : *list) w.value(x);
        }
        for (auto [name, list] : {std::pair("old", &old), {"reference", &reference}}) {
            w.end().key(name).array();
            for (auto& row : *list) {
                w.array();
                for (float x : row) w.value((double)x);
                w.end();
            }
        }
        return w.end().end().text;
    }
    Groups() = default;
    Groups(const char* path, const std::string& text, size_t group, uint32_t V) : size(group) { // of json()
        sj::Doc doc;
        bool good = sj::parse(doc, text).empty();
        const sj::Value v = doc.root();
        for (sj::Value row : v["rows"].items()) {
            rows.emplace_back();
            for (sj::Value word : row.items()) rows.back().push_back((uint32_t)word.number());
            const DatasetRow words = this->row(rows.size() - 1);
            good = good && !dataset_fault(words) && std::all_of(words.begin(), words.end(), [&](uint32_t word) {
                return (word & ~TRAIN) < V;
            });
        }
        for (sj::Value e : v["ended"].items()) ended.push_back(e.boolean());
        for (auto [name, list] : {std::pair("reward", &reward), {"advantage", &advantage}, {"each", &each}})
            for (sj::Value x : v[name].items()) list->push_back(x.number());
        for (auto [name, list] : {std::pair("old", &old), {"reference", &reference}})
            for (sj::Value row : v[name].items()) {
                list->emplace_back();
                for (sj::Value x : row.items()) list->back().push_back((float)x.number());
            }
        const size_t n = rows.size();
        good = good && n > 0 && n % size == 0 && ended.size() == n && reward.size() == n && advantage.size() == n;
        for (auto* list : {&old, &reference}) {
            good = good && (list->size() == n || (list == &reference && list->empty()));
            for (size_t i = 0; good && i < list->size(); i++) good = (*list)[i].size() == length(i);
        }
        if (!good) DIE("%s: its answers are damaged", path);
    }
};

// Draws answers of several prompts at once, on the weights as they are. The pages of a prompt that are full are
// computed once and shared by all answers to it; each answer has its own page for the rest, and for itself.
template <class T> struct AnswerEngine {
    Context& ctx;
    const Config& c;
    const Weights<T>& w;
    int tokens = 0, sequences = 0, pages = 0; // at once, at most; pages a sequence can have
    const acc<T>* rope = nullptr;             // (positions, D/2, 2)
    Activations<T> a;
    KVCache<T> kv;
    acc<T>* logits;                           // (sequences, V)
    T* picked;                                // (sequences, C)
    int *token, *pos, *seq, *slot, *named, *table; // a Batch, its rows that are drawn for
#ifdef __CUDACC__
    Draw* draws;                              // (sequences)
    int *drawn, *draw_pos, *draw_seq, *unused; // (sequences)
#endif

    AnswerEngine(Context& where, const Config& config, const Weights<T>& weights) : ctx(where), c(config), w(weights) {}
    void plan(Arena& arena) {
        a.plan(arena, c, tokens, !ctx.gpu);
        kv.plan(arena, c, (size_t)sequences * pages);
        logits = arena.take<acc<T>>((size_t)sequences * c.V), picked = arena.take<T>((size_t)sequences * c.C);
        for (int** list : {&token, &pos, &seq, &slot}) *list = arena.take<int>(tokens);
        named = arena.take<int>(sequences), table = arena.take<int>((size_t)sequences * pages);
#ifdef __CUDACC__
        draws = arena.take<Draw>(sequences);
        for (int** list : {&drawn, &draw_pos, &draw_seq, &unused}) *list = arena.take<int>(sequences);
#endif
    }

    struct Asked { const std::vector<int>* prompt; Sampling how; };
    struct Row { int token, pos, seq; };
    std::vector<int> pages_of; // the table, as the host has it

    // The answers to asked[0], asked[1], .., each at most `most` tokens with its end token. Neighbours that have the
    // same prompt share its pages. Without a meaning if it was interrupted.
    std::vector<std::vector<int>> answer(const std::vector<Asked>& asked, int most, int exist) {
        const int B = (int)asked.size();
        std::vector<Row> shared, rest;
        std::vector<std::vector<int>> answers(B);
        pages_of.assign((size_t)B * pages, 0);
        for (int s = 0, next = 0; s < B; s++) {
            const std::vector<int>& prompt = *asked[s].prompt;
            const int n = (int)prompt.size(), full = (n - 1) / PAGE, all = (n + most - 1 + PAGE - 1) / PAGE;
            const bool first = s == 0 || asked[s].prompt != asked[s - 1].prompt;
            for (int p = 0; p < all; p++)
                pages_of[(size_t)s * pages + p] = p < full && !first ? pages_of[(size_t)(s - 1) * pages + p] : next++;
            for (int i = 0; i < n; i++)
                if (i >= full * PAGE) rest.push_back({prompt[i], i, s});
                else if (first) shared.push_back({prompt[i], i, s});
        }
        copy_in(ctx, table, pages_of.data(), pages_of.size());
        compute(shared, asked, nullptr, exist);
        while (!rest.empty() && !interrupted) { // first the ends of the prompts, then a token of each answer
            std::vector<Row> next;
            compute(rest, asked, &next, exist);
            rest.clear();
            for (const Row& row : next) {
                std::vector<int>& answer = answers[row.seq];
                answer.push_back(row.token);
                const bool ends = std::find(c.end_tokens.begin(), c.end_tokens.end(), row.token) != c.end_tokens.end();
                if (!ends && (int)answer.size() < most) rest.push_back(row);
            }
        }
        return answers;
    }

    // Feeds rows, of which those of a sequence are neighbours. With `next` draws the token after each sequence's last.
    void compute(const std::vector<Row>& rows, const std::vector<Asked>& asked, std::vector<Row>* next, int exist) {
        for (size_t first = 0; first < rows.size() && !interrupted; first += tokens) {
            const int N = (int)std::min((size_t)tokens, rows.size() - first);
            std::vector<int> numbers[4], last;
            bool singles = true;
            int longest = 0;
            for (size_t i = first; i < first + N; i++) {
                const Row& r = rows[i];
                const bool ends = i + 1 == rows.size() || rows[i + 1].seq != r.seq;
                if (next && ends) last.push_back((int)(i - first));
                singles = singles && ends && (i == 0 || rows[i - 1].seq != r.seq);
                longest = std::max(longest, r.pos);
                const int of[4] = {r.token, r.pos, r.seq,
                                   pages_of[(size_t)r.seq * pages + r.pos / PAGE] * PAGE + r.pos % PAGE};
                for (int k = 0; k < 4; k++) numbers[k].push_back(of[k]);
            }
            int* const to[4] = {token, pos, seq, slot};
            for (int k = 0; k < 4; k++) copy_in(ctx, to[k], numbers[k].data(), numbers[k].size());
            Batch b = {N, (int)asked.size(), token, pos, seq, slot, table, pages, singles ? N : 0};
            b.splits = longest / SPLIT + 1, b.longest = singles ? 0 : longest + 1;
            forward(ctx, c, w, b, a, kv, rope);
            if (!last.empty()) draw(rows.data() + first, last, asked, *next, exist);
        }
    }

    // Of rows last[0], last[1], .. of the batch.
    void draw(const Row* rows, const std::vector<int>& last, const std::vector<Asked>& asked, std::vector<Row>& next,
              int exist) {
        const int R = (int)last.size();
        copy_in(ctx, named, last.data(), last.size());
        RUN(head, logits, picked, a.normed, named, w.head, R);
        std::vector<int> ids(R);
#ifdef __CUDACC__
        if constexpr (HAS_GPU<T>) if (ctx.gpu) draw_gpu(rows, last, asked, ids, exist);
#endif
        #pragma omp parallel for schedule(static) if (!ctx.gpu)
        for (int r = 0; r < (ctx.gpu ? 0 : R); r++) {
            const Row& row = rows[last[r]];
            ids[r] = sample(logits + (size_t)r * c.V, exist, asked[row.seq].how, (uint64_t)row.pos + 1);
        }
        for (int r = 0; r < R; r++) next.push_back({ids[r], rows[last[r]].pos + 1, rows[last[r]].seq});
    }
#ifdef __CUDACC__
    void draw_gpu(const Row* rows, const std::vector<int>& last, const std::vector<Asked>& asked, std::vector<int>& ids,
                  int exist) {
        std::vector<Draw> how;
        std::vector<int> positions, of;
        for (int row : last) {
            how.push_back({asked[rows[row].seq].how, exist});
            positions.push_back(rows[row].pos), of.push_back(rows[row].seq);
        }
        copy_in(ctx, draws, how.data(), how.size());
        copy_in(ctx, draw_pos, positions.data(), positions.size());
        copy_in(ctx, draw_seq, of.data(), of.size());
        const DrawState state = {drawn, draw_pos, unused, draw_seq, table, pages, nullptr, nullptr, 1, nullptr};
        const unsigned long long* const none = nullptr;
        launch(ctx, sample_kernel, (unsigned)last.size(), DRAW_THREADS, 0, logits, (size_t)c.V, draws, none,
               RowsDealt(), state);
        copy_out(ctx, ids.data(), drawn, ids.size());
    }
#endif
};
