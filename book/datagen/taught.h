// book/datagen/taught.h: a teacher's log-probabilities: requests for them, answers as rows, the rows' tokens.
//
//   rows > ask > requests > generate > responses > collect --rows > taught rows > pack
//
// A taught row is a conversation with `logprobs` beside it, as a choice of OpenAI's chat completions has it.
#pragma once
#include "book/arguments.h"
#include "book/conversations.h"
#include "book/datagen/training_rows.h"
#include "model/dataset.h"

namespace book {

int run_ask(const Arguments& a); // `datagen ask`: rows to requests
int collect_taught(const Arguments& a); // `datagen collect --rows`: replies to taught rows

bool is_taught(sj::Value row);

// The last answer of a taught row as tokens: the endpoint's own tokens, found in our vocabulary by their bytes. Each
// has its outcomes, its own first. Alternatives that are not in the vocabulary belong to the rest. Tokens that the endpoint
// did not report (the end of the answer) are certain.
struct TaughtRow {
    Words row;
    std::vector<std::vector<Outcome>> outcomes; // of its trained tokens
    std::string fault;                          // "": none
    size_t foreign = 0;                         // alternatives that are not in the vocabulary
    bool recut = false;                         // our tokenizer cuts the same text into other tokens

    TaughtRow(const Tokenizer& tokenizer, const Conversation& c, sj::Value logprobs);

  private:
    bool add(const Tokenizer& tokenizer, sj::Value entry);
};

} // namespace book
