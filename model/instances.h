// model/instances.h: the stored types that templates are compiled for.
//   #define INSTANTIATE(T) template void forward(Context&, const Weights<T>&, ...);
//   QWEN3_INSTANCES(INSTANTIATE)
#pragma once
#ifdef QWEN3_DOUBLE // of tests
#define QWEN3_INSTANCES(X) X(double)
#else
#define QWEN3_INSTANCES(X) X(bf16) X(float)
#endif
