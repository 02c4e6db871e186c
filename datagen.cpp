// datagen.cpp: from a textbook to a clean dataset. Plain C++; libcurl only for `generate`, `grade`.
//
//   book.md > chunk > chunks > prompt > requests > generate > responses > collect > qa > filter > clean
//   clean > split > train, test > pack > train.bin, test.bin            (stats and unpack look into any of them)
//
// Every step reads and writes JSONL, a row at a time, and is a pure function of its files: run it again and the same
// bytes come out. Output goes to stdout, or with -o to a file that appears when it is complete. A stopped step leaves
// nothing behind, except `generate`, whose answers cost money: they are written to a journal at once.
// Dropped rows are counted by rule on stderr, and listed with rule and reason in INPUT.dropped.
//
// Limits, patterns, terms and prompts are data: see data/datagen: limits.txt, the other lists, prompts/. A limit in
// the code protects the program, not the dataset: rows up to 64 MB, replies up to 32 MB, 2^32 rows a file.
//
// Here: options, the table of commands, main. A command is a file of book/datagen/, under its
// name; `ask` is in taught.cpp, `score` in score_command.cpp.
#include "base/error.h"
#include "base/file.h"
#include "base/options.h"
#include "book/arguments.h"
#include "book/datagen/chunk.h"
#include "book/datagen/collect.h"
#include "book/datagen/filter.h"
#include "book/datagen/generate.h"
#include "book/datagen/grade.h"
#include "book/datagen/pack.h"
#include "book/datagen/prompt.h"
#include "book/datagen/score_command.h"
#include "book/datagen/split.h"
#include "book/datagen/stats.h"
#include "book/datagen/taught.h"
#include "book/datagen/unpack.h"
#include "book/report.h"
#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

namespace book {

struct Command {
    const char *name, *files, *options; // of OPTIONS; those common to all commands are not listed
    size_t fewest, most;                // files
    int (*run)(const Arguments&);
    const char* help;
};
static const Command COMMANDS[] = {
    {"chunk", "BOOK...", "--characters --tokens --overlap --clean -z", 1, SIZE_MAX, run_chunk,
     "cuts books into chunks at headings, paragraphs and sentences. Reads Markdown and text in UTF-8; PDF\n"
     "needs pdftotext (poppler-utils); HTML, EPUB, DOCX and ODT need pandoc"},
    {"prompt", "chunks.jsonl", "--model --max-tokens --subject --examples --lang --chapter-quota --dropped", 1, 1,
     run_prompt, "writes requests in OpenAI's Batch format from the templates in data/datagen/prompts/"},
    {"ask", "rows.jsonl", "--model --max-tokens --top-logprobs --dropped", 1, 1, run_ask,
     "writes requests that send the rows' questions to a teacher, for answers with log-probabilities"},
    {"generate", "requests.jsonl",
     "--url --key-env --model --parallel --timeout --retries --journal --again --dropped", 1, 1, run_generate,
     "sends the requests to an OpenAI-compatible endpoint (--url URL, --key-env VARIABLE)"},
    {"collect", "responses.jsonl", "--chunks --rows --dropped", 1, 1, run_collect,
     "turns the replies into Alpaca rows (--chunks chunks.jsonl), or replies to `ask` into rows with the\n"
     "teacher's log-probabilities (--rows rows.jsonl)"},
    {"filter", "qa.jsonl", "--chunks --terms --skip --lang -z --dropped", 1, 1, run_filter,
     "drops bad and duplicate rows (--chunks chunks.jsonl compares answers with their source)"},
    {"split", "clean.jsonl", "--test --seed --drop-leaks --dropped", 1, 1, run_split,
     "splits rows by chunk into train.jsonl and test.jsonl (--test N rows) in the folder -o; reports leakage"},
    {"pack", "rows.jsonl out.bin", "-z --max-len --max-rows --over --info --name --dropped", 2, 2, run_pack,
     "tokenizes rows for train_lora; also reads dataset_info.json (--name NAMES)"},
    {"unpack", "data.bin", "-z", 1, 1, run_unpack, "prints the rows of a packed dataset as JSONL"},
    {"stats", "rows.jsonl|data.bin", "-z", 1, 1, run_stats, "prints rows, tokens, lengths and difficulties by chapter"},
    {"grade", "QUESTIONS", "--url --mode --health-limit --predict-limit --least --json -z", 1, 1, run_grade,
     "grades a server as a course's judge does: time limits, tokens per second, ROUGE-L. Reads rows of JSON, text\n"
     "or DOCX with 问题： and 答案：. Exit status 0: passed, 1: failed"},
};

// The help of each option; Arguments::given holds it under its first name. Some defaults come from limits.txt: a test
// checks that the two agree.
static std::vector<Option> option_table(Arguments& a) {
    std::vector<Option> table = {
        {"-o", "--output", "FILE", "output (default: standard output; split: a folder, default: this one)", {}},
        {"-z", "--tokenizer", "FILE", "tokenizer (default: tokenizer.bin in this folder or beside the program)", {}},
        {"", "--data", "DIR", "limits, patterns and prompts (default: data/datagen here or beside the\n"
         "program)", {}},
        {"", "--dropped", "FILE", "rejected input, with reasons (default: INPUT.dropped)", {}},
        {"", "--characters", "N", "longest chunk in characters (default 3500)", {}},
        {"", "--tokens", "N", "longest chunk in tokens, instead of --characters", {}},
        {"", "--overlap", "N", "characters repeated from the chunk before (default 200)", {}},
        {"", "--clean", "auto|yes|no", "remove page numbers, running heads, page breaks and hyphens at line\n"
         "ends; auto (default): if the text comes from a PDF", {}},
        {"", "--model", "NAME", "model to ask (default: the one in the requests; generate: else the\n"
         "endpoint's only one)", {}},
        {"", "--max-tokens", "N", "longest reply in tokens; 0: no limit (default: 400, 700, 1500 for each\n"
         "easy, medium, hard question; ask: no limit)", {}},
        {"", "--top-logprobs", "N", "likeliest tokens to report at each position (default 20)", {}},
        {"", "--subject", "TEXT", "subject of the book, for the templates (default: not stated)", {}},
        {"", "--examples", "DIR|none", "folder with examples for the templates, such as en/easy.json (default:\n"
         "examples of several everyday subjects)", {}},
        {"", "--lang", "NAME", "prompt: language of the templates (default: that of each chunk); filter:\n"
         "language of the rows, zh or en (default: as each row states)", {}},
        {"", "--chapter-quota", "N", "most questions per chapter (default: no limit)", {}},
        {"", "--url", "URL", "generate: an OpenAI-compatible endpoint, with or without /v1; grade: the\n"
         "server to grade (required)", {}},
        {"", "--key-env", "NAME", "environment variable with the API key (default: no key is sent)", {}},
        {"", "--parallel", "N", "requests at once (default 8)", {}},
        {"", "--timeout", "SECONDS", "seconds to wait for a reply (default 300)", {}},
        {"", "--retries", "N", "retries per failed request (default 6)", {}},
        {"", "--journal", "FILE", "file that stores each reply at once (default: INPUT.journal)", {}},
        {"", "--again", "FILE", "collect's dropped file: repeat the requests of unusable replies (default: off)", {}},
        {"", "--chunks", "FILE", "output of `chunk`: the source of each row (needed by collect; filter's\n"
         "default: do not compare answers with their source)", {}},
        {"", "--rows", "FILE", "the rows of `ask`: replies become rows with log-probabilities (default: the\n"
         "replies are to `prompt`)", {}},
        {"", "--terms", "FILE|auto", "require one of these terms in each row; auto: take the terms from the\n"
         "chunks (default: off)", {}},
        {"", "--skip", "RULE,...", "rules to turn off (default: none)", {}},
        {"", "--test", "N", "rows of the test set (required)", {}},
        {"", "--seed", "N", "seed of the split (default 0)", {}},
        {"", "--drop-leaks", "", "drop training rows that share text with test rows", {}},
        {"", "--max-len", "N", "longest row in tokens (default 512)", {}},
        {"", "--max-rows", "N", "read the first N rows of each dataset (default: all)", {}},
        {"", "--over", "drop|refuse", "longer rows: drop or refuse (default: drop)", {}},
        {"", "--info", "FILE", "dataset_info.json to write, or none (default: beside the rows)", {}},
        {"", "--mode", "ok|batch|both", "ask one question at a time, all in one list, or both (default: as the\n"
         "server's status says)", {}},
        {"", "--health-limit", "SECONDS", "seconds until the server must be ready (default 420)", {}},
        {"", "--predict-limit", "SECONDS", "seconds for all answers (default 360)", {}},
        {"", "--least", "X", "lowest ROUGE-L that passes (default 0.35)", {}},
        {"", "--json", "FILE", "write the report and each answer as one JSON object (default: off)", {}},
        {"", "--name", "NAMES", "comma-separated names of datasets in dataset_info.json; required to\n"
         "read one", {}},
    };
    for (auto& o : table) {
        const bool path = strstr(o.value, "FILE") || strstr(o.value, "DIR"); // (of any bytes)
        o.set = [&a, key = std::string(*o.brief ? o.brief : o.name), path](const char* option, const char* v) {
            path ? void(a.given[key] = v) : text(a.given[key])(option, v);
        };
    }
    return table;
}

} // namespace book

#if __INCLUDE_LEVEL__ == 0 // (the tests include the tables)
using namespace book;

static std::string usage() {
    std::string all = "usage: datagen COMMAND FILES [options]\n       datagen --version\n\n";
    for (auto& c : COMMANDS) {
        std::string help = c.help;
        for (size_t at = 0; (at = help.find('\n', at)) != help.npos; at++) help.replace(at, 1, "\n           ");
        all += format("  %-9s%-20s %s\n           %s\n", c.name, c.files, c.options, help.c_str());
    }
    all += format("  %-9s%-20s %s\n           %s\n", "score", "answers.jsonl reference.jsonl",
                  "--train --compat --json --seed --dict",
                  "scores answers: ROUGE, BLEU-4, key facts, multiple choice, with 95% intervals");
    Arguments none;
    all += "\nEvery command takes -o FILE, --data DIR and --help. - as an input file is standard input.\n";
    return all + help_text(option_table(none));
}

// No output replaces a file that the command reads.
static void must_differ(const Command& c, const Arguments& a) {
    Strings in = a.files, out;
    if (c.run == run_pack) out.push_back(in.back()), in.pop_back();
    for (const char* name : {"--chunks", "--again", "--terms", "-z"})
        if (a.has(name)) in.push_back(a.text(name));
    for (const char* name : {"-o", "--dropped", "--journal", "--json"})
        if (a.has(name)) out.push_back(a.text(name));
    const std::string folder = a.text("-o", ".");
    if (c.run == run_split) out.insert(out.end(), {folder + "/train.jsonl", folder + "/test.jsonl"});
    for (auto& to : out)
        for (auto& from : in)
            if (same_file(to, from)) DIE("%s: is read by this command", to.c_str());
}

static int run(int argc, char** argv) {
    const std::string name = argc > 1 ? argv[1] : "";
    if (name.empty()) return fputs(usage().c_str(), stderr), 1;
    if (told_version("datagen", argc, argv)) return 0;
    if (name == "-h" || name == "--help") return write_stdout(usage()), 0;
    if (name == "score") return score_main(argc - 1, argv + 1);
    for (auto& c : COMMANDS) {
        if (name != c.name) continue;
        Arguments a;
        bool help = false;
        std::vector<Option> table = option_table(a);
        const std::string known = std::string(" -o --data ") + c.options + " ";
        auto foreign = [&](const Option& o) {
            return known.find(format(" %s ", *o.brief ? o.brief : o.name)) == known.npos;
        };
        table.erase(std::remove_if(table.begin(), table.end(), foreign), table.end());
        table.push_back({"-h", "--help", "", "this text", flag(help)});
        a.files = parse(table, argc - 1, argv + 1);
        const std::string usage = format("usage: datagen %s %s [options]\n%s\n", c.name, c.files, c.help);
        if (help) return print_help(usage.c_str(), table), 0;
        if (a.files.size() < c.fewest || a.files.size() > c.most)
            DIE("usage: datagen %s %s [%s]", c.name, c.files, c.options);
        must_differ(c, a);
        return c.run(a);
    }
    DIE("unknown command %s; datagen --help lists them", name.c_str());
}

int main(int argc, char** argv) {
    take_signals({SIGINT, SIGTERM}, {SIGPIPE});
    auto run_or_stop = [](int argc, char** argv) {
        try {
            return run(argc, argv);
        } catch (const Interrupted&) {
            print_error("datagen", "interrupted");
            return 130;
        }
    };
    return run_program("datagen", run_or_stop, argc, argv);
}
#endif
