// hand_out.cpp: delivers sampled tokens to the replies.
#include "server/engine/disk_prefix.h"
#include "server/engine/scheduler.h"
#include <algorithm>
#include <utility>

namespace server {

void Scheduler::hand_out(Step& s) {
    collect(s);
    const double before = std::exchange(handed_out, seconds()), took = handed_out - std::max(before, s.begun);
    const size_t prompts = s.token.size() - (size_t)s.singles;
    if (s.proposed.empty()) prompt_pace.learn((size_t)s.singles, prompts, took);
    if (disk && !s.singles) disk->pace.learn(disk->pace.computing, prompts, took);
    const int hoped = std::exchange(expected, -1);
    if (ctx.gpu && s.alone) lookup.came(s.token.size(), handed_out, s.begun, s.from_idle);
    else lookup.paused();
    take_targets(s);
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
        piece.choice = it->second->job.choice, piece.finish = "stop";
        piece.cached = it->second->cached, piece.read = it->second->read;
        piece.hidden.assign(from, from + config.C);
        figures.stopped++, figures.whole.add(seconds() - it->second->job.arrived);
        outbox.push_back({it->second->job.reply, std::move(piece)});
        leave(it);
    }
}

void Scheduler::take_targets(Step& s) {
    for (size_t i = 0; i < s.targets.size(); i++) {
        const auto it = running.find(s.targets[i].rank);
        if (it == running.end() || it->second->admission != s.targets[i].admission) continue;
        Sequence& q = *it->second;
        q.told.push_back(std::move(s.targets_told[i]));
        if (q.told.size() != (q.told_pages + 1) * PAGE + 1) continue; // the page is full, and its last row computed
        PagePool::Page& page = pool.pages[(size_t)q.pages[q.told_pages++]];
        if (!page.name) continue; // another page with this content has its own
        page.told.assign(q.told.end() - 1 - PAGE, q.told.end() - 1);
        page.alternatives = q.job.prompt_alternatives;
    }
    for (auto& o : s.over) {
        const auto it = running.find(o.rank);
        if (it == running.end() || it->second->admission != o.admission) continue;
        Sequence& q = *it->second;
        Piece piece;
        piece.choice = q.job.choice, piece.cached = q.cached, piece.read = q.read, piece.finish = "length";
        tell_prompt(q, piece);
        figures.cut++, figures.whole.add(seconds() - q.job.arrived);
        outbox.push_back({q.job.reply, std::move(piece)});
        leave(it);
    }
}

void Scheduler::tell_prompt(Sequence& q, Piece& piece) const {
    if (std::exchange(q.job.prompt_alternatives, -1) < 0) return;
    Utf8Stream characters;
    for (TokenInfo& t : q.told) t.text = characters.feed(tokenizer.bytes(t.id));
    q.told.back().text += characters.flush();
    piece.prompt = std::exchange(q.told, {});
}

bool Scheduler::accept(Sequence& q, TokenInfo&& info) {
    Job& job = q.job;
    const int id = info.id;
    Piece piece;
    q.pending--;
    tell_prompt(q, piece);
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
    piece.count = q.ids.size() - q.prompt + end, piece.cached = q.cached, piece.read = q.read;
    if (end || q.speech.filter.stopped || complete)
        piece.finish = q.speech.calls ? "tool_calls" : "stop", figures.stopped++;
    else if (lost || piece.count == job.max_tokens) piece.finish = "length", figures.cut++;
    if (piece.finish) q.speech.finish(piece), piece.thoughts = q.thoughts, piece.stop = q.speech.filter.found;
    if (end && job.tells_end && !q.speech.filter.stopped) piece.tokens.push_back(std::move(info));

    const double now = seconds();
    figures.answer_tokens++;
    if (job.adapter) job.adapter->tokens++;
    if (q.last == 0) figures.first_token.add(now - job.arrived);
    else figures.between_tokens.add(now - q.last);
    if (piece.finish) figures.whole.add(now - job.arrived);
    q.last = now;
    const bool last = piece.finish;
    piece.choice = job.choice;
    if (last || job.every || !piece.text.empty() || !piece.tokens.empty() || !piece.prompt.empty() ||
        !piece.calls.empty())
        outbox.push_back({job.reply, std::move(piece)});
    return last;
}

bool Scheduler::ends(const Sequence& q, int id) const {
    return std::count(q.job.ends.begin(), q.job.ends.end(), id) ||
           (!q.job.ignore_eos && std::count(config.end_tokens.begin(), config.end_tokens.end(), id));
}

} // namespace server
