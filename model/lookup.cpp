#include "model/lookup.h"

size_t PairIndex::place(const std::vector<int>& ids, size_t at) const {
    const uint64_t pair = (uint64_t)(uint32_t)ids[at - 1] << 32 | (uint32_t)ids[at];
    return (size_t)(pair * 0x9E3779B97F4A7C15u >> (64 - bits)); // (the highest bits depend on all)
}

void PairIndex::grow(const std::vector<int>& ids) {
    if (newest.size() < ids.size()) { // anew, at least twice as large: two times an id, all together
        for (bits = 10; (size_t)1 << bits < ids.size();) bits++;
        newest.assign((size_t)1 << bits, -1), earlier.clear();
    }
    for (size_t at = earlier.size(); at < ids.size(); at++) {
        earlier.push_back(-1);
        if (at > 0) std::swap(earlier.back(), newest[place(ids, at)]), newest[place(ids, at)] = (int)at;
    }
}

PairIndex::Match PairIndex::find(const std::vector<int>& ids) const {
    Match best;
    if (ids.size() < 3) return best;
    const size_t last = ids.size() - 1;
    int at = earlier[last]; // the newest of this chain is the end itself
    for (int looks = 0; at > 0 && looks < LOOKS && best.length < LONGEST; looks++, at = earlier[(size_t)at]) {
        int length = 0;
        while (length < LONGEST && length <= at && ids[(size_t)(at - length)] == ids[last - (size_t)length])
            length++;
        if (length >= 2 && length > best.length) best = {(size_t)at + 1, length};
    }
    return best;
}

void LookUp::begin(const std::vector<int>& ids, double time) {
    index.clear(), index.grow(ids);
    proposed = right = 0, won = 0, taken = time, run_since = 0;
}

std::vector<int> LookUp::propose(const std::vector<int>& ids, size_t room) {
    index.grow(ids);
    const PairIndex::Match match = index.find(ids);
    if (!match.length || !room || !most) return {};
    kind = match.length < 4 ? 0 : match.length < 8 ? 1 : 2;
    const size_t n = number((int)std::min(room, (size_t)most));
    std::vector<int> next;
    for (size_t i = 0; i < n; i++) { // past the end of ids come the ids just proposed
        const size_t at = match.next + i;
        next.push_back(at < ids.size() ? ids[at] : next[at - ids.size()]);
    }
    return next;
}

void LookUp::computed(size_t tokens, double time, int times) {
    if (tokens < 1 || tokens > MOST + 1) return;
    proposed += (tokens - 1) * (size_t)times;
    if (tokens > 1) time = std::min(time, expected_time(0) * (double)tokens); // (a larger one was delayed)
    steps[tokens].add(time);
    const double one = expected_time(0);
    taken += times * one, won -= times * (expected_time((int)tokens - 1) - one);
}

void LookUp::came(size_t tokens, double now, double started, bool from_idle) {
    constexpr int RUN = 4;
    if (tokens > 1) computed(tokens, now - started);
    else if (from_idle) waited(now - started);
    else if (run_since) {
        if (++run < RUN) return;
        computed(1, (now - run_since) / RUN, RUN);
    }
    run = 0, run_since = tokens > 1 ? 0 : now;
}

void LookUp::foreseen(bool is_right) {
    for (double* sum : {&tried[kind], &hit[kind]}) *sum *= 0.95; // the last twenty or so count
    tried[kind]++, hit[kind] += is_right;
}

void LookUp::judged(bool is_right) {
    foreseen(is_right);
    if (!is_right) return;
    right++, won += expected_time(0), taken += expected_time(0);
}

void LookUp::waited(double time) {
    const double one = expected_time(0);
    taken += one, won -= std::min(std::max(time - one, 0.), one); // (a larger one was delayed)
}

double LookUp::expected_time(int n) const {
    const double one = steps[1].least();
    for (int m = n; m > 0; m--)
        if (const double time = steps[m + 1].least(); time > 0)
            return m == n ? time : one + std::max(0., time - one) * n / m;
    return one * (1 + 0.25 * n);
}

size_t LookUp::number(int n) {
    if (always) return (size_t)n;
    const double one = expected_time(0), stake = won + 0.01 * taken;
    if (one == 0) return 0; // no step was measured
    const double chance = (hit[kind] + 1.5) / (tried[kind] + 2);
    int best = 0;
    double rate = 1 / one, tokens = 1, all_right = 1;
    for (int i = 1; i <= n; i++) {
        tokens += all_right *= chance;
        const double time = expected_time(i), hoped = passed < 64 ? time : std::min(time, one * (1 + 0.25 * i));
        if (time - one <= stake && tokens / hoped > rate) best = i, rate = tokens / hoped;
    }
    passed = best ? 0 : passed + 1;
    if (!best) tried[kind] *= 0.99, hit[kind] *= 0.99; // so that it is tried again later
    return (size_t)best;
}
