// gpu/step/road.cu: the host code of one kernel a token: chooses it, packs weights, launches steps.
#include "gpu/packed/packed.h"
#include "gpu/step/formats.h"
#include "gpu/step/road.h"
#include "qwen3.cu"
#include <cstdio>

static int of_device(cudaDeviceAttr what) {
    int device = 0, value = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&value, what, device));
    return value;
}

int StepRoad::most_shared() { return of_device(cudaDevAttrMaxSharedMemoryPerBlockOptin); }
StepRoad::StepRoad(const Context& where, const Config& c, const Weights<bf16>& w, size_t share, size_t spoken_for)
    : ctx(where) {
    by_phase = ctx.one_kernel == Context::BY_PHASE;
    blocks = ctx.gpu->sms;
    if (const char* why = step_refuses(c, blocks)) DIE("--one-kernel: not for this model: %s", why);
    if (ctx.kv_fp8) DIE("--one-kernel: not with FP8 keys and values");
    const Linear<bf16>& one = w.layers[0].qkv;
    const auto check = [&](const Linear<bf16>& m) {
        if (!step_same(m, one)) DIE("--one-kernel: only if all layers' weights have one format");
        if (m.adapter.rank && m.format != Format::PLAIN)
            DIE("--one-kernel: not with an adapter beside packed weights");
    };
    for (const Layer<bf16>& l : w.layers) {
        check(l.qkv), check(l.o);
        if (!c.E) check(l.gate_up), check(l.down);
        else if (l.router.format != Format::PLAIN) DIE("--one-kernel: not with packed weights of the router");
        for (const Expert<bf16>& e : l.experts) check(e.gate_up), check(e.down);
    }
    if (one.format == Format::PLAIN && w.embed.format != Format::PLAIN)
        DIE("--one-kernel: not for bf16 behind packed embeddings");
    if (w.embed.format != Format::PLAIN) embed = w.embed;
    if (blocks > BEST_BLOCKS) DIE("--one-kernel: %d multiprocessors", blocks);
    choose(layers, c, one, c.E > 0), layers.last = args.phases();
    if (!step_same(w.head, one)) {
        choose(head, c, w.head, false);
        head.first = layers.last = args.phases() - 1, head.last = args.phases();
    }
    if (one.format == Format::PLAIN && !head.kernel && !c.E) choose_several(c);
    arena.gpu = true;
    plan();
    size_t free = 0, all = 0;
    CUDA_CHECK(cudaMemGetInfo(&free, &all));
    if (ctx.one_kernel == Context::WHERE_FASTER && arena.used > (free - std::min(free, spoken_for)) / share)
        DIE("--one-kernel: little memory is free");
    arena.allocate("--one-kernel: a second copy of the weights"); // (products of many tokens need the original rows)
    plan();
    pack(w);
    CUDA_CHECK(cudaHostAlloc((void**)&fault, sizeof *fault, cudaHostAllocMapped));
    *fault = 0;
    CUDA_CHECK(cudaHostGetDevicePointer((void**)&args.fault, fault, 0));
}

StepRoad::~StepRoad() {
    if (fault) cudaFreeHost(fault);
}

std::unique_ptr<StepRoad> StepRoad::find(const Context& ctx, const Config& c, const Weights<bf16>& w, size_t share,
                                         size_t spoken_for) {
    const bool asked = ctx.one_kernel > Context::WHERE_FASTER;
    if (ctx.one_kernel == Context::OFF || (!asked && (ctx.gpu->sm != 90 || ctx.invariant))) return nullptr;
    try {
        return std::make_unique<StepRoad>(ctx, c, w, share, spoken_for);
    } catch (const Error& e) {
        static bool told = false;
        if (asked && !told) fprintf(stderr, "%s; a token is a graph of kernels\n", e.what());
        told = told || asked;
        return nullptr;
    }
}

std::unique_ptr<OneKernelStep> Optional::one_kernel(const Context& ctx, const Config& c, const Weights<bf16>& w,
                                                    size_t share, size_t spoken_for) {
    return StepRoad::find(ctx, c, w, share, spoken_for);
}

void StepRoad::use(const Batch& batch, const KVCache<bf16>& cache, const float* rope, float* logits, const Draw* draw,
                   unsigned long long* best) {
    args.b = batch, args.rope = rope, args.logits = logits, args.draw = draw, args.best = best;
    args.keys = cache.keys, args.values = cache.values, args.layer_size = cache.layer_size;
}

void StepRoad::launch_step() {
    if (args.b.N > most) DIE("--one-kernel: a step of %d tokens, %d at most", args.b.N, most);
    if (args.b.N > 1) {
        Part all = several[args.b.N <= 2 ? 0 : args.b.N <= 4 ? 1 : 2];
        all.args = step_as_planned(args, all.args);
        return launch_part(all);
    }
    if (embed.in) packed_embed_gpu(ctx, args.residual, embed, args.b);
    launch_part(layers);
    if (!head.kernel) return;
    Part last = head;
    last.args = step_head(args, head.args);
    launch_part(last);
}

void StepRoad::check() const {
    if (*(volatile int*)fault) DIE("--one-kernel: a block waited for over a second for another one's words");
}

void StepRoad::choose(Part& part, const Config& c, const Linear<bf16>& W, bool experts) {
    with_step_weights(W, [&](auto packed) {
        using P = decltype(packed);
        if (experts) choose_shape<1, P, true>(part, c, 1);
        else choose_shape<1, P, false>(part, c, 1);
    });
    if (part.args.stages < 4) DIE("--one-kernel: %d bytes of shared memory a block are too few", most_shared());
    if (!all_resident(part)) DIE("--one-kernel: its blocks cannot all be resident on this GPU");
}

template <int TOKENS> void StepRoad::choose_tokens(Part& part, const Config& c) {
    if (most < TOKENS / 2) return;
    int N = TOKENS;
    for (; N > most; N--) {
        choose_shape<TOKENS, StepPlain, false>(part, c, N);
        if (part.args.stages >= 4) break;
    }
    part.last = args.phases();
    if (N > most && all_resident(part)) most = N;
}

void StepRoad::choose_several(const Config& c) {
    choose_tokens<2>(several[0], c), choose_tokens<4>(several[1], c), choose_tokens<8>(several[2], c);
}

bool StepRoad::all_resident(const Part& part) const {
    const int shared = (int)part.args.shared;
    int resident = 0;
    CUDA_CHECK(cudaFuncSetAttribute(part.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, part.kernel, threads, (size_t)shared));
    return by_phase || (resident && of_device(cudaDevAttrCooperativeLaunch));
}

void StepRoad::launch_part(const Part& part) {
    for (int phase = part.first; phase < part.last; phase = by_phase ? phase + 1 : part.last) {
        cudaLaunchAttribute together;
        together.id = cudaLaunchAttributeCooperative, together.val.cooperative = 1;
        cudaLaunchConfig_t config = {};
        config.gridDim = dim3(blocks), config.blockDim = dim3(threads), config.dynamicSmemBytes = part.args.shared;
        config.stream = ctx.gpu->stream, config.attrs = &together, config.numAttrs = by_phase ? 0 : 1;
        CUDA_CHECK(cudaLaunchKernelEx(&config, part.kernel, part.args, phase, by_phase ? phase + 1 : part.last));
    }
}

void StepRoad::plan() {
    args.gains = arena.take<bf16>(args.gains_of(args.L) + args.C);
    step_words(args, arena.take<uint4>(step_words(args, nullptr, most)), most);
    args.residual = arena.take<float>((size_t)most * args.C);
    args.router = arena.take<bf16>((size_t)args.L * args.E * args.C);
    args.steps = arena.take<uint32_t>(1), args.arrived = arena.take<int>(1);
    const StepProduct& logits = args.product[STEP_LOGITS];
    args.packed = arena.take<unsigned char>(logits.at + (head.kernel ? 0 : logits.bytes(layers.chunk)));
    if (head.kernel)
        head.args.packed = arena.take<unsigned char>(head.args.product[STEP_LOGITS].bytes(head.chunk));
}

void StepRoad::pack(const Weights<bf16>& w) {
    if (!embed.in) args.embed = w.embed.w[0];
    bf16 *gains = (bf16*)args.gains, *router = (bf16*)args.router;
    auto append = [&](bf16*& to, const bf16* from, int n) {
        CUDA_CHECK(cudaMemcpyAsync(to, from, n * sizeof(bf16), cudaMemcpyDeviceToDevice, ctx.gpu->stream));
        to += n;
    };
    auto gain = [&](const bf16* from, int n) { append(gains, from, n); };
    auto matrix = [&](const Linear<bf16>& W, const Part& part, int phase, size_t layer, size_t expert = 0) {
        const StepProduct q = part.args.of_one(phase);
        unsigned char* to = (unsigned char*)part.args.packed + expert * part.args.expert_bytes +
                            (&part == &head ? 0 : layer * part.args.layer_bytes + q.at);
        with_step_weights(W, [&](auto packed) { pack_matrix(to, W, packed, q, (size_t)W.out() / 2); });
    };
    for (size_t l = 0; l < w.layers.size(); l++) {
        const Layer<bf16>& y = w.layers[l];
        matrix(y.qkv, layers, STEP_QKV, l), matrix(y.o, layers, STEP_O, l);
        if (!args.E) matrix(y.gate_up, layers, STEP_GATE_UP, l), matrix(y.down, layers, STEP_DOWN, l);
        else append(router, y.router.w[0], args.E * args.C);
        for (size_t e = 0; e < y.experts.size(); e++) {
            matrix(y.experts[e].gate_up, layers, STEP_GATE_UP, l, e);
            matrix(y.experts[e].down, layers, STEP_DOWN, l, e);
        }
        gain(y.norm1, args.C), gain(y.norm2, args.C), gain(y.q_norm, STEP_HEAD), gain(y.k_norm, STEP_HEAD);
    }
    matrix(w.head, head.kernel ? head : layers, STEP_LOGITS, 0);
    gain(w.norm, args.C);
}
