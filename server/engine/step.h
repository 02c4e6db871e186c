// step.h: one step of an engine: a ragged batch, its draws, and their results.
#pragma once
#include "base/error.h"
#include "qwen3.cu"
#include "server/engine/adapters.h"
#include "server/engine/reply.h"
#include <cstdint>
#include <vector>

namespace server {

// A step, from its plan to its results.
struct Step {
    std::vector<int> token, pos, seq, slot; // the batch; token -1: the one just sampled on the GPU
    int singles = 0;
    struct Part { int first, rows; AdapterPtr adapter; };
    std::vector<Part> parts;   // its rows by sequence, then by adapter; empty: no row has one
    struct Draw { uint64_t rank, admission; int row; };
    std::vector<Draw> draws;
    std::vector<Draw> kept;    // rows whose hidden states are kept,
    std::vector<float> hidden; // ... and these: (., C)
    std::vector<Draw> over;    // answers of no tokens, whose prompts end here
    // A token of a prompt whose log-probability is reported: predicted from a row, or (row -1) from the last hidden
    // state of a page. The hidden state of the row is kept for the page `to`, if that is not -1.
    struct Target { uint64_t rank, admission; int id, alternatives, row, from, to; };
    std::vector<Target> targets;
    std::vector<TokenInfo> targets_told;
    std::vector<int> wanted;   // per draw: alternatives to report; -1: not even the log-probability
    bool tells = false;        // some draw reports something
    std::vector<TokenInfo> told; // the sampled tokens, on a CPU; on a GPU:
    std::vector<int> ids;      // the sampled ids,
    std::vector<float> logits; // ... their logits, before adjustments,
    std::vector<Likeliest> rows_told; // ... and the other reported data; of the draws that report something
    int turn = 0;              // index of its buffer, of two
    int rows = 0, drawn = 0;   // of the batch and the draws, padding included
    bool alone = false;        // one answer's next token, and the tokens
    std::vector<int> proposed; // ... proposed to follow it
    bool from_idle = false;    // nothing was in flight when it began
    bool masked = false;       // some draws may have a form: they run after `forward`, by draw_masked
    bool graph = false;
    bool one_kernel = false;   // by step.h's kernel
    bool straight = false;     // its ids go directly to the CPU's memory
    double begun = seconds();
};

} // namespace server
