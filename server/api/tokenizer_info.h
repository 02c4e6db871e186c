// tokenizer_info.h: the special tokens and the chat template of a model, as vLLM's /tokenizer_info has them.
#pragma once
#include "model/model_file.h"
#include "model/tokenizer.h"
#include <string>

namespace server {

// A JSON object with names of Hugging Face's tokenizer_config.json.
std::string tokenizer_info(const ModelFile& file, const Tokenizer& tokenizer);

} // namespace server
