// cuBLAS, beside the steps that it could replace. Needs -DHAVE_CUBLAS and -lcublas (the Makefile asks whether it is
// there).
#pragma once
#include "lab/lab.h"
#include <cublas_v2.h>

namespace lab {

// The one handle, on the stream that is timed.
inline cublasHandle_t cublas() {
    static const cublasHandle_t handle = [] {
        cublasHandle_t h;
        cublasCreate(&h);
        cublasSetStream(h, stream);
        void* scratch;
        GPU_CHECK(cudaMalloc(&scratch, 64 << 20)); // its own would be allocated inside the graph
        cublasSetWorkspace(h, scratch, 64 << 20);
        return h;
    }();
    return handle;
}

} // namespace lab
