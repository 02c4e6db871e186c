// cli/bench.cpp: the speed of prompts and of decoding, beside the ceilings of this machine.
#include "cli/bench.h"
#include "base/options.h"
#include "base/progress.h"
#include "model/cpu.h"
#include "model/device.h"
#include "qwen3.cu"
#include "sj.h"
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace cli {

struct BenchRow {
    const char* work;
    int position;
    double tokens_per_s, bytes, flops; // bytes and flops a token
    double readable;                   // bytes that could have been read in a token's time
};

// n random ids, different each time.
static std::vector<int> random_ids(int n, int V) {
    static uint64_t draw = 0;
    std::vector<int> ids(n);
    for (int& id : ids) id = (int)(philox(1, draw++, STREAM_SAMPLE).v[0] % (uint32_t)V);
    return ids;
}
static double median(std::vector<double> v) { return std::sort(v.begin(), v.end()), v[v.size() / 2]; }

// Tokens a second of a prompt.
static double time_prompt(Conversation& session, int length) {
    std::vector<double> times;
    for (int pass = 0; pass < (session.ctx().gpu ? 7 : 3); pass++) {
        session.rewind(0);
        const double start = seconds();
        session.feed(random_ids(length, session.config().V), &interrupted);
        times.push_back(seconds() - start);
        if (interrupted) DIE("interrupted");
    }
    return length / median(times);
}

struct DecodingTime { double rate, readable; }; // tokens a second, bytes a token's time

// Decoding from the session's position on. On the CPU each step is timed and the median counts; each is followed by a
// measurement of memory bandwidth, which changes by half within seconds on a shared machine, and is compared with that
// bandwidth (without `memory` with the ceiling). On a GPU steps are graphs that follow each other, and all of them
// count.
static DecodingTime time_decoding(Conversation& session, int steps, const Ceilings& ceiling, ReadTest* memory) {
    const int V = session.config().V, position = (int)session.ids().size();
    DecodingTime t = {};
    if (session.ctx().gpu) {
        const int warm = 20; // the first of them records the graph
        Sampling greedy = {};
        greedy.temperature = 0;
        session.begin_draws(greedy, V, position, steps);
        double start = 0;
        for (int i = 0; i < steps && !interrupted; i++) {
            if (i == warm) start = seconds();
            session.accept(session.draw());
        }
        t.rate = (steps - warm) / (seconds() - start);
        t.readable = ceiling.read / t.rate;
    } else {
        std::vector<double> times, readable;
        for (int i = 0; i < steps && !interrupted; i++) {
            const double start = seconds();
            session.feed(random_ids(1, V));
            times.push_back(seconds() - start);
            readable.push_back(times.back() * (memory ? memory->pass() : ceiling.read));
        }
        if (!interrupted) t = {1 / median(times), median(readable)};
    }
    if (interrupted) DIE("interrupted");
    session.rewind(position);
    return t;
}

static void print_bench(const Options& o, const Config& c, const char* type, const Ceilings& ceiling,
                        const std::vector<BenchRow>& rows) {
    const bool gpu = o.ctx.gpu != nullptr;
    const char* instructions = o.ctx.plain ? "plain loops" : instructions_used();
    if (o.json) {
        sj::Writer w;
        w.object().field("model", o.model).field("type", type).field("device", gpu ? device_name(o.ctx) : "cpu");
        if (!gpu) w.field("instructions", instructions).field("threads", thread_count());
        w.field("read_GBps", ceiling.read / 1e9).field("multiply_GFLOPs", ceiling.multiply / 1e9).key("rows").array();
        for (auto& r : rows) {
            const double bytes = r.bytes * r.tokens_per_s, flops = r.flops * r.tokens_per_s; // a second
            w.object().field("work", r.work).field("position", r.position).field("tokens_per_s", r.tokens_per_s);
            w.field("bytes_per_token", r.bytes).field("GBps", bytes / 1e9).field("read_share", r.bytes / r.readable);
            w.field("GFLOPs", flops / 1e9).field("multiply_share", flops / ceiling.multiply).end();
        }
        w.end().end();
        return write_stdout(w.text + "\n");
    }
    const std::string where = gpu ? device_name(o.ctx) : format("CPU, instructions %s", instructions);
    std::string out = format("%s: %.1f M parameters, %s, %s, %s\n", o.model.c_str(), (double)parameters(c) / 1e6,
                             type, where.c_str(), counted((size_t)thread_count(), "thread").c_str());
    out += format("ceilings: read %.1f GB/s, multiply %.0f GFLOP/s\n", ceiling.read / 1e9, ceiling.multiply / 1e9);
    out += "work    position     tok/s   MB/token      GB/s  of read   GFLOP/s  of multiply\n";
    for (auto& r : rows) {
        const double bytes = r.bytes * r.tokens_per_s, flops = r.flops * r.tokens_per_s;
        out += format("%-7s %8d %9.2f %10.1f %9.2f %7.1f%% %9.1f %11.1f%%\n", r.work, r.position, r.tokens_per_s,
                      r.bytes / 1e6, bytes / 1e9, 100 * r.bytes / r.readable, flops / 1e9,
                      100 * flops / ceiling.multiply);
    }
    write_stdout(out);
}

void bench(const Options& o, const LoadedModel& model) {
    const Config& c = model.file.config;
    const bool gpu = o.ctx.gpu != nullptr;
    model.decode_for_long();
    const int steps = gpu ? 200 : 24;
    std::vector<int> prompts = {512}, positions = {gpu ? 1 : 0, 100, 512, 2048};
    if (gpu) prompts = {512, 2048, 8192};
    if (o.bench_long || gpu) positions.push_back(8192);
    while (!positions.empty() && positions.back() + steps > c.max_positions) positions.pop_back();
    while (!prompts.empty() && prompts.back() > c.max_positions) prompts.pop_back();
    if (positions.empty() || prompts.empty()) DIE("--bench: the model's context of %d is too short", c.max_positions);
    const auto opened = model.open(std::max(prompts.back(), positions.back() + steps));
    Conversation& session = *opened;

    // Every matrix is read once a step, but the embedding only if it is the head. A token has its chosen experts.
    double matrices = (double)parameters(c) - (c.tied ? 0. : (double)c.V * c.C);
    for (int l = 0; l < c.L; l++)
        if (c.sparse(l)) matrices -= (double)(c.E - c.k) * 3 * c.M * c.C;
    const double weight_bytes = (double)model.step_bytes(c.k), all_bytes = (double)model.step_bytes(c.E);
    const double key_bytes = (double)model.token_bytes();
    const double head = (double)c.V * c.C, per_key = 4. * c.L * c.H * c.D;

    const std::unique_ptr<ReadTest> memory(gpu ? nullptr : new ReadTest);
    const Ceilings ceiling = model.wide ? measure_ceilings<float>(o.ctx, memory.get())
                                        : measure_ceilings<bf16>(o.ctx, memory.get());
    ReadTest* beside = weight_bytes < 0.5e9 ? nullptr : memory.get(); // it would evict a small model from the caches
    std::vector<BenchRow> rows;
    session.feed(random_ids(16, c.V)); // pages in the weights
    for (int length : prompts) {
        const double flops = 2 * (matrices - head) + per_key * length / 2 + 2 * head / length;
        const double rate = time_prompt(session, length);
        rows.push_back({"prompt", length, rate, all_bytes / length, flops, ceiling.read / rate});
    }
    session.rewind(0);
    auto progress = std::make_unique<Progress>();
    for (int position : positions) {
        for (int have; (have = (int)session.ids().size()) < position;) {
            session.feed(random_ids(std::min(512, position - have), c.V), &interrupted);
            if (interrupted) DIE("interrupted");
            progress->show(session.ids().size(), (size_t)positions.back(), [&](double) {
                return format("%zu of %d tokens in the context", session.ids().size(), positions.back());
            });
        }
        if (gpu && position == positions[0]) time_decoding(session, steps, ceiling, beside); // (clocks rise with work)
        const DecodingTime t = time_decoding(session, steps, ceiling, beside);
        const double middle = position + (gpu ? steps / 2 : 0);
        const double bytes = weight_bytes + key_bytes * (middle + 1), flops = 2 * matrices + per_key * middle;
        rows.push_back({"decode", position, t.rate, bytes, flops, t.readable});
    }
    progress.reset();
    print_bench(o, c, model.type_name(), ceiling, rows);
}

} // namespace cli
