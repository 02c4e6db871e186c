// embed_api.h: requests for vectors (OpenAI's /v1/embeddings) and for rankings (/v1/rerank, as Jina, Cohere and vLLM
// have it), from JSON to jobs. The rules of request.h hold here too.
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
