// book/training_rows.h: conversations, preferences and texts as rows of tokens, and which of these are trained.
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

using Words = std::vector<uint32_t>; // of a packed row

// One row for each answer of a conversation that has a word. So every answer of a long one is learnt after the very
// tokens that it is asked for with; one row with all turns could not have that, since the template shows earlier answers
// without the think block.
std::vector<Words> render_rows(const Tokenizer& tokenizer, const Conversation& c);

// The chosen and the rejected answer, each behind the same tokens: if one of them thinks, the other does not think in
// its own words.
std::vector<Words> render_pair(const Tokenizer& tokenizer, const Preference& p);

// A row of plain text: all of it is trained, and the end. Nothing in it is a role's, so special tokens in it are such.
Words render_text_row(const Tokenizer& tokenizer, const std::string& text);

// How many answers of a conversation have no word; render_rows leaves them out.
size_t count_wordless(const Conversation& c);

// Does a text hold the name of one of the vocabulary's special tokens, as <|im_end|>?
bool has_mark(const Tokenizer& tokenizer, std::string_view text);

size_t count_trained(DatasetRow row);
inline DatasetRow view(const Words& words) { return {words.data(), words.data() + words.size()}; }

} // namespace book
