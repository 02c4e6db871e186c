/* step_road.h: what the host does for one kernel a token: chooses the kernel, packs weights, launches steps. step.h
   includes it. */
#pragma once

// Calls use(StepPlain()) or of a StepPacked: how W's format is packed. Throws Error if it cannot be.
template <class Use> void with_step_weights(const Linear<bf16>& W, Use use) {
    switch (W.format) {
        case Format::PLAIN: return use(StepPlain());
        case Format::INT8: return use(StepPacked<PackedInt8, 2>());
        case Format::INT4:
            return W.group == 32   ? use(StepPacked<PackedInt4<1>, 4>())
                   : W.group == 64 ? use(StepPacked<PackedInt4<1>, 2>())
                                   : use(StepPacked<PackedInt4<1>, 1>());
        case Format::FP8:
            if (W.group % 64 || W.group_rows % 8)
                DIE("--one-kernel: FP8 in blocks of %d x %d (multiples of 8 x 64 only)", W.group_rows, W.group);
            return use(StepPacked<PackedFp8, 1>());
    }
}
inline bool step_same(const Linear<bf16>& a, const Linear<bf16>& b) { // packed in the same way
    return a.format == b.format && a.group == b.group && a.group_rows == b.group_rows;
}
inline StepPlain::Source step_source(const Linear<bf16>& W, StepPlain) {
    if (!W.adapter.rank) return {W.w[0], W.in};
    return {W.w[0], W.in, (int)W.adapter.width(), W.adapter.A, W.adapter.B};
}
template <class F, int GROUPS> PackedArgs step_source(const Linear<bf16>& W, StepPacked<F, GROUPS>) {
    return packed_args(W);
}

// A step by a kernel of another shape, for which `plan` was made.
inline StepArgs step_as_planned(StepArgs step, const StepArgs& plan) {
    step.stages = plan.stages, step.in_flight_pages = plan.in_flight_pages, step.joined = plan.joined;
    for (int i = 0; i < 7; i++) step.product[i].in_flight = plan.product[i].in_flight;
    step.sums_at = plan.sums_at, step.squares_at = plan.squares_at, step.work_at = plan.work_at;
    step.ring_at = plan.ring_at, step.shared = plan.shared;
    return step;
}
// Of a head that is packed in another way than the layers, and so a launch by itself: `head` has its plan and weights.
inline StepArgs step_head(StepArgs step, const StepArgs& head) {
    step.product[STEP_LOGITS] = head.product[STEP_LOGITS], step.product[STEP_LOGITS].at = 0;
    step.packed = head.packed;
    return step_as_planned(step, head);
}

#ifdef __CUDACC__
// ---- A session's steps by this kernel: packed weights and all else it needs in the GPU's memory. If the head has
// another format than the layers, a step is two launches: phases before the head, and the head; packed embeddings are
// made numbers by a kernel before. Steps of several tokens are for bf16 weights only; both kernels read the same copy.
struct StepRoad {
    using Kernel = void (*)(const StepArgs, int, int);
    struct Part { // of the step: phases `first` .. `last` - 1
        Kernel kernel = nullptr;
        StepArgs args = {};
        int first = 0, last = 0, chunk = 0;
    };
    Context ctx;
    Part layers, head; // head.kernel null: it is in `layers`
    Part several[3];   // the whole step, of up to 2, 4 and 8 tokens
    StepArgs& args = layers.args;
    int blocks = 0, threads = 0, most = 1;
    bool by_phase = false;
    Arena arena;
    Linear<bf16> embed; // if it is packed
    int* fault = nullptr; // in the CPU's memory

    // Throws Error if this GPU or this model cannot, or (WHERE_FASTER) if its copy of the weights takes more than 1 /
    // share of the memory that is free and not `spoken_for`.
    StepRoad(const Context& where, const Config& c, const Weights<bf16>& w, size_t share = 2, size_t spoken_for = 0)
        : ctx(where) {
        by_phase = ctx.one_kernel == Context::BY_PHASE;
        blocks = ctx.gpu->sms;
        if (const char* why = step_refuses(c)) DIE("--one-kernel: not for this model: %s", why);
        if (ctx.kv_fp8) DIE("--one-kernel: not with FP8 keys and values");
        const Linear<bf16>& one = w.layers[0].qkv;
        for (const Layer<bf16>& l : w.layers)
            for (const Linear<bf16>* m : {&l.qkv, &l.o, &l.gate_up, &l.down})
                if (!step_same(*m, one)) DIE("--one-kernel: only if all layers' weights have one format");
                else if (m->adapter.rank && m->format != Format::PLAIN)
                    DIE("--one-kernel: not with an adapter beside packed weights");
        if (one.format == Format::PLAIN && w.embed.format != Format::PLAIN)
            DIE("--one-kernel: not for bf16 behind packed embeddings");
        if (w.embed.format != Format::PLAIN) embed = w.embed;
        if (blocks > BEST_BLOCKS) DIE("--one-kernel: %d multiprocessors", blocks);
        choose(layers, c, one), layers.last = args.phases();
        if (!step_same(w.head, one)) {
            choose(head, c, w.head);
            head.first = layers.last = args.phases() - 1, head.last = args.phases();
        }
        if (one.format == Format::PLAIN && !head.kernel) choose_several(c);
        arena.gpu = true;
        plan();
        size_t free = 0, all = 0;
        CUDA_CHECK(cudaMemGetInfo(&free, &all));
        if (ctx.one_kernel == Context::WHERE_FASTER && arena.used > (free - std::min(free, spoken_for)) / share)
            DIE("--one-kernel: little memory is free");
        arena.allocate("--one-kernel: a second copy of the weights"); // (products of many tokens need theirs by rows)
        plan();
        pack(c, w);
        CUDA_CHECK(cudaHostAlloc((void**)&fault, sizeof *fault, cudaHostAllocMapped));
        *fault = 0;
        CUDA_CHECK(cudaHostGetDevicePointer((void**)&args.fault, fault, 0));
    }
    StepRoad(const StepRoad&) = delete;
    ~StepRoad() {
        if (fault) cudaFreeHost(fault);
    }
    // The road, or null; who asked for it is told why, once. WHERE_FASTER: where it was measured to be (on Hopper),
    // except with ctx.invariant: its sums have another order than a prompt's.
    static std::unique_ptr<StepRoad> find(const Context& ctx, const Config& c, const Weights<bf16>& w,
                                          size_t share = 2, size_t spoken_for = 0) {
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
    // Whose step it is: the batch, of up to `most` rows, and its cache; where logits go, and each block's likeliest.
    void use(const Batch& batch, const KVCache<bf16>& cache, const float* rope, float* logits, const Draw* draw,
             unsigned long long* best) {
        args.b = batch, args.rope = rope, args.logits = logits, args.draw = draw, args.best = best;
        args.keys = cache.keys, args.values = cache.values, args.layer_size = cache.layer_size;
    }
    // On the context's stream; part of a graph, if one is being recorded.
    void launch_step() {
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
    // As step_deal deals the head's tiles.
    RowsDealt dealt() const { return {blocks, 8, args.C / 8 % blocks}; }
    void check() const {
        if (*(volatile int*)fault) DIE("--one-kernel: a block waited for over a second for another one's words");
    }

  private:
    // The kernel and its plan, for weights packed as W.
    void choose(Part& part, const Config& c, const Linear<bf16>& W) {
        with_step_weights(W, [&](auto packed) { choose_shape<1, decltype(packed)>(part, c, 1); });
        if (part.args.stages < 4) DIE("--one-kernel: %d bytes of shared memory a block are too few", most_shared());
        if (!all_resident(part)) DIE("--one-kernel: its blocks cannot all be resident on this GPU");
    }
    // As many tokens as leave the ring room: their inputs lie in shared memory.
    void choose_several(const Config& c) {
        choose_tokens<2>(several[0], c), choose_tokens<4>(several[1], c), choose_tokens<8>(several[2], c);
    }
    template <int TOKENS> void choose_tokens(Part& part, const Config& c) {
        if (most < TOKENS / 2) return;
        int N = TOKENS;
        for (; N > most; N--) {
            choose_shape<TOKENS, StepPlain>(part, c, N);
            if (part.args.stages >= 4) break;
        }
        part.last = args.phases();
        if (N > most && all_resident(part)) most = N;
    }
    template <int TOKENS, class P> void choose_shape(Part& part, const Config& c, int N) {
        auto take = [&](auto shape) {
            using S = decltype(shape);
            part.kernel = step_kernel<S>, part.chunk = P::CHUNK, threads = S::THREADS;
            part.args = plan_step<S>(c, N, blocks, (size_t)most_shared());
        };
        auto choose = [&](auto steps) {
            constexpr int STEPS = decltype(steps)::value;
            take(StepShape<8, STEPS, TOKENS, false, P>());
            cudaFuncAttributes built;
            CUDA_CHECK(cudaFuncGetAttributes(&built, part.kernel));
            if (built.ptxVersion >= 90 && ctx.gpu->sm >= 90) take(StepShape<8, STEPS, TOKENS, true, P>());
        };
        // Chunks of a stage: 16 KB; of layers in 8 bits, where rows are shorter, 1,024 numbers.
        if constexpr (P::RUNS == 2)
            if (c.C <= STEP_SMALL && &part != &head) return choose(std::integral_constant<int, 16>());
        choose(std::integral_constant<int, 32>());
    }
    static int of_device(cudaDeviceAttr what) {
        int device = 0, value = 0;
        CUDA_CHECK(cudaGetDevice(&device));
        CUDA_CHECK(cudaDeviceGetAttribute(&value, what, device));
        return value;
    }
    static int most_shared() { return of_device(cudaDevAttrMaxSharedMemoryPerBlockOptin); }
    bool all_resident(const Part& part) const {
        const int shared = (int)part.args.shared;
        int resident = 0;
        CUDA_CHECK(cudaFuncSetAttribute(part.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
        CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, part.kernel, threads, (size_t)shared));
        return by_phase || (resident && of_device(cudaDevAttrCooperativeLaunch));
    }
    void launch_part(const Part& part) {
        for (int phase = part.first; phase < part.last; phase = by_phase ? phase + 1 : part.last) {
            cudaLaunchAttribute together;
            together.id = cudaLaunchAttributeCooperative, together.val.cooperative = 1;
            cudaLaunchConfig_t config = {};
            config.gridDim = dim3(blocks), config.blockDim = dim3(threads), config.dynamicSmemBytes = part.args.shared;
            config.stream = ctx.gpu->stream, config.attrs = &together, config.numAttrs = by_phase ? 0 : 1;
            CUDA_CHECK(cudaLaunchKernelEx(&config, part.kernel, part.args, phase, by_phase ? phase + 1 : part.last));
        }
    }
    void plan() {
        args.gains = arena.take<bf16>(args.gains_of(args.L) + args.C);
        step_words(args, arena.take<uint4>(step_words(args, nullptr, most)), most);
        args.residual = arena.take<float>((size_t)most * args.C);
        args.steps = arena.take<uint32_t>(1), args.arrived = arena.take<int>(1);
        const StepProduct& logits = args.product[STEP_LOGITS];
        args.packed = arena.take<unsigned char>(logits.at + (head.kernel ? 0 : logits.bytes(layers.chunk)));
        if (head.kernel)
            head.args.packed = arena.take<unsigned char>(head.args.product[STEP_LOGITS].bytes(head.chunk));
    }
    void pack(const Config& c, const Weights<bf16>& w) {
        if (!embed.in) args.embed = w.embed.w[0];
        bf16* gains = (bf16*)args.gains;
        auto gain = [&](const bf16* from, int n) {
            CUDA_CHECK(cudaMemcpyAsync(gains, from, n * sizeof(bf16), cudaMemcpyDeviceToDevice, ctx.gpu->stream));
            gains += n;
        };
        auto matrix = [&](const Linear<bf16>& W, const Part& part, int phase, size_t layer) { // (neighbouring blocks)
            const StepProduct& q = part.args.product[phase];
            unsigned char* to = (unsigned char*)part.args.packed +
                                (&part == &head ? 0 : layer * part.args.layer_bytes + q.at);
            with_step_weights(W, [&](auto packed) {
                using P = decltype(packed);
                const StepPacking<P> p = {to, step_source(W, packed), q, (size_t)c.F};
                launch_kernel(ctx, false, step_pack_kernel<P>,
                              dim3((unsigned)((q.bytes(P::CHUNK) / 16 + 255) / 256)), 256, 0, p);
            });
        };
        for (size_t l = 0; l < w.layers.size(); l++) {
            const Layer<bf16>& y = w.layers[l];
            matrix(y.qkv, layers, STEP_QKV, l), matrix(y.o, layers, STEP_O, l);
            matrix(y.gate_up, layers, STEP_GATE_UP, l), matrix(y.down, layers, STEP_DOWN, l);
            gain(y.norm1, c.C), gain(y.norm2, c.C), gain(y.q_norm, c.D), gain(y.k_norm, c.D);
        }
        matrix(w.head, head.kernel ? head : layers, STEP_LOGITS, 0);
        gain(w.norm, c.C);
    }
};
#endif
