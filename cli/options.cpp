// cli/options.cpp: qwen3's options.
#include "cli/options.h"
#include "base/error.h"
#include "search/hybrid.h"
#include "model/cpu.h"
#include "model/lookup.h"
#include <cctype>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <random>
#include <unistd.h>

namespace cli {

static const char* USAGE =
    "usage: qwen3 MODEL [QUESTION] [options]     MODEL: a model.bin or a Hugging Face folder\n"
    "       qwen3 MODEL                           a chat (/help in it)\n"
    "       qwen3 --version\n";

const char* instructions_used() { return instruction_set_name(instruction_set); }

static void choose_instructions(const char* option, const char* name) {
    std::string all;
    for (int set = ISA_PLAIN; set <= best_instruction_set(); set++) {
        if (!strcmp(name, instruction_set_name(set))) return void(instruction_set = (InstructionSet)set);
        all += format("%s%s", set ? ", " : "", instruction_set_name(set));
    }
    DIE("%s %s: this machine has %s", option, name, all.c_str());
}

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
        {"-r", "--think", "0|1", "let the model think first (default 0; 1 where it always thinks)",
         whole(o.think, 0, 1)},
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
        {"", "--cpu", "NAME", "lesser instructions: plain, avx2, avx512, avx512bf16, amx", choose_instructions},
        {"", "--tokenize", "TEXT", "no model needed; - reads standard input", given(o.tokenize, o.has_tokenize)},
        {"", "--detokenize", "IDS", "no model needed; - reads standard input", given(o.detokenize, o.has_detokenize)},
        {"", "--ids", "1,2,3", "these ids instead of text (no tokenizer needed)", given(o.ids, o.has_ids)},
        {"", "--logits", "FILE", "with -i, --raw or --ids: float32 logits of every position, then stop",
         text(o.logits_file)},
        {"", "--logits-hash", "", "the same, as one 64-bit hash on stdout", flag(o.logits_hash)},
        {"", "--convert", "OUT", "the model as one model.bin, where what is quantised becomes bf16; or, if\n"
         "OUT ends in .gguf, as GGUF with tokenizer and chat template: INT8 as\n"
         "Q8_0, INT4 as Q4_0 or Q4_1", file_name(o.convert)},
        {"", "--convert-adapter", "OUT.gguf", "the adapter of --adapter as GGUF", file_name(o.convert_adapter)},
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

Options parse_options(int argc, char** argv) {
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

std::string read_stdin() {
    std::string text;
    char buffer[65536];
    for (ssize_t n; (n = read(0, buffer, sizeof buffer)) != 0;) {
        if (n < 0 && errno == EINTR && !interrupted) continue;
        if (n < 0) DIE("standard input: %s", strerror(errno));
        text.append(buffer, (size_t)n);
    }
    return text;
}

std::vector<int> parse_ids(const char* option, const std::string& text) {
    std::vector<int> ids;
    for (size_t i = 0; i < text.size();) {
        size_t j = text.find_first_of(", \t\r\n", i);
        if (j == std::string::npos) j = text.size();
        if (j > i) ids.push_back((int)parse_integer(option, text.substr(i, j - i).c_str(), 0, INT_MAX));
        i = j + 1;
    }
    return ids;
}

Sampling sampling_of(const Options& o) {
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

} // namespace cli
