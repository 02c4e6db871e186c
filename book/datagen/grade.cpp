#include "book/datagen/grade.h"
#include "base/error.h"
#ifdef HAVE_CURL
#include "base/options.h"
#include "book/characters.h"
#include "book/datagen/grade_table.h"
#include "book/datagen/requests.h"
#include "book/datagen/transfer.h"
#include "book/report.h"
#include "model/chat_template.h"
#include <algorithm>
#include <cmath>
#include <memory>

namespace book {
namespace {

struct Judge {
    const std::vector<GradeQuestion>& questions;
    Grade& grade;
    std::string url;
    curl_slist* headers = json_headers();
    Transfer transfer;
    sj::Doc reply;
    // The current stage's.
    std::unique_ptr<Progress> progress;
    const char* stage = "";
    double begun = 0, end = 0; // its time limit
    size_t answered = 0;
    bool one_by_one = false;
    std::string last; // the last reply of a server that was not ready

    Judge(const std::string& endpoint, const std::vector<GradeQuestion>& questions, Grade& grade)
        : questions(questions), grade(grade), url(endpoint) {
        while (!url.empty() && url.back() == '/') url.pop_back();
    }
    Judge(const Judge&) = delete;
    ~Judge() { curl_slist_free_all(headers); }

    void begin(const char* name, size_t limit) {
        stage = name, begun = seconds(), end = begun + (double)limit, answered = 0;
        one_by_one = false, last.clear();
        progress = std::make_unique<Progress>();
    }
    bool late() const { return seconds() >= end; }

    void show() {
        if (!progress->due()) return;
        const double now = seconds(), rate = (double)answered / (now - begun);
        std::string text = format("%s: %.0f s", stage, now - begun);
        if (one_by_one) text += format(", answered %zu of %zu", answered, questions.size());
        if (!last.empty()) text += ", " + last;
        if (answered) text += format(", %.2f/s, %.0f s left", rate, (double)(questions.size() - answered) / rate);
        progress->line(text + format("; the limit is reached in %.0f s", std::max(end - now, 0.)));
    }
    static int tick(void* judge, curl_off_t, curl_off_t, curl_off_t, curl_off_t) {
        if (!interrupted) ((Judge*)judge)->show();
        return interrupted;
    }

    // One exchange within the stage's limit: sets `reply`. Returns the fault, or "".
    std::string ask(const char* path, const std::string* body) {
        stop_if_interrupted();
        // (Curl's timer may end a moment early by our clock, which says that the stage is late.)
        transfer.prepare(url + path, headers, body, std::max(0L, (long)std::ceil(1000 * (end - seconds()))) + 10);
        transfer.set(CURLOPT_FORBID_REUSE, 1L); // as Python's requests.post: one connection per request
        transfer.set(CURLOPT_NOPROGRESS, 0L);
        transfer.set(CURLOPT_XFERINFOFUNCTION, tick);
        transfer.set(CURLOPT_XFERINFODATA, (void*)this);
        const CURLcode code = curl_easy_perform(transfer.easy);
        stop_if_interrupted();
        if (code == CURLE_OPERATION_TIMEDOUT && late()) return "no reply within the limit";
        if (code != CURLE_OK) return curl_easy_strerror(code);
        long status = 0;
        get_info(transfer.easy, CURLINFO_RESPONSE_CODE, &status);
        const std::string fault = sj::parse(reply, transfer.reply);
        if (status / 100 != 2) {
            const std::string words = words_of(fault.empty() ? reply.root() : sj::Value(), transfer.reply);
            return format("HTTP status %ld%s%s", status, words.empty() ? "" : ": ", words.c_str());
        }
        return fault.empty() ? "" : "a reply that is no JSON: " + fault;
    }

    // Whether it is ready within the limit. Sets the mode.
    bool wait_until_ready() {
        begin("waiting until it is ready", grade.health_limit);
        say(format("GET %s/, for %zu s at most", url.c_str(), grade.health_limit));
        for (;;) {
            std::string fault = ask("/", nullptr);
            grade.status = fault.empty() ? reply.root()["status"].str() : "";
            if (grade.status == "ok" || grade.status == "batch") return true;
            if (fault.empty())
                fault = reply.root()["status"].is(sj::String) ? "status " + in_quotes(score_excerpt(grade.status, 60))
                                                              : "a reply without a status";
            if (!late()) last = fault;
            for (const double wake = std::min(seconds() + 0.5, end); seconds() < wake; usleep(20'000)) {
                stop_if_interrupted();
                show();
            }
            if (!late()) continue;
            grade.fault = "not ready within the limit; " + (last.empty() ? "no reply" : "the last reply: " + last);
            return false;
        }
    }

    // Takes a text of a reply; or returns the fault.
    static std::string take(sj::Value text, const std::string& where, Strings& answers) {
        if (!text.is(sj::String)) return where + (text ? ": not a string" : ": missing");
        answers.push_back(text.str());
        return "";
    }

    void ask_one_by_one(GradeRound& round) {
        one_by_one = true;
        for (auto& q : questions) {
            const std::string body = sj::Writer().object().field("prompt", q.question).end().text;
            std::string fault = ask("/predict", &body);
            if (fault.empty()) fault = take(reply.root()["response"], "response", round.answers);
            if (!fault.empty()) {
                round.fault = format("question %zu of %zu: %s", answered + 1, questions.size(), fault.c_str());
                return;
            }
            answered++;
        }
    }

    void ask_in_one_list(GradeRound& round) {
        sj::Writer w;
        w.object().key("prompt").array();
        for (auto& q : questions) w.value(q.question);
        const std::string body = w.end().end().text;
        round.fault = ask("/predict", &body);
        if (!round.fault.empty()) return;
        const sj::Value list = reply.root()["response"];
        if (!list.is(sj::Array)) round.fault = list ? "response: not a list" : "response: missing";
        else if (list.size() != questions.size())
            round.fault = format("response: %zu answers to %zu prompts", list.size(), questions.size());
        else
            for (sj::Value text : list.items())
                if (round.fault = take(text, format("response[%zu]", round.answers.size()), round.answers);
                    !round.fault.empty())
                    return;
    }

    void predict(bool list) {
        begin(list ? "asking in one list" : "asking one at a time", grade.predict_limit);
        say(format("POST %s/predict: %zu questions %s, for %zu s at most", url.c_str(), questions.size(),
                   list ? "in one list" : "one at a time", grade.predict_limit));
        GradeRound round;
        round.list = list;
        if (list) ask_in_one_list(round);
        else ask_one_by_one(round);
        round.seconds = seconds() - begun;
        progress.reset();
        grade.rounds.push_back(round);
    }
};

} // namespace

int run_grade(const Arguments& a) {
    const std::string url = a.need("--url"), mode = a.text("--mode");
    check_url(url);
    if (!mode.empty() && mode != "ok" && mode != "batch" && mode != "both")
        DIE("--mode %s: expected ok, batch or both", mode.c_str());
    if (a.has("--json") && a.text("--json") == a.output()) DIE("--json %s: the table goes there", a.output().c_str());
    Grade grade;
    grade.health_limit = a.number("--health-limit", 420, 1, 86400);
    grade.predict_limit = a.number("--predict-limit", 360, 1, 86400);
    grade.least = parse_number("--least", a.text("--least", "0.35").c_str(), 0, 1);
    const Jieba jieba(a.has("--data") ? a.data("jieba.bin") : find_jieba(" (--data DIR names the folder)"));
    const Tokenizer tokenizer(a.tokenizer());
    const std::vector<GradeQuestion> questions = read_questions(a);
    Output table(a.output()), json(a.has("--json") ? a.text("--json") : "-"); // a bad name fails at once
    curl_global_init(CURL_GLOBAL_DEFAULT);
    {
        Judge judge(url, questions, grade);
        const bool ready = judge.wait_until_ready();
        grade.health_seconds = seconds() - judge.begun;
        judge.progress.reset();
        if (ready) {
            const std::string asked = mode.empty() ? grade.status : mode;
            if (asked != "batch") judge.predict(false);
            if (asked != "ok") judge.predict(true);
        }
    }
    const GradeReport report = grade_report(jieba, tokenizer, questions, grade);
    if (a.has("--json")) json.line(report.json), json.commit();
    table.line(report.text), table.commit();
    return report.passed ? 0 : 1;
}

} // namespace book
#else
int book::run_grade(const Arguments&) {
    DIE("grade: built without libcurl; install libcurl4-openssl-dev and run make datagen again");
}
#endif
