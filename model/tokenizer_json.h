// model/tokenizer_json.h: a Hugging Face folder's own tokenizer.json, beside the tokenizer.bin that is used.
#pragma once
#include "model/tokenizer.h"
#include <string>

// Adds the file's further added tokens to the tokenizer. Returns in a few words all other differences: kind, splitting,
// a token's text, a merge; "": none. Ids that the tokenizer has left out, since the model has no row for them, do not
// count. A file that is not a tokenizer.json is an Error.
std::string adopt_tokenizer_json(Tokenizer& t, const std::string& path);
