// train/teacher.cpp: the teacher's passes, and the trainer's part in distillation: losses and gradients of a batch.
#include "train/teacher.h"
#include "base/options.h" // interrupted
#include "model/device.h"
#include "model/instances.h"
#include "model/pace.h"
#include "train/trainer.h"
#include <algorithm>
#include <vector>

#ifdef QWEN3_PORTABLE
static constexpr bool PACKED_ON_GPU = false;
#else
static constexpr bool PACKED_ON_GPU = true;
#endif

template <class T>
Teacher<T>::Teacher(const std::string& path, const Context& where, const ModelFile& student)
    : file(path), c(file.config), ctx(where),
      w(file, Format::PLAIN, std::is_same_v<T, bf16> && (!where.gpu || PACKED_ON_GPU)) {
    if (c.V != student.config.V)
        DIE("%s: a vocabulary of %d rows, and %s has one of %d: --teacher needs the same", path.c_str(), c.V,
            student.path.c_str(), student.config.V);
    if constexpr (HAS_GPU<T>) if (ctx.gpu) {
        ctx = with_own_scratch(ctx);
        w.upload(ctx, file);
    }
}

template <class T> size_t Teacher<T>::bytes() const {
    if (ctx.gpu) return w.gpu.size;
    size_t all = 0;
    for (const MappedFile& map : file.maps) all += map.size;
    return all;
}

template <class T> void Teacher<T>::plan(Arena& arena, int N, size_t pages, int longest, int rows) {
    a.plan(arena, c, N, !ctx.gpu);
    kv.plan(arena, c, pages, true);
    rope = arena.take<A>((size_t)longest * c.D), positions = longest;
    logits = arena.take<A>((size_t)rows * c.V), picked = arena.take<T>((size_t)rows * c.C);
    if constexpr (WITH_GPU) if (ctx.gpu) plan_scratch(ctx, arena);
}

template <class T> void Teacher<T>::fill() {
    std::vector<A> angles((size_t)positions * c.D);
    fill_rope(angles.data(), positions, c.D, c.rope_theta, c.rope_scaling);
    copy_in(ctx, rope, angles.data(), angles.size());
}

template <class T> template <class F> void Teacher<T>::timed(F compute) {
    auto now = [&] {
        if constexpr (WITH_GPU) if (ctx.gpu) gpu_synchronize(ctx);
        return seconds();
    };
    const double start = now();
    compute();
    time += now() - start;
}
template <class T> void Teacher<T>::forward(const Batch& b) {
    timed([&] { ::forward(ctx, c, w, b, a, kv, rope); });
}
template <class T> const acc<T>* Teacher<T>::logits_of(const int* rows, int R) {
    timed([&] { RUN(head, logits, picked, a.normed, rows, w.head, R); });
    return logits;
}

template <class T> double Teacher<T>::flops(double N, double pairs, double R) const {
    double products = 0;
    for (const ModelTensor& t : model_tensors(c))
        if (t.kind < MODULES) products += (double)t.size();
    return 2 * N * products + 4. * c.H * c.D * c.L * pairs + 2 * R * c.V * c.C;
}

// ---- The trainer with a teacher

// Whether a step is on the student's own answers.
template <class T> bool Trainer<T>::on_policy(int64_t k) const {
    return philox(o.seed, (uint64_t)k, STREAM_DISTIL).v[0] < o.distil.on_policy * 4294967296.;
}

// Adds up the losses of a batch in results[0], the divergences in results[2], in results[3] for how many tokens both
// models have the same likeliest id. With `to` also computes d.normed and the head's gradient, of `scale` times the
// sum of losses. It is loss_backward with both models' logits.
// The teacher's distribution is computed, or reported in the rows as some outcomes.
template <class T>
void Trainer<T>::distil_backward(const Batch& b, int R, const Gradients<T>* to, A scale, const Distillation& how) {
    const size_t ld = (size_t)c.V * (sizeof(A) / sizeof(T));
    T* const dlogits = to ? (T*)d.logits : nullptr;
    const Distilled<A> out = {loss, divergences, agrees};
    if (teacher) teacher->forward(b);
    if (to) clear(ctx, d.normed, (size_t)b.N * c.C);
    for (int r = 0; r < R && !interrupted; r += d.head_rows) {
        const int n = std::min(d.head_rows, R - r), *rows = loader.named + r;
        const Distilled<A> part = {out.loss + r, out.divergence + r, out.agrees + r};
        RUN(head, d.logits, d.picked, a.normed, rows, w.head, n);
        compare(part, to, rows, r, n, scale, how);
        if (!to) continue;
        if (to->head) RUN(linear_backward_weight, to->head, dlogits, ld, d.picked, n, c.V, c.C);
        RUN(head_backward, d.normed, dlogits, ld, ones, rows, w.head, n);
    }
    RUN(add_losses, results, out.loss, R);
    RUN(add_losses, results + 2, out.divergence, R);
    RUN(add_losses, results + 3, out.agrees, R);
}

// The losses of n rows of d.logits, from the batch's trained token `first` on; their gradients replace them.
template <class T>
void Trainer<T>::compare(const Distilled<A>& out, bool gradient, const int* rows, int first, int n, A scale,
                         const Distillation& how) {
    T* const dlogits = gradient ? (T*)d.logits : nullptr;
    if (teacher) {
        const DistillationRows<A> of = {teacher->logits_of(rows, n), loader.target + first, how, scale, n, c.V};
        RUN(distillation, out, dlogits, d.logits, of);
        return;
    }
    const int J = loader.outcomes, *ids = loader.outcome + (size_t)first * J;
    const DistillationRows<A> of = {loader.log_p + (size_t)first * J, first_outcome, how, scale, n, J};
    T* const dz = gradient ? (T*)outcomes : nullptr;
    RUN(gather_outcomes, outcomes, tails, d.logits, ids, n, J, c.V);
    RUN(distillation, out, dz, outcomes, of);
    if (!gradient) return;
    RUN(scatter_outcomes, dlogits, d.logits, dz, J * (sizeof(A) / sizeof(T)), tails, ids, n, J, c.V);
}

// Adds up the losses of this rank's own answers, and the gradients of their mean over the `all` tokens of the step: the
// divergence alone, as GKD, since an answer's own cross entropy would only sharpen what the student does.
template <class T> void Trainer<T>::add_own_answers(size_t all) {
    Distillation how = o.distil;
    how.weight = 1;
    clear(ctx, results, 4);
    const std::vector<size_t> list = all_groups();
    each_batch(groups, list, [&](const Batch& b, size_t first, int R) {
        distil_backward(b, R, &params.g, 1 / (A)all, how);
        params.last_batch = first + o.batch >= list.size();
        backward(ctx, c, w, b, a, d, params.g, kv, rope);
    });
}

// The number of tokens of the step's own answers, of all ranks.
template <class T> size_t Trainer<T>::drawn_tokens() {
    double all = 0;
    for (size_t i = 0; i < groups.rows.size(); i++) all += (double)groups.length(i);
    ranks.sum(&all, 1);
    return std::max<size_t>(1, (size_t)all); // (none if it was interrupted)
}

template <class T> void Trainer<T>::set_distilled(const double* sums, size_t all) {
    divergence = sums[0] / (double)all, agreement = sums[1] / (double)all;
}

#define INSTANTIATE(T) \
    template struct Teacher<T>; \
    template bool Trainer<T>::on_policy(int64_t) const; \
    template void Trainer<T>::distil_backward(const Batch&, int, const Gradients<T>*, acc<T>, const Distillation&); \
    template void Trainer<T>::add_own_answers(size_t); \
    template size_t Trainer<T>::drawn_tokens(); \
    template void Trainer<T>::set_distilled(const double*, size_t);
QWEN3_INSTANCES(INSTANTIATE)
#undef INSTANTIATE
