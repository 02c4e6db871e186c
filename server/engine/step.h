// step.h: one step of an engine: a ragged batch, what is drawn after it, and what came of it.
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
    std::vector<int> token, pos, seq, slot; // the batch; token -1: the one that was just drawn on the GPU
    int singles = 0;
    struct Part { int first, rows; AdapterPtr adapter; };
    std::vector<Part> parts;   // its rows by sequence, then by adapter; none: no row has one
    struct Draw { uint64_t rank, admission; int row; };
    std::vector<Draw> draws;
    std::vector<Draw> kept;    // rows whose hidden states are wanted,
    std::vector<float> hidden; // ... and these: (., C)
    std::vector<int> wanted;   // of the draws: how many alternatives are told; -1: not even the log-probability
    bool tells = false;        // some are
    std::vector<TokenInfo> told; // what was drawn, on a CPU; on a GPU:
    std::vector<int> ids;      // what was drawn,
    std::vector<float> logits; // ... the logits of these, as the model made them,
    std::vector<Likeliest> rows_told; // ... and what else is told; of the draws that tell something
    int turn = 0;              // which of the two buffers is its own
    int rows = 0, drawn = 0;   // of the batch and the draws, with spare ones
    bool alone = false;        // one answer's next token, and what is
    std::vector<int> proposed; // ... proposed to follow it
    bool from_idle = false;    // no other was under way when it began
    bool masked = false;       // some draws may have to keep to a form: they come after `forward`, as draw_masked
    bool graph = false;
    bool one_kernel = false;   // by step.h's
    bool straight = false;     // its ids go straight to the CPU's memory
    double begun = seconds();
};

} // namespace server
