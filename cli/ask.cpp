// cli/ask.cpp: one prompt and its answer, or its logits.
#include "cli/ask.h"
#include "base/file.h"
#include "base/options.h"
#include "book/text.h"
#include "cli/answer.h"
#include "cli/chat.h"
#include "cli/prompt_cache.h"
#include "cli/screen.h"
#include "model/chat_template.h"
#include "model/device.h"
#include "model/pace.h"
#include "search/documents.h"
#include "search/grounding.h"
#include "sj.h"
#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>
#include <unistd.h>
#include <vector>

namespace cli {

// The ids of the prompt, as given by the options; and the passages in it.
static std::vector<int> prompt_ids(const Options& o, const Tokenizer* tokenizer, size_t context,
                                   std::vector<Source>& sources) {
    if (o.has_ids) return parse_ids("--ids", o.ids == "-" ? read_stdin() : o.ids);
    std::string text = o.input;
    if (text == "-") {
        text = input_text("-");
        if (!text.empty() && text.back() == '\n') text.pop_back(); // the output of `echo` is not part of the question
    }
    if (o.raw) return tokenizer->encode(text, true);
    if (book::trimmed(text).empty()) DIE("the question is empty"); // e.g. an unset variable
    std::vector<Message> messages;
    if (!o.system.empty()) messages.push_back({"system", o.system});
    messages.push_back({"user", text});
    sources = add_passages(o, *tokenizer, messages, context, room_for_answer(o, context));
    ChatOptions options;
    options.thinking = o.think;
    return render_chat(*tokenizer, messages, options);
}

// The prompt's ids, checked. Empty for a chat.
static std::vector<int> checked_prompt(const Options& o, const Config& c, const Tokenizer* tokenizer, size_t context,
                                       std::vector<Source>& sources) {
    if (!o.has_input && !o.has_ids) return {};
    const std::vector<int> prompt = prompt_ids(o, tokenizer, context, sources);
    if (prompt.empty()) DIE("the prompt is empty");
    for (int id : prompt)
        if (id >= c.V) DIE("id %d is not in the vocabulary of %d", id, c.V);
    return prompt;
}

// --logits, --logits-hash: every position's logits as float32, V a row.
static void write_logits(const Options& o, Conversation& session, const std::vector<int>& prompt) {
    std::unique_ptr<OutputFile> out;
    if (!o.logits_file.empty()) out = std::make_unique<OutputFile>(o.logits_file);
    uint64_t hash = fnv1a(nullptr, 0);
    const size_t bytes = (size_t)session.config().V * sizeof(float);
    session.feed(prompt, &interrupted, [&](const float* row) {
        if (out) out->write(row, bytes);
        if (o.logits_hash) hash = fnv1a(row, bytes, hash);
    });
    if (interrupted) DIE("interrupted");
    if (out) out->commit();
    if (o.logits_hash) write_stdout(format("%016llx\n", (unsigned long long)hash));
}

// The times of an answer.
struct Took {
    size_t prompt_tokens, reused; // reused: from the prompt cache
    double load_s, prompt_s, decode_s;
    LookUp lookup{};
    bool quoted = false; // no token was computed
};
static void print_answer(const Options& o, const Generation& g, const Took& took, const std::vector<Source>& sources) {
    // The prompt's logits give the first token: the decode phase computes the others.
    const double rate = g.ids.size() > 1 && !took.quoted ? (double)(g.ids.size() - 1) / took.decode_s : 0;
    const double prompt_rate = took.prompt_s > 0 ? (double)(took.prompt_tokens - took.reused) / took.prompt_s : 0;
    if (o.json) {
        std::string out = "{\"text\": ";
        sj::quote(out, g.text);
        out += ", \"ids\": [";
        for (size_t i = 0; i < g.ids.size(); i++) out += format("%s%d", i ? ", " : "", g.ids[i]);
        out += format("], \"finish_reason\": \"%s\", \"seed\": %llu, ", g.finish, (unsigned long long)g.sampling.seed);
        out += format("\"prompt_tokens\": %zu, \"answer_tokens\": %zu, ", took.prompt_tokens, g.ids.size());
        if (o.library) {
            sj::Writer w;
            write_sources(w.object(), sources);
            out += w.text.substr(1) + ", "; // without the brace
        }
        out += format("\"timings\": {\"load_s\": %.6f, \"prompt_s\": %.6f, ", took.load_s, took.prompt_s);
        out += format("\"prompt_tokens_per_s\": %.3f, ", prompt_rate);
        out += format("\"decode_s\": %.6f, \"decode_tokens_per_s\": %.3f, ", took.decode_s, rate);
        write_stdout(out + format("\"lookup_proposed\": %zu, \"lookup_right\": %zu}}\n", took.lookup.proposed,
                                  took.lookup.right));
    } else {
        write_stdout("\n");
    }
    const std::string from_cache = o.prompt_cache.empty() ? "" : format(" (%zu from the prompt cache)", took.reused);
    if (took.quoted) return say(format("a quote of %s (%s)", counted(g.ids.size(), "token").c_str(), g.finish));
    say(format("prompt %s%s, %.1f tok/s; answer %s, %.1f tok/s%s (%s)", counted(took.prompt_tokens, "token").c_str(),
               from_cache.c_str(), prompt_rate, counted(g.ids.size(), "token").c_str(), rate,
               told(took.lookup).c_str(), g.finish));
    if (o.library) say_sources(sources);
}

int ask(const Options& o, LoadedModel& model, const Tokenizer* tokenizer, double start) {
    const Config& c = model.file.config;
    bool lasting = !o.has_input && !o.has_ids; // a chat; an answer may come to it
    if (lasting) model.decode_for_long();
    const int context = o.context ? o.context : std::min(4096, c.max_positions);
    std::vector<Source> sources;
    const std::vector<int> prompt = checked_prompt(o, c, tokenizer, (size_t)context, sources);
    if (prompt.size() > (size_t)context)
        DIE("the prompt is %s, the context %d (-c sets it, up to %d)", counted(prompt.size(), "token").c_str(), context,
            c.max_positions);
    const std::unique_ptr<Conversation> opened = model.open(context);
    Conversation& session = *opened;
    if (!o.logits_file.empty() || o.logits_hash) return write_logits(o, session, prompt), 0;
    use_lookup(o, session);

    Generation g;
    g.sampling = sampling_of(o);
    g.stops = o.stops;
    g.interrupt = &interrupted;
    if (o.max_tokens >= 0) g.max_tokens = (size_t)o.max_tokens;
    say(format("%s: %.1f M parameters, %s, %s, context %d%s\nseed %llu", o.model.c_str(), (double)parameters(c) / 1e6,
               model.type_name(), device_name(o.ctx).c_str(), context, c.rope_scaling.note().c_str(),
               (unsigned long long)g.sampling.seed));
    PromptCache cache(o.prompt_cache, model, o.variant, session);
    ThreadPace pace(o, o.ctx);
    if (prompt.empty()) return Chat{o, session, *tokenizer, cache, pace, g}.run();

    Took took = {prompt.size(), 0, seconds() - start, 0, 0};
    const double loaded = seconds();
    if (quote_passage(o, tokenizer, sources, (size_t)context, g)) {
        took.quoted = true;
        if (!o.json) Screen(isatty(1), tokenizer->chat.thinks, o.markdown).show_whole(g.text);
    } else if (g.max_tokens > 0 || !o.prompt_cache.empty()) {
        pace.begin();
        took.reused = feed_prompt(session, prompt);
        pace.end();
        took.prompt_s = seconds() - loaded;
        if (!interrupted) cache.save(session);
        if (!o.raw && !o.has_ids) g.in_thought = opens_thought(*tokenizer, prompt);
        Screen screen(isatty(1), !tokenizer || tokenizer->chat.thinks, o.markdown && !o.raw && !o.has_ids);
        speak(session, tokenizer, g, pace, [&](std::string_view s) {
            if (!o.json) screen.show(s);
            if (!lasting && g.ids.size() >= STEPS_TO_HUGE_PAGES) lasting = true, model.decode_for_long();
        });
        screen.end();
    } else {
        g.finish = "length";
    }
    took.decode_s = seconds() - loaded - took.prompt_s, took.lookup = session.lookup();
    print_answer(o, g, took, sources);
    return interrupted ? 130 : 0;
}

} // namespace cli
