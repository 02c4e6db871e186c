// train/report.cpp: fills in train/page/report.html.
#include "train/report.h"
#include "base/file.h"
#include "base/html.h"
#include "base/options.h" // counted
#include "sj.h"
#include <algorithm>

static const char REPORT_PAGE[] =
#include "build/train_report.inc"
    ;

std::string about_event(const RunFacts& run) {
    sj::Writer w;
    w.object().field("about", run.title).field("what", run.what).field("total_steps", run.steps);
    w.field("command", run.command).key("facts").array();
    for (auto& line : run.lines) w.value(line);
    w.end().end();
    return w.text;
}

std::string summary(const RunFacts& run, const TrainLog& log, int64_t step, double elapsed) {
    const std::string done = step == run.steps ? "" : format("%lld of ", (long long)step);
    std::string text = run.units + ", " + done + counted((size_t)run.steps, "step") + " in " + clock_text(elapsed);
    for (auto* list : {&log.losses, &log.evaluations}) {
        if (list->empty()) continue;
        text += list == &log.losses ? "; training " : "; evaluation ";
        text += format("%s %.4g after step %.0f", run.what.c_str(), list->front().value, list->front().step);
        if (list->size() > 1) text += format(", %.4g after step %.0f", list->back().value, list->back().step);
    }
    return text + ".";
}

// An answer as a term and a description of a list.
static std::string answer_html(const TrainLog::Answer& a, const char* kind) {
    const std::string name = a.step ? format("after %lld", (long long)a.step) : "before";
    const std::string text = a.text.empty() && a.ended ? "(empty)" : a.text + (a.ended ? "" : " … (cut)");
    return format("<dt>%s</dt><dd%s>%s</dd>\n", name.c_str(), kind, escape_html(text).c_str());
}

// A question with its reference and its first and last answer; those between are folded.
static std::string question_html(const std::vector<const TrainLog::Answer*>& answers) {
    const TrainLog::Answer& first = *answers[0];
    std::string html = "<div class=\"card answer\"><h3>" + escape_html(first.question) + "</h3>\n<dl>\n";
    if (!first.reference.empty()) html += "<dt>wanted</dt><dd>" + escape_html(first.reference) + "</dd>\n";
    html += answer_html(first, "");
    if (answers.size() > 1) html += answer_html(*answers.back(), " class=\"now\"");
    html += "</dl>\n";
    if (answers.size() > 2) {
        html += format("<details><summary>%zu more</summary>\n<dl>\n", answers.size() - 2);
        for (size_t i = 1; i + 1 < answers.size(); i++) html += answer_html(*answers[i], "");
        html += "</dl>\n</details>\n";
    }
    return html + "</div>\n";
}

void write_report(const RunFacts& run, const TrainLog& log, const std::string& summary) {
    std::string recipe = run.command, answers;
    for (auto& line : run.lines) recipe += "\n" + line;
    std::vector<std::string> asked;
    for (auto& a : log.answers)
        if (std::find(asked.begin(), asked.end(), a.question) == asked.end()) asked.push_back(a.question);
    for (auto& question : asked) {
        std::vector<const TrainLog::Answer*> list;
        for (auto& a : log.answers)
            if (a.question == question) list.push_back(&a);
        answers += question_html(list);
    }
    write_text(log.folder + "/report.html",
               fill_page(REPORT_PAGE, {{"title", escape_html(run.title)}, {"state", escape_html(summary)},
                                       {"curve", log.curve(run.steps)}, {"recipe", escape_html(recipe)},
                                       {"answers", (answers.empty() ? "" : "<h2>Answers</h2>\n") + answers}}));
}
