// model/portable.h: a portable build's Optional: it has no optional kernels. gpu/optional.h describes them.
#pragma once
#include "model/context.h"
#include "model/gpu_ops.h"
#include <cstdio>
#include <memory>

struct Optional {
    template <class... A> static bool embed(A&&...) { return false; }
    template <class... A> static RowsDealt few(A&&...) { return {}; }
    template <class Epilogue>
    static bool many(Context&, const Epilogue&, const bf16*&, const E4M3Rows&, const Linear<bf16>&, int) {
        return false;
    }
    template <class... A> static bool norm_many(A&&...) { return false; }
    template <bool X_COLS, bool W_COLS, class... A> static bool tiles(A&&...) { return false; }
    template <class... A> static bool weight_gradient(A&&...) { return false; }
    template <class L, class Use> static void weights(Context&, const L& W, Use use) { use(W.w[0]); }
    template <class L, class Use> static void parts(Context&, const L& W, bool columns, Use use) {
        use(0, columns ? W.in : W.out(), W.w[0]);
    }
    template <bool W_COLS, class... A> static bool expert_tiles(A&&...) { return false; }
    template <class... A> static bool experts(A&&...) { return false; }
    template <class... A> static bool experts_backward(A&&...) { return false; }
    template <class... A> static bool packed_rows(A&&...) { return false; }
    template <class... A> static int attention(A&&...) { return 0; }
    template <class... A> static bool attention_backward(A&&...) { return false; }
    template <class... A> static bool lora_up(A&&...) { return false; }
    template <class... A> static void plan(A&&...) {}
    template <class... A> static std::unique_ptr<OneKernelStep> one_kernel(const Context& ctx, A&&...) {
        if (ctx.one_kernel > Context::WHERE_FASTER)
            fprintf(stderr, "--one-kernel: a portable build has none; a token is a graph of kernels\n");
        return nullptr;
    }
    static constexpr bool HERE = false;
};
