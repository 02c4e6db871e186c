// gpu_step.h: an engine's steps on a GPU, as the engine sees them: no type of CUDA's.
#pragma once
#include "qwen3.cu"
#include "server/engine/sequence.h"
#include "server/engine/step.h"
#include <cstdint>
#include <memory>

namespace server {

template <class T> struct Engine;

// Of one engine. Its memory is planned with the engine's.
struct GpuStep {
    virtual ~GpuStep() = default; // waits for what is under way
    virtual int most_tokens() const = 0;          // of a step by one kernel (step.h); 1: there is none
    virtual const uint32_t* kernel_steps() const = 0;  // ... steps that it has computed, in the GPU's memory; null: none
    virtual size_t more_page_bytes() const = 0;   // of a page, beside keys and values
    virtual void plan() = 0;                      // memory of the engine's arena
    virtual void open() = 0;                      // ... and all else, once it is there
    virtual void describe(Sequence& q) = 0;       // tells the GPU of an answer that has a slot now
    virtual void compute(Step& s) = 0;            // launches it; nothing waits
    virtual void draw_masked(Step& s) = 0;        // the draws that `compute` has left, once their forms are known
    virtual void collect(Step& s) = 0;            // waits, and takes what was drawn
};
std::unique_ptr<GpuStep> make_gpu_step(Engine<bf16>& engine); // gpu_step.cu

} // namespace server
