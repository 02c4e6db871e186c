#include "book/datagen/score_command.h"
#include "base/error.h"
#include "base/options.h"
#include "book/characters.h"
#include "book/datagen/facts_and_choices.h"
#include "book/datagen/intervals.h"
#include "book/datagen/nearest_answer.h"
#include "book/datagen/score.h"
#include "book/datagen/score_rows.h"
#include "book/datagen/score_table.h"
#include "book/jieba.h"
#include "sj.h"
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

namespace book {

static std::string score_usage() {
    return "usage: datagen score ANSWERS.jsonl REFERENCE.jsonl [options]\n\n"
           "rouge-1, 2, l   rouge_chinese's F1 over jieba's words\n"
           "bleu-4-char     nltk's sentence BLEU over characters\n"
           "rouge-score     rougeL of Google's rouge_score over jieba's words: counts ASCII words only\n"
           "bleu-4-word     sacrebleu's sentence BLEU over words (13a), for languages with spaces\n"
           "facts           share of a row's `facts` found in the answer\n"
           "choice          rows with `choices` and `choice`: right letters; these rows have no other score\n"
           "All scores are means over rows in percent, with 95% intervals.\n\n";
}

static void add_choices(std::string& text, sj::Writer& w, size_t rows, size_t unanswered, double chance) {
    text += format("%zu choices: %zu answers name no letter, which is wrong; chance is %.2f%%\n", rows, unanswered,
                   chance);
    w.key("choices").object().field("rows", rows).field("no_letter", unanswered).field("chance", chance).end();
}

// One of the worst rows, to both outputs.
static void add_worst(std::string& text, sj::Writer& w, const ScoreFile::Row& a, const ScoreReference& row,
                      const std::string& answer, const Measures& m, bool by_id) {
    text += format("%8.4f  %s%s%s\n", row.choice ? m[CHOICE] : m[ROUGE_L],
                   a.where.substr(a.where.rfind(": ") + 2).c_str(), by_id ? ", id " : "",
                   by_id ? score_excerpt(a.id, 60).c_str() : "");
    text += "          question   " + score_excerpt(row.question, 160) + "\n";
    text += "          reference  " + score_excerpt(row.answer, 160) + "\n";
    text += "          answer     " + score_excerpt(answer, 160) + "\n";
    w.object().field("line", a.line);
    if (by_id) w.key("id").text += a.id, w.comma = true;
    for (size_t k = 0; k < METRIC_COUNT; k++)
        if (!std::isnan(m[k])) w.field(METRICS[k], m[k]);
    w.field("question", row.question).field("reference", row.answer).field("answer", answer).end();
}

int score_main(int argc, char** argv) {
    const std::string usage = score_usage();
    std::string dict, train_path;
    bool compat = false, json = false, help = false;
    uint64_t seed = 0;
    const std::vector<Option> options = {
        {"", "--train", "FILE", "training rows, to report the nearest training answer", file_name(train_path)},
        {"", "--compat", "", "count blank lines, as the original tools do", flag(compat)},
        {"", "--json", "", "print one JSON object", flag(json)},
        {"", "--seed", "N", "seed of the bootstrap for the intervals (default 0)", whole(seed, 0, INT64_MAX)},
        {"", "--dict", "FILE", "dictionary (default: data/datagen/jieba.bin beside the program or here)",
         file_name(dict)},
        {"-h", "--help", "", "print this text", flag(help)}};
    const std::vector<std::string> files = parse(options, argc, argv);
    if (help) return print_help(usage.c_str(), options), 0;
    if (files.size() != 2) DIE("%s", usage.substr(0, usage.find('\n')).c_str());
    const Jieba jieba(dict.empty() ? find_jieba(" (--dict FILE names it)") : dict);
    const ScoreFile answers(files[0]), references(files[1]);
    const bool by_id = answers.has_ids && references.has_ids;
    const std::vector<size_t> match = match_rows(answers, references, by_id);
    std::unique_ptr<NearestAnswer> nearest;
    if (!train_path.empty()) nearest = std::make_unique<NearestAnswer>(jieba, ScoreFile(train_path));

    std::vector<ScoreRow> table;
    size_t empty = 0, asked = 0, unanswered = 0;
    double chance = 0;
    for (size_t i = 0; i < match.size(); i++) {
        const ScoreReference row(references, references.rows[match[i]]);
        const std::string answer = without_thought(score_answer(answers, answers.rows[i], row.answer));
        const ScoredText text(jieba, answer);
        empty += text.words[0].empty();
        if (row.choice)
            asked++, chance += 100. / (double)row.choices, unanswered += !chosen_letter(answer, row.choices);
        table.push_back(score_row(jieba, row, text, nearest.get(), compat));
    }

    const char* matched = by_id ? "id" : "order";
    std::string text = format("%zu rows matched by %s; %zu empty answers, which score 0; ", table.size(),
                              matched, empty);
    text += format("95%% intervals of %d resamples, seed %llu\n", RESAMPLES, (unsigned long long)seed);
    sj::Writer w;
    w.object().field("rows", table.size()).field("matched_by", matched).field("empty", empty);
    w.field("compat", compat).field("seed", seed).field("resamples", RESAMPLES);
    if (asked) add_choices(text, w, asked, unanswered, chance / (double)asked);
    text += "\n" + score_table(table, compat, nearest != nullptr, seed, w);

    text += format("\nThe worst by %s:\n", asked == table.size() ? "choice" : "rouge-l");
    w.key("worst").array();
    for (size_t i : worst_rows(table)) {
        const ScoreReference row(references, references.rows[match[i]]);
        const std::string answer = without_thought(score_answer(answers, answers.rows[i], row.answer));
        add_worst(text, w, answers.rows[i], row, answer, table[i][ANSWER], by_id);
    }
    w.end().end();
    if (json) text = w.text + "\n";
    write_stdout(text);
    return 0;
}

} // namespace book
