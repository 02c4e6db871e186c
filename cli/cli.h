// cli.h: what programs offer around the model. Included once, at the end of qwen3.cu.
//   For every program
//     ModelOptions     the options that all of them have
//     tokenizer_path   where tokenizer.bin is; each_json_line
//     choose_device    CPU, GPU, or Book I's definitions
//     ThreadPace       fewer threads while other programs need the cores
//     Ceilings         what this machine could do
//     embed.h          vectors of texts, and how well documents answer a query
//   For qwen3 and serve
//     hybrid.h         the models that find passages of --docs beside words
//   For qwen3
//     Options          its table
//     PromptCache      --prompt-cache: keys and values of a prompt, kept in a file
//     chat.h           without -i: questions and answers
//     perplexity       --ppl: how well the model foresees a text
//     compare          --against: how far its distributions are from another model's
//     evaluate         --eval: its answers to the questions of a file, and its loss on the answers there
//     embed_or_rerank  --embed, --rerank: embed.h's work on the lines of a file
//     synthesize       --synthesize: random weights of a real shape
//     convert          --convert: any model that is read, as a model.bin
//     quantize         --quantize: the model in fewer bits (quantize.h)
//     bench            --bench: what this machine does, and what it could
//     answer, run      one prompt; what the options ask for
#pragma once
#include "base/json_lines.h"
#include "cpu/instruction_set.h"
#include "model/ceilings.h"
#include "model/device.h"
#include "model/pace.h"
#include "model/quantize.h"
#include "model/session.h"
#include "search/embed.h"
#include "search/hybrid.h"
#include <sys/file.h>
#include <array>
#include <ctime>
#include <random>

// ------------------------------------------------------------------------------------------- qwen3's options

struct Options : ModelOptions {
    std::string input, system, ids, logits_file, tokenize, detokenize;
    bool has_input = false, has_tokenize = false, has_detokenize = false, has_ids = false;
    Context ctx; // where it runs
    bool raw = false, json = false, logits_hash = false;
    float temperature = -1, top_p = -1, min_p = 0; // negative: Qwen's advice for the mode
    float repeat = 1, presence = 0, frequency = 0;
    std::vector<std::string> stops;
    int top_k = -1, max_tokens = -1, context = 0, think = 0;
    int lookup = -1; // -1: as the device allows
    uint64_t seed = 0;
    bool has_seed = false, bench = false, bench_long = false;
    std::string synthesize, synthesize_to, convert, quantize, quantize_to, calibrate, embedding, against;
    int group = 0; // of --quantize int4; 0: 128
    std::string prompt_cache, tools;
    uint64_t variant = 0; // names what is made of the model's file: INT8, packed, FP8 keys or activations, an adapter
    std::string ppl, eval, output;
    int stride = 0; // 0: half a window
    DocumentOptions documents;
    std::shared_ptr<const Documents> library; // with --docs
    std::string texts, instruct;
    bool embed = false, rerank = false, truncate = false;
    int dimensions = 0; // 0: all
};

static const char* USAGE =
    "usage: qwen3 MODEL [QUESTION] [options]     MODEL: a model.bin or a Hugging Face folder\n"
    "       qwen3 MODEL                           a chat (/help in it)\n"
    "       qwen3 --version\n";

#ifdef QWEN3_PLAIN // there is no cpu.h
static const char* instructions_used() { return "plain loops"; }
#else
static const char* instructions_used() { return instruction_set_name(instruction_set); }

static void choose_instructions(const char* option, const char* name) {
    std::string all;
    for (int set = ISA_PLAIN; set <= best_instruction_set(); set++) {
        if (!strcmp(name, instruction_set_name(set))) return void(instruction_set = (InstructionSet)set);
        all += format("%s%s", set ? ", " : "", instruction_set_name(set));
    }
    DIE("%s %s: this machine has %s", option, name, all.c_str());
}
#endif

static void parse_seed(Options& o, const char* option, const char* text) {
    char* end;
    errno = 0;
    o.seed = strtoull(text, &end, 10), o.has_seed = true;
    if (!isdigit((unsigned char)*text) || *end || errno)
        DIE("%s: %.60s is not a whole number from 0 to 2^64 - 1", option, text);
}

static std::vector<Option> option_table(Options& o) {
    auto given = [](std::string& to, bool& has) {
        return [&](const char*, const char* v) { to = v, has = true; };
    };
    std::vector<Option> table = {
        {"-i", "--input", "TEXT", "the question; - reads it from standard input", given(o.input, o.has_input)},
        {"-y", "--system", "TEXT", "system prompt", text(o.system)},
        {"-r", "--think", "0|1", "let the model think first (default 0)", whole(o.think, 0, 1)},
        {"-t", "--temp", "X", "temperature (default 0.7, thinking 0.6); 0 takes the likeliest token",
         number(o.temperature, 0, 100)},
        {"-k", "--top-k", "N", "draw among the N likeliest (default 20); 0 is off", whole(o.top_k, 0, INT_MAX)},
        {"-p", "--top-p", "X", "... that together have probability X (default 0.8, thinking 0.95);\n1 is off",
         number(o.top_p, 0, 1)},
        {"", "--min-p", "X", "... and at least X times that of the likeliest (default 0)", number(o.min_p, 0, 1)},
        {"", "--repeat-penalty", "X", "divides the logits of ids in prompt and answer (default 1: off)",
         number(o.repeat, 0.01, 100)},
        {"", "--presence-penalty", "X", "is subtracted once for ids in the answer (default 0)",
         number(o.presence, -100, 100)},
        {"", "--frequency-penalty", "X", "is subtracted for each time (default 0)", number(o.frequency, -100, 100)},
        {"", "--stop", "TEXT", "ends the answer before this text; may be repeated", list(o.stops)},
        {"-s", "--seed", "N", "seed of the draws (default random, printed)",
         [&o](const char* option, const char* v) { parse_seed(o, option, v); }},
        {"-n", "--max-tokens", "N", "tokens of the answer (default: to the end of the context)",
         whole(o.max_tokens, 0, INT_MAX)},
        {"", "--lookup", "N", "what followed the latest words before is computed with the next\n"
         "token, N tokens at most (up to 7), while it pays; the answer is the\n"
         "same (default 7; on a GPU only where a token is one kernel, or with\n"
         "--invariant, and then by default 0)",
         whole(o.lookup, 0, LookUp::MOST)},
        {"-c", "--ctx", "N", "context in tokens (default 4096, or the model's limit if that is less)",
         whole(o.context, 1, INT_MAX)},
        {"", "--docs", "PATH", "answers from a file or a folder of text: with a question go the passages\n"
         "that it is about", file_name(o.documents.docs)},
    };
    add_document_options(table, o.documents);
    const std::vector<Option> others = {
        {"", "--prompt-cache", "FILE", "restores what the prompt shares with FILE's; writes FILE if it does\n"
         "not exist or is the beginning of this prompt", text(o.prompt_cache)},
        {"", "--tools", "FILE", "commands that the model may ask for in a chat; each is run only if you\nsay yes",
         file_name(o.tools)},
        {"", "--raw", "", "the input as it is, without the chat template; special tokens are\nrecognised", flag(o.raw)},
        {"", "--json", "", "one JSON object instead of streamed text", flag(o.json)},
    };
    table.insert(table.end(), others.begin(), others.end());
    o.add_to(table, true);
    const std::vector<Option> more = {
        o.one_kernel_option("on a GPU: a token of an answer is one kernel (default: on Hopper, if\n"
                            "half of the free memory holds its copy of the weights); phases: a\n"
                            "launch for each of its phases, to study it"),
        {"", "", "", "measurements", {}},
        {"", "--bench", "[long]", "speed of prompt and decoding, with the machine's ceilings; --json",
         [&o](const char*, const char* v) { o.bench = true, o.bench_long = *v; }},
        {"", "--ppl", "FILE", "perplexity of a text (- reads standard input), over windows of -c\n"
         "tokens (default 2048)",
         text(o.ppl)},
        {"", "--stride", "N", "from one window to the next (default half a window)", whole(o.stride, 1, INT_MAX)},
        {"", "--against", "MODEL", "with --ppl: how far the distributions are from another model's, as KL,\n"
         "the share of tokens with the same likeliest, and perplexities", file_name(o.against)},
        {"", "--eval", "FILE", "JSONL of questions and answers: what the model answers, and its loss\n"
         "on the answers there. Greedy; -n 512. The same command goes on\nwhere it was interrupted", text(o.eval)},
        {"-o", "--output", "FILE", "where the answers of --eval go, or the lines of --embed and --rerank",
         text(o.output)},
        {"", "", "", "retrieval, with Qwen3-Embedding and Qwen3-Reranker", {}},
        {"", "--embed", "", "the vector of -i TEXT or of each of --texts, as JSONL", flag(o.embed)},
        {"", "--rerank", "", "how well each of --texts answers the query -i TEXT, the best first, as\nJSONL",
         flag(o.rerank)},
        {"", "--texts", "FILE", "a text a line (- reads standard input); of FILE.jsonl strings, or\n"
         "objects with \"text\" and maybe \"id\"", file_name(o.texts)},
        {"", "--instruct", "TASK", "with --embed: the texts are queries for this task; with --rerank the\n"
         "task (default: Qwen's, a web search)", file_name(o.instruct)},
        {"", "--dimensions", "N", "of the vectors, their first (default: all)", whole(o.dimensions, 1, 1 << 20)},
        {"", "--truncate", "", "cut texts that are longer than the context (-c), else they are a fault",
         flag(o.truncate)},
        {"", "", "", "for study and tests", {}},
#ifndef QWEN3_PLAIN
        {"", "--cpu", "NAME", "lesser instructions: plain, avx2, avx512, avx512bf16, amx", choose_instructions},
#endif
        {"", "--tokenize", "TEXT", "no model needed; - reads standard input", given(o.tokenize, o.has_tokenize)},
        {"", "--detokenize", "IDS", "no model needed; - reads standard input", given(o.detokenize, o.has_detokenize)},
        {"", "--ids", "1,2,3", "these ids instead of text (no tokenizer needed)", given(o.ids, o.has_ids)},
        {"", "--logits", "FILE", "with -i, --raw or --ids: float32 logits of every position, then stop",
         text(o.logits_file)},
        {"", "--logits-hash", "", "the same, as one 64-bit hash on stdout", flag(o.logits_hash)},
        {"", "--convert", "OUT.bin", "the model as one model.bin; what is quantised becomes bf16",
         file_name(o.convert)},
        {"", "--quantize", "FORMAT OUT.bin", "the model in fewer bits: int4 (4.2 a weight), int8 (8.5) or fp8 (8)",
         [&o](const char*, const char* v) { (o.quantize.empty() ? o.quantize : o.quantize_to) = v; }},
        {"", "--group", "N", "weights that share a scale in int4: 32, 64 or 128 (default)", whole(o.group, 32, 128)},
        {"", "--calibrate", "FILE", "a text: what is rounded changes its products least (GPTQ)",
         file_name(o.calibrate)},
        {"", "--embedding", "NAME", "embedding and head in int8 (default), or as they are: same",
         one_of(o.embedding, {"int8", "same"})},
        {"", "--synthesize", "SIZE OUT.bin", "random weights of a real shape (-s: seed). SIZE: 0.6B, 1.7B, 4B,\n"
         "8B, 14B, 32B or a config.json",
         [&o](const char*, const char* v) { (o.synthesize.empty() ? o.synthesize : o.synthesize_to) = v; }},
    };
    table.insert(table.end(), more.begin(), more.end());
    return table;
}

static Options parse_options(int argc, char** argv) {
    Options o;
    const std::vector<Option> table = option_table(o);
    const std::vector<std::string> words = parse(table, argc, argv);
    if (o.help) print_help(USAGE, table);
    if (words.size() > 2) DIE("one model and one question, please, in quotes: %s is too much", words[2].c_str());
    if (words.size() == 2 && o.has_input) DIE("one question, please: %s and -i %s", words[1].c_str(), o.input.c_str());
    if (words.size() > 0) o.model = words[0];
    if (words.size() == 2) o.input = words[1], o.has_input = true;
    return o;
}

static std::string read_stdin() {
    std::string text;
    char buffer[65536];
    for (ssize_t n; (n = read(0, buffer, sizeof buffer)) != 0;) {
        if (n < 0 && errno == EINTR && !interrupted) continue;
        if (n < 0) DIE("standard input: %s", strerror(errno));
        text.append(buffer, (size_t)n);
    }
    return text;
}

// Ids separated by commas or white space.
static std::vector<int> parse_ids(const char* option, const std::string& text) {
    std::vector<int> ids;
    for (size_t i = 0; i < text.size();) {
        size_t j = text.find_first_of(", \t\r\n", i);
        if (j == std::string::npos) j = text.size();
        if (j > i) ids.push_back((int)parse_integer(option, text.substr(i, j - i).c_str(), 0, INT_MAX));
        i = j + 1;
    }
    return ids;
}

// With --docs: the last question among the messages gets the passages that it is about, as many as fit, so that `room`
// tokens of the context are left.
static std::vector<Source> add_passages(const Options& o, const Tokenizer& tokenizer, std::vector<Message>& messages,
                                        size_t context, size_t room, const std::vector<std::string>& tools = {}) {
    if (!o.library) return {};
    auto rendered = [&](const std::vector<Message>& m) {
        return render_chat(tokenizer, m, {o.think == 1, true}, tools).size();
    };
    auto measure = [&](std::string_view s) { return tokenizer.encode(s, false).size(); };
    return add_passages(*o.library, messages, context - std::min(context, room), rendered, measure);
}

// Tokens of an answer that a prompt leaves room for.
static size_t room_for_answer(const Options& o, size_t context) {
    return std::min(o.max_tokens >= 0 ? (size_t)o.max_tokens : context, context / 4);
}

// The ids of the prompt, as the options give it; and what of the documents is in it.
static std::vector<int> prompt_ids(const Options& o, const Tokenizer* tokenizer, size_t context,
                                   std::vector<Source>& sources) {
    if (o.has_ids) return parse_ids("--ids", o.ids == "-" ? read_stdin() : o.ids);
    std::string text = o.input;
    if (text == "-") {
        text = read_stdin();
        if (!text.empty() && text.back() == '\n') text.pop_back(); // what `echo` adds is no part of the question
    }
    if (o.raw) return tokenizer->encode(text, true);
    if (text.empty()) DIE("the question is empty"); // as where a script's variable is not set
    std::vector<Message> messages;
    if (!o.system.empty()) messages.push_back({"system", o.system});
    messages.push_back({"user", text});
    sources = add_passages(o, *tokenizer, messages, context, room_for_answer(o, context));
    ChatOptions options;
    options.thinking = o.think;
    return render_chat(*tokenizer, messages, options);
}

// --logits, --logits-hash: every position's logits as float32, V a row.
template <class T> void write_logits(const Options& o, Session<T>& session, const std::vector<int>& prompt) {
    std::unique_ptr<OutputFile> out;
    if (!o.logits_file.empty()) out = std::make_unique<OutputFile>(o.logits_file);
    uint64_t hash = fnv1a(nullptr, 0);
    const size_t bytes = (size_t)session.config.V * sizeof(float);
    session.feed(prompt, &interrupted, [&](const float* row) {
        if (out) out->write(row, bytes);
        if (o.logits_hash) hash = fnv1a(row, bytes, hash);
    });
    if (interrupted) DIE("interrupted");
    if (out) out->commit();
    if (o.logits_hash) write_stdout(format("%016llx\n", (unsigned long long)hash));
}

// --lookup for this session. On a GPU a token has the same bits in steps of any number of tokens by step.h's kernels,
// or with --invariant.
template <class T> void use_lookup(const Options& o, Session<T>& session) {
    if (o.lookup > 0 && !session.can_look_up())
        DIE("--lookup %d: on a GPU it needs --one-kernel (bf16 weights and keys, room for a copy) or --invariant, or "
            "the answer could change", o.lookup);
    session.lookup.most = o.lookup >= 0 ? o.lookup : o.ctx.gpu && session.step_tokens() == 1 ? 0 : LookUp::MOST;
}
// What came of it, for people.
inline std::string told(const LookUp& lookup) {
    return lookup.proposed ? format(", %zu of %zu looked up were right", lookup.right, lookup.proposed) : "";
}

static Sampling sampling_of(const Options& o) {
    Sampling how; // Qwen's advice without thinking
    if (o.think) how.temperature = 0.6f, how.top_p = 0.95f;
    if (o.temperature >= 0) how.temperature = o.temperature;
    if (o.top_p >= 0) how.top_p = o.top_p;
    if (o.top_k >= 0) how.top_k = o.top_k;
    how.min_p = o.min_p;
    how.repeat = o.repeat, how.presence = o.presence, how.frequency = o.frequency;
    how.seed = o.has_seed ? o.seed : (uint64_t)std::random_device()() << 32 | std::random_device()();
    return how;
}

// ------------------------------------------------------------------------------------------------- Prompt cache

// Makes the session hold this prompt and computes only what it does not hold yet: returns how many tokens it
// held. The last one is computed in any case, since its logits are needed.
template <class T> size_t feed_prompt(Session<T>& session, const std::vector<int>& prompt) {
    const size_t most = std::min(session.ids.size(), prompt.size() - 1);
    size_t same = 0;
    while (same < most && prompt[same] == session.ids[same]) same++;
    session.rewind(same);
    session.feed({prompt.begin() + (ptrdiff_t)same, prompt.end()}, &interrupted);
    return same;
}

// `generate`, at the pace that the machine's other programs leave. `show` takes no part in it.
template <class T, class Show>
void speak(Session<T>& session, const Tokenizer* tokenizer, Generation& g, ThreadPace& pace, Show show) {
    pace.begin();
    generate(session, tokenizer, g, [&](std::string_view text) {
        pace.end();
        show(text);
        pace.begin();
    });
    pace.end();
}

// --prompt-cache: the keys and values of a prompt in a file, so that another start need not compute them.
//   Header; u32 ids[tokens], padded to 8 bytes; the pages of the keys, then of the values, layer by layer
// The file is of use to any prompt that begins like its own. It is checked whole before a byte of it is used, and
// one that does not fit is an error: never a wrong answer. (Against damage and mix-ups, that is. Who can forge
// the file can make the model say anything.)
template <class T> struct PromptCache {
    struct Header {
        char magic[8] = {'q', 'w', 'e', 'n', '3', 'k', 'v', 0};
        uint32_t version = 1;
        uint32_t number = sizeof(T); // bytes of a key's or value's number
        uint32_t layers, kv_heads, head_size, tokens;
        uint64_t model;              // see ModelFile::hash; and Options::variant
        uint64_t sum = 0;            // of the whole file, with this field 0
    };
    std::string path;     // "": no cache is wanted
    Header header;
    std::vector<int> ids; // of the file, once it is there

    // Restores into the new session what the file holds, if it exists, as far as the context reaches.
    // variant: see Options.
    PromptCache(const std::string& path, const ModelFile& file, uint64_t variant, Session<T>& session) : path(path) {
        const Config& c = file.config;
        header.layers = (uint32_t)c.L, header.kv_heads = (uint32_t)c.K, header.head_size = (uint32_t)c.D;
        header.tokens = 0;
        if (path.empty()) return;
        header.model = fnv1a(&variant, sizeof variant, file.hash());
        if (access(path.c_str(), F_OK) != 0 && errno == ENOENT) return;

        const MappedFile map(path);
        auto must = [&](bool ok, const char* fault) { if (!ok) DIE("%s: %s", path.c_str(), fault); };
        must(map.size >= sizeof header, "not a prompt cache");
        const Header expected = header;
        memcpy((void*)&header, map.data, sizeof header);
        must(!memcmp(header.magic, expected.magic, sizeof header.magic), "not a prompt cache");
        must(header.version == expected.version, "a prompt cache of another version of this program");
        must(header.model == expected.model && header.number == expected.number &&
             header.layers == expected.layers && header.kv_heads == expected.kv_heads &&
             header.head_size == expected.head_size, "the prompt cache of another model or --dtype");
        must(header.tokens > 0 && header.tokens <= (uint32_t)c.max_positions, "damaged: its number of tokens");
        const size_t tokens = header.tokens, ids_bytes = (tokens + 1) / 2 * 8, block = block_bytes(session, tokens);
        must(map.size == sizeof header + ids_bytes + 2 * (size_t)c.L * block, "damaged: its length");
        const uint64_t sum = std::exchange(header.sum, 0);
        const uint64_t found = checksum(0, &header, sizeof header);
        must(checksum(found, map.data + sizeof header, map.size - sizeof header) == sum, "damaged: its checksum");

        ids.resize(tokens);
        memcpy(ids.data(), map.data + sizeof header, tokens * sizeof(int));
        for (int id : ids) must(id >= 0 && id < c.V, "damaged: an id that the model has not");
        const size_t n = std::min(tokens, (size_t)session.capacity);
        const uint8_t* at = map.data + sizeof header + ids_bytes;
        each_block(session, n, [&](T* pages) {
            memcpy((void*)pages, at, block_bytes(session, n));
            at += block;
        });
        session.ids.assign(ids.begin(), ids.begin() + (ptrdiff_t)n);
    }

    // Writes what the session holds, if there is no file yet or all of the file is only its beginning.
    void save(Session<T>& session) {
        if (path.empty() || session.ids.size() <= ids.size()) return;
        if (!std::equal(ids.begin(), ids.end(), session.ids.begin())) return;
        ids = session.ids;
        header.tokens = (uint32_t)ids.size();
        std::vector<int> padded = ids;
        padded.resize((ids.size() + 1) / 2 * 2);
        const size_t block = block_bytes(session, ids.size());
        auto each_part = [&](auto use) {
            use(&header, sizeof header);
            use(padded.data(), padded.size() * sizeof(int));
            each_block(session, ids.size(), [&](T* pages) { use(pages, block); });
        };
        header.sum = 0;
        uint64_t sum = 0;
        each_part([&](const void* part, size_t bytes) { sum = checksum(sum, part, bytes); });
        header.sum = sum;
        OutputFile out(path);
        each_part([&](const void* part, size_t bytes) { out.write(part, bytes); });
        out.commit();
    }

  private:
    // Like FNV-1a, but on words of 8 bytes, since it must keep up with a disk. Every step can be undone, so that
    // damage within one word always shows. `bytes` is a multiple of 8.
    static uint64_t checksum(uint64_t hash, const void* data, size_t bytes) {
        for (size_t i = 0; i < bytes; i += 8) {
            uint64_t word;
            memcpy(&word, (const uint8_t*)data + i, 8);
            hash = (hash ^ word) * 0x100000001b3;
            hash ^= hash >> 32; // else the upper bits would never reach the lower ones
        }
        return hash;
    }
};


#include "cli/chat.h"

// ------------------------------------------------------------------------------------ Perplexity and evaluation

// A line on stderr that is written over once a second; where that is no terminal, a new one every half minute.
struct Progress {
    const bool terminal = isatty(2);
    const double start = seconds();
    double told = start;

    ~Progress() { if (terminal && told > start) fputc('\n', stderr); }

    // What `line` says, when `done` of `all` is done.
    template <class F> void show(size_t done, size_t all, F line) {
        const double now = seconds();
        if (now - told < (terminal ? 1 : 30)) return;
        told = now;
        const double left = (now - start) * (double)(all - done) / (double)done;
        fprintf(stderr, terminal ? "\r%s, %.0f s left   " : "%s, %.0f s left\n", line(now - start).c_str(), left);
    }
};

// -ln softmax(logits)[id]: over all V rows as transformers takes it, the ids that do not exist among them; in
// double, and in one order.
template <class Number> double negative_log_likelihood(const Number* logits, int V, int id) {
    const double top = *std::max_element(logits, logits + V);
    double sum = 0;
    for (int v = 0; v < V; v++) sum += std::exp(logits[v] - top);
    return std::log(sum) + top - logits[id];
}

// --ppl: the mean negative log-likelihood of a text's tokens and its exponential, over windows as in "Perplexity of
// fixed-length models" (https://huggingface.co/docs/transformers/perplexity): each window begins --stride tokens
// after the one before and scores the tokens that are new in it; the others are their context. The first token of
// the text has none and is not scored; with a stride of a whole window no window's first is. Every scored token
// counts the same (the loop printed there gives those of later windows a little less).
// The text is plain: names of special tokens in it stay text.
template <class T>
int perplexity(const Options& o, const Config& c, const Weights<T>& weights, const Tokenizer& tokenizer) {
    const char* name = o.ppl == "-" ? "standard input" : o.ppl.c_str();
    const std::vector<int> ids = tokenizer.encode(o.ppl == "-" ? read_stdin() : MappedFile(o.ppl).text(), false);
    const size_t n = ids.size(), window = (size_t)(o.context ? o.context : std::min(2048, c.max_positions));
    const size_t stride = o.stride ? (size_t)o.stride : window / 2;
    if (n < 2) DIE("%s: %s; it takes two to predict one", name, n ? "one token" : "no token");
    if (window < 2) DIE("--ctx %zu: a window of one token predicts nothing", window);
    if (stride > window) DIE("--stride %zu: tokens would be left out between windows of %zu (-c)", stride, window);

    Session<T> session(c, weights, (int)std::min(window, n), o.ctx);
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
        session.feed({&ids[next - 1], &ids[end - 1]}, &interrupted, [&](const acc<T>* row) {
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

// A mean with its 95% interval. Neighbouring tokens are alike, so that blocks of them are the sample.
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
    double margin() const { // 1.96 standard errors; without two blocks nobody knows
        const double count = (double)blocks.size();
        if (count < 2) return INFINITY;
        double center = 0, square = 0;
        for (double b : blocks) center += b / count;
        for (double b : blocks) square += (b - center) * (b - center);
        return 1.96 * std::sqrt(square / (count - 1) / count);
    }
};

// --ppl with --against: how far this model's distributions are from another one's, on each token of a text, in windows
// that each begin anew: KL(other || this), how often both think the same token likeliest, both perplexities.
template <class T>
int compare(const Options& o, const ModelFile& file, const Weights<T>& weights, const Tokenizer& tokenizer) {
    constexpr size_t PIECE = 64; // tokens whose logits are held
    const ModelFile other(o.against);
    const Config& c = file.config;
    if (other.config.V != c.V || !fits(tokenizer, other))
        DIE("%s: another vocabulary than that of %s", o.against.c_str(), o.model.c_str());
    Context usual = o.ctx; // FP8 keys, values and activations are part of what is measured
    usual.kv_fp8 = usual.fp8_activations = false;
#ifdef __CUDACC__
    if (usual.gpu) usual.gpu = std::make_shared<Gpu>(*usual.gpu); // (each has room of its own to unpack weights)
#endif
    Weights<T> truth(other, false, keeps_packed<T>(o, o.ctx));
    to_device(usual, other, truth);
    const std::vector<int> ids = tokenizer.encode(o.ppl == "-" ? read_stdin() : MappedFile(o.ppl).text(), false);
    const int most = std::min(c.max_positions, other.config.max_positions);
    const size_t window = (size_t)(o.context ? o.context : std::min(2048, most)), V = (size_t)c.V;
    if (ids.size() < 2 || window < 2) DIE("--ppl: a text and a window of one token predict nothing");
    if (window > (size_t)other.config.max_positions) DIE("--ctx %zu: more than %s has", window, o.against.c_str());
    Session<T> ours(c, weights, (int)window, o.ctx), theirs(other.config, truth, (int)window, usual);
    MeanOfTokens kl, same, nll, nll_other, more;
    std::vector<acc<T>> held;
    Progress progress;
    ThreadPace pace(o, o.ctx);
    pace.begin();
    for (size_t at = 0; at + 1 < ids.size() && !interrupted;) {
        if (at % window == 0) ours.rewind(0), theirs.rewind(0);
        const size_t end = std::min({at + PIECE, at / window * window + window, ids.size()});
        const std::vector<int> piece(&ids[at], &ids[0] + end);
        held.clear();
        theirs.feed(piece, &interrupted, [&](const acc<T>* row) { held.insert(held.end(), row, row + V); });
        size_t n = at;
        if (!interrupted) ours.feed(piece, &interrupted, [&](const acc<T>* q) {
            const acc<T>* p = &held[(n - at) * V];
            if (++n == ids.size() || n % window == 0) return; // the last row of a window predicts what is not in it
            const int top_p = (int)(std::max_element(p, p + V) - p), top_q = (int)(std::max_element(q, q + V) - q);
            const double zp = negative_log_likelihood(p, c.V, top_p), zq = negative_log_likelihood(q, c.V, top_q);
            double sum = 0;
            for (size_t v = 0; v < V; v++) {
                const double lp = p[v] - p[top_p] - zp, lq = q[v] - q[top_q] - zq;
                sum += std::exp(lp) * (lp - lq);
            }
            const double a = zq + q[top_q] - q[ids[n]], b = zp + p[top_p] - p[ids[n]];
            kl.add(sum), same.add(top_p == top_q), nll.add(a), nll_other.add(b), more.add(a - b);
        });
        at = end;
        pace.step();
        progress.show(at, ids.size(), [&](double) {
            return format("%zu of %zu tokens, kl %.5f", at, ids.size(), kl.n ? kl.mean() : 0.);
        });
    }
    if (interrupted) return 130;
    sj::Writer w;
    w.object().field("tokens", kl.n).field("window", window);
    for (auto [name, m] : {std::pair("kl", &kl), {"same_top1", &same}, {"nll", &nll}, {"nll_against", &nll_other},
                           {"nll_more", &more}})
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
                        : "kl " + interval(kl, 1) + " top1 " + interval(same, 100) + "% ppl " + ppl(nll) + " against " +
                              ppl(nll_other) + " ratio " + ppl(more) + format(" tokens %zu\n", kl.n));
    return 0;
}

// A row of a QA file, ready to be asked. Prompt and answer are tokenized apart, as in training.
struct QuestionRow {
    size_t line;                         // of the file
    std::string id, question, reference; // id: JSON, "" if the row has none
    std::vector<Message> messages;       // the question, and what comes before it
    std::vector<std::string> tools;
    std::vector<Source> sources;         // that go with the question
    std::vector<int> prompt;             // what is answered
    std::vector<int> before, trained;    // what the reference follows, an empty thought at its end; its own ids
    size_t length() const { return before.size() + trained.size(); }
};

// Alpaca's {instruction, input?, output, system?, history?} or OpenAI's {messages, tools?}, the last message being
// the reference. That is plain text: what the assistant thought before it is not scored.
static QuestionRow question_row(const Options& o, const Tokenizer& tokenizer, size_t line, sj::Value v) {
    if (!v.is(sj::Object)) DIE("not an object");
    QuestionRow row;
    row.line = line;
    std::vector<Message> messages;
    if (v["messages"]) {
        messages = messages_from_json(v["messages"]);
        if (messages.empty() || messages.back().role != "assistant")
            DIE("messages: the last one is not the assistant's");
        if (!messages.back().tool_calls.empty())
            DIE("messages: the last one has tool calls, which cannot be a reference");
        row.reference = messages.back().content;
        messages.pop_back();
        for (auto& m : messages)
            if (m.role == "user") row.question = m.content;
    } else {
        auto absent = [](sj::Value x) { return !x || x.is(sj::Null); };
        auto text = [&](const char* key, bool needed) {
            const sj::Value s = v[key];
            if (!s.is(sj::String) && (needed || !absent(s))) DIE("%s: %s", key, s ? "not a string" : "missing");
            return s.str();
        };
        row.question = text("instruction", true);
        row.reference = text("output", true);
        const std::string input = text("input", false), system = text("system", false);
        if (!input.empty()) row.question += "\n" + input;
        if (!system.empty()) messages.push_back({"system", system});
        if (!absent(v["history"]) && !v["history"].is(sj::Array)) DIE("history: not a list");
        for (sj::Value turn : v["history"].items()) {
            if (turn.size() != 2 || !turn[0].is(sj::String) || !turn[1].is(sj::String))
                DIE("history: not a list of [question, answer]");
            messages.push_back({"user", turn[0].str()});
            messages.push_back({"assistant", turn[1].str()});
        }
        messages.push_back({"user", row.question});
    }
    if (!o.system.empty() && (messages.empty() || messages[0].role != "system"))
        messages.insert(messages.begin(), {"system", o.system});
    if (v["id"]) row.id = sj::dump(v["id"]);
    const std::vector<std::string> tools = tools_from_json(v["tools"]);
    tokenizer.encode(row.trained, row.reference, false);
    row.trained.push_back(tokenizer.id("<|im_end|>"));
    tokenizer.encode(row.trained, "\n", false);
    row.before = render_chat(tokenizer, messages, {false, true}, tools);
    row.messages = std::move(messages), row.tools = tools;
    return row;
}

// What is only done when the row's turn comes: looking it up in documents may take long.
static void look_up(const Options& o, const Tokenizer& tokenizer, size_t context, QuestionRow& row) {
    const size_t room = std::max(room_for_answer(o, context), row.trained.size());
    row.sources = add_passages(o, tokenizer, row.messages, context, room, row.tools);
    row.prompt = render_chat(tokenizer, row.messages, {o.think == 1, true}, row.tools);
    row.before = render_chat(tokenizer, row.messages, {false, true}, row.tools);
}

static std::vector<QuestionRow> read_questions(const Options& o, const Tokenizer& tokenizer, const MappedFile& file) {
    std::vector<QuestionRow> rows;
    each_json_line(file, [&](size_t line, std::string_view, sj::Value row) {
        try {
            rows.push_back(question_row(o, tokenizer, line, row));
        } catch (const Error& e) {
            DIE("%s: line %zu: %s", file.path.c_str(), line, e.what());
        }
    });
    if (rows.empty()) DIE("%s: no row in it", file.path.c_str());
    return rows;
}

// --eval's output while it is made: FILE.partial holds a line that says what the rows depend on, then the rows so
// far. Whoever stops it loses at most the row at work: the next run goes on after the last whole line, if it would
// write the same first one.
struct PartialFile {
    const std::string path, partial, header;
    std::string rows; // that were there
    FILE* file;

    PartialFile(const std::string& path, const std::string& first)
        : path(path), partial(path + ".partial"), header(first + "\n") {
        if (access(path.c_str(), F_OK) == 0) DIE("%s: exists; remove it or name another file", path.c_str());
        file = fopen(partial.c_str(), "a+b");
        must(file);
        must(flock(fileno(file), LOCK_EX | LOCK_NB) == 0, "another run is writing it");
        char some[65536];
        for (size_t n; (n = fread(some, 1, sizeof some, file)) > 0;) rows.append(some, n);
        must(!ferror(file));
        const size_t same = std::min(rows.size(), header.size());
        must(rows.compare(0, same, header, 0, same) == 0,
             "begun with another model, other rows or options; remove it to start anew");
        rows.resize(rows.rfind('\n') + 1); // none: npos + 1 is 0
        must(ftruncate(fileno(file), (off_t)rows.size()) == 0);
        if (rows.empty()) append(header);
        else rows.erase(0, header.size());
    }
    PartialFile(const PartialFile&) = delete;
    ~PartialFile() { fclose(file); }

    void append(std::string_view line) {
        must(fwrite(line.data(), 1, line.size(), file) == line.size() && fflush(file) == 0);
    }

    // All rows are there: gives them their name, without the first line.
    void finish() {
        OutputFile out(path);
        out.write(MappedFile(partial).text().substr(header.size()));
        out.commit();
        unlink(partial.c_str());
    }

  private:
    void must(bool ok, const char* fault = nullptr) {
        if (!ok) DIE("%s: %s", partial.c_str(), fault ? fault : strerror(errno));
    }
};

// What the rows of an output come to, read off its lines.
struct EvalTotals {
    size_t rows = 0, skipped = 0, ended = 0, tokens = 0;
    double nll = 0;

    // False: not the line of the next row.
    bool add(std::string_view line) {
        sj::Doc doc;
        int64_t index = -1, count = 0;
        if (!sj::parse(doc, line).empty() || !doc.root()["index"].integer(&index)) return false;
        if (index != (int64_t)rows) return false;
        doc.root()["tokens"].integer(&count);
        rows++;
        skipped += (bool)doc.root()["error"];
        ended += doc.root()["finish"].str() == "stop";
        tokens += (size_t)count;
        if (sj::Value x = doc.root()["nll"]) nll += x.number(NAN); // null where the model said NaN
        return true;
    }
};

// One row: the model's answer, then the loss of the reference after the same prompt. It is the answer's ids, then
// <|im_end|> and a newline, that are trained on, and counted here.
template <class T>
std::string evaluate_row(Session<T>& session, const Tokenizer& tokenizer, Generation g, const QuestionRow& row,
                         size_t index, ThreadPace& pace) {
    const int V = session.config.V;
    const size_t count = row.trained.size(), length = row.length();
    sj::Writer w;
    w.object().field("index", index);
    if (!row.id.empty()) w.key("id").text += row.id, w.comma = true;
    w.field("question", row.question).field("reference", row.reference);
    if (!row.sources.empty()) write_sources(w, row.sources);
    if (length > (size_t)session.capacity) {
        w.field("error", format("%zu tokens, more than the context of %d", length, session.capacity));
    } else {
        g.sampling.seed += index; // draws go by position
        feed_prompt(session, row.prompt);
        speak(session, &tokenizer, g, pace, [](std::string_view) {});
        feed_prompt(session, row.before);
        double nll = negative_log_likelihood(session.logits, V, row.trained[0]);
        size_t next = 1;
        session.feed({row.trained.begin(), row.trained.end() - 1}, &interrupted, [&](const acc<T>* logits) {
            nll += negative_log_likelihood(logits, V, row.trained[next++]);
        });
        w.field("answer", g.text).field("finish", g.finish);
        w.field("loss", nll / (double)count).field("tokens", count).field("nll", nll);
    }
    return w.end().text + "\n";
}

// --eval: what the model answers to the questions of a QA file, and its loss on the answers there. Greedy, unless -t
// is given.
template <class T>
int evaluate(const Options& o, const ModelFile& file, const Weights<T>& weights, const Tokenizer& tokenizer) {
    const Config& c = file.config;
    const MappedFile qa(o.eval);
    const int context = o.context ? o.context : std::min(4096, c.max_positions);
    const std::vector<QuestionRow> rows = read_questions(o, tokenizer, qa);
    if (std::none_of(rows.begin(), rows.end(), [&](auto& row) { return row.length() <= (size_t)context; }))
        DIE("%s: every row is longer than the context of %d tokens: nothing to measure (-c sets it)", o.eval.c_str(),
            context);
    Session<T> session(c, weights, context, o.ctx);
    use_lookup(o, session);
    Generation how;
    how.sampling = sampling_of(o);
    if (o.temperature < 0) how.sampling.temperature = 0;
    how.sampling.seed = o.seed; // 0, not a random one: a run that goes on must draw as it would have
    how.max_tokens = o.max_tokens >= 0 ? (size_t)o.max_tokens : 512;
    how.stops = o.stops;
    how.interrupt = &interrupted;

    const Sampling& s = how.sampling;
    auto hex = [](uint64_t hash) { return format("%016llx", (unsigned long long)hash); };
    sj::Writer w;
    w.object().field("qa", hex(fnv1a(qa.data, qa.size))).field("model", hex(file.hash()));
    w.field("variant", hex(o.variant)).field("bits", 8 * sizeof(T));
    if (o.library) w.field("documents", hex(o.library->hash()));
    w.field("tokenizer", hex(tokenizer.hash())).field("system", o.system).field("think", o.think);
    w.field("context", session.capacity).field("max_tokens", how.max_tokens);
    w.key("sampling").array().value(s.temperature).value(s.top_k).value(s.top_p).value(s.min_p);
    w.value(s.repeat).value(s.presence).value(s.frequency).value(s.seed).end().key("stop").array();
    for (auto& stop : o.stops) w.value(stop);
    PartialFile out(o.output, w.end().end().text);

    EvalTotals totals;
    for (size_t at = 0; at < out.rows.size();) {
        const std::string_view line = std::string_view(out.rows).substr(at, out.rows.find('\n', at) - at);
        at += line.size() + 1;
        if (totals.rows == rows.size() || !totals.add(line))
            DIE("%s: line %zu is damaged; remove the file to start anew", out.partial.c_str(), totals.rows + 2);
    }
    const size_t before = totals.rows;
    if (before)
        say(format("%s: %zu of %s are there", out.partial.c_str(), before, counted(rows.size(), "row").c_str()));
    {
        Progress progress;
        ThreadPace pace(o, o.ctx);
        while (totals.rows < rows.size() && !interrupted) {
            QuestionRow row = rows[totals.rows];
            try {
                look_up(o, tokenizer, (size_t)context, row);
            } catch (const Error& e) {
                if (interrupted) break;
                DIE("%s: line %zu: %s", qa.path.c_str(), row.line, e.what());
            }
            const std::string line = evaluate_row(session, tokenizer, how, row, totals.rows, pace);
            if (interrupted) break;
            out.append(line);
            totals.add(line);
            progress.show(totals.rows - before, rows.size() - before, [&](double) {
                const double mean = totals.nll / (double)std::max<size_t>(1, totals.tokens); // (rows may be skipped)
                return format("%zu of %zu rows, loss %.4f", totals.rows, rows.size(), mean);
            });
        }
    }
    if (interrupted) {
        say(format("%s: %zu of %s; the same command goes on", out.partial.c_str(), totals.rows,
                   counted(rows.size(), "row").c_str()));
        return 130;
    }
    out.finish();
    const double loss = totals.nll / (double)totals.tokens;
    say(format("%s: %s, %zu skipped (too long for the context), %s, loss %.6f over %s", o.output.c_str(),
               counted(totals.rows, "row").c_str(), totals.skipped, counted(totals.ended, "complete answer").c_str(),
               loss, counted(totals.tokens, "token").c_str()));
    sj::Writer all;
    all.object().field("rows", totals.rows).field("skipped", totals.skipped).field("ended", totals.ended);
    all.field("loss", loss).field("tokens", totals.tokens).end();
    write_stdout(o.json ? all.text + "\n" : format("rows %zu skipped %zu ended %zu loss %.6f tokens %zu\n", totals.rows,
                                                   totals.skipped, totals.ended, loss, totals.tokens));
    return 0;
}

// ------------------------------------------------------------------------------------------ --embed, --rerank

struct TextRow {
    std::string id, text; // id: JSON, "" if the row has none
};

// The texts of -i, or of --texts. Every line is one, an empty line too.
static std::vector<TextRow> read_texts(const Options& o) {
    if (o.texts.empty()) return {{"", o.input == "-" ? read_stdin() : o.input}};
    std::vector<TextRow> rows;
    if (o.texts.size() > 6 && o.texts.compare(o.texts.size() - 6, 6, ".jsonl") == 0) {
        const MappedFile file(o.texts);
        each_json_line(file, [&](size_t line, std::string_view, sj::Value row) {
            const sj::Value text = row.is(sj::Object) ? row["text"] : row;
            if (!text.is(sj::String))
                DIE("%s: line %zu: neither a string nor an object with \"text\"", o.texts.c_str(), line);
            rows.push_back({row.is(sj::Object) && row["id"] ? sj::dump(row["id"]) : "", text.str()});
        });
    } else {
        const std::string input = o.texts == "-" ? read_stdin() : std::string(MappedFile(o.texts).text());
        for (size_t at = 0, end; at < input.size(); at = end + 1) {
            end = std::min(input.find('\n', at), input.size());
            const bool carriage = end > at && input[end - 1] == '\r';
            rows.push_back({"", input.substr(at, end - at - carriage)});
        }
    }
    if (rows.empty()) DIE("%s: no text in it", o.texts == "-" ? "standard input" : o.texts.c_str());
    return rows;
}

// What is shown for each row. One that is too long is a fault, before anything is computed.
static std::vector<std::vector<int>> shown_ids(const Options& o, const Tokenizer& tokenizer, const RerankPrompt* prompt,
                                               const std::vector<TextRow>& rows, size_t context) {
    const std::string query = prompt && o.input == "-" ? read_stdin() : o.input;
    if (prompt && query.empty()) DIE("the query is empty");
    std::vector<int> question;
    if (prompt) question = prompt->query_ids(tokenizer, o.instruct.empty() ? RETRIEVAL_TASK : o.instruct, query);
    const size_t most = o.truncate ? context : 0;
    if (prompt && context <= prompt->length())
        DIE("--ctx %zu: the question alone is %zu tokens", context, prompt->length());
    std::vector<std::vector<int>> all;
    for (auto& row : rows) {
        const std::string text = prompt || o.instruct.empty() ? row.text : with_task(o.instruct, row.text);
        all.push_back(prompt ? prompt->ids(tokenizer, question, text, most) : embedding_ids(tokenizer, text, most));
        if (all.back().size() > context)
            DIE("text %zu is %s, the context %zu (-c sets it, --truncate cuts)", all.size(),
                counted(all.back().size(), "token").c_str(), context);
        if (interrupted) DIE("interrupted");
    }
    return all;
}

static std::string text_line(const Options& o, const TextRow& row, size_t index, const std::vector<float>& vector,
                             double score) {
    sj::Writer w;
    w.object().field("index", index);
    if (!row.id.empty()) w.key("id").text += row.id, w.comma = true;
    if (o.rerank) return w.field("relevance_score", score).field("text", row.text).end().text + "\n";
    write_numbers(w.key("embedding").text, vector);
    return w.end().text + "\n";
}

// --embed, --rerank: a line of JSON for each text: vectors in the order of the texts, scores from the best down.
template <class T>
int embed_or_rerank(const Options& o, const ModelFile& file, const Weights<T>& weights, const Tokenizer& tokenizer) {
    const Config& c = file.config;
    if (o.dimensions > c.C) DIE("--dimensions %d: the model's vectors have %d", o.dimensions, c.C);
    const size_t dimensions = (size_t)(o.dimensions ? o.dimensions : c.C);
    std::unique_ptr<RerankPrompt> prompt;
    std::unique_ptr<Relevance> relevance;
    if (o.rerank) prompt = std::make_unique<RerankPrompt>(tokenizer);
    if (o.rerank) relevance = std::make_unique<Relevance>(o.ctx, weights, *prompt);
    const std::vector<TextRow> rows = read_texts(o);
    const size_t context = (size_t)(o.context ? o.context : std::min(4096, c.max_positions));
    const std::vector<std::vector<int>> ids = shown_ids(o, tokenizer, prompt.get(), rows, context);
    size_t longest = 0, tokens = 0;
    for (auto& text : ids) longest = std::max(longest, text.size()), tokens += text.size();

    std::unique_ptr<OutputFile> out;
    if (!o.output.empty()) out = std::make_unique<OutputFile>(o.output);
    auto write = [&](const std::string& line) { out ? out->write(line) : write_stdout(line); };
    Embedder<T> model(c, weights, (int)longest, o.ctx);
    ThreadPace pace(o, o.ctx);
    std::vector<std::pair<double, size_t>> scores; // and whose
    const double start = seconds();
    {
        Progress progress;
        pace.begin();
        model.run(ids, &interrupted, [&](size_t i, const std::vector<float>& hidden) {
            if (!all_finite(hidden)) DIE("text %zu: the model's numbers are not finite", i + 1);
            if (o.rerank) scores.push_back({(*relevance)(hidden), i});
            else write(text_line(o, rows[i], i, unit_vector(hidden, dimensions), 0));
            pace.step();
            progress.show(i + 1, rows.size(), [&](double s) {
                return format("%zu of %zu texts, %.1f a second", i + 1, rows.size(), (double)(i + 1) / s);
            });
        });
        pace.end();
    }
    if (interrupted) return 130;
    std::stable_sort(scores.begin(), scores.end(), [](auto& a, auto& b) { return a.first > b.first; });
    for (auto& [score, i] : scores) write(text_line(o, rows[i], i, {}, score));
    if (out) out->commit();
    const double spent = seconds() - start;
    say(format("%s, %s in %.2f s: %.1f texts/s, %.0f tok/s", counted(rows.size(), "text").c_str(),
               counted(tokens, "token").c_str(), spent, (double)rows.size() / spent, (double)tokens / spent));
    return 0;
}

// ---------------------------------------------------------------------------------------------- --synthesize

// --synthesize: a checkpoint of a real shape with seeded random weights, so that speed can be measured without
// a download. SHAPE is a size by name or a config.json. Matrices are drawn with standard deviation 0.02, norms
// around 1; stored as bf16, or float32 if the config says so.
static void synthesize(const std::string& shape, const std::string& path, uint64_t seed) {
    // https://huggingface.co/Qwen: hidden, layers, query heads, key/value heads, ffn, tied
    static const struct { const char* name; int C, L, H, K, F; bool tied; } sizes[] = {
        {"0.6B", 1024, 28, 16, 8, 3072, true},   {"1.7B", 2048, 28, 16, 8, 6144, true},
        {"4B", 2560, 36, 32, 8, 9728, true},     {"8B", 4096, 36, 32, 8, 12288, false},
        {"14B", 5120, 40, 40, 8, 17408, false},  {"32B", 5120, 64, 64, 8, 25600, false}};
    std::string config_text, generation_text =
        R"({"bos_token_id": 151643, "do_sample": true, "eos_token_id": [151645, 151643], )"
        R"("temperature": 0.6, "top_k": 20, "top_p": 0.95})";
    for (auto& s : sizes)
        if (shape == s.name)
            config_text = format(R"({"architectures": ["Qwen3ForCausalLM"], "attention_bias": false, )"
                                 R"("bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, )"
                                 R"("hidden_act": "silu", "hidden_size": %d, "intermediate_size": %d, )"
                                 R"("max_position_embeddings": 40960, "model_type": "qwen3", )"
                                 R"("num_attention_heads": %d, "num_hidden_layers": %d, "num_key_value_heads": %d, )"
                                 R"("rms_norm_eps": 1e-06, "rope_theta": 1000000, "tie_word_embeddings": %s, )"
                                 R"("torch_dtype": "bfloat16", "vocab_size": 151936})",
                                 s.C, s.F, s.H, s.L, s.K, s.tied ? "true" : "false");
    if (config_text.empty()) {
        if (shape.size() < 6 || shape.compare(shape.size() - 5, 5, ".json") != 0)
            DIE("--synthesize %s: 0.6B, 1.7B, 4B, 8B, 14B, 32B or a config.json", shape.c_str());
        config_text = MappedFile(shape).text();
        generation_text.clear();
    }
    const Config c = parse_config(shape, config_text, generation_text);
    sj::Doc doc;
    sj::parse(doc, config_text);
    const bool wide = doc.root()["dtype"].str(doc.root()["torch_dtype"].str()) == "float32";

    // A draw is the sum of four 16-bit uniforms, which is near enough to normal and the same on every machine.
    const size_t BLOCK = 1 << 20, width = wide ? 4 : 2;
    std::vector<uint8_t> bytes(BLOCK * width);
    const size_t all = parameters(c) * width;
    size_t written = 0;
    auto progress = std::make_unique<Progress>();
    uint64_t counter = 0;
    auto draw = [&](OutputFile& out, size_t n, float mean, float deviation) {
        for (size_t first = 0; first < n; first += BLOCK) {
            const size_t count = std::min(BLOCK, n - first);
            #pragma omp parallel for schedule(static)
            for (size_t i = 0; i < (count + 1) / 2; i++) { // one Philox call, two draws
                Philox r = philox(seed, counter + i, STREAM_SYNTHESIZE);
                for (size_t k = 0; k < 2 && 2 * i + k < count; k++) {
                    uint32_t a = r.v[2 * k], b = r.v[2 * k + 1];
                    float sum = (float)((a & 0xffff) + (a >> 16) + (b & 0xffff) + (b >> 16)); // mean 131070
                    float normal = (sum - 131070.f) * (1.f / 37837.2f);                       // 65536 * sqrt(4 / 12)
                    float x = mean + deviation * normal;
                    bf16 h = to_bf16(x);
                    if (wide) memcpy(&bytes[(2 * i + k) * 4], &x, 4);
                    else memcpy(&bytes[(2 * i + k) * 2], &h, 2);
                }
            }
            counter += (count + 1) / 2;
            out.write(bytes.data(), count * width);
            written += count * width;
            progress->show(written, all, [&](double) {
                return format("%s: %.0f of %.0f MB", path.c_str(), (double)written / 1e6, (double)all / 1e6);
            });
            if (interrupted) DIE("interrupted");
        }
    };
    std::vector<OutTensor> tensors;
    for (const ModelTensor& t : model_tensors(c))
        tensors.push_back({t.name(), wide ? "F32" : "BF16", t.shape(), [&draw, t](OutputFile& out) {
            draw(out, t.size(), t.columns ? 0.f : 1.f, t.columns ? 0.02f : 0.1f);
        }});
    const size_t size = write_safetensors(path, model_metadata(config_text, generation_text), tensors);
    progress.reset(); // its line ends
    fprintf(stderr, "%s: %.1f M parameters, %.0f MB, seed %llu\n", path.c_str(), (double)parameters(c) / 1e6,
            (double)size / 1e6, (unsigned long long)seed);
}

// ---------------------------------------------------------------------------------------------------- --convert

static void convert(const Options& o, bool asks_more) {
    if (asks_more || !o.adapter.empty() || !o.dtype.empty())
        DIE("--convert goes with a model alone: no question, --dtype or --adapter (train_lora --merge merges)");
    const ModelFile file(o.model);
    for (const MappedFile& map : file.maps)
        if (same_file(map.path, o.convert)) DIE("--convert %s: is the model itself", o.convert.c_str());
    const size_t size = write_model(file, o.convert);
    fprintf(stderr, "%s: %.1f M parameters, %.0f MB\n", o.convert.c_str(), (double)parameters(file.config) / 1e6,
            (double)size / 1e6);
}

// --------------------------------------------------------------------------------------------------- --quantize

static int quantize(const Options& o, bool asks_more) {
    if (asks_more || !o.adapter.empty() || !o.dtype.empty())
        DIE("--quantize goes with a model alone: no question, --dtype or --adapter (train_lora --merge merges)");
    if (o.quantize != "int4" && o.quantize != "int8" && o.quantize != "fp8")
        DIE("--quantize %s: int4, int8 or fp8", o.quantize.c_str());
    if (o.group && (o.quantize != "int4" || (o.group != 32 && o.group != 64 && o.group != 128)))
        DIE("--group %d: 32, 64 or 128, of int4", o.group);
    const ModelFile file(o.model);
    for (const MappedFile& map : file.maps)
        if (same_file(map.path, o.quantize_to)) DIE("--quantize %s: is the model itself", o.quantize_to.c_str());
    Quantization how;
    how.format = o.quantize == "int4" ? Format::INT4 : o.quantize == "int8" ? Format::INT8 : Format::FP8;
    how.group = o.group ? o.group : 128;
    how.keep_embedding = o.embedding == "same";
    how.window = std::min(how.window, file.config.max_positions);
    if (!o.calibrate.empty()) {
        const std::string path = tokenizer_path(o);
        const Tokenizer tokenizer(path);
        if (!fits(tokenizer, file)) not_its_tokenizer(path, tokenizer, file);
        how.text = tokenizer.encode(MappedFile(o.calibrate).text(), false);
        if (how.windows() == 0)
            DIE("%s: %s; one window takes %d", o.calibrate.c_str(), counted(how.text.size(), "token").c_str(),
                how.window);
    }
    Context ctx;
    if (!o.device.empty() || !how.text.empty()) ctx = choose_device(o, file);
    ctx.stop = &interrupted;
    auto progress = std::make_unique<Progress>();
    ThreadPace pace(o, Context()); // (most of it is the CPU's in any case)
    const bool paced = !how.text.empty(); // (else threads wait for the disk, which it would take for a lack of cores)
    if (paced) pace.begin();
    how.progress = [&](size_t done, size_t all, int layer) {
        if (paced) pace.step();
        progress->show(done, all, [&](double) { return format("layer %d of %d", layer + 1, file.config.L); });
    };
    const double start = seconds();
    const auto quantize = [&] {
        return wide(o, file) ? quantize_model<float>(file, how, ctx) : quantize_model<bf16>(file, how, ctx);
    };
    std::vector<OutTensor> tensors;
    try {
        tensors = quantize();
    } catch (const Error& e) { // a GPU that nobody asked for may be too small
        if (!ctx.gpu || !o.device.empty() || interrupted) throw;
        fprintf(stderr, "%s; on the CPU\n", e.what());
        ctx = Context(), ctx.stop = &interrupted;
        tensors = quantize();
    }
    progress.reset(); // its line ends
    const Metadata metadata = model_metadata(quantized_config(file, how), file.generation_text);
    const size_t size = write_safetensors(o.quantize_to, metadata, tensors);
    const std::string by = how.text.empty() ? "to the nearest" : format("GPTQ with %zu windows of %d tokens",
                                                                        how.windows(), how.window);
    fprintf(stderr, "%s: %.1f M parameters, %.0f MB, %s, %.1f s\n", o.quantize_to.c_str(),
            (double)parameters(file.config) / 1e6, (double)size / 1e6, by.c_str(), seconds() - start);
    return 0;
}

// ---------------------------------------------------------------------------------------------------- --bench
struct BenchRow {
    const char* work;
    int position;
    double tokens_per_s, bytes, flops; // bytes and flops a token
    double readable;                   // bytes that could have been read in a token's time
};

// n random ids, others each time.
static std::vector<int> random_ids(int n, int V) {
    static uint64_t draw = 0;
    std::vector<int> ids(n);
    for (int& id : ids) id = (int)(philox(1, draw++, STREAM_SAMPLE).v[0] % (uint32_t)V);
    return ids;
}
static double median(std::vector<double> v) { return std::sort(v.begin(), v.end()), v[v.size() / 2]; }

// Tokens a second of a prompt.
template <class T> double time_prompt(Session<T>& session, int length) {
    std::vector<double> times;
    for (int pass = 0; pass < (session.ctx.gpu ? 7 : 3); pass++) {
        session.rewind(0);
        const double start = seconds();
        session.feed(random_ids(length, session.config.V), &interrupted);
        times.push_back(seconds() - start);
        if (interrupted) DIE("interrupted");
    }
    return length / median(times);
}

struct DecodingTime { double rate, readable; }; // tokens a second, bytes a token's time

// Decoding from where the session is. On the CPU a step is timed by itself and the median counts; each is followed by a
// reading of memory, whose rate moves by half within seconds on a shared machine, and by that reading's rate it is
// judged (without `memory` by the ceiling). On a GPU steps are graphs that follow each other, and all of them count.
template <class T>
DecodingTime time_decoding(Session<T>& session, int steps, const Ceilings& ceiling, ReadTest* memory) {
    const int V = session.config.V, position = (int)session.ids.size();
    DecodingTime t = {};
    if (session.ctx.gpu) {
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

// --bench: prompts, and decoding at several positions, on this model and device.
template <class T> void bench(const Options& o, const ModelFile& file) {
    const Config& c = file.config;
    Weights<T> weights(file, o.dtype == "int8", keeps_packed<T>(o, o.ctx));
    to_device(o.ctx, file, weights);
    const bool gpu = o.ctx.gpu != nullptr;
    decode_for_long(o.ctx, file, weights);
    const int steps = gpu ? 200 : 24;
    std::vector<int> prompts = {512}, positions = {gpu ? 1 : 0, 100, 512, 2048};
    if (gpu) prompts = {512, 2048, 8192};
    if (o.bench_long || gpu) positions.push_back(8192);
    while (!positions.empty() && positions.back() + steps > c.max_positions) positions.pop_back();
    while (!prompts.empty() && prompts.back() > c.max_positions) prompts.pop_back();
    if (positions.empty() || prompts.empty()) DIE("--bench: the model's context of %d is too short", c.max_positions);
    Session<T> session(c, weights, std::max(prompts.back(), positions.back() + steps), o.ctx);

    // Every matrix is read once a step, but the embedding only if it is the head.
    const double matrices = (double)parameters(c) - (c.tied ? 0. : (double)c.V * c.C);
    const double weight_bytes = (double)step_bytes(weights);
    const double key_bytes = (double)KVCache<T>::bytes(c, 1, o.ctx.kv_fp8) / PAGE;
    const double head = (double)c.V * c.C, per_key = 4. * c.L * c.H * c.D;

    const std::unique_ptr<ReadTest> memory(gpu ? nullptr : new ReadTest);
    const Ceilings ceiling = measure_ceilings<T>(o.ctx, weights.layers[0].down.format != Format::PLAIN, memory.get());
    ReadTest* beside = weight_bytes < 0.5e9 ? nullptr : memory.get(); // it would drive a small model out of the caches
    std::vector<BenchRow> rows;
    session.feed(random_ids(16, c.V)); // pages in the weights
    for (int length : prompts) {
        const double flops = 2 * (matrices - head) + per_key * length / 2 + 2 * head / length;
        const double rate = time_prompt(session, length);
        rows.push_back({"prompt", length, rate, weight_bytes / length, flops, ceiling.read / rate});
    }
    session.rewind(0);
    auto progress = std::make_unique<Progress>();
    for (int position : positions) {
        for (int have; (have = (int)session.ids.size()) < position;) {
            session.feed(random_ids(std::min(512, position - have), c.V), &interrupted);
            if (interrupted) DIE("interrupted");
            progress->show(session.ids.size(), (size_t)positions.back(), [&](double) {
                return format("%zu of %d tokens in the context", session.ids.size(), positions.back());
            });
        }
        if (gpu && position == positions[0]) time_decoding(session, steps, ceiling, beside); // (clocks rise with work)
        const DecodingTime t = time_decoding(session, steps, ceiling, beside);
        const double middle = position + (gpu ? steps / 2 : 0);
        const double bytes = weight_bytes + key_bytes * (middle + 1), flops = 2 * matrices + per_key * middle;
        rows.push_back({"decode", position, t.rate, bytes, flops, t.readable});
    }
    progress.reset();
    print_bench(o, c, type_name(weights), ceiling, rows);
}

// ------------------------------------------------------------------------------------------- One prompt; main

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

// The tokenizer that the options name or that is found. Null if none is there or fits, and none is needed.
static std::unique_ptr<Tokenizer> fitting_tokenizer(const Options& o, const ModelFile& file) {
    if (o.has_ids && find_tokenizer(o.tokenizer, o.model).empty()) return nullptr;
    const std::string path = tokenizer_path(o);
    auto tokenizer = std::make_unique<Tokenizer>(path);
    if (fits(*tokenizer, file)) return tokenizer;
    if (!o.has_ids || !o.tokenizer.empty()) not_its_tokenizer(path, *tokenizer, file);
    return nullptr; // found by chance
}

// What an answer took.
struct Took {
    size_t prompt_tokens, reused; // reused: from the prompt cache
    double load_s, prompt_s, decode_s;
    LookUp lookup{};
};
static void print_answer(const Options& o, const Generation& g, const Took& took, const std::vector<Source>& sources) {
    // The first token comes from the prompt's logits: the decode phase makes the others.
    const double rate = g.ids.size() > 1 ? (double)(g.ids.size() - 1) / took.decode_s : 0;
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
    fprintf(stderr, "prompt %s%s, %.1f tok/s; answer %s, %.1f tok/s%s (%s)\n",
            counted(took.prompt_tokens, "token").c_str(), from_cache.c_str(), prompt_rate,
            counted(g.ids.size(), "token").c_str(), rate, told(took.lookup).c_str(), g.finish);
    say_sources(sources);
}

// One prompt, one answer; or a chat, --ppl, --eval, --logits.
template <class T> int answer(Options& o, const ModelFile& file, double start) {
    const Config& c = file.config;
    Weights<T> weights(file, o.dtype == "int8", keeps_packed<T>(o, o.ctx));
    to_device(o.ctx, file, weights);
    o.variant = o.dtype == "int8" ? 1 : file.is_quantized() && keeps_packed<T>(o, o.ctx) ? 2 : 0;
    if (o.ctx.kv_fp8) o.variant |= 4;
    if (o.ctx.fp8_activations) o.variant |= 8;
    std::unique_ptr<AttachedAdapter<T>> adapter;
    if (!o.adapter.empty()) {
        const AdapterFile from(o.adapter, c);
        o.variant = adapter_hash(from, o.variant);
        const int rows = o.ctx.gpu ? Session<T>::GPU_CHUNK : Session<T>::CHUNK;
        adapter = std::make_unique<AttachedAdapter<T>>(o.ctx, weights, from, rows);
    }
    const std::unique_ptr<Tokenizer> tokenizer = fitting_tokenizer(o, file);
    if (o.context > c.max_positions) DIE("--ctx %d: the model's limit is %d", o.context, c.max_positions);
    if (o.embed || o.rerank) return embed_or_rerank(o, file, weights, *tokenizer);
    if (!o.against.empty()) return compare(o, file, weights, *tokenizer);
    if (!o.ppl.empty()) return perplexity(o, c, weights, *tokenizer);
    if (!o.documents.docs.empty())
        o.library = std::make_shared<Documents>(o.documents, say, open_document_models(o, o.documents));
    bool lasting = !o.eval.empty() || (!o.has_input && !o.has_ids); // many answers, a chat; an answer may come to it
    if (lasting) decode_for_long(o.ctx, file, weights);
    if (!o.eval.empty()) return evaluate(o, file, weights, *tokenizer);

    const int context = o.context ? o.context : std::min(4096, c.max_positions);
    std::vector<Source> sources;
    const std::vector<int> prompt = checked_prompt(o, c, tokenizer.get(), (size_t)context, sources);
    if (prompt.size() > (size_t)context)
        DIE("the prompt is %s, the context %d (-c sets it, up to %d)", counted(prompt.size(), "token").c_str(), context,
            c.max_positions);
    Session<T> session(c, weights, context, o.ctx);
    if (!o.logits_file.empty() || o.logits_hash) return write_logits(o, session, prompt), 0;
    use_lookup(o, session);

    Generation g;
    g.sampling = sampling_of(o);
    g.stops = o.stops;
    g.interrupt = &interrupted;
    if (o.max_tokens >= 0) g.max_tokens = (size_t)o.max_tokens;
    fprintf(stderr, "%s: %.1f M parameters, %s, %s, context %d, seed %llu\n", o.model.c_str(),
            (double)parameters(c) / 1e6, type_name(weights), device_name(o.ctx).c_str(), context,
            (unsigned long long)g.sampling.seed);
    PromptCache<T> cache(o.prompt_cache, file, o.variant, session);
    ThreadPace pace(o, o.ctx);
    if (prompt.empty()) return Chat<T>{o, session, *tokenizer, cache, pace, g}.run();

    Took took = {prompt.size(), 0, seconds() - start, 0, 0};
    const double loaded = seconds();
    if (g.max_tokens > 0 || !o.prompt_cache.empty()) {
        pace.begin();
        took.reused = feed_prompt(session, prompt);
        pace.end();
        took.prompt_s = seconds() - loaded;
        if (!interrupted) cache.save(session);
        Screen screen(isatty(1));
        speak(session, tokenizer.get(), g, pace, [&](std::string_view s) {
            if (!o.json) screen.show(s);
            if (!lasting && g.ids.size() >= STEPS_TO_HUGE_PAGES) lasting = true, decode_for_long(o.ctx, file, weights);
        });
        screen.end();
    } else {
        g.finish = "length";
    }
    took.decode_s = seconds() - loaded - took.prompt_s, took.lookup = session.lookup;
    print_answer(o, g, took, sources);
    return interrupted ? 130 : 0;
}

// What --embed, --rerank and their options need, and do not go with.
static void check_retrieval(const Options& o) {
    const bool retrieves = o.embed || o.rerank;
    if (!retrieves && (!o.texts.empty() || !o.instruct.empty() || o.truncate))
        DIE("--texts, --instruct and --truncate are for --embed and --rerank");
    if (!o.embed && o.dimensions) DIE("--dimensions is for --embed");
    if (o.embed && o.has_input != o.texts.empty()) DIE("--embed takes -i TEXT or --texts FILE");
    if (o.rerank && (!o.has_input || o.texts.empty())) DIE("--rerank takes the query, -i TEXT, and --texts FILE");
    if (o.rerank && o.input == "-" && o.texts == "-") DIE("standard input cannot be both the query and the texts");
    if (retrieves && o.has_ids) DIE("--ids is not for --embed and --rerank");
}

// Does what the options ask for; see run_program.
static int run(int argc, char** argv) {
    const double start = seconds();
    if (told_version("qwen3", argc, argv)) return 0;
    Options o = parse_options(argc, argv);
    if (o.help) return 0;
    o.use_threads();
    if (o.has_tokenize) {
        const std::string text = o.tokenize == "-" ? read_stdin() : o.tokenize;
        std::string line;
        for (int id : Tokenizer(tokenizer_path(o)).encode(text, true)) line += format(line.empty() ? "%d" : " %d", id);
        return write_stdout(line + "\n"), 0;
    }
    if (o.has_detokenize) {
        const std::vector<int> ids = parse_ids("--detokenize", o.detokenize == "-" ? read_stdin() : o.detokenize);
        return write_stdout(Tokenizer(tokenizer_path(o)).decode(ids, false)), 0;
    }
    if (!o.synthesize.empty()) return synthesize(o.synthesize, o.synthesize_to, o.seed), 0;
    if (o.model.empty()) DIE("no model named (--help lists the options)");
    const bool asks = o.has_input || o.has_ids, measures = !o.ppl.empty() || !o.eval.empty() || o.bench;
    const bool retrieves = o.embed || o.rerank;
    if ((asks && !retrieves) + !o.ppl.empty() + !o.eval.empty() + o.bench + o.embed + o.rerank > 1)
        DIE("one thing at a time: -i or --ids, --ppl, --eval, --bench, --embed, --rerank");
    check_retrieval(o);
    if (!o.eval.empty() && o.output.empty()) DIE("--eval needs -o FILE, where the answers go");
    if (o.eval.empty() && !retrieves && !o.output.empty()) DIE("-o is for --eval, --embed and --rerank");
    if (o.stride && o.ppl.empty()) DIE("--stride is for --ppl");
    if (!o.against.empty() && (o.ppl.empty() || o.stride)) DIE("--against is for --ppl, without --stride");
    const bool in_words = !o.has_ids && !o.raw && o.ppl.empty() && !o.bench && !retrieves;
    if (!o.documents.docs.empty() && !in_words)
        DIE("--docs is for questions: not with --raw, --ids, --ppl, --bench or --embed");
    check_document_options(o.documents);
    if (!o.tools.empty() && (asks || measures || retrieves))
        DIE("--tools is for a chat: not with a question, --ppl, --eval, --bench, --embed or --rerank");
    if ((!asks || retrieves) && (o.raw || (o.json && !measures) || o.logits_hash || !o.logits_file.empty()))
        DIE("nothing asked: -i TEXT gives a question (a chat, which is without it, has no --raw, --json or --logits)");
    if (!o.convert.empty()) return convert(o, asks || measures || retrieves), 0;
    if (!o.quantize.empty()) return quantize(o, asks || measures || retrieves);
    if (o.group || !o.calibrate.empty() || !o.embedding.empty())
        DIE("--group, --calibrate and --embedding are for --quantize");
    open_adapter(o);
    ModelFile file(o.model);
    file.logits = !retrieves;
    o.ctx = choose_device(o, file);
    if (o.bench && !o.adapter.empty()) DIE("--adapter changes no figure of --bench");
    if (o.bench) return wide(o, file) ? bench<float>(o, file) : bench<bf16>(o, file), 0;
    return wide(o, file) ? answer<float>(o, file, start) : answer<bf16>(o, file, start);
}
