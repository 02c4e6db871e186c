// engine_options.h: how much of what an engine computes at once.
#pragma once
#include <cstddef>

namespace server {

struct EngineOptions {
    int context = 0;      // tokens of a prompt and its answer
    int max_seqs = 0;     // answers at once
    int chunk = 0;        // tokens of prompts in a step that others wait for,
    int burst = 0;        // ... and in one that nobody waits for (answers of a batch do not)
    size_t kv_bytes = 0;  // of the KV cache; 0: as much as there is room for
    bool at_most = false; // the context may be less: what the cache holds
    int texts = 0;        // pooled jobs at once, beside the answers
    bool adapters = true; // there may be some
    int jump = 2;         // so many tokens that a form leaves no choice about are taken at once; 0: never, a step each
    size_t adapter_bytes = 0; // that adapters which clients load may take, all together; 0: some of what is free
    bool paced = false;   // `chunk` is the least; more where they keep the step short, see pace.h
    int lookup = 0;       // tokens that are looked up for an answer that runs alone, at most (lookup.h); on a GPU those
                          // that step.h's kernel has room for, if there is one
};

} // namespace server
