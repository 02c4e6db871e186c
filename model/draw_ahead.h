// model/draw_ahead.h: sampling of a session on a GPU, ahead of the caller.
#pragma once
#include "model/session.h"
#include "qwen3.cu"
#include <map>
#include <memory>
#include <vector>

// ---- Sampling on a GPU: a step, from embedding to sampled token, is one CUDA graph; all its changing numbers are in
// the GPU's memory. Up to AHEAD steps are launched beyond the tokens that the caller has seen. Tokens reach the caller
// through `ring` in the CPU's memory; results past the last accepted token are overwritten later. A graph starts when
// the graph launched before it has completed entirely, so the next graph's kernels may read early the results of
// sample_kernel. With lookup, if a step is one kernel, two steps are ahead. When a proposal follows the tokens that
// have arrived, no more steps are launched; those under way complete, and show whether the proposal still holds; then
// one step computes all proposed tokens, and so on while there are proposals. (Not with penalties: each row would need
// its own counts.)
struct GpuDraws : DrawsAhead {
    static constexpr int AHEAD = 8, ROWS = STEP_TOKENS;
    Session<bf16>& session;
    Context& ctx;
    DrawState step = {};                   // of ROWS rows; of a step of one token the first
    uint32_t* seen;
    Draw* draw_parameters;                 // (ROWS), all the same
    unsigned long long* best;
    int* seq;                              // (ROWS) zeros: the only sequence
    volatile int* ring = nullptr;          // (ROWS, ring_size)
    int* host_rows = nullptr;              // (3,ROWS) token, pos and slot on their way to `step`
    int launched = 0;                      // draws up to this position are on their way,
    int last = 0;                          // ... and up to this one will be wanted
    std::map<int, cudaGraphExec_t> graphs; // by splits and whether there are penalties; see also launch_step
    bool penalties = false;
    std::unique_ptr<OneKernelStep> road;   // if a step is one kernel
    bool asked = false;                    // ... and its speed is known
    // With lookup:
    std::vector<int> text;                 // the session's ids and the sampled tokens that have arrived
    std::vector<int> proposed;             // in the step under way
    int expected = -1;                     // the proposed id for the token under way, if any
    bool row_known = true;                 // the first row of `step` is the one to go on from
    bool from_idle = false;                // nothing was under way when the step that is was launched,
    double started = 0;                    // ... which was then (s)

    explicit GpuDraws(Session<bf16>& s) : session(s), ctx(s.ctx) {}
    GpuDraws(const GpuDraws&) = delete;
    ~GpuDraws() override;

    // The session's memory that only a GPU needs.
    void plan() override;
    // The most tokens of a step by one kernel. Sets that kernel up first, which takes memory.
    int tokens() override;

    void begin(size_t most) override;

    int next() override;

  private:
    // The token that a row sampled for a position.
    int wait(int row, int pos);
    // With lookup: launches what can be.
    void go_on();
    // With lookup: waits for the oldest step under way.
    void take();
    // Writes the last known token and its possible successors to the rows of `step`: from the last position of `text`
    // on.
    void put_rows(const std::vector<int>& ids);
    void launch_proposed(const std::vector<int>& next);

    void launch_draw(const int* row);

    // A step of N tokens as one kernel, which also samples if that is greedy. Its graphs have negative numbers.
    void launch_road_step(int N) { CUDA_CHECK(cudaGraphLaunch(road_step(N), ctx.gpu->stream)); }
    cudaGraphExec_t road_step(int N);
    void record_road_step(int N);
    bool greedy() const { return session.drawing.how.temperature == 0 || session.drawing.exist == 1; }

    void launch_step();
};
