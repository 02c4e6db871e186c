// train/plan.cpp: the memory of a training run: one arena, and the use of its arrays.
#include "qwen3.cu"
#include "model/device.h"
#include "model/adapters.h"
#include "model/instances.h"
#include "model/session.h"
#include "train/trainer.h"

template <class T> std::vector<typename Trainer<T>::Part> Trainer<T>::plan() {
    std::vector<Part> parts;
    auto part = [&](const char* name, size_t before) { parts.push_back({name, arena.used - before}); };
    size_t before = arena.used;
    const int N = loader.most_tokens;
    params.plan_copies(arena);
    part("parameters", before), before = arena.used;
    params.plan_gradients(arena);
    part("gradients and moments", before), before = arena.used;
    h = arena.take<T>(o.full ? 0 : (size_t)N * each_adapter(w, [](Linear<T>&, AdapterPlace) {}).h);
    expert_h = arena.take<T>(ctx.gpu && adapts_experts() ? (size_t)N * c.k * 2 * params.rank : 0);
    kept = arena.take<uint32_t>(ctx.gpu && o.dropout > 0 ? each_kept([](Linear<T>&, size_t) {}) : 0);
    const size_t dora = dora_rows();
    u = arena.take<T>((size_t)N * (o.recompute ? dora / c.L : dora));
    dora_norms = arena.take<A>(2 * dora);
    const size_t scratch = arena.used;
    a.plan_training(arena, c, N, o.recompute, ample, (bool)ctx.gpu);
    kv.plan(arena, c, (size_t)N / PAGE + loader.sequences(), !ample);
    part("activations", before), before = arena.used;
    const bool distilled = distils(data) || (eval && distils(*eval));
    const bool halves = distilled && ctx.gpu; // a float's memory holds two bf16
    const int rows = std::min(halves ? (N + 1) / 2 * 2 : N, ctx.gpu ? gpu_head_rows(o.full || o.lora.head) : HEAD_ROWS);
    d.plan(arena, c, N, params.rank, rows, (bool)ctx.gpu);
    d.head_rows = halves ? rows / 2 : rows;
    const size_t out = std::max((c.H + 2 * c.K) * c.D, 2 * c.F), in = std::max({c.C, c.H * c.D, c.F});
    d.u = arena.take<T>(dora ? N * out : 0);
    dora_off = arena.take<T>(dora && o.dropout > 0 ? N * out : 0);
    dora_x = arena.take<T>(dora && o.dropout > 0 && ctx.gpu ? 2 * N * in : 0);
    part("their gradients, logits", before), before = arena.used;
    if (answers()) plan_answers(scratch); // before all that must outlive an answer
    if (arena.used > before) part("answers", before), before = arena.used;
    if (distilled) plan_distillation();
    if (arena.used > before) part("the teacher", before), before = arena.used;
    for (auto& model : reward_models) model->plan(arena, loader.most_tokens, loader.sequences(), loader.longest);
    if (!reward_models.empty()) part("reward models", before), before = arena.used;
    rope = arena.take<A>((size_t)positions() * c.D);
    loss = arena.take<A>(N);
    results = arena.take<double>(4);
    loader.plan(arena);
    if constexpr (WITH_GPU) {
        if (ctx.gpu && answers()) plan_scratch(ctx, arena, c, N, engine.sequences, positions(), 0);
        else if (ctx.gpu) plan_scratch(ctx, arena); // (its attention splits no keys)
    }
    part("the rest", before);
    return parts;
}

template <class T> void Trainer<T>::reserve() {
    std::vector<Part> parts = plan();
    size_t have = available_memory();
    // Activations::ample takes a third more memory. A small run leaves the rest of the GPU to others; a large run uses
    // it if it does not fill the GPU.
    if constexpr (WITH_GPU) if (ctx.gpu) {
        have = gpu_free_memory();
        const auto plan_anew = [&](bool more) { ample = more, arena.used = 0, parts = plan(); };
        if (!o.recompute && arena.used > gpu_all_memory() / 8) {
            plan_anew(true);
            if (arena.used > have / 5 * 4) plan_anew(false);
        }
    }
    memory = format("memory: %.1f MB%s:", (double)arena.used / 1e6, ample ? ", SwiGLU and RoPE kept" : "");
    for (auto& part : parts)
        memory += format("%s %s %.1f", &part == &parts.front() ? "" : ",", part.name, (double)part.bytes / 1e6);
    arena.gpu = ctx.gpu != nullptr;
    if (arena.used > have)
        DIE("%s: training needs %zu bytes of %s, %zu more than there are; --recompute, a smaller --batch with more "
            "--accum, --max-len%s need less", file.path.c_str(), arena.used, ctx.gpu ? "GPU memory" : "memory",
            arena.used - have, o.full ? ", LoRA instead of --full" : ", --rank");
    arena.allocate("training");
    plan();
}

template <class T> void Trainer<T>::plan_distillation() {
    const size_t pages = (size_t)loader.most_tokens / PAGE + loader.sequences();
    if (teacher) teacher->plan(arena, loader.most_tokens, pages, loader.longest, d.head_rows);
    divergences = arena.take<A>(loader.most_tokens), agrees = arena.take<A>(loader.most_tokens);
    outcomes = arena.take<A>((size_t)d.head_rows * loader.outcomes), tails = arena.take<A>(d.head_rows);
    first_outcome = arena.take<int>(d.head_rows), ones = arena.take<A>(d.head_rows);
}

// Sampled answers use the memory that holds training's activations at other times.
template <class T> void Trainer<T>::plan_answers(size_t scratch) {
    const size_t end = arena.used;
    const size_t sequences = o.samples() ? loader.sequences() : questions.list.size(); // (questions change no batch)
    engine.sequences = (int)std::min(sequences, (size_t)loader.most_tokens);
    engine.tokens = std::min(loader.most_tokens, std::max(ctx.gpu ? Session<T>::GPU_CHUNK : Session<T>::CHUNK,
                                                          engine.sequences));
    const int of_answer = o.samples() ? loader.max_pages : 0, of_question = (questions.positions + PAGE - 1) / PAGE;
    engine.pages = std::max(of_answer, of_question);
    engine.all_pages = std::max((size_t)engine.sequences * of_answer,
                                std::min(questions.list.size(), (size_t)engine.sequences) * of_question);
    arena.used = scratch;
    engine.plan(arena);
    arena.used = std::max(arena.used, end);
    if (!o.grpo) return;
    by = arena.take<A>(loader.most_tokens), norm = arena.take<T>(c.C);
    if (o.rl.kl_beta > 0) first_stored = arena.take<T>(params.count), params.first_m = arena.take<A>(dora_rows());
}

// Calls f(linear, at) for each product that has an adapter: the place of its DropoutMasks. With --recompute all layers
// share one place. Returns the end of the last.
template <class T> size_t Trainer<T>::each_kept(const std::function<void(Linear<T>& linear, size_t at)>& f) {
    size_t at = 0, end = 0;
    int layer = 0;
    each_adapter(w, [&](Linear<T>& linear, AdapterPlace) {
        const Adapter<T>& a = linear.adapter;
        const int its = module_numbered(a.module[0], c.L).layer;
        if (o.recompute && its != layer) layer = its, at = 0;
        f(linear, at);
        at += DropoutMasks::size(a.modules, linear.in, loader.most_tokens), end = std::max(end, at);
    });
    return end;
}

// Points the adapters at their h and masks.
template <class T> void Trainer<T>::fill() {
    if (!o.full) {
        const size_t all = dora_rows();
        each_adapter(w, [&](Linear<T>& linear, AdapterPlace at) {
            const bool of_expert = module_numbered(linear.adapter.module[0], c.L).expert >= 0;
            linear.adapter.h = ctx.gpu && of_expert ? expert_h : h + at.h * loader.most_tokens;
            Dora<T>& dora = linear.adapter.dora;
            const size_t layer = all / c.L, in = std::max({c.C, c.H * c.D, c.F});
            dora.norm = dora_norms + at.u, dora.c = dora_norms + all + at.u, dora.off = dora_off;
            dora.u = u + (o.recompute && all ? at.u % layer : at.u) * loader.most_tokens;
            dora.x = dora_x, dora.dx = dora_x + loader.most_tokens * in;
        });
        each_kept([&](Linear<T>& linear, size_t at) { linear.adapter.kept = kept + at; });
    }
    std::vector<A> angles((size_t)positions() * c.D);
    fill_rope(angles.data(), positions(), c.D, c.rope_theta, c.rope_scaling);
    copy_in(ctx, rope, angles.data(), angles.size());
    engine.rope = rope;
    if (o.grpo) set_temperature();
    for (auto& model : reward_models) model->base.fill();
    if (teacher) teacher->fill();
    if (!distils(data) && !(eval && distils(*eval))) return;
    const std::vector<A> all(d.head_rows, 1);
    copy_in(ctx, ones, all.data(), all.size());
    clear(ctx, first_outcome, d.head_rows);
}

#define INSTANTIATE(T) \
    template void Trainer<T>::reserve(); \
    template void Trainer<T>::fill();
QWEN3_INSTANCES(INSTANTIATE)
#undef INSTANTIATE
