// model/cpu.h: the parts of cpu/ that callers use by name: ops, the sampler, instruction sets, ceilings of this
// machine. A portable build (QWEN3_PORTABLE) replaces them by Book I's ops, one instruction set, and no ceilings.
#pragma once
#include "qwen3.cu"
#ifndef QWEN3_PORTABLE
#include "cpu/instruction_set.h"
#include "cpu/ops.h"
#include "cpu/step_ceilings.h"
#else
#include <limits>

// ---- Ops
template <class T> void rmsnorm_cpu(Context&, T* out, const acc<T>* x, const T* w, int N, int C, float eps) {
    rmsnorm(out, x, w, N, C, eps);
}
template <class T> void swiglu_cpu(Context&, T* out, const T* gate_up, int N, int F) { swiglu(out, gate_up, N, F); }
template <class T> void lora_down_cpu(Context&, T* h, const T* x, const Linear<T>& W, int N) { lora_down(h, x, W, N); }
template <class T>
void head_cpu(Context&, acc<T>* logits, T* picked, const T* x, const int* rows, const Linear<T>& W, int R) {
    head(logits, picked, x, rows, W, R);
}
// y plus the adapter's part of row r: of[n] is token n's adapter, or null.
template <class T> acc<T> with_adapter(acc<T> y, const Adapter<T>* const* of, int n, int r) {
    if (const Adapter<T>* a = of[n])
        for (size_t i = 0; i < a->width(); i++)
            y += to_acc(a->B[r * a->width() + i]) * to_acc(a->h[n * a->width() + i]);
    return y;
}
template <class T>
void rows_linear_cpu(Context&, T* out, const T* x, const Linear<T>& W, const Adapter<T>* const* of, int N) {
    const size_t ld = W.out();
    product(W, x, N, [=](int n, int r, acc<T> y) { out[n * ld + r] = to_stored<T>(with_adapter(y, of, n, r)); });
}
template <class T>
void rows_linear_add_cpu(Context&, acc<T>* out, const acc<T>* residual, const T* x, const Linear<T>& W,
                         const Adapter<T>* const* of, int N) {
    const size_t ld = W.out();
    product(W, x, N, [=](int n, int r, acc<T> y) {
        out[n * ld + r] = residual[n * ld + r] + with_adapter(y, of, n, r);
    });
}
inline int sample_cpu(const Context&, const float* logits, int exist, const Sampling& how, uint64_t counter) {
    return sample(logits, exist, how, counter);
}
inline void likeliest_cpu(const Context&, Likeliest& out, const float* logits, int exist, int k) {
    likeliest(out, logits, exist, k);
}

// ---- Instruction sets
enum InstructionSet { ISA_PLAIN };
inline InstructionSet instruction_set = ISA_PLAIN;
inline const char* instruction_set_name(int) { return "plain"; }
inline InstructionSet best_instruction_set() { return ISA_PLAIN; }

// ---- Ceilings
struct ReadTest {
    double ceiling = 0;
    ReadTest() {
        DIE("the ceilings of this machine are measured by cpu/ and gpu/, which a portable build does not have");
    }
    double pass() { return 0; }
};
struct Ceilings { double read, multiply; };
template <class T> double multiply_ceiling(const Context&, double) {
    return std::numeric_limits<double>::infinity(); // shares of it are shown as 0
}
template <class T> Ceilings measure_ceilings(const Context&, const ReadTest*) { return {ReadTest().ceiling, 0}; }
#endif
