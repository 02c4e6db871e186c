// cpu/products.h: dropout of a product's input, for its adapter.
#pragma once
#include "qwen3.cu"

// x after the dropout of module j of W's adapter, in scratch, or x itself. Kept numbers are not scaled: the caller
// multiplies sums over them by drop_scale.
template <class T> acc<T> drop_scale(const Adapter<T>& a) { return a.dropout ? 1 / (1 - (acc<T>)a.dropout->p) : 1; }
template <class T> const T* dropped_cpu(const T* x, const Linear<T>& W, int j, int N);
