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
// Here: options, the table of commands, main. A command is a file of book/, under its name.
#include "base/error.h"
#include "base/options.h"
#include "book/arguments.h"
#include "book/chunk.h"
#include "book/collect.h"
#include "book/filter.h"
#include "book/generate.h"
#include "book/grade.h"
#include "book/pack.h"
#include "book/prompt.h"
#include "book/report.h"
#include "book/score_command.h"
#include "book/split.h"
#include "book/stats.h"
#include "book/unpack.h"
#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdio>
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
     "cuts books into chunks at headings, paragraphs and sentences. Markdown and text in UTF-8; PDF where\n"
     "pdftotext (poppler-utils) is installed, HTML, EPUB, DOCX and ODT where pandoc is"},
    {"prompt", "chunks.jsonl", "--model --max-tokens --subject --examples --lang --chapter-quota --dropped", 1, 1,
     run_prompt, "makes requests in OpenAI's Batch format from the templates in data/datagen/prompts/"},
    {"generate", "requests.jsonl",
     "--url --key-env --model --parallel --timeout --retries --journal --again --dropped", 1, 1, run_generate,
     "asks an OpenAI-compatible endpoint (--url URL, --key-env NAME of the variable with the key)"},
    {"collect", "responses.jsonl", "--chunks --dropped", 1, 1, run_collect,
     "makes Alpaca rows of the replies (--chunks chunks.jsonl)"},
    {"filter", "qa.jsonl", "--chunks --terms --skip --lang -z --dropped", 1, 1, run_filter,
     "keeps the good rows, once (--chunks chunks.jsonl compares answers with their source)"},
    {"split", "clean.jsonl", "--test --seed --drop-leaks --dropped", 1, 1, run_split,
     "writes train.jsonl and test.jsonl (--test N rows) into the folder -o, by chunk; measures leakage"},
    {"pack", "rows.jsonl out.bin", "-z --max-len --over --info --name --dropped", 2, 2, run_pack,
     "tokenizes; also reads dataset_info.json (--name NAME)"},
    {"unpack", "data.bin", "-z", 1, 1, run_unpack, "the rows of a dataset as JSONL"},
    {"stats", "rows.jsonl|data.bin", "-z", 1, 1, run_stats, "rows, tokens, lengths, difficulties by chapter"},
    {"grade", "QUESTIONS", "--url --mode --health-limit --predict-limit --least --json -z", 1, 1, run_grade,
     "asks a server as a course's judge does, and grades: limits, tokens a second, ROUGE-L (rows of JSON; text or\n"
     "DOCX with 问题： and 答案：). Exit status 0: passed, 1: failed"},
};

// The help of each option; Arguments::given holds it under its first name. Some defaults come from limits.txt: a test
// checks that the two agree.
static std::vector<Option> option_table(Arguments& a) {
    std::vector<Option> table = {
        {"-o", "--output", "FILE", "default: standard output. split: a folder (default: this one)", {}},
        {"-z", "--tokenizer", "FILE", "default: tokenizer.bin in this folder or beside the program", {}},
        {"", "--data", "DIR", "limits, patterns and prompts (default: data/datagen here or beside the\nprogram)", {}},
        {"", "--dropped", "FILE", "what is not passed on, and why (default: INPUT.dropped)", {}},
        {"", "--characters", "N", "of a chunk, at most (default 3500)", {}},
        {"", "--tokens", "N", "the same in tokens, instead of --characters", {}},
        {"", "--overlap", "N", "characters that a chunk repeats of the one before (default 200)", {}},
        {"", "--clean", "auto|yes|no", "whether page numbers, running heads and feet, page breaks and hyphens at\n"
         "line ends go; auto (the default): where the text was a PDF", {}},
        {"", "--model", "NAME", "that is asked (default: what the requests name; generate: else the\n"
         "endpoint's only one)", {}},
        {"", "--max-tokens", "N", "of a reply, at most; 0: no limit (default: 400, 700, 1500 for each easy,\n"
         "medium, hard question of the request)", {}},
        {"", "--subject", "TEXT", "what the book is about (default: the templates do not say)", {}},
        {"", "--examples", "DIR|none", "en/easy.json and so on in DIR: examples for the templates (default: of\n"
         "several everyday subjects)", {}},
        {"", "--lang", "NAME", "prompt: language of the templates (default: each chunk's); filter: zh or\n"
         "en, the language of the rows (default: what each row says)", {}},
        {"", "--chapter-quota", "N", "questions a chapter, at most (default: no limit)", {}},
        {"", "--url", "URL", "generate: an OpenAI-compatible endpoint, with or without /v1; grade: the\n"
         "server that is graded; needed", {}},
        {"", "--key-env", "NAME", "of the variable with the API key (default: no key is sent)", {}},
        {"", "--parallel", "N", "requests at once (default 8)", {}},
        {"", "--timeout", "SECONDS", "for a reply (default 300)", {}},
        {"", "--retries", "N", "of a request that failed (default 6)", {}},
        {"", "--journal", "FILE", "where replies go as they come (default: INPUT.journal)", {}},
        {"", "--again", "FILE", "what collect dropped: replies without a question are asked again (default:\nnone is)", {}},
        {"", "--chunks", "FILE", "what `chunk` wrote: the source of each row (collect needs it; filter's\n"
         "default: answers are not compared with their source)", {}},
        {"", "--terms", "FILE|auto", "terms of the subject, one of which a row has to name; auto takes them\n"
         "from the chunks (default: none, and the rule is off)", {}},
        {"", "--skip", "RULE,...", "rules that are turned off (default: none)", {}},
        {"", "--test", "N", "rows of the test set; needed", {}},
        {"", "--seed", "N", "of the split (default 0)", {}},
        {"", "--drop-leaks", "", "leaves out the rows of train that test rows share text with", {}},
        {"", "--max-len", "N", "tokens of a row, at most (default 512)", {}},
        {"", "--over", "drop|refuse", "what becomes of longer rows (default: drop)", {}},
        {"", "--info", "FILE", "dataset_info.json to write, or none (default: beside the rows)", {}},
        {"", "--mode", "ok|batch|both", "questions one at a time, in one list, or both (default: what the server's\n"
         "status says)", {}},
        {"", "--health-limit", "SECONDS", "until the server is ready (default 420)", {}},
        {"", "--predict-limit", "SECONDS", "for all answers (default 360)", {}},
        {"", "--least", "X", "ROUGE-L that passes (default 0.35)", {}},
        {"", "--json", "FILE", "all of it and each answer as one JSON object (default: none is written)", {}},
        {"", "--name", "NAME", "of the dataset in dataset_info.json; needed to read one", {}},
    };
    for (auto& o : table)
        o.set = [&a, key = std::string(*o.brief ? o.brief : o.name)](const char*, const char* v) { a.given[key] = v; };
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
                  "ROUGE, BLEU-4, key facts and choices of answers, with 95% intervals");
    Arguments none;
    all += "\nEvery command: -o FILE, --data DIR, and --help for its own options. A file that is read once may be -,\n"
           "which is standard input.\n";
    return all + help_text(option_table(none));
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
