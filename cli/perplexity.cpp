// cli/perplexity.cpp: --ppl and --against.
#include "cli/perplexity.h"
#include "base/file.h"
#include "base/options.h"
#include "base/progress.h"
#include "model/device.h"
#include "model/pace.h"
#include "sj.h"
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace cli {

double negative_log_likelihood(const float* logits, int V, int id) {
    const double top = *std::max_element(logits, logits + V);
    double sum = 0;
    for (int v = 0; v < V; v++) sum += std::exp(logits[v] - top);
    return std::log(sum) + top - logits[id];
}

int perplexity(const Options& o, const LoadedModel& model, const Tokenizer& tokenizer) {
    const Config& c = model.file.config;
    const char* name = o.ppl == "-" ? "standard input" : o.ppl.c_str();
    const std::vector<int> ids = tokenizer.encode(input_text(o.ppl), false);
    const size_t n = ids.size(), window = (size_t)(o.context ? o.context : std::min(2048, c.max_positions));
    const size_t stride = o.stride ? (size_t)o.stride : window / 2;
    if (n < 2) DIE("%s: %s; it takes two to predict one", name, n ? "one token" : "no token");
    if (window < 2) DIE("--ctx %zu: a window of one token predicts nothing", window);
    if (stride > window) DIE("--stride %zu: tokens would be left out between windows of %zu (-c)", stride, window);

    const std::unique_ptr<Conversation> opened = model.open((int)std::min(window, n));
    Conversation& session = *opened;
    Progress progress;
    ThreadPace pace(o, o.ctx);
    double sum = 0;
    size_t scored = 0, end = 0;
    pace.begin();
    for (size_t begin = 0; end < n && !interrupted; begin += stride) {
        size_t next = std::max(end, begin + 1); // is predicted by the row of the token before it
        end = std::min(begin + window, n);
        session.rewind(0);
        session.feed({&ids[begin], &ids[next - 1]}, &interrupted);
        session.feed({&ids[next - 1], &ids[end - 1]}, &interrupted, [&](const float* row) {
            sum += negative_log_likelihood(row, c.V, ids[next++]);
            scored++;
            pace.step();
            progress.show(next, n, [&](double s) {
                const double mean = sum / (double)scored;
                return format("%zu of %zu tokens, %.1f tok/s, nll %.4f, ppl %.2f", next, n, (double)scored / s, mean,
                              std::exp(mean));
            });
        });
    }
    if (interrupted) return 130;
    const double mean = sum / (double)scored, ppl = std::exp(mean);
    sj::Writer all;
    all.object().field("nll", mean).field("ppl", ppl).field("tokens", scored);
    all.field("window", window).field("stride", stride).end();
    write_stdout(o.json ? all.text + "\n" : format("nll %.6f ppl %.4f tokens %zu\n", mean, ppl, scored));
    return 0;
}

// A mean with its 95% interval. Neighbouring tokens are correlated, so blocks of them are the sample.
struct MeanOfTokens {
    static constexpr size_t BLOCK = 32;
    std::vector<double> blocks;
    double part = 0;
    size_t n = 0;

    void add(double x) {
        part += x;
        if (++n % BLOCK == 0) blocks.push_back(std::exchange(part, 0) / BLOCK);
    }
    double mean() const {
        double sum = part;
        for (double b : blocks) sum += b * BLOCK;
        return sum / (double)n;
    }
    double margin() const { // 1.96 standard errors; unknown for fewer than two blocks
        const double count = (double)blocks.size();
        if (count < 2) return INFINITY;
        double center = 0, square = 0;
        for (double b : blocks) center += b / count;
        for (double b : blocks) square += (b - center) * (b - center);
        return 1.96 * std::sqrt(square / (count - 1) / count);
    }
};

// Means over tokens: of the model, and of the one that it is compared with.
struct Comparison { MeanOfTokens kl, same, nll, nll_other, more; };

static void report(const Options& o, const Comparison& x, size_t window) {
    sj::Writer w;
    w.object().field("tokens", x.kl.n).field("window", window);
    for (auto [name, m] : {std::pair("kl", &x.kl), {"same_top1", &x.same}, {"nll", &x.nll},
                           {"nll_against", &x.nll_other}, {"nll_more", &x.more}})
        w.key(name).array().value(m->mean()).value(m->mean() - m->margin()).value(m->mean() + m->margin()).end();
    auto ppl = [](const MeanOfTokens& m) {
        const double low = std::exp(m.mean() - m.margin()), high = std::exp(m.mean() + m.margin());
        return format("%.4f [%.4f, %.4f]", std::exp(m.mean()), low, high);
    };
    auto interval = [](const MeanOfTokens& m, double unit) {
        const double mean = unit * m.mean(), margin = unit * m.margin();
        return format("%.6f [%.6f, %.6f]", mean, mean - margin, mean + margin);
    };
    write_stdout(o.json ? w.end().text + "\n"
                        : "kl " + interval(x.kl, 1) + " top1 " + interval(x.same, 100) + "% ppl " + ppl(x.nll) +
                              " against " + ppl(x.nll_other) + " ratio " + ppl(x.more) +
                              format(" tokens %zu\n", x.kl.n));
}

int compare(const Options& o, const LoadedModel& model, const ModelFile& other, const Tokenizer& tokenizer) {
    constexpr size_t PIECE = 64; // tokens whose logits are held
    const Config& c = model.file.config;
    Context usual = o.ctx; // FP8 keys and values, and rounded activations, are part of the measurement
    usual.kv_fp8 = usual.fp8_activations = usual.int8_activations = false;
    if constexpr (WITH_GPU)
        if (usual.gpu) usual = with_own_scratch(usual); // (each has room of its own to unpack weights)
    const bool keeps = !model.wide && keeps_packed<bf16>(o, o.ctx);
    const std::unique_ptr<LoadedModel> truth = load_model(other, usual, model.wide, Format::PLAIN, keeps);
    const std::vector<int> ids = tokenizer.encode(input_text(o.ppl), false);
    const int most = std::min(c.max_positions, other.config.max_positions);
    const size_t window = (size_t)(o.context ? o.context : std::min(2048, most)), V = (size_t)c.V;
    if (ids.size() < 2 || window < 2) DIE("--ppl: a text and a window of one token predict nothing");
    if (window > (size_t)other.config.max_positions) DIE("--ctx %zu: more than %s has", window, o.against.c_str());
    const std::unique_ptr<Conversation> opened = model.open((int)window), opposed = truth->open((int)window);
    Conversation &ours = *opened, &theirs = *opposed;
    Comparison x;
    std::vector<float> held;
    Progress progress;
    ThreadPace pace(o, o.ctx);
    pace.begin();
    for (size_t at = 0; at + 1 < ids.size() && !interrupted;) {
        if (at % window == 0) ours.rewind(0), theirs.rewind(0);
        const size_t end = std::min({at + PIECE, at / window * window + window, ids.size()});
        const std::vector<int> piece(&ids[at], &ids[0] + end);
        held.clear();
        theirs.feed(piece, &interrupted, [&](const float* row) { held.insert(held.end(), row, row + V); });
        size_t n = at;
        if (!interrupted) ours.feed(piece, &interrupted, [&](const float* q) {
            const float* p = &held[(n - at) * V];
            if (++n == ids.size() || n % window == 0) return; // the last row of a window predicts a token outside it
            const int top_p = (int)(std::max_element(p, p + V) - p), top_q = (int)(std::max_element(q, q + V) - q);
            const double zp = negative_log_likelihood(p, c.V, top_p), zq = negative_log_likelihood(q, c.V, top_q);
            double sum = 0;
            for (size_t v = 0; v < V; v++) {
                const double lp = p[v] - p[top_p] - zp, lq = q[v] - q[top_q] - zq;
                sum += std::exp(lp) * (lp - lq);
            }
            const double a = zq + q[top_q] - q[ids[n]], b = zp + p[top_p] - p[ids[n]];
            x.kl.add(sum), x.same.add(top_p == top_q), x.nll.add(a), x.nll_other.add(b), x.more.add(a - b);
        });
        at = end;
        pace.step();
        progress.show(at, ids.size(), [&](double) {
            return format("%zu of %zu tokens, kl %.5f", at, ids.size(), x.kl.n ? x.kl.mean() : 0.);
        });
    }
    if (interrupted) return 130;
    report(o, x, window);
    return 0;
}

} // namespace cli
