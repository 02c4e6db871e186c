#include "book/datagen/score_table.h"
#include "base/error.h"
#include "book/datagen/bleu_words.h"
#include "book/datagen/facts_and_choices.h"
#include "book/datagen/intervals.h"
#include <algorithm>
#include <cmath>
#include <utility>

namespace book {

// A multiple-choice row is scored by its letter alone.
static Measures measure_text(const ScoreReference& row, const ScoredText& a, const ScoredText& reference, bool blanks) {
    Measures m;
    m.fill(NAN);
    if (row.choice) {
        m[CHOICE] = chosen_letter(a.text, row.choices) == row.choice ? 100 : 0;
        return m;
    }
    const Scores four = score_pair(a, reference)[blanks];
    std::copy(four.begin(), four.end(), m.begin());
    m[ROUGE_SCORE] = rounded_percent(rouge_score(a.ascii, reference.ascii));
    if (has_spaces(reference.text)) m[BLEU_WORD] = rounded_percent(bleu4_words(a.text, reference.text));
    if (!row.facts.empty()) {
        const std::string form = fact_form(a.text);
        double found = 0;
        for (const std::string& fact : row.facts) found += fact_stands(form, fact);
        m[FACTS] = rounded_percent(found / (double)row.facts.size());
    }
    return m;
}

ScoreRow score_row(const Jieba& jieba, const ScoreReference& row, const ScoredText& answer,
                   const NearestAnswer* nearest, bool compat) {
    const std::string wanted = without_thought(row.answer), found = nearest ? nearest->answer(jieba, row.question) : "";
    const ScoredText reference(jieba, wanted);
    auto measures = [&](const ScoredText& text, bool blanks) { return measure_text(row, text, reference, blanks); };
    ScoreRow all;
    all[ANSWER] = measures(answer, compat);
    all[OTHER_BLANKS] = measures(answer, !compat);
    all[ECHO] = measures(ScoredText(jieba, row.question), compat);
    all[NEAREST].fill(NAN);
    if (nearest) all[NEAREST] = measures(ScoredText(jieba, found), compat);
    for (size_t m = 0; m < METRIC_COUNT; m++) all[GAIN][m] = all[ANSWER][m] - all[NEAREST][m];
    return all;
}

namespace {

// A table column over the rows that have this measure; n: their number.
struct ScoreColumn {
    size_t n = 0;
    Interval interval{};

    ScoreColumn(const std::vector<ScoreRow>& table, size_t candidate, size_t metric, uint64_t seed) {
        std::vector<double> values;
        double sum = 0;
        for (auto& row : table)
            if (!std::isnan(row[candidate][metric])) values.push_back(row[candidate][metric]), sum += values.back();
        n = values.size();
        if (n == 0) return;
        const bool share = metric == CHOICE && candidate != GAIN;
        interval = share ? wilson(sum / 100, (double)n) : bootstrap(values, seed);
    }
};

} // namespace

std::string score_table(const std::vector<ScoreRow>& table, bool compat, bool trained, uint64_t seed, sj::Writer& w) {
    const char* keys[CANDIDATES] = {"answers", compat ? "blank_lines_dropped" : "blank_lines_counted", "question",
                                    "nearest", "answers_less_nearest"};
    const char* titles[CANDIDATES] = {"answers", "", "the question as answer", "nearest training answer",
                                      "answers less nearest"};
    std::string text = format("%-12s%6s", "", "rows");
    auto candidates = trained ? std::vector<size_t>{ANSWER, ECHO, NEAREST, GAIN} : std::vector<size_t>{ANSWER, ECHO};
    for (size_t c : candidates) text += format("  %-26s", titles[c]);
    text.erase(text.find_last_not_of(' ') + 1) += "\n";
    auto cell = [](const Interval& x) { return format("  %8.4f [%6.2f, %6.2f]", x.mean, x.low, x.high); };
    std::string lines, other = compat ? "blank lines dropped:\n" : "blank lines counted:\n";
    for (size_t m = 0; m < METRIC_COUNT; m++) {
        const ScoreColumn answers(table, ANSWER, m, seed);
        if (answers.n == 0) continue;
        lines += format("%-12s%6zu", METRICS[m], answers.n);
        for (size_t c : candidates) lines += cell(ScoreColumn(table, c, m, seed).interval);
        lines += "\n";
        if (m > ROUGE_L) continue;
        other += format("  %-10s%6zu", METRICS[m], answers.n);
        other += cell(ScoreColumn(table, OTHER_BLANKS, m, seed).interval) + "\n";
    }
    for (size_t c = 0; c < CANDIDATES; c++) {
        if ((c == NEAREST || c == GAIN) && !trained) continue;
        w.key(keys[c]).object();
        for (size_t m = 0; m < METRIC_COUNT; m++) {
            const ScoreColumn column(table, c, m, seed);
            const Interval& x = column.interval;
            if (column.n == 0) continue;
            w.key(METRICS[m]).object().field("rows", column.n);
            w.field("mean", x.mean).field("low", x.low).field("high", x.high).end();
        }
        w.end();
    }
    return text + lines + (lines.find("rouge") == 0 ? other : "");
}

std::vector<size_t> worst_rows(const std::vector<ScoreRow>& table) {
    std::vector<size_t> worst(table.size()); // by ROUGE-L or the choice, then by BLEU-4
    for (size_t i = 0; i < worst.size(); i++) worst[i] = i;
    std::stable_sort(worst.begin(), worst.end(), [&](size_t a, size_t b) {
        auto key = [&](size_t i) {
            const Measures& m = table[i][ANSWER];
            return std::isnan(m[CHOICE]) ? std::pair(m[ROUGE_L], m[BLEU_CHAR]) : std::pair(m[CHOICE], 0.);
        };
        return key(a) < key(b);
    });
    worst.resize(std::min<size_t>(worst.size(), 3));
    return worst;
}

} // namespace book
