// gpu/products/experts.cu: the products of gpu/products/experts.h with bf16 weights, for model/experts.cu.
#include "gpu/products/experts.h"

#define WITH(W_COLS, Weights, Epilogue) \
    template bool Optional::expert_tiles<W_COLS>(Context&, const Weights&, const ExpertsArgs&, int, const Epilogue&);
#define INSTANTIATE(W_COLS, Weights, Epilogue) \
    WITH(W_COLS, Weights, Epilogue) WITH(W_COLS, Adapted<Weights>, Epilogue)
INSTANTIATE(false, StreamArgs, ExpertSwiglu)
INSTANTIATE(false, StreamArgs, ExpertStore<float>)
INSTANTIATE(true, ExpertColumns, ExpertStore<bf16>)
