// train/run.cpp: a training run.
#include "train/run.h"
#include "base/file.h"
#include "model/cpu.h"
#include "model/device.h"
#include "model/instances.h"
#include "model/pace.h"
#include "train/folder.h"
#include "train/log.h"
#include "train/merge.h"
#include "train/questions.h"
#include "train/report.h"
#include "train/trainer.h"
#include "train/watch.h"
#include <algorithm>
#include <cmath>
#include <memory>

// Model, data and memory of a run, as lines for people.
template <class T> static RunFacts facts_of(const Trainer<T>& t) {
    const TrainOptions& o = t.o;
    RunFacts run;
    run.title = o.model + ", trained on " + o.train, run.what = o.grpo ? "reward" : "loss", run.command = o.command;
    run.units = counted(t.loader.rows.size(), t.loader.unit()), run.steps = t.steps;
    const std::string whole = std::string(o.lora.embed ? ", embed_tokens" : "") + (o.lora.head ? ", lm_head" : "");
    const std::string lora = o.full ? "" : format("LoRA rank %d, alpha %g, dropout %g%s: ", o.lora.rank, o.lora.alpha,
                                                  o.dropout, whole.c_str());
    const std::string several = t.ranks.size > 1 ? format("%d x ", t.ranks.size) : "";
    run.lines.push_back(format("%s: %.2f M parameters, %s, %s%s%s; %s%.2f M of them trained", o.model.c_str(),
                               (double)parameters(t.c) / 1e6, type_name(t.w), several.c_str(),
                               device_name(t.ctx).c_str(), t.c.rope_scaling.note().c_str(), lora.c_str(),
                               (double)t.params.trained() / 1e6));
    const std::string what = o.grpo ? format("%d answers to each, of at most %d tokens", o.rl.group, o.rl.max_tokens)
                                    : counted(t.data.labelled() ? trained_tokens(Half{t.data, 0}, t.loader.rows)
                                                               : trained_tokens(t.data, t.loader.rows),
                                              "trained token");
    run.lines.push_back(format("%s: %s, %s; %s of %s, %lld an epoch, seed %llu", o.train.c_str(), run.units.c_str(),
                               what.c_str(), counted((size_t)t.steps, "step").c_str(),
                               counted(t.loader.step_units(), t.loader.unit()).c_str(),
                               (long long)t.loader.epoch_steps, (unsigned long long)o.seed));
    if (t.teacher)
        run.lines.push_back(format(
            "%s: the teacher, %.2f M parameters, %s; its weights %.1f MB%s", o.teacher.c_str(),
            (double)parameters(t.teacher->c) / 1e6, type_name(t.teacher->w), (double)t.teacher->bytes() / 1e6,
            o.distil.on_policy > 0 ? format("; %g of the steps on own answers", o.distil.on_policy).c_str() : ""));
    run.lines.push_back(t.memory);
    if (o.full && t.file.is_float16())
        run.lines.push_back(format("%s: F16; computed in %s, and model.bin is F16 again", o.model.c_str(),
                                   type_name(t.w)));
    return run;
}

// Tokens a second; the machine's ceiling of them, by the measured speed of its products as in --bench; s that are left.
static std::string rate_event(double rate, double ceiling, double left) {
    sj::Writer w;
    return w.object().field("rate", rate).field("ceiling", ceiling).field("share", rate / ceiling).field("left", left)
        .end().text;
}

template <class T>
int train(const TrainOptions& o, const Context& ctx, const ModelFile& file, const Dataset& data, const Dataset* eval,
          size_t leaked) {
    Ranks& ranks = *o.ranks;
    const bool first = ranks.rank == 0;
    std::unique_ptr<RunFolder> folder;
    std::unique_ptr<Watch> watch;
    Questions questions;
    if (first) {
        folder = std::make_unique<RunFolder>(o);
        questions = Questions(o, file.config, eval);
        if (o.watch >= 0) watch = std::make_unique<Watch>(o.watch);
        if (watch) ranks.tell("the run is shown at http://127.0.0.1:%d/\n", watch->port());
    }
    Trainer<T> t(o, ctx, file, data, eval, questions);
    double best = INFINITY, before = 0;
    const std::string state = o.out + "/state.safetensors";
    if (o.resume) t.read_state(state, best, before);
    else if (o.preference && o.preference->has_reference) t.make_reference();
    if (first) folder->open();
    for (const std::string& to : {o.out, o.out + "/best"}) {
        if (!first || !o.full || (to != o.out && !eval)) continue;
        make_folder(to);
        give_tokenizer(o, file, to, o.overwrite);
    }
    const RunFacts run = facts_of(t);
    for (auto& line : run.lines) ranks.tell("%s\n", line.c_str());
    if (watch) watch->add(about_event(run));
    TrainLog log(o.out, run.what.c_str(), t.step, first, o.tensorboard, [&](const std::string& line) {
        if (watch) watch->add(line);
    });
    auto ask = [&] { // unless the questions were answered after this step
        if (questions.list.empty() || (!log.answers.empty() && log.answers.back().step == t.step)) return;
        const double begun = seconds();
        const std::vector<TrainLog::Answer> answers = t.answer_questions();
        if (interrupted) return;
        log.add(answers);
        ranks.tell("step %lld/%lld  %s answered in %.1f s\n", (long long)t.step, (long long)t.steps,
                   counted(answers.size(), "question").c_str(), seconds() - begun);
    };
    if (t.step == 0) ask();

    const double start = seconds();
    auto elapsed = [&] { return before + seconds() - start; };
    auto add_to_log = [&](sj::Writer& w) { // including each line's end
        const double share = (double)t.step / (double)t.steps;
        w.field("epoch", (double)t.step / (double)t.loader.epoch_steps);
        w.field("percentage", std::round(share * 1e4) / 100);
        w.field("elapsed_time", clock_text(elapsed()));
        if (share > 0) w.field("remaining_time", clock_text(elapsed() / share * (1 - share)));
        log.add(w.end().text);
    };
    auto save = [&] {
        t.write_result(o.out, leaked);
        t.write_state(state, best, elapsed());
        const auto lock = ranks.writing();
        if (!first) return;
        write_text(o.out + "/" + run.what + ".svg", log.curve(t.steps));
        write_report(run, log, summary(run, log, t.step, elapsed()));
    };
    auto due = [&](int64_t every) { return t.step == t.steps || t.step % (every ? every : t.loader.epoch_steps) == 0; };
    auto told_beside = [&](const Dataset& of) {
        if (t.distils(of)) return format("  divergence %.4f  agreement %.3f", t.divergence, t.agreement);
        return o.preference ? t.preferences.text(data.pairs()) : o.grpo ? t.rewarded.text() : std::string();
    };
    auto measure = [&] { // whether the model is better than it was at its best; of rewards `best` is the negative
        const double value = o.grpo ? t.mean_reward(*eval, t.loader.eval_rows) : t.mean_loss(*eval, t.loader.eval_rows);
        const double loss = o.grpo ? -value : value;
        if (interrupted) return false;
        if (!std::isfinite(loss))
            t.not_finite(*eval, t.loader.eval_rows,
                         format("after step %lld: loss %g", (long long)t.step, std::fabs(loss)));
        log.evaluations.push_back({(double)t.step, value});
        sj::Writer w;
        w.object().field("current_steps", t.step).field("total_steps", t.steps);
        if (o.grpo) t.rewarded.write(w, o.rl, true);
        else w.field("eval_loss", loss);
        if (o.preference) t.preferences.write(w, "eval_", data.pairs());
        if (t.distils(*eval)) w.field("eval_divergence", t.divergence).field("eval_agreement", t.agreement);
        add_to_log(w);
        ranks.tell("step %lld/%lld  evaluation %s %.6f%s%s\n", (long long)t.step, (long long)t.steps,
                   log.what.c_str(), value, o.grpo ? "" : told_beside(*eval).c_str(),
                   loss < best ? ", the best so far" : "");
        const bool better = loss < best;
        best = std::min(loss, best);
        return better;
    };
    auto evaluate = [&] { // if it is due, and not done yet
        if (due(o.eval_every)) ask();
        if (!eval || (t.step == 0 && !o.grpo) || !due(o.eval_every)) return;
        const bool done = !log.evaluations.empty() && log.evaluations.back().step == (double)t.step;
        int better = first && !done && measure();
        ranks.sum(&better, 1);
        if (better) t.write_result(o.out + "/best", leaked);
    };
    evaluate(); // a run may have been stopped within it
    const double ceiling = multiply_ceiling<T>(ctx, 0.02);
    auto speed = [&](double flops) { // a second
        const bool giga = flops < 1e12;
        return format("%.1f %cFLOP/s, %.3g%% of the ceiling", flops / (giga ? 1e9 : 1e12), giga ? 'G' : 'T',
                      100 * flops / (ceiling * ranks.size));
    };
    const int64_t begun_at = t.step;
    int64_t saved = -1;
    size_t told_tokens = 0; // of the last progress line
    double told_at = start;
    ThreadPace pace(o, ctx);
    while (t.step < t.steps && (!interrupted || ranks.size > 1)) { // (several ranks all stop in the same step)
        const double begun = seconds(), taught = t.teacher ? t.teacher->time : 0;
        pace.begin();
        if (!t.train_step()) break;
        pace.end();
        const double now = seconds(), took = std::max(now - begun, 1e-9);
        log.losses.push_back({(double)t.step, o.grpo ? t.rewarded.value[Rewarded::REWARD] : t.last_loss});
        sj::Writer w;
        w.object().field("current_steps", t.step).field("total_steps", t.steps).field("loss", t.last_loss);
        if (o.preference) t.preferences.write(w, "", data.pairs());
        if (t.distils(data)) {
            w.field("divergence", t.divergence).field("agreement", t.agreement);
            if (t.teacher) w.field("teacher_share", (t.teacher->time - taught) / took);
            if (t.rewarded.answers > 0) // of a step on own answers
                for (int i : {Rewarded::LENGTH, Rewarded::CUT}) w.field(Rewarded::NAMES[i], t.rewarded.value[i]);
        }
        if (o.grpo) t.rewarded.write(w, o.rl, false);
        w.field("lr", t.last_lr).field("grad_norm", t.last_norm);
        const double rate = (double)t.tokens_done / (now - start);
        w.field("throughput", std::round(rate * 100) / 100).field("total_tokens", t.tokens_done);
        if (ranks.size > 1) w.field("waited", std::round(t.waited * 1e3) / 1e3);
        if (const double time = t.rewarded.time; time > 0) { // of this step's answers
            w.field("rollout_throughput", std::round(t.rewarded.drawn / time)).field("rollout_share", time / took);
            w.field("train_throughput", std::round(t.tokens_fed / std::max(took - time, 1e-9)));
        }
        add_to_log(w);
        if (now - told_at >= 1 || t.step == t.steps || t.step == begun_at + 1) {
            const double left = (now - start) * (double)(t.steps - t.step) / (double)(t.step - begun_at);
            std::string lost = ranks.size > 1 ? format("  waited %.1f%%", 100 * t.waited / (now - start)) : "";
            if (t.teacher) lost += format("  teacher %.0f%%", 100 * t.teacher->time / (now - start));
            ranks.tell("step %lld/%lld  loss %.4f%s  lr %.2e  norm %.3f  %.0f tok/s  %s%s  %.1f MB  %s left\n",
                       (long long)t.step, (long long)t.steps, t.last_loss, told_beside(data).c_str(),
                       t.last_lr, t.last_norm, (double)(t.tokens_done - told_tokens) / std::max(now - told_at, 1e-9),
                       speed(t.flops / took).c_str(), lost.c_str(), (double)t.arena.size / 1e6,
                       clock_text(left).c_str());
            if (watch) watch->add(rate_event((double)(t.tokens_done - told_tokens) / std::max(now - told_at, 1e-9),
                                             ceiling * ranks.size * t.tokens_fed / t.flops, left));
            told_tokens = t.tokens_done, told_at = now;
        }
        evaluate();
        if (due(o.save_every)) save(), saved = t.step;
    }
    if (saved != t.step) save();
    int stopped = interrupted != 0; // by a signal to any rank
    ranks.sum(&stopped, 1);
    if (!t.fault.empty()) DIE("%s; step %lld is saved, --resume goes on", t.fault.c_str(), (long long)t.step);
    if (watch)
        watch->end((stopped ? "Stopped: " : "Done: ") + summary(run, log, t.step, elapsed()) +
                   " This page as a file: " + o.out + "/report.html", stopped != 0);
    if (stopped) {
        ranks.tell("stopped after step %lld of %lld; the same command with --resume goes on\n", (long long)t.step,
                   (long long)t.steps);
        return 130;
    }
    ranks.tell("%s: %s and report.html in %s\n", o.out.c_str(), o.full ? "model.bin" : "adapter_model.safetensors",
               clock_text(elapsed()).c_str());
    return 0;
}

#define INSTANTIATE(T) \
    template int train<T>(const TrainOptions&, const Context&, const ModelFile&, const Dataset&, const Dataset*, \
                          size_t);
QWEN3_INSTANCES(INSTANTIATE)
#undef INSTANTIATE
