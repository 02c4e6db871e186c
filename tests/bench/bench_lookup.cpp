// Prompt lookup: its gain on texts that repeat, and its cost on one that does not.
//   make build/bench_lookup
//   build/bench_lookup MODEL [ROUNDS [N]]       from the repository's root; the tokenizer lies beside MODEL, or here
// The model reads a prompt and then "says" a known answer: after each draw the answer's next token is taken instead of
// the one that was drawn. So the times are the model's, and how much is right of what is looked up is a fact of the
// texts, all from data/course:
//   summary   a section of the notes, and the first sentence of each of its paragraphs
//   answer    a section of the notes, and the answers to the questions of dev.jsonl whose evidence lies in it
//   edit      a program of the notes, and the same with a variable renamed
//   other     a section of the notes, and the answers to three questions on another one
// Without and with --lookup N (7) in turns, after one round that does not count; medians of ROUNDS (5) and, in brackets,
// the least and the largest ratio of a round.
#include "base/json_lines.h"
#include "model/chat_template.h"
#include "model/device.h"
#include "model/model_file.h"
#include "model/options.h"
#include "model/session.h"
#include "model/tokenizer.h"
#include "model/weights.h"
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

static std::string between(const std::string& s, const std::string& from, const std::string& to) {
    const size_t at = s.find(from);
    if (at == std::string::npos) DIE("the notes have no %s", from.c_str());
    return s.substr(at, s.find(to, at + from.size()) - at);
}
static std::string notes(const char* name) {
    return std::string(MappedFile(format("data/course/notes/%s.md", name)).text());
}
static std::string first_sentences(const std::string& section) {
    std::string all;
    for (size_t at = 0; at < section.size();) {
        const size_t end = std::min(section.find('\n', at), section.size());
        const std::string line = section.substr(at, end - at);
        const size_t stop = line.find("。");
        if (stop != std::string::npos) all += line.substr(0, stop) + "。\n";
        at = end + 1;
    }
    return all;
}
static std::string answers(const std::string& evidence) { // of rows whose evidence begins so
    std::string all;
    const MappedFile file("data/course/dev.jsonl");
    each_json_line(file, [&](size_t, std::string_view, sj::Value row) {
        if (row["evidence"].str().compare(0, evidence.size(), evidence) == 0) all += row["output"].str() + "\n";
    });
    return all;
}

struct Case { const char* name; std::string prompt, answer; };
static std::vector<Case> cases() {
    const std::string reduction = between(notes("08-reduction-and-scan"), "## 块内树形归约", "\n## ");
    const std::string scheduling = between(notes("01-introduction"), "## 用峰值数字认识一块卡", "\n## ");
    const std::string program = between(notes("05-performance-considerations"), "// 一块 16×16 线程算 C", "```");
    std::string edited = program;
    for (size_t at = 0; (at = edited.find("acc", at)) != std::string::npos; at += 3) edited.replace(at, 3, "sum");
    if (edited == program) DIE("the program has no variable acc");
    return {{"summary", "请概括：\n" + scheduling, first_sentences(scheduling)},
            {"answer", "请根据下文回答。\n" + reduction, answers("08-reduction-and-scan.md:3")},
            {"edit", "把变量 acc 改名为 sum：\n" + program, edited},
            {"other", "请概括：\n" + scheduling, answers("16-") + answers("12-")}};
}

struct Timing { double rate; size_t proposed, right; };
template <class T>
Timing say(Session<T>& session, const std::vector<int>& prompt, const std::vector<int>& answer, int lookup) {
    session.rewind(0);
    session.lookup.most = lookup;
    session.feed(prompt);
    Sampling how;
    how.temperature = 0;
    session.begin_draws(how, session.config.V, session.ids.size(), answer.size());
    const double start = seconds();
    for (int id : answer) {
        session.draw();
        session.accept(id);
    }
    return {(double)answer.size() / (seconds() - start), session.lookup.proposed, session.lookup.right};
}

template <class T> void measure(const std::string& path, int rounds, int lookup) {
    const ModelFile file(path);
    const Weights<T> weights(file, Format::PLAIN, keeps_packed<T>({}, {}));
    use_huge_pages(file, weights);
    const Tokenizer tokenizer(find_tokenizer("", path));
    Session<T> session(file.config, weights, std::min(2048, file.config.max_positions));
    printf("text       prompt  answer   without      with  ratio                 proposed  right\n");
    for (const Case& one : cases()) {
        const std::vector<int> prompt = render_chat(tokenizer, {{"user", one.prompt}});
        std::vector<int> answer = tokenizer.encode(one.answer, false);
        answer.resize(std::min(answer.size(), (size_t)session.capacity - prompt.size()));
        std::vector<double> without, with, ratio;
        Timing t{};
        for (int round = -1; round < rounds; round++) {
            double alone = 0;
            for (int turn = 0; turn < 2; turn++) // each goes first every other time
                if ((turn + round + 2) % 2) alone = say(session, prompt, answer, 0).rate;
                else t = say(session, prompt, answer, lookup);
            if (round < 0) continue;
            without.push_back(alone), with.push_back(t.rate), ratio.push_back(t.rate / alone);
        }
        for (auto* v : {&without, &with, &ratio}) std::sort(v->begin(), v->end());
        const size_t middle = (size_t)rounds / 2;
        printf("%-9s %7zu %7zu %9.2f %9.2f  %5.2f (%.2f to %.2f) %9zu %6zu\n", one.name, prompt.size(), answer.size(),
               without[middle], with[middle], ratio[middle], ratio[0], ratio.back(), t.proposed, t.right);
        fflush(stdout);
    }
}

int main(int argc, char** argv) {
    try {
        if (argc < 2) DIE("usage: bench_lookup MODEL [ROUNDS [N]]");
        measure<bf16>(argv[1], argc > 2 ? std::max(1, atoi(argv[2])) : 5, argc > 3 ? atoi(argv[3]) : LookUp::MOST);
    } catch (const std::exception& e) {
        fprintf(stderr, "bench_lookup: %s\n", e.what());
        return 1;
    }
}
