// search/document_options.h: the options of --docs.
#pragma once
#include "base/options.h"
#include <cstddef>
#include <string>
#include <vector>

struct DocumentOptions {
    std::string docs, index; // a file or a folder; "": the default place
    size_t passages = 0;     // per question, at most; 0: four
    std::string embed{}, rerank{}; // paths of models, or "": see hybrid.h
    int quote = -1;          // the best passage is the answer; -1: decided by the model's size, see quote.h
};

// Adds the options of --docs to a program's table, and those that they need.
void add_document_options(std::vector<Option>& table, DocumentOptions& o);
void check_document_options(const DocumentOptions& o);
