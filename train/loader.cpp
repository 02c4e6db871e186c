// train/loader.cpp: units in the order of steps, and batches of units.
#include "train/loader.h"
#include "model/distillation.h"
#include "train/buckets.h"
#include <algorithm>
#include <cmath>
#include <numeric>

void Loader::choose_rows(const Dataset* evaluation) {
    rows = fitting(data);
    if (evaluation) eval_rows = fitting(*evaluation);
    const size_t most = std::max(data.outcomes(), evaluation ? evaluation->outcomes() : 0);
    if (most) outcomes = (int)(most + 1 + 3) / 4 * 4; // (kernels read four logits at once)
    const size_t a_step = step_units();
    epoch_steps = (int64_t)((rows.size() + a_step - 1) / a_step) * o.rl.iterations;
    max_pages = (longest + PAGE - 1) / PAGE;
}

std::vector<size_t> Loader::fitting(const Dataset& from) {
    std::vector<size_t> list;
    std::vector<int> lengths;
    const size_t limit = (size_t)std::min(o.max_len, c.max_positions), all = from.rows() / from.group();
    for (size_t i = 0; i < all; i++) {
        size_t most = 0, sum = 0;
        each_row(from, {i}, [&](DatasetRow row) { most = std::max(most, row.size()), sum += row.size() - unfed; });
        if (from.labelled()) sum = most - 1; // (its two rows are in different batches)
        const size_t sampled = o.samples() ? prompt_of(from.row(i)).size() + o.rl.max_tokens : 0;
        if (o.grpo) most = sampled, sum = o.rl.group * (most - unfed);
        else if (sampled > most) most = sampled, sum = most - 1;
        if (most > limit) continue;
        list.push_back(i), lengths.push_back((int)sum), longest = std::max(longest, (int)(most - unfed));
    }
    const char *name = from.file.path.c_str(), *with = o.samples() ? " with --max-tokens" : "";
    if (list.empty())
        DIE("%s: every %s has more than %zu tokens%s (%s)", name, unit(), limit, with,
            o.max_len > c.max_positions ? "the model's limit" : "--max-len");
    if (list.size() < all)
        ranks.tell("%s: %s left out of %zu: more than %zu tokens%s\n", name,
                   counted(all - list.size(), unit()).c_str(), all, limit, with);
    std::sort(lengths.rbegin(), lengths.rend());
    const auto end = lengths.begin() + std::min(lengths.size(), (size_t)o.batch);
    most_tokens = std::max(most_tokens, std::accumulate(lengths.begin(), end, 0));
    return list;
}

// ---- Steps

std::vector<size_t> Loader::rows_of(int64_t k) {
    const int64_t an_epoch = epoch_steps / o.rl.iterations, epoch = (k /= o.rl.iterations) / an_epoch;
    if (epoch != ordered) {
        order = rows;
        for (size_t i = order.size() - 1; i > 0 && o.shuffle; i--) {
            const Philox r = philox(o.seed, (uint64_t)epoch << 32 | i, STREAM_SHUFFLE);
            const uint64_t bits = (uint64_t)r.v[1] << 32 | r.v[0];
            std::swap(order[i], order[(size_t)((unsigned __int128)bits * (i + 1) >> 64)]);
        }
        ordered = epoch;
    }
    const size_t a_step = step_units(), first = (size_t)(k % an_epoch) * a_step;
    return {order.begin() + (ptrdiff_t)first, order.begin() + (ptrdiff_t)std::min(first + a_step, order.size())};
}

std::vector<size_t> Loader::deal_step(const std::vector<size_t>& list) {
    if (ranks.size == 1) return list;
    std::vector<size_t> tokens, mine;
    for (size_t unit : list) tokens.push_back(o.grpo ? 1 : trained_tokens(data, {unit}));
    places = deal(tokens, ranks.size)[ranks.rank];
    for (size_t place : places) mine.push_back(list[place]);
    return mine;
}

// ---- Batches

void Loader::plan(Arena& arena) {
    const int N = most_tokens;
    for (int** list : {&token, &pos, &seq, &slot, &named, &target}) *list = arena.take<int>(N);
    place = arena.take<uint32_t>(N), bound = arena.take<float>(o.neftune > 0 ? N : 0);
    pages = arena.take<int>(sequences() * max_pages);
    outcome = arena.take<int>((size_t)N * outcomes), log_p = arena.take<float>((size_t)N * outcomes);
}

template <class From>
Batch Loader::load(const From& from, const size_t* list, int n, int first, int& R, bool whole) {
    const int group = (int)from.group();
    n *= group; // sequences
    std::vector<int> all_token, all_pos, all_seq, all_slot, all_named, all_target, table((size_t)n * max_pages, 0);
    std::vector<uint32_t> all_place;
    std::vector<float> all_bound;
    int page = 0;
    ends.clear();
    for (int s = 0; s < n; s++) {
        const DatasetRow row = from.row(list[s / group] * group + s % group);
        const size_t in_step = place_in_step((size_t)(first + s / group));
        for (int i = 0, end = (int)row.size() - !whole; i < end; i++) {
            if (i % PAGE == 0) table[(size_t)s * max_pages + i / PAGE] = page++;
            if (whole && i + 1 == end) all_named.push_back((int)all_token.size()), all_target.push_back(0);
            if (!whole && row.first[i + 1] & TRAIN) {
                all_named.push_back((int)all_token.size());
                all_target.push_back((int)(row.first[i + 1] & ~TRAIN));
            }
            all_token.push_back((int)(row.first[i] & ~TRAIN)), all_pos.push_back(i), all_seq.push_back(s);
            all_slot.push_back((page - 1) * PAGE + i % PAGE);
            all_place.push_back((uint32_t)(in_step * group + s % group) * (uint32_t)o.max_len + (uint32_t)i);
        }
        if (o.neftune > 0)
            all_bound.resize(all_token.size(), (float)(o.neftune / std::sqrt((double)(row.size() - 1) * c.C)));
        ends.push_back((int)all_named.size());
    }
    const size_t N = all_token.size();
    copy_in(ctx, token, all_token.data(), N);
    copy_in(ctx, pos, all_pos.data(), N);
    copy_in(ctx, seq, all_seq.data(), N);
    copy_in(ctx, slot, all_slot.data(), N);
    copy_in(ctx, place, all_place.data(), N);
    if (!all_bound.empty()) copy_in(ctx, bound, all_bound.data(), all_bound.size());
    copy_in(ctx, pages, table.data(), table.size());
    copy_in(ctx, named, all_named.data(), all_named.size());
    copy_in(ctx, target, all_target.data(), all_target.size());
    R = (int)all_named.size();
    if constexpr (std::is_same_v<From, Dataset>)
        if (from.taught()) load_outcomes(from, {list, list + n / group});
    return {(int)N, n, token, pos, seq, slot, pages, max_pages};
}
// The outcomes of these rows' trained tokens. The tail has at least 1e-7, to which its sum is exact.
void Loader::load_outcomes(const Dataset& from, const std::vector<size_t>& list) {
    std::vector<int> ids;
    std::vector<float> all;
    for (size_t i : list) {
        const uint32_t* id = from.outcome_ids(i);
        const float* p = from.outcome_log_p(i);
        for (size_t left = trained_tokens(from, {i}); left > 0; left--, id += from.outcomes(), p += from.outcomes()) {
            const size_t first = ids.size();
            double sum = 0;
            ids.resize(first + outcomes, -1), all.resize(first + outcomes, NEVER<float>);
            for (size_t k = 0; k < from.outcomes() && id[k] != NO_ID; k++) {
                ids[first + k] = (int)id[k], all[first + k] = p[k];
                sum += std::exp((double)p[k]);
            }
            all.back() = (float)std::log(std::max(1 - sum, 1e-7));
        }
    }
    copy_in(ctx, outcome, ids.data(), ids.size());
    copy_in(ctx, log_p, all.data(), all.size());
}
template Batch Loader::load(const Dataset&, const size_t*, int, int, int&, bool);
template Batch Loader::load(const Half&, const size_t*, int, int, int&, bool);
template Batch Loader::load(const Groups&, const size_t*, int, int, int&, bool);
