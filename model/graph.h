// model/graph.h: CUDA graphs.
#pragma once
#include "qwen3.cu"

// Records the launches of f as a graph that can be launched many times.
template <class F> cudaGraphExec_t record_graph(Context& ctx, F f) {
    cudaGraph_t recorded;
    cudaGraphExec_t graph;
    CUDA_CHECK(cudaStreamBeginCapture(ctx.gpu->stream, cudaStreamCaptureModeThreadLocal));
    f();
    CUDA_CHECK(cudaStreamEndCapture(ctx.gpu->stream, &recorded));
    CUDA_CHECK(cudaGraphInstantiate(&graph, recorded, 0));
    cudaGraphDestroy(recorded);
    return graph;
}
