// job.h: one answer to be made, as requests hand it to the engine.
#pragma once
#include "qwen3.cu"
#include "server/engine/adapters.h"
#include "server/engine/reply.h"
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

struct Automaton; // form/automaton.h

namespace server {

constexpr float BAN = -1e30f;   // as a bias: never,
constexpr float ALLOW = 1000;   // ... and: these only. (Far above all logits, and still exact to 1e-4.)
constexpr size_t MAX_ENDS = 64; // ids that end an answer, of a request, and of a model

// One answer to be made.
struct Job {
    std::shared_ptr<Reply> reply;
    int choice = 0;
    std::vector<int> prompt;
    Sampling how;
    std::vector<std::pair<int, float>> bias; // ids and what is added to their logits, after the penalties
    std::vector<std::string> stops;
    std::vector<int> ends;            // ids that end it, beside the model's
    size_t max_tokens = 0, min_tokens = 0; // before min_tokens nothing ends it
    bool ignore_eos = false, thinking = false;
    bool specials = false;            // special tokens are told as text
    bool every = false;               // a piece for every token, even if nothing can be shown yet: a stream that lives
    int alternatives = -1;            // of each token that are told, -1: not even its own log-probability
    std::shared_ptr<Automaton> form{}; // that the answer keeps to, once its thought is over;
    bool form_of_calls = false;       // ... or, instead, what follows each <tool_call>
    std::shared_ptr<const std::set<std::string>> tools{}; // that may be called; none: <tool_call> is text
    bool sure_calls = false;          // calls are in form, and are told as they come
    bool one_call = false;            // the answer ends with it
    uint64_t salt = 1;                // its API key's number: keys take turns
    uint64_t space = 0;               // only prompts of one space share pages: its cache_salt's, or (0) the key's
    AdapterPtr adapter{};             // it is computed with
    bool bulk = false;                // one of a batch: nobody waits for its next token
    int priority = 0;                 // within its key; the lowest first
    std::shared_ptr<const Piece> given{}; // the answer, where no model makes it
    bool pooled = false;              // no answer: the hidden state of the prompt's last token
    double arrived = seconds();
    std::shared_ptr<void> counted{};  // as load of the engine that has it, see Window

    // Texts take their turns beside the answers of the same key.
    static constexpr uint64_t TEXTS = 1ull << 32;
    uint64_t line() const { return salt + (pooled ? TEXTS : 0); }
};
constexpr size_t MAX_TEXTS = 2048;               // of a request for vectors or a ranking: OpenAI's limit
constexpr size_t WAITING_TEXTS = 8 * MAX_TEXTS;  // ... and of all requests; they have no part in the queue of answers
constexpr size_t MAX_TEXT_TOKENS = 1 << 20, WAITING_TEXT_TOKENS = 32 << 20; // the same of their tokens

// The space of a key's requests with this cache_salt. Below 2^32 are the keys' own, then come the names of pages; two
// keys never have one in common.
uint64_t salted_space(uint64_t key, const std::string& salt);

} // namespace server
