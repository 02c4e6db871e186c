// train/step.cpp: the trainer's beginning, and a step: gradients of rows, sums over ranks, and
// AdamW by Parameters::update.
#include "base/options.h" // interrupted
#include "model/adapters.h"
#include "model/balance.h"
#include "model/device.h"
#include "model/instances.h"
#include "train/trainer.h"

template <class T>
Trainer<T>::Trainer(const TrainOptions& options, const Context& where, const ModelFile& f, const Dataset& train,
                    const Dataset* evaluation, const Questions& asked)
    : o(options), ranks(*o.ranks), ctx(where), file(f), c(f.config), w(f, Format::PLAIN, keeps_packed<T>(options, where)),
      data(train), eval(evaluation), questions(asked), loader(o, ctx, c, data), params(o, ctx, file, w) {
    ctx.stop = &interrupted;
    if (o.samples()) open_rewards();
    if (!o.teacher.empty()) teacher = std::make_unique<Teacher<T>>(o.teacher, ctx, file);
    loader.choose_rows(eval);
    steps = o.steps ? o.steps : (int64_t)std::ceil((o.epochs ? o.epochs : EPOCHS) * (double)loader.epoch_steps);
    if (o.rl.model_scores()) open_reward_models();
    run = describe_run(o, file, data, steps, type_name(w));
    agree();
    if (!o.full) check_dora("--dora", c, o.lora);
    if (!o.full) params.rank = adapt(w, o.lora, o.rank_step);
    if (!o.full && o.dropout > 0 && std::max({c.C, c.H * c.D, c.F}) > 1 << 19)
        DIE("%s: --dropout: layers wider than 2^19", file.path.c_str());
    if (ctx.gpu && c.E && o.full)
        DIE("%s: --full: a mixture of experts is trained on the CPU only (--device cpu); a GPU trains adapters of it",
            file.path.c_str());
    if (ctx.gpu && adapts_experts() && o.dropout > 0)
        DIE("%s: a GPU trains adapters of experts without dropout: --dropout 0, or --targets q,k,v,o (or --device cpu)",
            file.path.c_str());
    if (!o.full && o.dropout > 0 && (int64_t)MODULES * c.L * (c.E + 1) > 1 << 16)
        DIE("%s: --dropout: more than 2^16 modules", file.path.c_str());
    if (c.balance > 0 && (o.preference || o.grpo))
        DIE("%s: output_router_logits asks for the load-balancing loss, which is of training on answers only",
            file.path.c_str());
    params.measure();
    params.divide();
    if constexpr (HAS_GPU<T>) if (ctx.gpu && !o.full) w.upload(ctx, file); // (--full has its own copies)
    reserve();
    params.begin(first_stored);
    fill();
    params.begin_dora();
}

template <class T> void Trainer<T>::agree() {
    sj::Doc doc;
    sj::parse(doc, run);
    std::string facts = format("device\t%s\n", ctx.gpu ? "a GPU" : "the CPU");
    for (auto [key, value] : doc.root().members())
        facts += format("%s\t%s\n", std::string(key).c_str(), sj::dump(value).c_str());
    const uint64_t hash = eval ? fnv1a(eval->file.data, eval->file.size) : 0;
    facts += format("--eval\t%016llx\n--eval-every\t%lld\n", (unsigned long long)hash, (long long)o.eval_every);
    facts += format("--save-every\t%lld\n--resume\t%d\n--no-overlap\t%d\n", (long long)o.save_every, o.resume,
                    !o.overlap);
    ranks.must_agree(facts);
}

template <class T> void Trainer<T>::use_dropout(bool on) {
    const Dropout* used = on && o.dropout > 0 ? &dropout : nullptr;
    each_adapter(w, [&](Linear<T>& linear, AdapterPlace) { linear.adapter.dropout = used; });
    a.noise = on && o.neftune > 0 ? &noise : nullptr;
}

// ---- Batches

template <class T> template <class From>
void Trainer<T>::each_batch(const From& from, const std::vector<size_t>& list, const OnBatch& f,
                            const std::set<size_t>* wanted) {
    for (size_t first = 0; first < list.size() && !interrupted; first += o.batch) {
        int R;
        const int n = (int)std::min((size_t)o.batch, list.size() - first);
        auto is_wanted = [&](size_t unit) { return wanted->count(unit) > 0; };
        if (wanted && std::none_of(&list[first], &list[first] + n, is_wanted)) continue;
        const Batch b = loader.load(from, &list[first], n, (int)first, R, o.scores());
        forward(ctx, c, w, b, a, kv, rope);
        f(b, first, R);
    }
}

template <class T> std::vector<acc<T>> Trainer<T>::losses_of(const Batch& b, int R) {
    std::vector<A> losses(R);
    loss_backward<T>(ctx, c, w, a, d, nullptr, loss, {loader.named, loader.target, 0, nullptr, R}, b.N);
    copy_out(ctx, losses.data(), loss, losses.size());
    return losses;
}

// Adds up the losses of units in results[0], and the gradients of that sum divided by `all` in `to` (null: none).
template <class T>
void Trainer<T>::add_rows(const Dataset& from, const std::vector<size_t>& list, const Gradients<T>* to, size_t all) {
    const A scale = 1 / (A)all;
    clear(ctx, results, 4);
    double sum = 0; // of preferences
    preferences = {};
    const OnBatch add = [&](const Batch& b, size_t first, int R) {
        if (o.preference) sum += preferences_backward(from, &list[first], b, R, to, scale);
        else if (distils(from)) distil_backward(b, R, to, scale, o.distil);
        else {
            loss_backward<T>(ctx, c, w, a, d, to, loss, {loader.named, loader.target, scale, nullptr, R}, b.N);
            RUN(add_losses, results, loss, R);
            if (to && c.balance > 0) // weighted by the batch's part of the step's trained tokens
                balance_loss(ctx, results, d.slope, c, a, b, (double)c.balance * R,
                             (double)c.balance * R / (double)all);
        }
        params.last_batch = first + o.batch >= list.size();
        if (to) backward(ctx, c, w, b, a, d, *to, kv, rope);
    };
    if (from.labelled()) {
        find_kl(from, list, to != nullptr, all);
        each_batch(Half{from, 0}, list, add);
    } else each_batch(from, list, add);
    if (o.preference) copy_in(ctx, results, &sum, 1);
}

template <class T> size_t Trainer<T>::weight(const Dataset& from, const std::vector<size_t>& list) const {
    return o.preference ? list.size() : trained_tokens(from, list);
}

// ---- Steps

// The factor of the learning rate in step k = 0, 1, ..: as in transformers' get_cosine_schedule_with_warmup and its
// linear and constant variants, except that a run of one step has no warm-up: its rate would be 0.
static double schedule(const TrainOptions& o, int64_t k, int64_t steps) {
    const int64_t warm = (int64_t)std::ceil(o.warmup * (double)steps);
    if (k < warm && steps > 1) return (double)k / (double)warm;
    const double done = (double)std::max<int64_t>(0, k - warm) / (double)std::max<int64_t>(1, steps - warm);
    if (o.schedule == "linear") return 1 - done;
    return o.schedule == "cosine" ? 0.5 * (1 + std::cos(M_PI * done)) : 1;
}

template <class T> void Trainer<T>::add_gradients(const std::vector<size_t>& list, size_t all) {
    dropout = {o.dropout, o.seed, (uint32_t)step, loader.place};
    noise = {o.seed, (uint32_t)step, loader.place, loader.bound};
    use_dropout(true);
    params.clear_gradient();
    if (o.grpo) add_groups();
    else if (on_policy(step)) add_own_answers(all);
    else add_rows(data, list, &params.g, all);
    if (ranks.size == 1) return;
    loader.places.clear();
    params.add_up(-1);
    ranks.finish();
    clear(ctx, results + 1, 1); // (no kernel launched after a clear starts before it: see launch_kernel)
}

// Counts of a step: fed tokens; multiplications and additions: forward; backward to the input, and to the trained
// parameters; one more pass to sample answers; with --grpo one for the reference; with --kto one for the mismatched
// rows, which are as long on average; the teacher's pass.
template <class T> template <class From>
typename Trainer<T>::Work Trainer<T>::work_of(const From& from, const std::vector<size_t>& list) const {
    double N = 0, pairs = 0, products = 0, adapters = 0;
    each_row(from, list, [&](DatasetRow row) {
        const double n = (double)row.size() - 1;
        N += n, pairs += n * (n + 1) / 2;
    });
    for (const ModelTensor& t : model_tensors(c))
        if (t.kind < MODULES) {
            const double used = t.expert < 0 ? 1 : (double)c.k / c.E; // by a token, on average
            products += used * (double)t.size();
            if (!o.full && o.lora.targets[t.kind]) adapters += used * o.lora.rank * (t.rows + t.columns);
        }
    const int more = std::is_same_v<From, Groups> + (first_stored != nullptr) + data.labelled();
    const double passes = (o.full ? 3 : 2) + o.recompute + more, attention = 4. * c.H * c.D * c.L * pairs;
    const double heads = (o.full || o.lora.head ? 3 : 2) + (o.preference || o.grpo) + more;
    const double R = (double)trained_tokens(from, list), head = o.scores() ? 0 : R * c.V * c.C * heads;
    const double scores = attention * (3.5 + o.recompute + more);
    const double theirs = teacher ? teacher->flops(N, pairs, R) : 0;
    return {N, 2 * N * (products * passes + adapters * (3 + more)) + scores + 2 * head + theirs};
}

template <class T> bool Trainer<T>::train_step() {
    const std::vector<size_t> list = loader.rows_of(step);
    const bool samples = o.grpo || on_policy(step);
    if (samples) take_groups(list);
    else rewarded = {};
    const size_t all = o.grpo ? 1 : samples ? drawn_tokens() : weight(data, list);
    add_gradients(samples ? std::vector<size_t>() : loader.deal_step(list), all);
    Work work = samples ? work_of(groups, all_groups())
                        : data.labelled() ? work_of(Half{data, 0}, list) : work_of(data, list);
    if (samples) ranks.sum((double*)&work, 2);
    RUN(grad_norm, results + 1, params.partial, params.own_gradient, params.own);
    double result[4];
    copy_out(ctx, result, results, 4);
    // The sums over all ranks. (Their parts of the norm cover different parameters if each owns a part.)
    ranks.look_at_the_clock();
    struct { double loss, squares, stop, waited, distilled[2]; Preferences preferences; } told =
        {result[0], result[1] * result[1], (double)interrupted, ranks.waited, {result[2], result[3]}, preferences};
    ranks.sum((double*)&told, sizeof told / sizeof(double));
    waited = told.waited / ranks.size, preferences = told.preferences;
    if (o.preference) preferences.divide();
    if (samples) rewarded.sum_over(ranks), rewarded.divide();
    set_distilled(told.distilled, all);
    if (told.stop > 0) return interrupted = 1, false;
    if (params.sharded()) {
        result[1] = std::sqrt(told.squares);
        copy_in(ctx, results + 1, result + 1, 1);
    }
    last_loss = told.loss / (double)all, last_norm = result[1];
    if (!std::isfinite(last_loss) || !std::isfinite(last_norm))
        not_finite(data, list, format("step %lld: loss %g, gradient norm %g", (long long)step + 1,
                                      std::fabs(last_loss), last_norm));
    last_lr = o.lr * schedule(o, step, steps);
    params.update(results + 1, last_lr, step);
    tokens_fed = work.tokens, tokens_done += (size_t)work.tokens, flops = work.flops;
    step++;
    return true;
}

template <class T> double Trainer<T>::mean_loss(const Dataset& from, const std::vector<size_t>& list) {
    use_dropout(false);
    const size_t all = weight(from, list);
    add_rows(from, list, nullptr, all);
    if (o.preference) preferences.divide();
    double sums[4];
    copy_out(ctx, sums, results, 4);
    set_distilled(sums + 2, all);
    return sums[0] / (double)all;
}

template <class T>
void Trainer<T>::not_finite(const Dataset& from, const std::vector<size_t>& list, const std::string& what) {
    if (ranks.rank > 0) ranks.wait_for_the_end();
    std::vector<size_t> blamed;
    for (size_t row : o.grpo ? std::vector<size_t>() : list) // (their answers are gone)
        if (!std::isfinite(mean_loss(from, {row}))) blamed.push_back(row);
    const std::vector<size_t>& shown = blamed.empty() ? list : blamed;
    std::string numbers;
    for (size_t i = 0; i < std::min(shown.size(), (size_t)20); i++)
        numbers += format("%s%zu", i ? ", " : "", shown[i]);
    if (shown.size() > 20) numbers += format(", .. (%zu in all)", shown.size());
    DIE("%s: %s; %s: %s", from.file.path.c_str(), what.c_str(),
        format(o.grpo ? "the %ss" : blamed.empty() ? "each %s's own loss is finite; the %ss"
                                                   : "%ss whose loss is not finite",
               loader.unit(), loader.unit()).c_str(),
        numbers.c_str());
}

#define INSTANTIATE(T) \
    template Trainer<T>::Trainer(const TrainOptions&, const Context&, const ModelFile&, const Dataset&, \
                                 const Dataset*, const Questions&); \
    template bool Trainer<T>::train_step(); \
    template double Trainer<T>::mean_loss(const Dataset&, const std::vector<size_t>&); \
    template size_t Trainer<T>::weight(const Dataset&, const std::vector<size_t>&) const; \
    template void Trainer<T>::add_gradients(const std::vector<size_t>&, size_t); \
    template void Trainer<T>::not_finite(const Dataset&, const std::vector<size_t>&, const std::string&); \
    template void Trainer<T>::use_dropout(bool); \
    template void Trainer<T>::each_batch(const Dataset&, const std::vector<size_t>&, const OnBatch&, \
                                         const std::set<size_t>*); \
    template void Trainer<T>::each_batch(const Half&, const std::vector<size_t>&, const OnBatch&, \
                                         const std::set<size_t>*); \
    template void Trainer<T>::each_batch(const Groups&, const std::vector<size_t>&, const OnBatch&, \
                                         const std::set<size_t>*); \
    template std::vector<acc<T>> Trainer<T>::losses_of(const Batch&, int);
QWEN3_INSTANCES(INSTANTIATE)
#undef INSTANTIATE
