// train/rewards.cpp: rewards by rules, and by a program.
#include "base/child.h"
#include "base/options.h"
#include "book/datagen/score.h"
#include "model/utf8.h"
#include "sj.h"
#include "train/rewards.h"
#include <algorithm>
#include <cmath>
#include <locale.h>
#include <memory>
#include <poll.h>
#include <regex.h>

size_t count_choices(std::string_view question) {
    size_t n = 0;
    for (size_t at = 0; at < question.size() && n < 26;) {
        const std::string_view line = question.substr(at, question.find('\n', at) - at);
        at += line.size() + 1;
        const std::string_view sign = line.substr(std::min<size_t>(line.size(), 1));
        const bool follows = sign.substr(0, 1).find_first_of(".):") == 0 || sign.substr(0, 3) == "．" ||
                             sign.substr(0, 3) == "、" || sign.substr(0, 3) == "：";
        if (follows && line[0] == (char)('A' + n)) n++;
    }
    return n;
}

static std::string_view trimmed(std::string_view s) {
    const size_t first = s.find_first_not_of(" \t\r\n");
    return first == s.npos ? "" : s.substr(first, s.find_last_not_of(" \t\r\n") + 1 - first);
}

namespace {
// A POSIX extended regular expression over characters of UTF-8. (Not std::regex: it recurses for each character.)
struct AnswerPattern {
    regex_t compiled = {};
    locale_t utf8 = newlocale(LC_CTYPE_MASK, "C.UTF-8", nullptr);

    explicit AnswerPattern(const std::string& pattern) {
        int fault = 0;
        with_utf8([&] { fault = regcomp(&compiled, pattern.c_str(), REG_EXTENDED | REG_NOSUB); });
        if (!fault) return;
        char why[200];
        regerror(fault, &compiled, why, sizeof why);
        if (utf8) freelocale(utf8);
        DIE("--reward regex:%s: %s", pattern.c_str(), why);
    }
    AnswerPattern(const AnswerPattern&) = delete;
    ~AnswerPattern() {
        regfree(&compiled);
        if (utf8) freelocale(utf8);
    }
    bool found_in(const std::string& text) const {
        regmatch_t whole = {0, (regoff_t)text.size()}; // (the text may hold a zero)
        bool found = false;
        with_utf8([&] { found = regexec(&compiled, text.c_str(), 0, &whole, REG_STARTEND) == 0; });
        return found;
    }

  private:
    template <class F> void with_utf8(F f) const { // where the system has that locale
        const locale_t before = utf8 ? uselocale(utf8) : nullptr;
        f();
        if (before) uselocale(before);
    }
};
} // namespace

// ---- A program

// Runs `program` with `input` and returns its output. It has `limit` seconds. "" if it was ended because this process
// is to stop (see `interrupted`).
static std::string ask_program(const std::string& program, const std::string& input, double limit) {
    const char* name = program.c_str();
    const std::unique_ptr<FILE, int (*)(FILE*)> in(tmpfile(), fclose); // (a pipe could fill meanwhile)
    if (!in || fwrite(input.data(), 1, input.size(), in.get()) != input.size() || fseek(in.get(), 0, SEEK_SET) != 0)
        DIE("a temporary file: %s", strerror(errno));
    const Child child({program}, fileno(in.get()), false, execv);
    const size_t most = (size_t)64 << 20;
    std::string out;
    bool open = true;
    const double start = seconds();
    while (open && !interrupted && seconds() - start < limit && out.size() <= most) {
        pollfd wait = {child.out, POLLIN, 0};
        char some[65536];
        if (poll(&wait, 1, 50) <= 0) continue;
        const ssize_t n = read(child.out, some, sizeof some);
        if (n > 0) out.append(some, (size_t)n);
        else open = n < 0 && errno == EINTR;
    }
    bool ended = false; // it may live on after it has closed its output
    while (!ended && !interrupted && seconds() - start < limit && !open)
        if (!(ended = child.has_ended())) usleep(1000);
    const int status = child.end();
    if (interrupted) return "";
    if (out.size() > most) DIE("--reward %s: wrote more than 64 MiB", name);
    if (!ended) DIE("--reward %s: no end within %g s (--reward-timeout)", name, limit);
    if (WIFSIGNALED(status)) DIE("--reward %s: ended by signal %d", name, WTERMSIG(status));
    if (WEXITSTATUS(status)) DIE("--reward %s: exit status %d", name, WEXITSTATUS(status));
    return out;
}

// The numbers of a text, one a line: `count` of them, all finite.
static std::vector<double> numbers_of(const std::string& program, const std::string& text, size_t count) {
    std::vector<double> all;
    const char* name = program.c_str();
    for (size_t at = 0; at < text.size();) {
        const std::string line = text.substr(at, text.find('\n', at) - at), number(trimmed(line));
        at += line.size() + 1;
        char* end;
        const double x = strtod(number.c_str(), &end);
        if (number.empty() || *end || !std::isfinite(x)) {
            std::string text;
            utf8_repair(text, line, true);
            DIE("--reward %s: line %zu is no number: %s", name, all.size() + 1, score_excerpt(text, 60).c_str());
        }
        all.push_back(x);
    }
    if (all.size() != count)
        DIE("--reward %s: %s for %s", name, counted(all.size(), "number").c_str(), counted(count, "answer").c_str());
    return all;
}

static std::vector<double> ask_program(const std::string& program, const std::vector<Answered>& answers, double limit) {
    std::string lines;
    for (const Answered& a : answers) {
        sj::Writer w;
        w.object().field("prompt", a.prompt).field("answer", a.text).field("reference", a.reference);
        w.field("tokens", a.tokens).field("finish", a.ended ? "stop" : "length").end();
        lines += w.text + "\n";
    }
    const std::string out = ask_program(program, lines, limit);
    return interrupted ? std::vector<double>(answers.size()) : numbers_of(program, out, answers.size());
}

// ---- All of them

Reward make_reward(const std::string& spec, double limit) {
    Reward r;
    const char* said = spec.c_str();
    size_t from = 0;
    if (const size_t star = spec.find('*'); star != spec.npos && star < spec.find_first_of(":/")) {
        r.weight = parse_number("--reward", spec.substr(0, star).c_str(), -1e6, 1e6);
        from = star + 1;
    }
    r.name = spec.substr(from);
    const size_t colon = r.name.find(':');
    const std::string kind = r.name.substr(0, colon), value = colon == r.name.npos ? "" : r.name.substr(colon + 1);
    auto each = [&r](auto one) {
        r.of = [one](const std::vector<Answered>& answers) {
            std::vector<double> all;
            for (const Answered& a : answers) all.push_back(one(a));
            return all;
        };
    };
    if (access((r.name + "/adapter_config.json").c_str(), F_OK) == 0) return r; // a reward model
    if (r.name.find('/') != r.name.npos && kind != "regex") {
        struct stat st;
        if (access(r.name.c_str(), X_OK) != 0) DIE("--reward %s: %s", r.name.c_str(), strerror(errno));
        if (stat(r.name.c_str(), &st) == 0 && !S_ISREG(st.st_mode))
            DIE("--reward %s: neither a program nor the folder of a --reward-model", r.name.c_str());
        r.of = [program = r.name, limit](const std::vector<Answered>& a) { return ask_program(program, a, limit); };
    } else if (r.name == "exact") {
        each([](const Answered& a) {
            return trimmed(without_thought(a.text)) == trimmed(without_thought(a.reference)) ? 1. : 0.;
        });
    } else if (r.name == "choice") {
        auto letter = [](const Answered& a, const std::string& text) {
            return chosen_letter(without_thought(text), count_choices(a.prompt));
        };
        each([letter](const Answered& a) { return letter(a, a.text) == letter(a, a.reference) ? 1. : 0.; });
        r.check = [letter](const Answered& a) {
            if (count_choices(a.prompt) < 2) DIE("no choices: lines that begin with A., B., ..");
            if (!letter(a, a.reference)) DIE("its answer names none of the choices");
        };
    } else if (r.name == "rouge-l") {
        each([jieba = std::make_shared<Jieba>(find_jieba())](const Answered& a) {
            const std::string answer = without_thought(a.text), reference = without_thought(a.reference);
            return score_pair(ScoredText(*jieba, answer), ScoredText(*jieba, reference))[0][ROUGE_L] / 100;
        });
    } else if (kind == "regex" && !value.empty()) {
        each([pattern = std::make_shared<AnswerPattern>(value)](const Answered& a) {
            return pattern->found_in(a.text) ? 1. : 0.;
        });
    } else if (kind == "length" && !value.empty()) {
        const double most = (double)parse_integer("--reward length", value.c_str(), 1, 1 << 24);
        each([most](const Answered& a) { return std::clamp((most - (double)a.tokens) / most, -1., 0.); });
    } else {
        DIE("--reward %s: none of exact, choice, rouge-l, regex:PATTERN, length:N; a program's name has a /", said);
    }
    return r;
}
