// For the code in the course's notes: build/notes.cuh holds it (data/course/check_notes.py --emit), each block in a
// namespace called after its first function.
#pragma once
#include "notes.cuh"
#include <algorithm>
#include <cstring>
#include <vector>

// Ends the program, in one line, at a fault of CUDA.
#define OK(x)                                                                                                          \
    do {                                                                                                               \
        cudaError_t e_ = (x);                                                                                          \
        if (e_ != cudaSuccess) {                                                                                       \
            printf("%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(e_));                                         \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

template <class T> struct Dev { // a device array
    T* p;
    size_t n;
    explicit Dev(size_t n) : n(n) {
        OK(cudaMalloc(&p, n * sizeof(T)));
        OK(cudaMemset(p, 0, n * sizeof(T)));
    }
    explicit Dev(const std::vector<T>& v) : Dev(v.size()) {
        OK(cudaMemcpy(p, v.data(), n * sizeof(T), cudaMemcpyHostToDevice));
    }
    ~Dev() { cudaFree(p); }
    std::vector<T> get() {
        std::vector<T> v(n);
        OK(cudaDeviceSynchronize());
        OK(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
        return v;
    }
    void zero() { OK(cudaMemset(p, 0, n * sizeof(T))); }
};
inline std::vector<float> noise(size_t n, unsigned seed = 1) {
    std::vector<float> v(n);
    for (auto& x : v) {
        seed = seed * 1664525u + 1013904223u;
        x = (int)(seed >> 24) / 64.0f - 2.0f;
    } // multiples of 1/64: short sums are exact
    return v;
}
