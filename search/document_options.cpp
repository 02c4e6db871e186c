// search/document_options.cpp: the --docs options in a program's table, see document_options.h.
#include "search/document_options.h"
#include "base/error.h"
#include <utility>

void add_document_options(std::vector<Option>& table, DocumentOptions& o) {
    const std::vector<Option> more = {
        {"", "--index", "FILE", "where the index of --docs lies (default: in the user's cache folder)",
         file_name(o.index)},
        {"", "--passages", "N", "of --docs for a question, at most (default 4)", whole(o.passages, 1, 64)},
        {"", "--docs-embed", "MODEL", "a Qwen3-Embedding: passages of --docs are found by its vectors, too,\n"
         "which are made once", file_name(o.embed)},
        {"", "--docs-rerank", "MODEL", "a Qwen3-Reranker: it orders the first 20 passages that are found",
         file_name(o.rerank)},
        {"", "--quote", "0|1", "whether the best passage of --docs is the answer, with its source\n"
         "(default: 1 if the model has less than 200 M parameters)", whole(o.quote, 0, 1)},
    };
    table.insert(table.end(), more.begin(), more.end());
}

void check_document_options(const DocumentOptions& o) {
    if (!o.docs.empty()) return;
    const std::pair<const char*, bool> given[] = {{"--index", !o.index.empty()}, {"--passages", o.passages > 0},
                                                  {"--docs-embed", !o.embed.empty()},
                                                  {"--docs-rerank", !o.rerank.empty()}, {"--quote", o.quote >= 0}};
    for (auto [name, is] : given)
        if (is) DIE("%s is for --docs", name);
}
