// sequence.h: a running answer (or pooled text), and the lines of waiting ones.
#pragma once
#include "form/matcher.h"
#include "model/tokenizer.h"
#include "qwen3.cu"
#include "server/engine/job.h"
#include "server/engine/speech.h"
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <utility>
#include <vector>

namespace server {

// A running answer. The keys and values of tokens 0 .. computed - 1 are in its pages, or will be when the steps in
// flight are done; `pending` of its ids have been sampled and not yet processed.
struct Sequence {
    Job job;                   // its prompt is moved to `ids`
    Speech speech;
    std::vector<int> ids;      // prompt and answer
    const size_t prompt;       // tokens of the prompt
    uint64_t arrival, rank = 0; // counters: of arrivals, of first admissions
    std::vector<int> pages{};
    size_t computed = 0, pending = 0;
    size_t known = 0;          // named pages
    uint64_t chain = 0;        // the name of the last of these
    std::vector<Digest> keys{}; // of its prompt's whole pages on disk, once they are needed
    enum { NOT, COUNTED, DONE } looked = NOT; // for them;
    size_t read = 0;           // ... so many tokens came from there
    int slot = -1;             // row of the block table
    uint64_t admission = 0;    // counts all admissions: tokens sampled before a preemption are void
    size_t resumed = 0;        // tokens answered at that time
    bool restrained = false;   // the GPU treats it as one that may not end yet
    size_t cached = SIZE_MAX;
    size_t thoughts = 0;       // tokens of its thought
    double last = 0;           // when its last token came
    std::unique_ptr<Matcher> matcher{}; // of the job's form
    std::deque<int> forced{};  // the next tokens, forced by the form
    std::vector<TokenInfo> told{}; // log-probabilities of the prompt so far, if requested,
    size_t told_pages = 0;     // ... pages whose share of these the pool has,
    int told_from = -1;        // ... and the cached page whose last hidden state predicts the next

    Sequence(Job&& j, const Tokenizer& t, uint64_t arrival);
    size_t total() const { return ids.size() + pending; }
    size_t left() const { return total() - computed; }
    size_t answered() const { return total() - prompt; }
    // Tokens that a step takes as a chunk of a prompt. (An answer's next token is not one.)
    size_t prompt_left() const { return job.pooled || !job.max_tokens || left() > 1 ? left() : 0; }
    bool telling() const { return job.prompt_alternatives >= 0 && told.size() < prompt; }
    uint64_t space() const { return job.space ? job.space : job.salt; } // in which prompts share pages
    uint64_t adapter() const { return job.adapter ? job.adapter->number : 0; }
    size_t pages_needed() const { return job.pooled ? (ids.size() + PAGE - 1) / PAGE : ids.size() / PAGE + 1; }
};
using Place = std::pair<int, uint64_t>; // position in a line: by priority, then by arrival
using Line = std::map<Place, std::unique_ptr<Sequence>>;
using Running = std::map<uint64_t, std::unique_ptr<Sequence>>;

} // namespace server
