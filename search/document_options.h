// search/document_options.h: the options of --docs.
#pragma once
#include "base/options.h"
#include <cstddef>
#include <string>
#include <vector>

struct DocumentOptions {
    std::string docs, index; // a file or a folder; "": the default place
    size_t passages = 0;     // for a question, at most; 0: four
    std::string embed{}, rerank{}; // paths of models, maybe: see hybrid.h
    int quote = -1;          // the best passage is the answer; -1: the model's size says, see quote.h
};

// The options of --docs, for a program's table; and what they need.
void add_document_options(std::vector<Option>& table, DocumentOptions& o);
void check_document_options(const DocumentOptions& o);
