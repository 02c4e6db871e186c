// engine_options.h: limits on what an engine computes at once.
#pragma once
#include <cstddef>

namespace server {

struct DiskPages;

struct EngineOptions {
    int context = 0;      // tokens of a prompt with its answer
    int max_seqs = 0;     // answers at once
    int chunk = 0;        // prompt tokens in a step that clients wait for,
    int burst = 0;        // ... and in one that no client waits for (batches do not wait)
    size_t kv_bytes = 0;  // of the KV cache; 0: as much as fits
    bool at_most = false; // the context may shrink to the cache's size
    int texts = 0;        // pooled jobs at once, beside the answers
    bool adapters = true; // adapters are possible
    int jump = 2;         // so many tokens forced by a form are taken at once, without sampling; 0: never
    size_t adapter_bytes = 0; // for all adapters that clients load together; 0: a share of the free memory
    bool paced = false;   // `chunk` is the minimum; more while the step stays short, see pace.h
    int lookup = 0;       // most tokens of prompt lookup for an answer that runs alone (lookup.h); on a GPU
                          // limited by step.h's kernel, if there is one
    DiskPages* disk = nullptr; // of all engines: the prefix cache on disk; null: none
};

} // namespace server
