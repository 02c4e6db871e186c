// train/answers.cpp: samples answers during training.
#include "qwen3.cu"
#include "train/answers.h"
#include "base/options.h" // interrupted
#include "model/instances.h"
#include <algorithm>

template <class T> void AnswerEngine<T>::plan(Arena& arena) {
    a.plan(arena, c, tokens, !ctx.gpu);
    kv.plan(arena, c, all_pages);
    logits = arena.take<acc<T>>((size_t)sequences * c.V), picked = arena.take<T>((size_t)sequences * c.C);
    for (int** list : {&token, &pos, &seq, &slot}) *list = arena.take<int>(tokens);
    named = arena.take<int>(sequences), table = arena.take<int>((size_t)sequences * pages);
    if constexpr (WITH_GPU) {
        draws = arena.take<Draw>(sequences);
        for (int** list : {&drawn, &draw_pos, &draw_seq, &unused}) *list = arena.take<int>(sequences);
    }
}

template <class T>
std::vector<std::vector<int>> AnswerEngine<T>::answer(const std::vector<Asked>& asked, int most, int exist) {
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
    while (!rest.empty() && !interrupted) { // first the last tokens of the prompts, then a token of each answer
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

template <class T>
void AnswerEngine<T>::compute(const std::vector<Row>& rows, const std::vector<Asked>& asked, std::vector<Row>* next,
                              int exist) {
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

template <class T>
void AnswerEngine<T>::draw(const Row* rows, const std::vector<int>& last, const std::vector<Asked>& asked,
                           std::vector<Row>& next, int exist) {
    const int R = (int)last.size();
    copy_in(ctx, named, last.data(), last.size());
    RUN(head, logits, picked, a.normed, named, w.head, R);
    std::vector<int> ids(R);
    if constexpr (HAS_GPU<T>) if (ctx.gpu) draw_gpu(rows, last, asked, ids, exist);
    #pragma omp parallel for schedule(static) if (!ctx.gpu)
    for (int r = 0; r < (ctx.gpu ? 0 : R); r++) {
        const Row& row = rows[last[r]];
        ids[r] = sample(logits + (size_t)r * c.V, exist, asked[row.seq].how, (uint64_t)row.pos + 1);
    }
    for (int r = 0; r < R; r++) next.push_back({ids[r], rows[last[r]].pos + 1, rows[last[r]].seq});
}

template <class T>
void AnswerEngine<T>::draw_gpu([[maybe_unused]] const Row* rows, [[maybe_unused]] const std::vector<int>& last,
                               [[maybe_unused]] const std::vector<Asked>& asked,
                               [[maybe_unused]] std::vector<int>& ids, [[maybe_unused]] int exist) {
    if constexpr (HAS_GPU<T>) {
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
        sample_gpu(ctx, true, logits, (size_t)c.V, draws, nullptr, RowsDealt(), state, (int)last.size());
        copy_out(ctx, ids.data(), drawn, ids.size());
    }
}

#define INSTANTIATE(T) template struct AnswerEngine<T>;
QWEN3_INSTANCES(INSTANTIATE)
#undef INSTANTIATE
