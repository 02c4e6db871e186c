// train/log.cpp: the log's lines, answers, and the curve as SVG.
#include "train/log.h"
#include "base/appended_file.h"
#include "base/file.h"
#include "sj.h"
#include "train/tensorboard.h"
#include <algorithm>
#include <cmath>
#include <cstring>
#include <unistd.h>
#include <utility>

std::string clock_text(double s) {
    const long long t = (long long)s;
    const std::string days = t >= 86400 ? format("%lld day%s, ", t / 86400, t >= 2 * 86400 ? "s" : "") : "";
    return days + format("%lld:%02lld:%02lld", t / 3600 % 24, t / 60 % 60, t % 60);
}

// The lines of a run's file up to a step, which the file keeps; f gets each, as JSON too.
template <class F> static void keep_lines(const std::string& path, int64_t steps, F f) {
    std::string kept;
    const bool exists = access(path.c_str(), F_OK) == 0;
    if (steps > 0 && exists) {
        const MappedFile old(path);
        const std::string_view all = old.text();
        for (size_t at = 0, end; (end = all.find('\n', at)) != std::string_view::npos; at = end + 1) {
            sj::Doc doc;
            const std::string_view line = all.substr(at, end - at);
            if (!sj::parse(doc, line).empty()) DIE("%s: a damaged line", path.c_str());
            if (doc.root()["current_steps"].number() > (double)steps) break;
            f(doc.root(), std::string(line));
            kept += std::string(line) + "\n";
        }
    }
    if (exists) write_text(path, kept);
}

TrainLog::TrainLog(const std::string& out, const char* drawn, int64_t steps, bool writes, bool tensorboard,
                   const Listener& hears)
    : folder(out), what(drawn), listener(hears) {
    if (!writes) return;
    const std::string path = folder + "/trainer_log.jsonl";
    keep_lines(path, steps, [&](sj::Value v, const std::string& line) {
        for (auto [name, list] : {std::pair(what, &losses), {"eval_" + what, &evaluations}})
            if (const sj::Value x = v[name.c_str()]) list->push_back({v["current_steps"].number(), x.number()});
        if (listener) listener(line);
    });
    keep_lines(folder + "/trainer_answers.jsonl", steps, [&](sj::Value v, const std::string& line) {
        answers.push_back({(int64_t)v["current_steps"].number(), v["question"].str(), v["reference"].str(),
                           v["answer"].str(), v["finish"].str() == "stop"});
        if (listener) listener(line);
    });
    file = std::make_unique<AppendedFile>(path);
    if (tensorboard) events = std::make_unique<EventFile>(folder, steps);
}

TrainLog::~TrainLog() = default;

void TrainLog::add(const std::string& line) {
    if (!file) return;
    file->add(line + "\n");
    if (events) events->add(line);
    if (listener) listener(line);
}

void TrainLog::add(const std::vector<Answer>& more) {
    AppendedFile to(folder + "/trainer_answers.jsonl");
    for (auto& a : more) {
        sj::Writer w;
        w.object().field("current_steps", a.step).field("question", a.question);
        if (!a.reference.empty()) w.field("reference", a.reference);
        w.field("answer", a.text).field("finish", a.ended ? "stop" : "length").end();
        to.add(w.text + "\n");
        answers.push_back(a);
        if (listener) listener(w.text);
    }
}

std::string TrainLog::curve(int64_t steps) const {
    constexpr double W = 800, H = 400, LEFT = 60, TOP = 20, RIGHT = 20, BOTTOM = 40;
    double most = 0, least = 0;
    for (auto* list : {&losses, &evaluations})
        for (const Point& p : *list) most = std::max(most, p.value), least = std::min(least, p.value);
    // 1, 2 or 5 times a power of ten
    double tick = std::pow(10, std::floor(std::log10(std::max(most - least, 1e-9))));
    for (double more : {0.5, 0.4, 0.5})
        if ((most - least) / tick < 4) tick *= more;
    const double low = std::floor(least / tick) * tick;
    const double high = std::max(low / tick + 1, std::ceil(most / tick)) * tick;
    auto x = [&](double step) { return LEFT + (W - LEFT - RIGHT) * step / (double)steps; };
    auto y = [&](double value) { return H - BOTTOM - (H - TOP - BOTTOM) * (value - low) / (high - low); };
    std::string s = format("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %g %g\" "
                           "font-family=\"sans-serif\" font-size=\"12\">\n"
                           "<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n", W, H);
    for (double i = std::round(low / tick); i <= std::round(high / tick); i++) {
        const double at = i * tick;
        s += format("<path d=\"M%g %.1fH%g\" stroke=\"#ddd\"/>"
                    "<text x=\"%g\" y=\"%.1f\" text-anchor=\"end\">%g</text>\n",
                    LEFT, y(at), W - RIGHT, LEFT - 6, y(at) + 4, at + 0.);
    }
    for (int i = 0; i <= 4; i++)
        s += format("<text x=\"%.1f\" y=\"%g\" text-anchor=\"middle\">%lld</text>\n", x((double)(steps * i / 4)),
                    H - BOTTOM + 18, (long long)(steps * i / 4));
    s += format("<text x=\"%g\" y=\"%g\" text-anchor=\"middle\">step</text>"
                "<text x=\"16\" y=\"%g\" transform=\"rotate(-90 16 %g)\" text-anchor=\"middle\">%s</text>\n",
                (LEFT + W - RIGHT) / 2, H - 6, H / 2, H / 2, what.c_str());
    std::string thin, thick;
    double mean = losses.empty() ? 0 : losses[0].value;
    for (const Point& p : losses) {
        mean += (p.value - mean) * 0.1;
        thin += format("%.1f,%.1f ", x(p.step), y(p.value)), thick += format("%.1f,%.1f ", x(p.step), y(mean));
    }
    s += "<polyline points=\"" + thin + "\" fill=\"none\" stroke=\"#9bd\"/>\n";
    s += "<polyline points=\"" + thick + "\" fill=\"none\" stroke=\"#05a\" stroke-width=\"2\"/>\n";
    for (const Point& p : evaluations)
        s += format("<circle cx=\"%.1f\" cy=\"%.1f\" r=\"4\" fill=\"#c30\"><title>%g</title></circle>\n", x(p.step),
                    y(p.value), p.value);
    s += format("<text x=\"%g\" y=\"36\" text-anchor=\"end\" fill=\"#05a\">training</text>", W - RIGHT - 6);
    if (!evaluations.empty())
        s += format("<text x=\"%g\" y=\"52\" text-anchor=\"end\" fill=\"#c30\">evaluation</text>", W - RIGHT - 6);
    return s + "\n</svg>\n";
}
