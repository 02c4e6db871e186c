// search/document_options.cpp: the --docs options in a program's table, see document_options.h.
#include "search/document_options.h"
#include "base/error.h"
#include <utility>

void add_document_options(std::vector<Option>& table, DocumentOptions& o) {
    const std::vector<Option> more = {
        {"", "--index", "FILE", "index file of --docs (default: in the user's cache folder)",
         file_name(o.index)},
        {"", "--passages", "N", "most passages per question (default 4)", whole(o.passages, 1, 64)},
        {"", "--docs-embed", "MODEL", "also search --docs by vectors of this Qwen3-Embedding model; they are\n"
         "computed once", existing(o.embed)},
        {"", "--docs-rerank", "MODEL", "order the first 20 passages by this Qwen3-Reranker model",
         existing(o.rerank)},
        {"", "--quote", "0|1", "answer with the best passage and its source (default: 1 for models\n"
         "below 200 M parameters)", whole(o.quote, 0, 1)},
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
