// search/hybrid.h: the models behind --docs-embed and --docs-rerank. Qwen3-Embedding makes vectors of passages and
// questions (embed.h), Qwen3-Reranker scores how well passages answer a question (rerank.h); documents.h uses them.
#pragma once
#include "base/error.h"
#include "base/options.h" // interrupted
#include "base/stop_flag.h"
#include "model/options.h"
#include "search/document_models.h"
#include "search/document_options.h"

// An aborted lookup.
struct LookupStopped : Error {
    using Error::Error;
};
// When it becomes non-zero, the lookups of this thread are aborted.
inline thread_local const StopFlag* lookup_stop = &interrupted;

// Opens the models of --docs-embed and --docs-rerank, on the other model's device, in their stored format.
DocumentModels open_document_models(const ModelOptions& like, const DocumentOptions& documents);
