// book/datagen/training_rows.h: conversations, preferences and texts as rows of tokens, with the trained part marked.
#pragma once
#include "book/conversations.h"
#include "model/dataset.h"
#include "model/tokenizer.h"
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace book {

using Words = std::vector<uint32_t>; // a packed row

// One row for each non-empty answer of a conversation. So every answer is trained behind exactly the tokens that
// precede it in generation. One row with all turns could not do this, since the template shows earlier answers without
// the think block.
std::vector<Words> render_rows(const Tokenizer& tokenizer, const Conversation& c);

// The chosen and the rejected answer, each behind the same tokens: if only one of them thinks, the other has an empty
// think block.
std::vector<Words> render_pair(const Tokenizer& tokenizer, const Preference& p);

bool same_prompt(const Words& a, const Words& b);
// The prompt of a row with the answer of another, cut to `longest` tokens: KTO measures it and does not train it.
Words mismatched_row(const Words& row, const Words& other, size_t longest);

// A row of plain text: all of it is trained, and the end token. Names of special tokens in it become special tokens.
Words render_text_row(const Tokenizer& tokenizer, const std::string& text);

// The number of empty answers in a conversation; render_rows skips them.
size_t count_wordless(const Conversation& c);

// Whether a text contains the name of one of the vocabulary's special tokens, such as <|im_end|>.
bool has_mark(const Tokenizer& tokenizer, std::string_view text);

size_t count_trained(DatasetRow row);
inline DatasetRow view(const Words& words) { return {words.data(), words.data() + words.size()}; }

} // namespace book
