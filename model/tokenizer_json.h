// model/tokenizer_json.h: a Hugging Face folder's own tokenizer.json, beside the tokenizer.bin that is used.
#pragma once
#include "model/tokenizer.h"
#include <string>

// Gives the tokenizer the added tokens that the file has beyond its own. Returns in a few words how the two differ in
// anything else: kind, splitting, a token's text, a merge; "": in nothing. Ids that the tokenizer has left out, since the
// model has no row for them, do not count. A file that is no tokenizer.json is an Error.
std::string adopt_tokenizer_json(Tokenizer& t, const std::string& path);
