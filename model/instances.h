// model/instances.h: which object has the code of templates and kernels, and the stored types of templates.
//   #define INSTANTIATE(T) template void forward(Context&, const Weights<T>&, ...);
//   QWEN3_INSTANCES(INSTANTIATE)
#pragma once
#ifdef QWEN3_DOUBLE // of tests
#define QWEN3_INSTANCES(X) X(double)
#else
#define QWEN3_INSTANCES(X) X(bf16) X(float)
#endif

// Functions of Book I (qwen3.cu) that are templates on T.
#ifdef QWEN3_LIBRARY
#define BOOK_I_INSTANCE template
#else
#define BOOK_I_INSTANCE extern template
#endif
#define BOOK_I_INSTANCES(T) \
    BOOK_I_INSTANCE void layer_forward(Context&, const Config&, const Layer<T>&, const Batch&, \
                                       typename Activations<T>::PerLayer&, const LayerCache<T>&, const acc<T>*); \
    BOOK_I_INSTANCE void mlp_forward(Context&, const Config&, const Layer<T>&, const Batch&, \
                                     typename Activations<T>::PerLayer&); \
    BOOK_I_INSTANCE void forward(Context&, const Config&, const Weights<T>&, const Batch&, Activations<T>&, \
                                 KVCache<T>&, const acc<T>*); \
    BOOK_I_INSTANCE void loss_backward(Context&, const Config&, const Weights<T>&, const Activations<T>&, Flow<T>&, \
                                       const Gradients<T>*, acc<T>*, const int*, const int*, acc<T>, int, int, \
                                       const acc<T>*); \
    BOOK_I_INSTANCE void balance_loss(Context&, double*, acc<T>*, const Config&, const Activations<T>&, const Batch&, \
                                      double, double); \
    BOOK_I_INSTANCE void backward(Context&, const Config&, const Weights<T>&, const Batch&, Activations<T>&, Flow<T>&, \
                                  const Gradients<T>&, KVCache<T>&, const acc<T>*);

// Kernels and launchers of Book II. A portable object of qwen3.cu has all of them. Otherwise it has those of PART_TEXT,
// which have no optional counterpart. The rest is divided among sources in gpu/, each of which defines one of the other
// names as 1, so that they compile at the same time. (In an #if a name that is not defined is 0.)
#ifdef QWEN3_LIBRARY
#define PART_TEXT 1
#endif
#if defined(QWEN3_EVERY_PART) || (defined(QWEN3_LIBRARY) && defined(QWEN3_PORTABLE))
#define COMPILED(part) 1
#else
#define COMPILED(part) part
#endif
