// hand_out.cpp: delivers sampled tokens to the replies.
#include "server/engine/scheduler.h"
#include <algorithm>
#include <utility>

namespace server {

void Scheduler::hand_out(Step& s) {
    collect(s);
    const double before = std::exchange(handed_out, seconds());
    if (s.proposed.empty())
        prompt_pace.learn((size_t)s.singles, s.token.size() - (size_t)s.singles,
                          handed_out - std::max(before, s.begun));
    const int hoped = std::exchange(expected, -1);
    if (ctx.gpu && s.alone) lookup.came(s.token.size(), handed_out, s.begun, s.from_idle);
    else lookup.paused();
    for (size_t i = 0; i < s.draws.size(); i++) {
        const auto it = running.find(s.draws[i].rank);
        const bool valid = it != running.end() && it->second->admission == s.draws[i].admission;
        if (!valid) continue;
        TokenInfo info{};
        if (!ctx.gpu) info = std::move(s.told[i]);
        else if (s.wanted[i] >= 0) info = describe(s.rows_told[i], s.ids[i], s.logits[i]);
        else info = {s.ids[i], 0, "", {}};
        if (hoped >= 0) lookup.foreseen(info.id == hoped);
        if (accept(*it->second, std::move(info)) || take_proposed(s, *it->second) || jump(*it->second)) leave(it);
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

bool Scheduler::accept(Sequence& q, TokenInfo&& info) {
    Job& job = q.job;
    const int id = info.id;
    Piece piece;
    q.pending--;
    const bool end = ends(q, id);
    if (job.min_tokens && q.ids.size() - q.prompt == job.min_tokens) q.speech.filter.stops = job.stops;
    const auto state = q.speech.state;
    const bool keeps = !end && has_form(q) && !(state == Speech::BEGIN && id == q.speech.open);
    const bool lost = keeps && !q.matcher->advance(id); // only if nested without bound
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

bool Scheduler::ends(const Sequence& q, int id) const {
    return std::count(q.job.ends.begin(), q.job.ends.end(), id) ||
           (!q.job.ignore_eos && std::count(config.end_tokens.begin(), config.end_tokens.end(), id));
}

} // namespace server
