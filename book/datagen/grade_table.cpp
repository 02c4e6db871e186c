#include "book/datagen/grade_table.h"
#include "base/error.h"
#include "book/datagen/score.h"
#include "sj.h"
#include <algorithm>
#include <numeric>

namespace book {
namespace {

const char* asked_how(const GradeRound& round) { return round.list ? "in one list" : "one at a time"; }

// The figures of one round.
struct Counted {
    size_t answers = 0, all = 0;         // tokens: of the answers, and of answers with questions
    double rouge_l = 0, rouge_score = 0; // means over the questions
    std::vector<double> row_l, row_score;
};

Counted count(const Jieba& jieba, const Tokenizer& tokenizer, const std::vector<GradeQuestion>& questions,
              const Strings& answers) {
    Counted c;
    for (size_t i = 0; i < answers.size(); i++) {
        const size_t tokens = tokenizer.encode(answers[i], false).size();
        c.answers += tokens, c.all += tokens + tokenizer.encode(questions[i].question, false).size();
        const ScoredText answer(jieba, answers[i]), reference(jieba, questions[i].reference);
        c.row_l.push_back(rouge(answer.words[1], reference.words[1])[2]);
        c.row_score.push_back(rouge_score(answer.ascii, reference.ascii));
    }
    auto mean = [&](const std::vector<double>& rows) {
        return std::accumulate(rows.begin(), rows.end(), 0.) / (double)questions.size();
    };
    c.rouge_l = mean(c.row_l), c.rouge_score = mean(c.row_score);
    return c;
}

std::vector<size_t> worst_ten(const Counted& c) {
    std::vector<size_t> rows(c.row_l.size());
    std::iota(rows.begin(), rows.end(), 0);
    std::stable_sort(rows.begin(), rows.end(), [&](size_t a, size_t b) { return c.row_l[a] < c.row_l[b]; });
    rows.resize(std::min<size_t>(rows.size(), 10));
    return rows;
}

} // namespace

GradeReport grade_report(const Jieba& jieba, const Tokenizer& tokenizer, const std::vector<GradeQuestion>& questions,
                         const Grade& grade) {
    std::string table = "                                            of answers        with questions\n"
                        "stage            seconds   limit answers    tokens  a second    tokens  a second  ROUGE-L "
                        "rouge_score\n";
    table += format("%-15s %8.2f %7zu\n", "health", grade.health_seconds, grade.health_limit);
    std::string worst;
    Strings faults;
    if (!grade.fault.empty()) faults.push_back("health: " + grade.fault);
    sj::Writer w;
    w.object().field("questions", questions.size()).field("least", grade.least).key("health").object();
    w.field("seconds", grade.health_seconds).field("limit", grade.health_limit).field("status", grade.status).end();
    w.key("rounds").array();
    for (const GradeRound& round : grade.rounds) {
        const Counted c = count(jieba, tokenizer, questions, round.answers);
        const double answers_rate = (double)c.answers / round.seconds, all_rate = (double)c.all / round.seconds;
        table += format("%-15s %8.2f %7zu %7zu %9zu %9.1f %9zu %9.1f %8.4f %11.4f\n", asked_how(round), round.seconds,
                        grade.predict_limit, round.answers.size(), c.answers, answers_rate, c.all, all_rate, c.rouge_l,
                        c.rouge_score);
        if (!round.fault.empty()) faults.push_back(format("%s: %s", asked_how(round), round.fault.c_str()));
        if (!round.answers.empty() && c.rouge_l < grade.least)
            faults.push_back(format("%s: ROUGE-L is %.4f; %.4f is needed", asked_how(round), c.rouge_l, grade.least));
        w.object().field("mode", round.list ? "batch" : "ok").field("seconds", round.seconds);
        w.field("limit", grade.predict_limit).field("answers", round.answers.size()).field("tokens", c.answers);
        w.field("tokens_a_second", answers_rate).field("tokens_with_questions", c.all);
        w.field("tokens_with_questions_a_second", all_rate).field("rouge_l", c.rouge_l);
        w.field("rouge_score", c.rouge_score).key("rows").array();
        for (size_t i = 0; i < round.answers.size(); i++) {
            w.object().field("question", questions[i].question).field("reference", questions[i].reference);
            w.field("answer", round.answers[i]).field("rouge_l", c.row_l[i]).field("rouge_score", c.row_score[i]).end();
        }
        w.end().end();
        const bool again = &round != &grade.rounds[0] && round.answers == grade.rounds[0].answers;
        const std::vector<size_t> rows = again ? std::vector<size_t>() : worst_ten(c);
        if (!rows.empty())
            worst += format("\nThe worst %zu by ROUGE-L, asked %s:\n", rows.size(), asked_how(round));
        for (size_t i : rows) {
            worst += format("%8.4f  question %zu: %s\n", c.row_l[i], i + 1,
                            score_excerpt(questions[i].question, 160).c_str());
            worst += "          reference  " + score_excerpt(questions[i].reference, 160) + "\n";
            worst += "          answer     " + score_excerpt(round.answers[i], 160) + "\n";
        }
    }
    w.end();
    table += "\nROUGE-L is rouge_chinese's over jieba's words. "
             "rouge_score is Google's over them: it counts words of ASCII only.\n";
    if (grade.rounds.size() == 2) {
        const Strings &a = grade.rounds[0].answers, &b = grade.rounds[1].answers;
        size_t same = 0;
        for (size_t i = 0; i < std::min(a.size(), b.size()); i++) same += a[i] == b[i];
        table += format("Answers that are the same in both modes: %zu of %zu.\n", same, questions.size());
        w.field("same", same);
    }
    const bool passed = faults.empty();
    table += worst;
    for (auto& fault : faults) table += "\nfailed: " + fault;
    if (passed) table += "\npassed";
    w.field("passed", passed).key("faults").array();
    for (auto& fault : faults) w.value(fault);
    w.end().end();
    return {table, w.text, passed};
}

} // namespace book
