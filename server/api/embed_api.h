// embed_api.h: requests for vectors (OpenAI's /v1/embeddings) and for rankings (/v1/rerank, as in Jina, Cohere and
// vLLM), from JSON to jobs. The rules of request.h apply here too.
#pragma once
#include "server/api/fields.h"
#include "server/api/request.h"
#include <cstdint>

namespace server {

// POST /v1/embeddings
Ask read_embeddings(const Service& service, const Fields& f, uint64_t salt);
// POST /v1/rerank
Ask read_ranking(const Service& service, const Fields& f, uint64_t salt);

} // namespace server
