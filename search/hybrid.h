// search/hybrid.h: the models behind --docs-embed and --docs-rerank. Qwen3-Embedding makes vectors of passages and
// questions (embed.h), Qwen3-Reranker says how well passages answer a question (rerank.h); documents.h uses them.
#pragma once
#include "base/error.h"
#include "base/options.h" // interrupted
#include "model/options.h"
#include "search/document_models.h"
#include "search/document_options.h"
#include <csignal>

// A lookup that was given up.
struct LookupStopped : Error {
    using Error::Error;
};
// When it becomes non-zero, the lookups of this thread are given up.
inline thread_local const volatile sig_atomic_t* lookup_stop = &interrupted;

// The models that --docs-embed and --docs-rerank name, on the device of the other model, as they are stored.
DocumentModels open_document_models(const ModelOptions& like, const DocumentOptions& documents);
