// train/nccl.h: NCCL, NVIDIA's library for sums between GPUs, without CUDA's types. It is loaded at run time: the
// program is built without it. Compiled for GPUs only; other builds never create one.
#pragma once
#include <cstddef>
#include <memory>

struct Context;

struct Nccl {
    struct Id { char bytes[128]; };

    explicit Nccl(const Context& model); // that of the model: sums begin after its stream's work so far
    Id make_id();
    void join(int size, const Id& id, int rank); // all ranks, with the same id

    // The four below are called between begin and end.
    void begin();
    void all_reduce(float* x, size_t n);                                // x becomes its sum over all ranks
    void reduce_scatter(float* own, const float* x, size_t piece);      // own: this rank's piece of it
    void all_gather(void* all, const void* own, size_t bytes);          // all: the pieces of all ranks
    void end();
    void finish(); // the model's stream continues when all sums are complete
    double look(); // seconds that it has waited since the last measurement; all its work is complete

  private:
    struct Library;
    std::shared_ptr<Library> library;
};
