// cli/options.cpp: qwen3's options.
#include "cli/options.h"
#include "base/error.h"
#include "base/file.h"
#include "base/text.h"
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
        return [&](const char* option, const char* v) { text(to)(option, v), has = true; };
    };
    std::vector<Option> table = {
        {"-i", "--input", "TEXT", "the question; - reads it from standard input", given(o.input, o.has_input)},
        {"-y", "--system", "TEXT", "system prompt", text(o.system)},
        {"-r", "--think", "0|1", "let the model think first (default 0; 1 for models that always think)",
         whole(o.think, 0, 1)},
        {"-t", "--temp", "X", "temperature (default 0.7, thinking 0.6); 0: always the likeliest token",
         number(o.temperature, 0, 100)},
        {"-k", "--top-k", "N", "sample from the N likeliest tokens (default 20); 0: off", whole(o.top_k, 0, INT_MAX)},
        {"-p", "--top-p", "X", "... from the likeliest that reach a total probability of X (default\n"
         "0.8, thinking 0.95); 1: off",
         number(o.top_p, 0, 1)},
        {"", "--min-p", "X", "... that are at least X times as probable as the likeliest (default 0)",
         number(o.min_p, 0, 1)},
        {"", "--repeat-penalty", "X", "divides the logits of tokens in the prompt and the answer\n"
         "(default 1: off)",
         number(o.repeat, 0.01, 100)},
        {"", "--presence-penalty", "X", "subtracted once from the logit of a token in the answer (default 0)",
         number(o.presence, -100, 100)},
        {"", "--frequency-penalty", "X", "subtracted once per occurrence (default 0)", number(o.frequency, -100, 100)},
        {"", "--stop", "TEXT", "ends the answer before this text; may be repeated", list(o.stops)},
        {"-s", "--seed", "N", "seed of the sampler (default: random, printed)",
         [&o](const char* option, const char* v) { parse_seed(o, option, v); }},
        {"-n", "--max-tokens", "N", "longest answer in tokens (default: up to the end of the context)",
         whole(o.max_tokens, 0, INT_MAX)},
        {"", "--lookup", "N", "speculation: if the latest tokens occurred earlier in the text, propose\n"
         "up to N (at most 7) tokens that followed there and verify them in one\n"
         "step; answers do not change (default 7; on a GPU 7 only with one\n"
         "kernel per token; with --invariant the default is 0)",
         whole(o.lookup, 0, LookUp::MOST)},
        {"-c", "--ctx", "N", "context length in tokens (default 4096, or the model's limit if lower)",
         whole(o.context, 1, INT_MAX)},
        {"", "--docs", "PATH", "retrieval: adds passages of a file or folder to each question",
         existing(o.documents.docs)},
    };
    add_document_options(table, o.documents);
    const std::vector<Option> others = {
        {"", "--prompt-cache", "FILE", "loads the shared prefix of the prompt from FILE; writes FILE if it is\n"
         "missing or holds only the beginning of this prompt", [&o](const char* option, const char* v) {
             o.prompt_cache = v;
             if (access(v, F_OK) == 0) must_exist(option, v, true);
             else must_be_writable(option, v);
         }},
        {"", "--tools", "FILE", "commands that the model may call in a chat; each call asks you first",
         existing_file(o.tools)},
        {"", "--raw", "", "send the input without the chat template; special tokens in it count", flag(o.raw)},
        {"", "--json", "", "print one JSON object instead of streaming text", flag(o.json)},
        {"", "--markdown", "0|1", "on a terminal: draw headings, lists, code and tables (default 1);\n"
         "0: the text as the model writes it", whole(o.markdown, 0, 1)},
    };
    table.insert(table.end(), others.begin(), others.end());
    o.add_to(table, true);
    const std::vector<Option> more = {
        o.one_kernel_option("on a GPU: decode each token with one kernel (default: on Hopper, if its\n"
                            "copy of the weights fits half of the free memory); phases: one launch\n"
                            "per phase, to study it"),
        {"", "", "", "measurements", {}},
        {"", "--bench", "[long]", "measure prompt and decoding speed beside the machine's ceilings;\n"
         "also with --json",
         [&o](const char*, const char* v) { o.bench = true, o.bench_long = *v; }},
        {"", "--ppl", "FILE", "perplexity of a text over windows of -c tokens (default 2048);\n"
         "- reads standard input",
         existing_file(o.ppl, true)},
        {"", "--stride", "N", "distance between two windows (default: half a window)", whole(o.stride, 1, INT_MAX)},
        {"", "--against", "MODEL", "with --ppl: compare with another model: KL divergence, share of equal\n"
         "likeliest tokens, both perplexities", existing(o.against)},
        {"", "--eval", "FILE", "answer the questions of a JSONL file greedily (-n 512) and measure the\n"
         "loss on its answers; the same command resumes an interrupted run", existing_file(o.eval)},
        {"-o", "--output", "FILE", "output of --eval, --embed and --rerank",
         output_file(o.output)},
        {"", "", "", "retrieval, with Qwen3-Embedding and Qwen3-Reranker", {}},
        {"", "--embed", "", "print the vector of -i TEXT, or of each line of --texts, as JSONL", flag(o.embed)},
        {"", "--rerank", "", "score each line of --texts for the query -i TEXT, best first, as JSONL",
         flag(o.rerank)},
        {"", "--texts", "FILE", "one text per line (- reads standard input); FILE.jsonl: strings, or\n"
         "objects with \"text\" and an optional \"id\"", existing_file(o.texts, true)},
        {"", "--instruct", "TASK", "--embed: the texts are queries for this task; --rerank: the task\n"
         "(default: Qwen's web search task)", text(o.instruct)},
        {"", "--dimensions", "N", "keep the first N dimensions of a vector (default: all)",
         whole(o.dimensions, 1, 1 << 20)},
        {"", "--truncate", "", "cut texts longer than the context (-c); without it they are refused",
         flag(o.truncate)},
        {"", "", "", "for study and tests", {}},
        {"", "--cpu", "NAME", "use an older instruction set: plain, avx2, avx512, avx512bf16, amx",
         choose_instructions},
        {"", "--tokenize", "TEXT", "print token ids; needs no model; - reads standard input",
         [&o](const char*, const char* v) { o.tokenize = v, o.has_tokenize = true; }}, // (the tokenizer repairs it)
        {"", "--detokenize", "IDS", "print the text of token ids; needs no model; - reads standard input",
         given(o.detokenize, o.has_detokenize)},
        {"", "--ids", "1,2,3", "token ids instead of text (needs no tokenizer)", given(o.ids, o.has_ids)},
        {"", "--logits", "FILE", "write the float32 logits of every position of -i, --raw or --ids; exit",
         output_file(o.logits_file)},
        {"", "--logits-hash", "", "print a 64-bit hash of these logits; exit", flag(o.logits_hash)},
        {"", "--convert", "OUT", "write the model as one file: model.bin, where quantised weights become\n"
         "bf16; or, if OUT ends in .gguf, GGUF with tokenizer and chat template:\n"
         "INT8 as Q8_0, INT4 as Q4_0 or Q4_1", file_name(o.convert)},
        {"", "--convert-adapter", "OUT.gguf", "write the adapter of --adapter as GGUF", file_name(o.convert_adapter)},
        {"", "--quantize", "FORMAT OUT.bin", "write a quantised model: int4 (4.2 bits a weight), int8 (8.5), fp8 (8)",
         [&o](const char*, const char* v) { (o.quantize.empty() ? o.quantize : o.quantize_to) = v; }},
        {"", "--overwrite", "", "replace the file at OUT; without it an existing one is refused", flag(o.overwrite)},
        {"", "--group", "N", "int4: weights per scale: 32, 64 or 128 (default)", whole(o.group, 32, 128)},
        {"", "--calibrate", "FILE", "quantise with GPTQ on this text: smaller error of the products",
         existing_file(o.calibrate)},
        {"", "--embedding", "NAME", "embedding and head as int8 (default) or unchanged (same)",
         one_of(o.embedding, {"int8", "same"})},
        {"", "--synthesize", "SIZE OUT.bin", "write random weights of a real shape (-s: seed). SIZE: 0.6B, 1.7B, 4B,\n"
         "8B, 14B, 32B, 30B-A3B, 1B-A0.3B or a config.json",
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
    if (words.size() > 2) DIE("expected one model and one question in quotes: %s is too much", words[2].c_str());
    if (words.size() == 2 && o.has_input) DIE("expected one question: %s and -i %s", words[1].c_str(), o.input.c_str());
    if (words.size() > 0) o.model = words[0];
    if (words.size() == 2) text(o.input)("the question", words[1].c_str()), o.has_input = true;
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

std::string input_text(const std::string& path) {
    if (path != "-") return text_of(path);
    const std::string text = read_stdin();
    must_be_utf8("standard input", text);
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
