// cli/options.h: qwen3's options.
#pragma once
#include "base/options.h"
#include "model/options.h"
#include "qwen3.cu"
#include "search/document_options.h"
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

struct Documents; // search/documents.h

namespace cli {

struct Options : ModelOptions {
    std::string input, system, ids, logits_file, tokenize, detokenize;
    bool has_input = false, has_tokenize = false, has_detokenize = false, has_ids = false;
    Context ctx; // where it runs
    bool raw = false, json = false, logits_hash = false;
    int markdown = 1; // whether a terminal draws an answer's Markdown
    float temperature = -1, top_p = -1, min_p = 0; // negative: Qwen's advice for the mode
    float repeat = 1, presence = 0, frequency = 0;
    std::vector<std::string> stops;
    int top_k = -1, max_tokens = -1, context = 0;
    int think = -1; // -1: as the model's chat template has it, where that leaves it open 0
    int lookup = -1; // -1: as the device allows
    uint64_t seed = 0;
    bool has_seed = false, bench = false, bench_long = false;
    std::string synthesize, synthesize_to, convert, convert_adapter, quantize, quantize_to;
    std::string calibrate, embedding, against;
    int group = 0; // of --quantize int4; 0: 128
    bool overwrite = false; // what --convert, --quantize and the like write
    std::string prompt_cache, tools;
    std::vector<std::string> starters; // of the model or its adapter: a chat offers them
    uint64_t variant = 0; // of the model's file: INT8, packed, FP8 keys, rounded activations, an adapter
    std::string ppl, eval, output;
    int stride = 0; // 0: half a window
    DocumentOptions documents;
    std::shared_ptr<const Documents> library; // with --docs
    bool quotes = false; // its best passage is the answer
    std::string texts, instruct;
    bool embed = false, rerank = false, truncate = false;
    int dimensions = 0; // 0: all
};

// Throws Error, one line, for a command line that cannot be read. With --help it prints that, and o.help is set.
Options parse_options(int argc, char** argv);

// The instruction set of --cpu, or this machine's.
const char* instructions_used();

std::string read_stdin();
// The text of a file, or for - of standard input, in UTF-8.
std::string input_text(const std::string& path);
// Ids separated by commas or white space.
std::vector<int> parse_ids(const char* option, const std::string& text);

// Sampling settings: Qwen's advice for the mode, unless the options set them.
Sampling sampling_of(const Options& o);

} // namespace cli
