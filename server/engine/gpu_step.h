// gpu_step.h: an engine's GPU steps as the engine sees them, without CUDA types.
#pragma once
#include "qwen3.cu"
#include "server/engine/sequence.h"
#include "server/engine/step.h"
#include <cstdint>
#include <functional>
#include <memory>

namespace server {

template <class T> struct Engine;

// Belongs to one engine, which plans its memory.
struct GpuStep {
    virtual ~GpuStep() = default; // waits for work in flight
    virtual int most_tokens() const = 0;          // tokens in a step by one kernel (step.h); 1: no such kernel
    virtual const uint32_t* kernel_steps() const = 0;  // ... steps computed by it, in GPU memory; null: no such kernel
    virtual size_t more_page_bytes() const = 0;   // per page, beside keys and values
    virtual void plan() = 0;                      // plans memory of the engine's arena
    virtual void open() = 0;                      // ... and creates the rest, once the arena exists
    virtual void describe(Sequence& q) = 0;       // sends an answer that got a slot to the GPU
    virtual void compute(Step& s) = 0;            // launches the step; does not wait
    virtual void draw_masked(Step& s) = 0;        // the draws that `compute` left out, once their forms are known
    virtual void collect(Step& s) = 0;            // waits, and takes the sampled tokens
    virtual void copy_page(int page, uint8_t* bytes, bool out, std::function<void()> then) = 0; // see Scheduler
};
std::unique_ptr<GpuStep> make_gpu_step(Engine<bf16>& engine); // gpu_step.cu

} // namespace server
