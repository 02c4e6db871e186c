// model/instances.h: the stored types that templates are compiled for.
//   #define INSTANTIATE(T) template void forward(Context&, const Weights<T>&, ...);
//   QWEN3_INSTANCES(INSTANTIATE)
#pragma once
#ifdef QWEN3_DOUBLE // of tests
#define QWEN3_INSTANCES(X) X(double)
#else
#define QWEN3_INSTANCES(X) X(bf16) X(float)
#endif

// Functions of Book I (qwen3.cu) that are templates on T; BOOK_I_INSTANCE: template, or extern template.
#define BOOK_I_INSTANCES(T) \
    BOOK_I_INSTANCE void layer_forward(Context&, const Config&, const Layer<T>&, const Batch&, \
                                       typename Activations<T>::PerLayer&, const LayerCache<T>&, const acc<T>*); \
    BOOK_I_INSTANCE void forward(Context&, const Config&, const Weights<T>&, const Batch&, Activations<T>&, \
                                 KVCache<T>&, const acc<T>*); \
    BOOK_I_INSTANCE void loss_backward(Context&, const Config&, const Weights<T>&, const Activations<T>&, Flow<T>&, \
                                       const Gradients<T>*, acc<T>*, const int*, const int*, acc<T>, int, int, \
                                       const acc<T>*); \
    BOOK_I_INSTANCE void backward(Context&, const Config&, const Weights<T>&, const Batch&, Activations<T>&, Flow<T>&, \
                                  const Gradients<T>&, KVCache<T>&, const acc<T>*);
