#include "book/report.h"
#include "base/options.h"
#include "book/characters.h"
#include "model/utf8.h"

namespace book {

void stop_if_interrupted() {
    if (interrupted) throw Interrupted();
}

void say(const std::string& line) {
    fprintf(stderr, "%s\n", line.c_str());
}

bool Progress::due() {
    const double now = seconds();
    if (now - told < (terminal ? 1 : 10)) return false;
    told = now;
    return true;
}

void Progress::line(const std::string& text) const {
    fprintf(stderr, "%s%s   %s", terminal ? "\r" : "", text.c_str(), terminal ? "" : "\n");
}

void Progress::show(const char* what, size_t rows, double share) {
    stop_if_interrupted();
    if (!due()) return;
    const double past = told - start;
    line(format("%s: %zu rows, %.0f rows/s, %.0f%%, %.0f s left", what, rows, (double)rows / past, 100 * share,
                share > 0 ? past / share - past : 0));
}

Report::Report(const std::string& side_path, const Strings& names) : side(side_path), path(side_path) {
    for (auto& name : names) rules.push_back({name});
}

void Report::drop(const std::string& rule, const std::string& why, const Reader& in) {
    for (auto& r : rules)
        if (r.name == rule && r.dropped++ == 0) r.first = why;
    sj::Writer w;
    w.object().field("rule", rule).field("why", why).field("line", in.number);
    if (in.row()) w.key("row").value(in.row());
    else {
        std::string text;
        utf8_repair(text, in.text.substr(0, 4096), true);
        w.field("text", text);
    }
    side.line(w.end().text);
}

size_t Report::dropped() const {
    size_t sum = 0;
    for (auto& r : rules) sum += r.dropped;
    return sum;
}

void Report::finish(const char* unit, const char* advice) {
    side.commit();
    say(format("%zu %s kept, %zu dropped%s", kept, unit, dropped(), dropped() ? (" into " + path).c_str() : ""));
    for (auto& r : rules)
        if (r.seconds >= 0.05) say(format("  %-12s %8zu   %.1f s", r.name.c_str(), r.dropped, r.seconds));
        else if (r.dropped) say(format("  %-12s %8zu", r.name.c_str(), r.dropped));
    for (auto& r : rules)
        if (advice && 2 * r.dropped > kept + dropped()) {
            std::string what = advice;
            if (const size_t at = what.find("%s"); at != what.npos) what.replace(at, 2, r.name);
            say(format("*** The rule %s dropped %zu of %zu %s, more than half; the first: %s. %s ***",
                       r.name.c_str(), r.dropped, kept + dropped(), unit, score_excerpt(r.first, 120).c_str(),
                       what.c_str()));
        }
}

} // namespace book
