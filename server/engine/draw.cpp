// draw.cpp: sampling on the CPU.
#include "model/cpu.h"
#include "server/engine/scheduler.h"

namespace server {

std::map<int, float> Scheduler::biases(const Sequence& q, bool restrained) const {
    std::map<int, float> all;
    for (auto [id, more] : q.job.bias) all[id] += more;
    if (!restrained) return all;
    for (int id : q.job.ends) all[id] = BAN;
    if (!q.job.ignore_eos)
        for (int id : config.end_tokens) all[id] = BAN;
    return all;
}

TokenInfo Scheduler::draw_row(const Sequence& q, float* row, const uint32_t* mask) const {
    std::vector<float> before; // the row's logits
    Likeliest told;
    if (q.job.alternatives >= 0) {
        likeliest_cpu(ctx, told, row, tokenizer.size(), q.job.alternatives);
        before = std::vector<float>(row, row + config.V);
    }
    penalize(row, q.job.how, q.ids, q.prompt, config.V);
    for (auto [id, more] : biases(q, restrained(q))) row[id] += more;
    const int id = mask ? draw_of(row, mask, q) : sample_cpu(ctx, row, tokenizer.size(), q.job.how, q.ids.size());
    return before.empty() ? TokenInfo{id, 0, "", {}} : describe(told, id, before[(size_t)id]);
}

int Scheduler::draw_of(const float* row, const uint32_t* bits, const Sequence& q) const {
    std::vector<int> ids;
    std::vector<float> some;
    for (size_t w = 0; w < mask_words(); w++)
        for (uint32_t left = bits[w]; left; left &= left - 1) {
            ids.push_back((int)(32 * w) + __builtin_ctz(left));
            some.push_back(row[ids.back()]);
        }
    if (ids.empty()) return 0; // no token is allowed: the answer ends
    return ids[(size_t)sample_cpu(ctx, some.data(), (int)some.size(), q.job.how, q.ids.size())];
}

} // namespace server
