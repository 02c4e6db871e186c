// cpu/products.h: dropout of a product's input, for its adapter.
#pragma once
#include "qwen3.cu"

// What module j of W's adapter keeps of x, in scratch, or x itself: what is summed over it is to be multiplied by
// drop_scale.
template <class T> acc<T> drop_scale(const Adapter<T>& a) { return a.dropout ? 1 / (1 - (acc<T>)a.dropout->p) : 1; }
template <class T> const T* dropped_cpu(const T* x, const Linear<T>& W, int j, int N);
