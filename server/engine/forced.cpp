// forced.cpp: the tokens that a form allows: masks, and forced tokens.
#include "server/engine/scheduler.h"
#include <algorithm>
#include <string>
#include <string_view>

namespace server {

bool Scheduler::has_form(const Sequence& q) const {
    return q.matcher && (q.job.form_of_calls ? q.speech.state == Speech::CALL : q.speech.state != Speech::THOUGHT);
}

bool Scheduler::tokens_of_form(Sequence& q, Allowed& tokens) {
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

int Scheduler::mask_row(Sequence& q, std::map<Allowed, int>& rows, uint32_t* bits) {
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

void Scheduler::foresee(Sequence& q) {
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
        if (text.compare(at, bytes.size(), bytes) || ends(q, id)) break; // half a character, or another encoding of it
        q.forced.push_back(id), at += bytes.size();
    }
}

bool Scheduler::jump(Sequence& q) {
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

} // namespace server
