/* train_lora.cu: fine-tuning of Qwen3 on answers, on preferences or on rewards, with LoRA or of all parameters.

   Build:  make
   Run:    ./train_lora model.bin train.bin -o out/        (datagen pack makes train.bin)
           ./qwen3 model.bin --adapter out/ -i "..."

   What a step is: `batch` x `accum` rows, in an order that Philox draws for each epoch. `batch` rows at a time are
   packed into one ragged batch, each a sequence of its own that begins at position 0; there is no padding. `forward`
   and `backward` (qwen3.cu) add up the gradients of the loss, which is the sum over the step's trained tokens divided
   by their number in the whole step: so it does not matter into how many batches the step is cut. Then AdamW moves the
   master parameters, which are float32, and their copies of type T, which the products read.

   With --dpo a unit of data is not a row but a pair, two rows with one prompt, and the loss is a mean over pairs. Its
   gradient by the logits of a token is that of cross entropy times a number of its row, so that nothing but the head's
   pass differs: once for the losses, which give the numbers; then row by row, each with its number as `scale`.

   With --grpo it is a prompt, and its rows are made in the run: `group` answers that the model draws, each worth what
   rewards.h says. Here every token has a number of its own (grpo.h), by which its row of the head's gradient is scaled.

   With LoRA the parameters are the A and B of each targeted module and nothing else; with --full all of the model's.
   Either way they are one array, and so are their gradients and AdamW's two moments: p, g, m, v.

   Several GPUs (ranks.h) share each step: every rank has its rows of it, and the sums of gradients over all ranks are
   those of the whole step. With LoRA each rank has all parameters and moments and moves them alike. With --full each
   owns a part of them (ZeRO stage 1; Rajbhandari et al., 2020): it gets the sums of that part, moves its parameters,
   and sends the others their copies of type T. Rank 0 evaluates, and writes all there is to write.

   What is random (order of rows, first A, dropout) is a function of seed, step and place, so that a run that was
   stopped goes on bit by bit as if it had not been. It is the arithmetic of PEFT and transformers' Trainer: see
   tests/unit/test_train.cpp, which holds it to theirs.

   Contents: 1 options  2 preferences, rewards  3 memory, batches, steps  4 log and curve  5 merge  6 main
*/
#include "model/ceilings.h"
#include "model/chat_template.h"
#include "model/device.h"
#include "model/pace.h"
#include "model/quantize.h"
#include "model/session.h"
#include "model/write.h"
#include "qwen3.cu"
#include "gpu/backward.h"
#include "model/dataset.h"
#include "train/grpo.h"
#include "train/ranks.h"

// ================================================================================================== 1 Options

struct Options : ModelOptions {
    std::string train, out, eval, adapter_init, merge, merge_as, schedule = "cosine";
    AdapterConfig lora;
    float dropout = 0.1f;
    double lr = 1.5e-4, weight_decay = 0.01, warmup = 0.1, clip = 1, epochs = 0; // 0: not said
    int batch = 16, accum = 1, max_len = 512;
    int64_t steps = 0, eval_every = 0, save_every = 0; // 0: epochs say, every epoch
    uint64_t seed = 42;
    bool shuffle = true, resume = false, overwrite = false, full = false, recompute = false, allow_leak = false;
    bool dpo = false, overlap = true;
    int gpus = 1;
    std::shared_ptr<Ranks> ranks = std::make_shared<Ranks>("train_lora");
    double beta = 0.1, label_smoothing = 0;
    std::string says_dpo, says_grpo; // the last of the options that need --dpo, --grpo
    bool grpo = false;
    GrpoOptions rl;
    int rank_step = 1; // see adapt: GPU_RANK_STEP on a GPU
    std::string says_lora; // the last of the options that --adapter-init and --full leave no room for
};

constexpr double EPOCHS = 2;
constexpr double DPO_LR = 5e-6; // LLaMA-Factory's example for LoRA; without dropout, as TRL
constexpr double GRPO_LR = 1e-5;

static const char* USAGE =
    "usage: train_lora MODEL TRAIN.bin -o OUT [options]       fine-tunes; datagen pack makes TRAIN.bin\n"
    "       train_lora MODEL --adapter-init DIR --merge PATH   merges an adapter into the model\n"
    "       train_lora --version\n";

static void parse_targets(AdapterConfig& lora, const std::string& list) {
    std::fill(lora.targets, lora.targets + MODULES, list == "all");
    for (size_t at = 0, end; list != "all" && at <= list.size(); at = end + 1) {
        end = std::min(list.find(',', at), list.size());
        const std::string one = list.substr(at, end - at);
        const int m = std::max(module_of(one), module_of(one + "_proj"));
        if (m < 0) DIE("--targets: %.40s is none of q, k, v, o, gate, up, down", one.c_str());
        lora.targets[m] = true;
    }
}

static std::vector<Option> option_table(Options& o) {
    auto lora = [&o](Setter set) { // of the adapter
        return [&o, set](const char* option, const char* v) { o.says_lora = option, set(option, v); };
    };
    auto dpo = [&o](Setter set) {
        return [&o, set](const char* option, const char* v) { o.says_dpo = option, set(option, v); };
    };
    auto grpo = [&o](Setter set) {
        return [&o, set](const char* option, const char* v) { o.says_grpo = option, set(option, v); };
    };
    GrpoOptions& rl = o.rl;
    const Setter targets = [&o](const char*, const char* v) { parse_targets(o.lora, v); };
    std::vector<Option> table = {
        {"-o", "--output", "DIR", "adapter, log, curve and state go there", file_name(o.out)},
        {"", "--full", "", "trains all parameters and writes OUT/model.bin; without it LoRA:", flag(o.full)},
        {"", "--rank", "N", "of the adapter: 32", lora(whole(o.lora.rank, 1, MAX_RANK))},
        {"", "--alpha", "X", "2 x rank: what the adapter adds is scaled by alpha / rank",
         lora(number(o.lora.alpha, 1e-6, 1e6))},
        {"", "--rslora", "", "... by alpha / sqrt(rank)", lora(flag(o.lora.rslora))},
        {"", "--targets", "LIST", "all, or some of q,k,v,o,gate,up,down", lora(targets)},
        {"", "--dropout", "P", "0.1; with --dpo and --grpo 0", number(o.dropout, 0, 0.99)},
        {"", "--adapter-init", "DIR", "begins with this adapter, and its rank, alpha and targets",
         file_name(o.adapter_init)},
        {"", "--dpo", "", "trains on pairs of a chosen and a rejected answer; a row below is then a pair", flag(o.dpo)},
        {"", "--beta", "X", "... how strongly the model is held to what it was: 0.1",
         dpo(number(o.beta, 1e-6, 1e6))},
        {"", "--label-smoothing", "X", "... the share of pairs taken to be the wrong way round: 0",
         dpo(number(o.label_smoothing, 0, 0.5))},
        {"", "--grpo", "", "trains on rewards of answers that it draws; a row below is then a prompt", flag(o.grpo)},
        {"", "--reward", "NAME", "... what an answer is worth: exact, choice, rouge-l, regex:PATTERN, length:N, or\n"
         "a program (./NAME); WEIGHT*NAME; may be repeated, and all are added up", grpo(list(rl.rewards))},
        {"", "--reward-timeout", "S", "... for a program, a step: 60", grpo(number(rl.timeout, 0.01, 1e6))},
        {"", "--group", "N", "... answers to a prompt: 8", grpo(whole(rl.group, 2, 4096))},
        {"-n", "--max-tokens", "N", "... of an answer: 256", grpo(whole(rl.max_tokens, 1, 1 << 20))},
        {"-t", "--temp", "X", "... temperature of the answers: 1", grpo(number(rl.temperature, 0.01, 100))},
        {"-p", "--top-p", "X", "... drawn among the likeliest that together have this probability: 1",
         grpo(number(rl.top_p, 0.01, 1))},
        {"", "--iterations", "N", "... steps on the same answers: 1", grpo(whole(rl.iterations, 1, 1024))},
        {"", "--loss-type", "NAME", "... grpo, dr_grpo or dapo (the default): a mean of answers' means, a sum\n"
         "over a constant, a mean of tokens", grpo(one_of(rl.loss, {"grpo", "dr_grpo", "dapo"}))},
        {"", "--scale-rewards", "NAME", "... group: an advantage is in standard deviations of its group; or none",
         grpo(one_of(rl.scale, {"group", "none"}))},
        {"", "--epsilon", "X", "... how far a token's probability may move in steps on the same answers: 0.2",
         grpo(number(rl.epsilon, 0, 1))},
        {"", "--epsilon-high", "X", "... upwards (default: as --epsilon)", grpo(number(rl.epsilon_high, 0, 1e6))},
        {"", "--kl-beta", "X", "... weight of the divergence from what the model was: 0",
         grpo(number(rl.kl_beta, 0, 1e6))},
        {"", "--mask-truncated", "", "... answers without an end are not trained", grpo(flag(rl.mask_truncated))},
        {"", "--epochs", "X", "2", number(o.epochs, 1e-6, 1e6)},
        {"", "--steps", "N", "instead of epochs", whole(o.steps, 1, 1000000000)},
        {"", "--batch", "N", "rows a batch: 16", whole(o.batch, 1, 65536)},
        {"", "--accum", "N", "batches a step: 1", whole(o.accum, 1, 65536)},
        {"", "--max-len", "N", "longer rows are left out: 512", whole(o.max_len, 2, 1 << 24)},
        {"", "--lr", "X", "learning rate: 1.5e-4; with --dpo 5e-6, with --grpo 1e-5", number(o.lr, 0, 10)},
        {"", "--schedule", "NAME", "of the learning rate: cosine, linear or constant",
         one_of(o.schedule, {"cosine", "linear", "constant"})},
        {"", "--warmup", "X", "share of the steps in which it rises: 0.1", number(o.warmup, 0, 1)},
        {"", "--weight-decay", "X", "0.01", number(o.weight_decay, 0, 10)},
        {"", "--clip", "X", "longest gradient: 1; 0 is off", number(o.clip, 0, 1e9)},
        {"", "--no-shuffle", "", "rows in the file's order", flag(o.shuffle, false)},
        {"-s", "--seed", "N", "42", whole(o.seed, 0, INT64_MAX)},
        {"", "--eval", "FILE", "another dataset, whose loss is measured, with --grpo the reward", file_name(o.eval)},
        {"", "--eval-every", "N", "... each N steps (default: every epoch)", whole(o.eval_every, 1, INT64_MAX)},
        {"", "--allow-leak", "", "... also if rows of TRAIN.bin are in it", flag(o.allow_leak)},
        {"", "--save-every", "N", "steps from one checkpoint to the next (default: every epoch)",
         whole(o.save_every, 1, INT64_MAX)},
        {"", "--resume", "", "goes on with the run in OUT", flag(o.resume)},
        {"", "--overwrite", "", "replaces it; with --merge also what is at PATH", flag(o.overwrite)},
        {"", "--merge", "PATH", "afterwards: a model.bin (PATH ends in .bin) or a Hugging Face folder\n"
         "with the adapter merged, and its tokenizer", file_name(o.merge)},
        {"", "--merge-as", "FORMAT", "... quantised anew: int4, int8 or fp8, to the nearest (PATH ends in .bin)",
         one_of(o.merge_as, {"int4", "int8", "fp8"})},
        {"", "--recompute", "", "keeps less for the backward pass, and computes it again", flag(o.recompute)},
        {"", "--gpus", "N", "of this host: a process each, and --batch rows for each; with -d cpu N\n"
         "processes on the CPU. (torchrun, mpirun and Slurm need no --gpus)", whole(o.gpus, 1, 1024)},
        {"", "--no-overlap", "", "... whose gradients are added up after the backward pass, not during it",
         flag(o.overlap, false)},
    };
    o.add_to(table, false);
    return table;
}

static void check_grpo(const Options& o) {
    const GrpoOptions& rl = o.rl;
    if (o.dpo) DIE("--dpo or --grpo: not both");
    if (rl.rewards.empty()) DIE("--grpo: --reward NAME says what an answer is worth");
    for (auto& name : rl.rewards) make_reward(name, rl.timeout); // throws
    if (rl.max_tokens >= o.max_len)
        DIE("--max-tokens %d leaves no room for a prompt in --max-len %d", rl.max_tokens, o.max_len);
    if (o.full && rl.temperature != 1) DIE("--temp %g: with --full the temperature is 1", rl.temperature);
    if (rl.iterations > 1 && std::max(o.gpus, o.ranks->size) > 1)
        DIE("--iterations %d: several GPUs take one step on the same answers", rl.iterations);
}

static void check_options(const Options& o) {
    if (o.train.empty() && (o.merge.empty() || o.adapter_init.empty()))
        DIE("no dataset named (without one: --adapter-init DIR --merge PATH)");
    if (o.train.empty() && !o.out.empty())
        DIE("no dataset named, and -o is for training (--merge PATH says where a merged model goes)");
    if (!o.merge_as.empty() && (o.merge.size() < 5 || o.merge.compare(o.merge.size() - 4, 4, ".bin") != 0))
        DIE("--merge-as %s is for --merge PATH where PATH ends in .bin", o.merge_as.c_str());
    if (!o.train.empty() && o.out.empty()) DIE("-o DIR says where the adapter goes");
    if (o.resume && o.overwrite) DIE("--resume goes on with a run and --overwrite replaces it: not both");
    const std::string adapter = !o.says_lora.empty() ? o.says_lora : o.merge.empty() ? "--adapter-init" : "--merge";
    if (o.full && (!o.adapter_init.empty() || !o.merge.empty() || !o.says_lora.empty()))
        DIE("--full trains the model itself: there is no adapter for %s", adapter.c_str());
    if (!o.adapter_init.empty() && !o.says_lora.empty()) DIE("%s: --adapter-init says it already", o.says_lora.c_str());
    if (o.eval.empty() && (o.eval_every || o.allow_leak))
        DIE("--eval FILE names the dataset for --eval-every and --allow-leak");
    if (!o.dpo && !o.says_dpo.empty()) DIE("%s is for --dpo", o.says_dpo.c_str());
    if (!o.grpo && !o.says_grpo.empty()) DIE("%s is for --grpo", o.says_grpo.c_str());
    if (o.grpo) check_grpo(o);
    if (o.steps && o.epochs) DIE("--steps %lld or --epochs %g: not both", (long long)o.steps, o.epochs);
    if (o.gpus > 1 && o.train.empty()) DIE("--gpus is for training");
    const uint64_t tokens = (uint64_t)o.batch * o.max_len * (o.dpo ? 2 : o.grpo ? o.rl.group : 1);
    if (tokens > 1 << 26)
        DIE("--batch %d%s with --max-len %d: more than 2^26 tokens at once", o.batch,
            o.grpo ? format(", --group %d", o.rl.group).c_str() : "", o.max_len);
    if (tokens * o.accum * std::max(o.gpus, o.ranks->size) > UINT32_MAX)
        DIE("--batch, --accum, --max-len and the number of GPUs: more than 2^32 tokens a step");
}

static Options parse_options(int argc, char** argv) {
    Options o;
    o.lora.rank = 32;
    std::fill(o.lora.targets, o.lora.targets + MODULES, true);
    o.lr = o.dropout = -1; // not said
    const std::vector<Option> table = option_table(o);
    const std::vector<std::string> words = parse(table, argc, argv);
    if (o.help) return print_help(USAGE, table), o;
    if (words.empty()) DIE("no model named (--help lists the options)");
    if (words.size() > 2) DIE("one model and one dataset, please; %s is too much", words[2].c_str());
    o.model = words[0];
    if (words.size() == 2) o.train = words[1];
    if (!o.lora.alpha) o.lora.alpha = 2 * o.lora.rank;
    if (o.lr < 0) o.lr = o.dpo ? DPO_LR : o.grpo ? GRPO_LR : Options().lr;
    if (o.dropout < 0) o.dropout = o.dpo || o.grpo ? 0 : Options().dropout;
    if (o.rl.epsilon_high < 0) o.rl.epsilon_high = o.rl.epsilon;
    check_options(o);
    return o;
}

// Puts the tokenizer of the model beside what was made of the model, so that it needs no -z. One that is there and
// another is replaced only if `replace`; else a line says what to do.
static void give_tokenizer(const Options& o, const ModelFile& file, const std::string& folder, bool replace) {
    const std::string from = find_tokenizer(o.tokenizer, o.model), to = folder + "/tokenizer.bin";
    if (from.empty() || same_file(from, to)) return;
    const MappedFile bytes(from);
    if (!fits(Tokenizer(from), file)) return; // found by chance
    if (access(to.c_str(), F_OK) == 0 && !replace) {
        if (MappedFile(to).text() != bytes.text())
            fprintf(stderr, "%s: another tokenizer, and left as it is; ask with -z %s\n", to.c_str(), from.c_str());
        return;
    }
    write_text(to, bytes.text());
}

// ======================================================================================= 2 Preferences, rewards

// Direct preference optimization (Rafailov et al., 2023, equation 7). The reward of an answer y to a prompt x is
// beta (log p(y|x) - log p_ref(y|x)); a pair's margin is the reward of the chosen answer less that of the rejected one;
//   loss = -log sigmoid(margin), with label smoothing e: -(1 - e) log sigmoid(margin) - e log sigmoid(-margin)
// (Mitchell, 2023). `slope` is its derivative by the margin.
struct PairLoss { double loss, slope; };
inline PairLoss dpo_loss(double margin, double smoothing) {
    auto minus_log_sigmoid = [](double x) { return std::max(-x, 0.) + std::log1p(std::exp(-std::fabs(x))); };
    const double loss = (1 - smoothing) * minus_log_sigmoid(margin) + smoothing * minus_log_sigmoid(-margin);
    return {loss, smoothing / (1 + std::exp(-margin)) - (1 - smoothing) / (1 + std::exp(margin))};
}

// What is told of pairs beside the loss, by TRL's names; sums, then means.
struct Preferences {
    static constexpr const char* NAMES[] = {"rewards/chosen", "rewards/rejected", "rewards/accuracies",
                                            "rewards/margins", "logps/chosen", "logps/rejected"};
    static constexpr int ACCURACY = 2, MARGIN = 3, N = 6;
    double value[N] = {};

    void add(double reward_chosen, double reward_rejected, double chosen, double rejected) {
        const double more[] = {reward_chosen, reward_rejected, reward_chosen > reward_rejected ? 1. : 0.,
                               reward_chosen - reward_rejected, chosen, rejected};
        for (int i = 0; i < N; i++) value[i] += more[i];
    }
    void divide(double n) { for (double& x : value) x /= n; }
    void write(sj::Writer& w, const std::string& before) const {
        for (int i = 0; i < N; i++) w.field(before + NAMES[i], value[i]);
    }
    std::string text() const {
        return format("  %s %.4f  %s %.3f", NAMES[MARGIN], value[MARGIN], NAMES[ACCURACY], value[ACCURACY]);
    }
};

// What is told of answers and their rewards, by TRL's names: of each answer, group, token. Sums, then means; reward_std
// is a sum of squares first.
struct Rewarded {
    static constexpr const char* NAMES[] = {"reward", "completions/mean_length", "completions/clipped_ratio",
                                            "reward_std", "frac_reward_zero_std",
                                            "kl", "clip_ratio/low_mean", "clip_ratio/high_mean",
                                            "clip_ratio/region_mean"};
    static constexpr int REWARD = 0, LENGTH = 1, CUT = 2, SPREAD = 3, ALIKE = 4, KL = 5, LOW = 6, HIGH = 7, CLIPPED = 8,
                         N = 9;
    double value[N] = {}, answers = 0, groups = 0, tokens = 0;
    double drawn = 0, time = 0; // tokens that were drawn, how long it took
    std::vector<double> each;   // kind of reward

    Rewarded() = default;
    explicit Rewarded(const Groups& g) : each(g.each) {
        for (size_t i = 0; i < g.rows.size(); i++, answers++)
            value[REWARD] += g.reward[i], value[LENGTH] += (double)g.length(i), value[CUT] += !g.ended[i];
        for (double r : g.reward) value[SPREAD] += r * r;
        for (size_t i = 0; i < g.rows.size(); i += g.size, groups++)
            value[ALIKE] += advantages(&g.reward[i], g.size, false).deviation == 0;
        drawn = value[LENGTH];
    }
    void add(const TokenLoss& t) {
        tokens++, value[KL] += t.kl, value[LOW] += t.low, value[HIGH] += t.high;
        value[CLIPPED] += t.low || t.high;
    }
    void sum_over(Ranks& ranks) {
        for (double* x : {&answers, &groups, &tokens, &drawn, &time}) ranks.sum(x, 1);
        ranks.sum(value, N);
        ranks.sum(each.data(), each.size());
        time /= ranks.size;
    }
    void divide() {
        for (int i = 0; i < N; i++) value[i] /= std::max(1., i < ALIKE ? answers : i < KL ? groups : tokens);
        const double variance = std::max(0., value[SPREAD] - value[REWARD] * value[REWARD]);
        value[SPREAD] = std::sqrt(variance * answers / std::max(1., answers - 1)); // of a sample
        for (double& x : each) x /= std::max(1., answers);
    }
    void write(sj::Writer& w, const Options& o, bool evaluated) const {
        const std::string before = evaluated ? "eval_" : "";
        for (int i = 0; i < (evaluated ? SPREAD : N); i++)
            if (i != KL || o.rl.kl_beta > 0) w.field(before + NAMES[i], value[i]);
        for (size_t k = 0; k < each.size() && each.size() > 1; k++)
            w.field(before + "rewards/" + o.rl.rewards[k] + "/mean", each[k]);
    }
    std::string text() const {
        return format("  %s %.4f  %s %.4f  length %.1f", NAMES[REWARD], value[REWARD], NAMES[SPREAD], value[SPREAD],
                      value[LENGTH]);
    }
};

// =============================================================================== 3 Memory, batches, steps

// What a run is: if any of this differs, --resume would not go on with it.
static std::string describe(const Options& o, const ModelFile& file, const Dataset& data, int64_t steps,
                            const char* type) {
    auto hex = [](uint64_t hash) { return format("%016llx", (unsigned long long)hash); };
    sj::Writer w;
    w.object().field("model", hex(file.hash())).field("dataset", hex(fnv1a(data.file.data, data.file.size)));
    w.field("dtype", type).field("full", o.full).field("rank", o.lora.rank).field("alpha", o.lora.alpha);
    w.field("rslora", o.lora.rslora).key("targets").array();
    for (bool target : o.lora.targets) w.value(target);
    w.end().field("dropout", (double)o.dropout).field("lr", o.lr).field("weight-decay", o.weight_decay);
    w.field("warmup", o.warmup).field("clip", o.clip).field("schedule", o.schedule).field("steps", steps);
    w.field("batch", o.batch).field("accum", o.accum).field("max-len", o.max_len).field("seed", o.seed);
    w.field("shuffle", o.shuffle);
    if (o.ranks->size > 1) w.field("ranks", o.ranks->size);
    if (o.dpo) {
        const std::string reference = o.adapter_init.empty() ? "" : o.adapter_init + "/adapter_model.safetensors";
        w.field("dpo", true).field("beta", o.beta).field("label-smoothing", o.label_smoothing);
        w.field("reference", reference.empty() ? "" : hex(fnv1a(MappedFile(reference).text())));
    }
    if (o.grpo) {
        const GrpoOptions& rl = o.rl;
        w.field("grpo", true).key("reward").array();
        for (auto& name : rl.rewards) w.value(name);
        w.end().field("group", rl.group).field("max-tokens", rl.max_tokens).field("temp", rl.temperature);
        w.field("top-p", rl.top_p).field("iterations", rl.iterations).field("loss-type", rl.loss);
        w.field("scale-rewards", rl.scale).field("epsilon", rl.epsilon).field("epsilon-high", rl.epsilon_high);
        w.field("kl-beta", rl.kl_beta).field("mask-truncated", rl.mask_truncated);
    }
    w.end();
    return w.text;
}

// The factor of the learning rate in step k = 0, 1, ..: as transformers' get_cosine_schedule_with_warmup and
// its linear and constant siblings have it.
static double schedule(const Options& o, int64_t k, int64_t steps) {
    const int64_t warm = (int64_t)std::ceil(o.warmup * (double)steps);
    if (k < warm) return (double)k / (double)warm;
    const double done = (double)(k - warm) / (double)std::max<int64_t>(1, steps - warm);
    if (o.schedule == "linear") return 1 - done;
    return o.schedule == "cosine" ? 0.5 * (1 + std::cos(M_PI * done)) : 1;
}

template <class T> struct Trainer {
    using A = acc<T>;
    static constexpr int HEAD_ROWS = 64; // trained tokens that go through the head at once;
    // ... on a GPU: twice as many where they add to a gradient of the head, which is as long as their logits.
    static constexpr int gpu_head_rows(bool full) { return full ? 2048 : 1024; }

    const Options& o;
    Ranks& ranks;
    Context ctx;
    const ModelFile& file;
    const Config& c;
    Weights<T> w;
    const Dataset &data, *eval;
    std::vector<size_t> rows, eval_rows; // of the datasets, the units that are not too long: rows, or pairs
    int64_t epoch_steps, steps, step = 0; // steps an epoch, in all, done
    std::string run;                     // see describe

    Trainer(const Options& options, const Context& where, const ModelFile& f, const Dataset& train,
            const Dataset* evaluation)
        : o(options), ranks(*o.ranks), ctx(where), file(f), c(f.config),
          w(f, false, keeps_packed<T>(options, where)), data(train), eval(evaluation) {
        ctx.stop = &interrupted;
        if (o.grpo) open_rewards();
        rows = fitting(data);
        if (eval) eval_rows = fitting(*eval);
        const size_t a_step = step_units();
        epoch_steps = (int64_t)((rows.size() + a_step - 1) / a_step) * o.rl.iterations;
        steps = o.steps ? o.steps : (int64_t)std::ceil((o.epochs ? o.epochs : EPOCHS) * (double)epoch_steps);
        run = describe(o, file, data, steps, type_name(w));
        agree();
        if (!o.full) rank = adapt(w, o.lora, o.rank_step);
        if (!o.full && o.dropout > 0 && std::max({c.C, c.H * c.D, c.F}) > 1 << 19)
            DIE("%s: --dropout: layers wider than 2^19", file.path.c_str());
        measure();
        divide();
#ifdef __CUDACC__
        if constexpr (HAS_GPU<T>) if (ctx.gpu && !o.full) w.upload(ctx, file); // (--full has its own copies)
#endif
        reserve();
        first_parameters();
        fill();
    }

    size_t step_units() const { return (size_t)o.batch * o.accum * ranks.size; } // rows, pairs or prompts of a step

    // Ends all ranks unless they are about to do the same.
    void agree() {
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

    // ---- What is trained: one array of numbers, cut into segments that AdamW treats alike.
    struct Segment { size_t first, n; double decay; float copy; };
    std::vector<Segment> segments;
    size_t count = 0;
    int rank = 0;            // of adapters as they lie here
    A *p, *m, *v;            // (own) master parameters, AdamW's moments
    A *gradient;             // (padded) of this rank's rows, then of all ranks'
    A *own_gradient;         // (own) of all ranks' rows
    T* stored;               // (padded) what the products read: the parameters as T, those of B times s
    size_t own = 0, padded = 0; // one rank: count

    // ---- Several ranks: gradients are added up in buckets.
    Buckets buckets;
    std::vector<int> lowest;         // (buckets) layer whose numbers are in it; -1: what is in no layer
    std::vector<size_t> order_of_buckets; // highest layer first
    std::vector<size_t> places;      // of this rank's units in the step; none: they are in it as they are listed
    size_t buckets_done = 0;
    bool last_batch = false;         // of the step: when a layer's gradients are complete
    double waited = 0;               // s, as Ranks has it, the mean of all ranks

    bool sharded() const { return o.full && ranks.size > 1; } // each rank has its pieces of p, m and v
    void divide() {
        buckets = Buckets(count, ranks.size);
        own = sharded() ? buckets.n * buckets.piece : count;
        padded = ranks.size > 1 ? buckets.padded() : count;
        lowest.assign(buckets.n, c.L);
        auto is_in = [&](size_t first, size_t n, int layer) {
            for (size_t b = first / buckets.bucket; b * buckets.bucket < first + n; b++)
                lowest[b] = std::min(lowest[b], layer);
        };
        if (o.full) each_tensor([&](const ModelTensor& t, size_t at) { is_in(at, t.size(), t.layer); });
        else each_adapter(w, [&](Linear<T>& linear, AdapterPlace at) {
            const int layer = linear.adapter.module[0] / MODULES;
            is_in(at.A, linear.adapter.width() * linear.in, layer);
            is_in(at.B, linear.adapter.width() * linear.out(), layer);
        });
        order_of_buckets.resize(buckets.n);
        std::iota(order_of_buckets.begin(), order_of_buckets.end(), (size_t)0);
        std::stable_sort(order_of_buckets.begin(), order_of_buckets.end(),
                         [&](size_t a, size_t b) { return lowest[a] > lowest[b]; });
        if (ranks.size > 1)
            g.done = [this](int layer) { if (last_batch && o.overlap) add_up(layer); };
    }

    // Adds up over all ranks the buckets that are complete when `backward` has done a layer; -1: all that are left.
    void add_up(int layer) {
        size_t end = buckets_done;
        while (end < buckets.n && lowest[order_of_buckets[end]] >= layer) end++;
        if (end > buckets_done) ranks.together([&] {
            for (; buckets_done < end; buckets_done++) {
                const size_t b = order_of_buckets[buckets_done], first = b * buckets.bucket;
                if (sharded()) ranks.add_up_pieces(own_gradient + b * buckets.piece, gradient + first, buckets.piece);
                else ranks.add_up(gradient + first, std::min(buckets.bucket, count - first));
            }
        });
    }

    // Calls f(first, at, n) for what this rank has of p, m and v: n numbers from `first` of the whole array on are its
    // own from `at` on.
    template <class F> void each_own(F f) const {
        if (sharded()) buckets.each_piece(ranks.rank, f);
        else f((size_t)0, (size_t)0, count);
    }
    void keep(A* to, const std::vector<A>& all) {
        each_own([&](size_t first, size_t at, size_t n) { copy_in(ctx, to + at, &all[first], n); });
    }
    // With shards: `all` (padded) from each rank's pieces, which piece(b) points to.
    template <class U, class F> void gather(U* all, F piece) {
        ranks.together([&] {
            for (size_t b = 0; b < buckets.n; b++)
                ranks.gather(all + b * buckets.bucket, piece(b), buckets.piece * sizeof(U));
        });
        ranks.finish();
    }

    // With --full: calls f(tensor, at) for each tensor of the model, which is the tensor.size() numbers from `at` on.
    // Matrices come before vectors, since AdamW decays only matrices; results and states have the same order. Blocks of
    // a Linear are neighbours.
    template <class F> void each_tensor(F f) {
        size_t at = 0;
        const std::vector<ModelTensor> tensors = model_tensors(c);
        for (bool matrices : {true, false})
            for (const ModelTensor& t : tensors)
                if (matrices == (t.columns > 0)) f(t, at), at += t.size();
    }

    // Where `backward` looks for the gradient of a module's Linear; of any tensor (of a block: of its Linear).
    typename Gradients<T>::OfLinear& gradient_of_module(int m, int l) {
        auto& layer = g.layer[l];
        return m <= V_PROJ ? layer.qkv : m == O_PROJ ? layer.o : m == DOWN_PROJ ? layer.down : layer.gate_up;
    }
    A*& gradient_of(const ModelTensor& t) {
        switch (t.kind) {
            case EMBED: return g.embed;
            case HEAD: return g.head;
            case FINAL_NORM: return g.norm;
            case INPUT_NORM: return g.layer[t.layer].norm1;
            case Q_NORM: return g.layer[t.layer].q_norm;
            case K_NORM: return g.layer[t.layer].k_norm;
            case POST_NORM: return g.layer[t.layer].norm2;
            default: return gradient_of_module(t.kind, t.layer).W;
        }
    }

    // How many numbers are trained; the array of an adapter's holds zeros beside them.
    size_t trained_parameters() const { return o.full ? count : adapter_parameters(c, o.lora); }

    // How many numbers the array has, and of what kind.
    void measure() {
        if (!o.full) {
            const AdapterPlace end = each_adapter(w, [](Linear<T>&, AdapterPlace) {});
            count = end.B;
            segments = {{0, end.A, o.weight_decay, 1}, {end.A, end.B - end.A, o.weight_decay, (float)o.lora.scale()}};
            return;
        }
        size_t matrices = 0;
        each_tensor([&](const ModelTensor& t, size_t at) {
            count = at + t.size();
            if (t.columns) matrices = count;
        });
        segments = {{0, matrices, o.weight_decay, 1}, {matrices, count - matrices, 0, 1}}; // as transformers' Trainer
    }

    // ---- Memory: one arena, planned before the first step.
    Arena arena;
    Activations<T> a;
    Flow<T> d;
    Gradients<T> g;
    KVCache<T> kv;
    T* h;                                               // of all adapters
    uint32_t* kept;                                     // ... and what dropout keeps of what they read, on a GPU
    A *rope, *loss;                                     // (positions, D/2, 2), (tokens)
    double *results, *partial;                          // results: loss and gradient norm of the step
    int *token, *pos, *seq, *slot, *pages, *named, *target; // a Batch, its trained rows and what comes after them
    uint32_t* place;                                    // Dropout::token
    Dropout dropout;
    int most_tokens = 0, longest = 0, max_pages;        // of a batch, of a row

    const char* unit() const { return o.dpo ? "pair" : o.grpo ? "prompt" : "row"; }
    // Calls f(row) for each row of some units. (From: Dataset, or Groups.)
    template <class From, class F> static void each_row(const From& from, const std::vector<size_t>& list, F f) {
        for (size_t i : list)
            for (size_t k = 0; k < from.group(); k++) f(from.row(i * from.group() + k));
    }

    // Units that are not too long. Of a row all tokens but the last are fed.
    std::vector<size_t> fitting(const Dataset& from) {
        std::vector<size_t> list;
        std::vector<int> lengths;
        const size_t limit = (size_t)std::min(o.max_len, c.max_positions), all = from.rows() / from.group();
        for (size_t i = 0; i < all; i++) {
            size_t most = 0, sum = 0;
            each_row(from, {i}, [&](DatasetRow row) { most = std::max(most, row.size()), sum += row.size() - 1; });
            if (o.grpo) most = prompt_of(from.row(i)).size() + o.rl.max_tokens, sum = o.rl.group * (most - 1);
            if (most > limit) continue;
            list.push_back(i), lengths.push_back((int)sum), longest = std::max(longest, (int)most - 1);
        }
        const char *name = from.file.path.c_str(), *with = o.grpo ? " with --max-tokens" : "";
        if (list.empty())
            DIE("%s: every %s has more than %zu tokens%s (%s)", name, unit(), limit, with,
                o.max_len > c.max_positions ? "the model's limit" : "--max-len");
        if (list.size() < all)
            ranks.tell("%s: %s left out of %zu: more than %zu tokens%s\n", name,
                       counted(all - list.size(), unit()).c_str(), all, limit, with);
        std::sort(lengths.rbegin(), lengths.rend());
        const auto end = lengths.begin() + std::min(lengths.size(), (size_t)o.batch);
        most_tokens = std::max(most_tokens, std::accumulate(lengths.begin(), end, 0));
        return list;
    }

    size_t sequences() const { return (size_t)o.batch * (o.grpo ? o.rl.group : data.group()); } // of a batch, at most

    struct Part { const char* name; size_t bytes; };
    std::vector<Part> plan() {
        std::vector<Part> parts;
        auto part = [&](const char* name, size_t before) { parts.push_back({name, arena.used - before}); };
        size_t before = arena.used;
        const int N = most_tokens;
        p = arena.take<A>(own), stored = arena.take<T>(padded);
        part("parameters", before), before = arena.used;
        gradient = arena.take<A>(padded), m = arena.take<A>(own), v = arena.take<A>(own);
        own_gradient = sharded() ? arena.take<A>(own) : gradient;
        partial = arena.take<double>((own + NORM_PIECE - 1) / NORM_PIECE);
        part("gradients and moments", before), before = arena.used;
        h = arena.take<T>(o.full ? 0 : (size_t)N * each_adapter(w, [](Linear<T>&, AdapterPlace) {}).h);
        kept = arena.take<uint32_t>(ctx.gpu && o.dropout > 0 ? each_kept([](Linear<T>&, size_t) {}) : 0);
        const size_t scratch = arena.used;
        a.plan_training(arena, c, N, o.recompute, ample);
        max_pages = (longest + PAGE - 1) / PAGE;
        kv.plan(arena, c, (size_t)N / PAGE + sequences(), !ample);
        part("activations", before), before = arena.used;
        d.plan(arena, c, N, rank, std::min(N, ctx.gpu ? gpu_head_rows(o.full) : HEAD_ROWS), (bool)ctx.gpu);
        part("their gradients, logits", before), before = arena.used;
        if (o.grpo) plan_answers(scratch), part("answers", before), before = arena.used;
        rope = arena.take<A>((size_t)longest * c.D);
        loss = arena.take<A>(N);
        results = arena.take<double>(2);
        for (int** list : {&token, &pos, &seq, &slot, &named, &target}) *list = arena.take<int>(N);
        place = arena.take<uint32_t>(N);
        pages = arena.take<int>(sequences() * max_pages);
#ifdef __CUDACC__
        if (ctx.gpu && o.grpo) plan_scratch(ctx, arena, c, N, engine.sequences, longest, 0);
        else if (ctx.gpu) plan_scratch(ctx, arena); // (its attention splits no keys)
#endif
        part("the rest", before);
        return parts;
    }

    std::string memory; // the plan, for people
    bool ample = false;
    void reserve() {
        std::vector<Part> parts = plan();
        size_t have = available_memory();
#ifdef __CUDACC__
        // Activations::ample takes a third more memory. A run that needs little leaves the rest of the GPU to others;
        // one that needs a lot gets what does not fill it.
        size_t all;
        if (ctx.gpu) CUDA_CHECK(cudaMemGetInfo(&have, &all));
        if (ctx.gpu && !o.recompute && arena.used > all / 8) {
            const auto plan_anew = [&](bool more) { ample = more, arena.used = 0, parts = plan(); };
            plan_anew(true);
            if (arena.used > have / 5 * 4) plan_anew(false);
        }
#endif
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

    // The first parameters: of an adapter as PEFT draws them (A uniform in +-1 / sqrt(in), B zero), or those of a file;
    // with --full the model's own.
    void first_parameters() {
        std::vector<A> first(count, 0);
        if (o.full) {
            each_tensor([&](const ModelTensor& t, size_t at) { // as they are stored, not as T has them
                const Tensor& from = file.tensors.at(t.name());
                for (size_t i = 0; i < t.size(); i++) first[at + i] = number(from, i);
            });
        } else if (!o.adapter_init.empty()) {
            first = adapter_numbers(w, AdapterFile(o.adapter_init, c));
        } else {
            size_t drawn = 0; // the same numbers whatever the rank is rounded up to
            each_adapter_tensor(w, [&](const std::string&, size_t rows, size_t in, size_t at, size_t) {
                const float bound = 1 / std::sqrt((float)in);
                for (size_t i = 0; i < rows * in && at < segments[0].n; i++) { // segments[0]: every A
                    const uint32_t bits = philox(o.seed, drawn++, STREAM_INIT).v[0] >> 8;
                    first[at + i] = bound * ((float)bits * (1.f / 8388608) - 1); // 2^23
                }
            });
        }
        keep(p, first);
        give_copies(stored, first);
        if (o.rl.kl_beta > 0) give_copies(first_stored, first);
    }

    // Makes the copies that products read, of parameters that were loaded. (Of those it computes, AdamW makes them.)
    void give_copies(T* to, const std::vector<A>& from) {
        std::vector<T> copies(count);
        for (const Segment& s : segments)
            for (size_t i = s.first; i < s.first + s.n; i++) copies[i] = to_stored<T>(from[i] * (A)s.copy);
        copy_in(ctx, to, copies.data(), count);
    }

    // Calls f(linear, at) for each product that has an adapter: where its DropoutMasks begin. With --recompute a
    // layer's take the place of the one above. Returns where the last end.
    template <class F> size_t each_kept(F f) {
        size_t at = 0, end = 0;
        int layer = 0;
        each_adapter(w, [&](Linear<T>& linear, AdapterPlace) {
            const Adapter<T>& a = linear.adapter;
            if (o.recompute && a.module[0] / MODULES != layer) layer = a.module[0] / MODULES, at = 0;
            f(linear, at);
            at += DropoutMasks::size(a.modules, linear.in, most_tokens), end = std::max(end, at);
        });
        return end;
    }

    // Lets the model look for its parameters there.
    void use(T* copies) {
        if (o.full) each_tensor([&](const ModelTensor& t, size_t at) { place_of(w, t).numbers() = copies + at; });
        else each_adapter(w, [&](Linear<T>& linear, AdapterPlace at) {
            linear.adapter.A = copies + at.A, linear.adapter.B = copies + at.B;
        });
        if (o.full && c.tied) w.head = w.embed;
    }

    // Lets the model look where the copies are, and `backward` where gradients go.
    void fill() {
        g.layer.resize(c.L);
        use(stored);
        if (o.full) {
            each_tensor([&](const ModelTensor& t, size_t at) {
                if (place_of(w, t).block == 0) gradient_of(t) = gradient + at;
            });
            if (c.tied) g.head = g.embed;
        } else {
            each_adapter(w, [&](Linear<T>& linear, AdapterPlace at) {
                Adapter<T>& adapter = linear.adapter;
                auto& to = gradient_of_module(adapter.module[0] % MODULES, adapter.module[0] / MODULES);
                adapter.h = h + at.h * most_tokens;
                to.A = gradient + at.A, to.B = gradient + at.B;
            });
            each_kept([&](Linear<T>& linear, size_t at) { linear.adapter.kept = kept + at; });
        }
        std::vector<A> angles((size_t)longest * c.D);
        fill_rope(angles.data(), longest, c.D, c.rope_theta);
        copy_in(ctx, rope, angles.data(), angles.size());
        if (o.grpo) engine.rope = rope, set_temperature();
    }

    // ---- Batches

    // How many tokens of these units are trained.
    template <class From> size_t trained(const From& from, const std::vector<size_t>& list) const {
        size_t n = 0;
        each_row(from, list, [&](DatasetRow row) { for (uint32_t word : row) n += word >> 31; });
        return n;
    }

    std::vector<int> ends; // where the trained tokens of each sequence end in `named`

    // Packs units list[0 .. n - 1], of which the first is number `first` of its step, or of this rank's part of it. R:
    // the tokens to predict.
    template <class From> Batch load(const From& from, const size_t* list, int n, int first, int& R) {
        const int group = (int)from.group();
        n *= group; // sequences
        std::vector<int> all_token, all_pos, all_seq, all_slot, all_named, all_target, table((size_t)n * max_pages, 0);
        std::vector<uint32_t> all_place;
        int page = 0;
        ends.clear();
        for (int s = 0; s < n; s++) {
            const DatasetRow row = from.row(list[s / group] * group + s % group);
            const size_t in_step = places.empty() ? (size_t)(first + s / group) : places[first + s / group];
            for (int i = 0; i + 1 < (int)row.size(); i++) {
                if (i % PAGE == 0) table[(size_t)s * max_pages + i / PAGE] = page++;
                if (row.first[i + 1] & TRAIN) {
                    all_named.push_back((int)all_token.size());
                    all_target.push_back((int)(row.first[i + 1] & ~TRAIN));
                }
                all_token.push_back((int)(row.first[i] & ~TRAIN)), all_pos.push_back(i), all_seq.push_back(s);
                all_slot.push_back((page - 1) * PAGE + i % PAGE);
                all_place.push_back((uint32_t)(in_step * group + s % group) * (uint32_t)o.max_len + (uint32_t)i);
            }
            ends.push_back((int)all_named.size());
        }
        const size_t N = all_token.size();
        copy_in(ctx, token, all_token.data(), N);
        copy_in(ctx, pos, all_pos.data(), N);
        copy_in(ctx, seq, all_seq.data(), N);
        copy_in(ctx, slot, all_slot.data(), N);
        copy_in(ctx, place, all_place.data(), N);
        copy_in(ctx, pages, table.data(), table.size());
        copy_in(ctx, named, all_named.data(), all_named.size());
        copy_in(ctx, target, all_target.data(), all_target.size());
        R = (int)all_named.size();
        return {(int)N, n, token, pos, seq, slot, pages, max_pages};
    }

    // The units of a step. Each epoch's order is drawn anew (Fisher and Yates, with Philox).
    std::vector<size_t> order;
    int64_t ordered = -1; // the epoch of this order
    std::vector<size_t> rows_of(int64_t k) {
        const int64_t an_epoch = epoch_steps / o.rl.iterations, epoch = (k /= o.rl.iterations) / an_epoch;
        if (epoch != ordered) {
            order = rows;
            for (size_t i = order.size() - 1; i > 0 && o.shuffle; i--) {
                const Philox r = philox(o.seed, (uint64_t)epoch << 32 | i, STREAM_SHUFFLE);
                const uint64_t bits = (uint64_t)r.v[1] << 32 | r.v[0];
                std::swap(order[i], order[(size_t)((unsigned __int128)bits * (i + 1) >> 64)]);
            }
            ordered = epoch;
        }
        const size_t a_step = step_units(), first = (size_t)(k % an_epoch) * a_step;
        return {order.begin() + (ptrdiff_t)first, order.begin() + (ptrdiff_t)std::min(first + a_step, order.size())};
    }

    void use_dropout(bool on) {
        const Dropout* used = on && o.dropout > 0 ? &dropout : nullptr;
        each_adapter(w, [&](Linear<T>& linear, AdapterPlace) { linear.adapter.dropout = used; });
    }

    // ---- Steps

    double last_loss = 0, last_norm = 0, last_lr = 0;
    size_t tokens_done = 0;   // that were fed
    double tokens_fed = 0;    // in the last step
    double flops = 0;         // of the last step

    // ---- With --dpo
    // The reference is the model before the first step: the base, or with --adapter-init the two together. Its
    // log-probabilities are computed once, of every pair that is still to be seen. To do it in each step, without the
    // adapter, would cost as much in each epoch, and be of no use to --full and --adapter-init.
    std::vector<double> reference, eval_reference; // (rows of the dataset)
    Preferences preferences;                       // of the last step or evaluation

    void make_reference() {
        auto seen_from = [&](int64_t k) {
            std::set<size_t> seen;
            for (; k < steps && seen.size() < rows.size(); k++)
                for (size_t pair : rows_of(k)) seen.insert(pair);
            return seen;
        };
        // In the same batches whatever step is next: a GPU's bits depend on the batch.
        const std::set<size_t> all = seen_from(0), left = seen_from(step);
        use_dropout(false);
        reference = reference_of(data, {all.begin(), all.end()}, &left);
        if (eval) eval_reference = reference_of(*eval, eval_rows, nullptr);
    }
    std::vector<double> reference_of(const Dataset& from, const std::vector<size_t>& list,
                                     const std::set<size_t>* wanted) {
        const double start = seconds();
        double told = start;
        std::vector<double> out(from.rows());
        std::set<size_t> mine; // every rank takes some of the batches
        for (size_t i = 0; i < list.size(); i++)
            if (i / o.batch % ranks.size == (size_t)ranks.rank && (!wanted || wanted->count(list[i])))
                mine.insert(list[i]);
        ThreadPace pace(o, ctx);
        pace.begin();
        each_batch(from, list, [&](const Batch& b, size_t first, int R) {
            const std::vector<double> p = log_probabilities(b, R);
            pace.step();
            for (size_t s = 0; s < p.size(); s++) out[list[first + s / 2] * 2 + s % 2] = p[s];
            const size_t done = first + p.size() / 2;
            if (done < list.size() && seconds() - told < 10) return;
            told = seconds();
            ranks.tell("%s: the reference of %zu/%zu pairs, %.1f s\n", from.file.path.c_str(), done, list.size(),
                       told - start);
        }, &mine);
        ranks.sum(out.data(), out.size());
        return out;
    }

    // Of a batch that went forward: of its trained tokens; of its answers.
    std::vector<A> losses_of(const Batch& b, int R) {
        std::vector<A> losses(R);
        loss_backward<T>(ctx, c, w, a, d, nullptr, loss, named, target, 0, b.N, R);
        copy_out(ctx, losses.data(), loss, losses.size());
        return losses;
    }
    std::vector<double> log_probabilities(const Batch& b, int R) {
        const std::vector<A> losses = losses_of(b, R);
        std::vector<double> sums;
        int r = 0;
        for (int end : ends) for (sums.push_back(0); r < end; r++) sums.back() -= (double)losses[r];
        return sums;
    }

    // Adds up the losses of a batch's pairs, which are list[0], list[1], .., and what is told of them. With `to` also
    // d.normed and the head's gradient, of `scale` times that sum.
    double pairs_backward(const Dataset& from, const size_t* list, const Batch& b, int R, const Gradients<T>* to,
                          A scale) {
        const std::vector<double> p = log_probabilities(b, R);
        const std::vector<double>& ref = &from == &data ? reference : eval_reference;
        double sum = 0;
        for (size_t s = 0; s < p.size(); s += 2) {
            const double* q = &ref[list[s / 2] * 2];
            const double chosen = o.beta * (p[s] - q[0]), rejected = o.beta * (p[s + 1] - q[1]);
            const PairLoss pair = dpo_loss(chosen - rejected, o.label_smoothing);
            preferences.add(chosen, rejected, p[s], p[s + 1]);
            sum += pair.loss;
            for (size_t k = 0; to && k < 2; k++) { // cross entropy is the negative log-probability
                const int first = s + k ? ends[s + k - 1] : 0;
                const double by_loss = (k ? 1 : -1) * o.beta * pair.slope;
                loss_backward(ctx, c, w, a, d, to, loss + first, named + first, target + first,
                              (A)((double)scale * by_loss), s + k ? 0 : b.N, ends[s + k] - first);
                // (The first call clears all of d.normed; N = 0 clears nothing of it.)
            }
        }
        return sum;
    }

    // ---- With --grpo
    std::unique_ptr<Tokenizer> tokenizer;
    std::vector<Reward> rewards;
    AnswerEngine<T> engine{ctx, c, w};
    T *first_stored = nullptr, *norm; // copies of the first parameters, which are the reference; the final norm's
    A* by;                            // (tokens) what a token's cross entropy is scaled by
    Groups groups;                    // this rank's, of this step
    Rewarded rewarded;                // what is told of the last step or evaluation
    std::string fault;                // of a reward program: the run is to end

    void open_rewards() {
        tokenizer = std::make_unique<Tokenizer>(tokenizer_path(o));
        for (auto& name : o.rl.rewards) rewards.push_back(make_reward(name, o.rl.timeout));
        for (const Dataset* from : {&data, eval})
            for (size_t i = 0; from && i < from->rows(); i++)
                for (auto& reward : rewards) try {
                    if (reward.check) reward.check(question_of(from->row(i)));
                } catch (const Error& e) {
                    DIE("%s: row %zu: --reward %s: %s", from->file.path.c_str(), i, reward.name.c_str(), e.what());
                }
    }

    // Answers are drawn where the activations of training lie at other times.
    void plan_answers(size_t scratch) {
        const size_t end = arena.used;
        engine.sequences = std::min((int)sequences(), most_tokens);
        engine.tokens = std::min(most_tokens, std::max(ctx.gpu ? Session<T>::GPU_CHUNK : Session<T>::CHUNK,
                                                       engine.sequences));
        engine.pages = max_pages;
        arena.used = scratch;
        engine.plan(arena);
        arena.used = std::max(arena.used, end);
        by = arena.take<A>(most_tokens), norm = arena.take<T>(c.C);
        if (o.rl.kl_beta > 0) first_stored = arena.take<T>(count);
    }

    // What is drawn and trained is the model with its logits divided by the temperature: by its final norm, which LoRA
    // does not train.
    void set_temperature() {
        if (o.rl.temperature == 1) return;
        std::vector<T> numbers;
        for (const ModelTensor& t : model_tensors(c))
            for (size_t i = 0; t.kind == FINAL_NORM && i < t.size(); i++)
                numbers.push_back(to_stored<T>((A)(number(file.tensors.at(t.name()), i) / o.rl.temperature)));
        copy_in(ctx, norm, numbers.data(), numbers.size());
        w.norm = norm;
    }

    // A row is a prompt, and what is trained at its end the answer that rewards may compare with.
    static const uint32_t* answer_in(DatasetRow row) {
        const uint32_t* at = row.end();
        while (!(at[-1] & TRAIN)) at--;
        while (at[-1] & TRAIN) at--;
        return at;
    }
    static std::vector<int> prompt_of(DatasetRow row) {
        std::vector<int> ids;
        for (const uint32_t* at = row.begin(); at < answer_in(row); at++) ids.push_back((int)(*at & ~TRAIN));
        return ids;
    }
    bool is_end(int id) const {
        return std::find(c.end_tokens.begin(), c.end_tokens.end(), id) != c.end_tokens.end();
    }
    Answered question_of(DatasetRow row) const {
        std::vector<int> ids;
        for (const uint32_t* at = answer_in(row); at < row.end() && !is_end((int)(*at & ~TRAIN)); at++)
            ids.push_back((int)(*at & ~TRAIN));
        Answered a;
        a.prompt = tokenizer->decode(prompt_of(row), false), a.reference = tokenizer->decode(ids, true);
        return a;
    }

    // Draws `size` answers to each prompt of a list, and says what they are worth. Without a meaning if interrupted.
    Groups draw_groups(const Dataset& from, const std::vector<size_t>& list, size_t size, bool greedy) {
        Groups made;
        made.size = size;
        std::vector<Answered> answered;
        use_dropout(false);
        for (size_t first = 0, n; first < list.size() && !interrupted; first += n) {
            n = std::min(list.size() - first, std::max<size_t>(1, (size_t)engine.sequences / size));
            std::vector<std::vector<int>> prompts;
            std::vector<typename AnswerEngine<T>::Asked> asked;
            for (size_t i = first; i < first + n; i++) prompts.push_back(prompt_of(from.row(list[i])));
            for (size_t s = 0; s < n * size; s++) {
                const size_t place = (places.empty() ? first + s / size : places[first + s / size]) * size + s % size;
                const Philox bits = philox(o.seed, (uint64_t)(step / o.rl.iterations) << 32 | place, STREAM_ROLLOUT);
                Sampling how;
                how.temperature = greedy ? 0 : 1, how.top_k = 0, how.top_p = (float)o.rl.top_p;
                how.seed = (uint64_t)bits.v[1] << 32 | bits.v[0];
                asked.push_back({&prompts[s / size], how});
            }
            auto answers = engine.answer(asked, o.rl.max_tokens, tokenizer->size());
            for (size_t s = 0; s < answers.size() && !interrupted; s++) {
                std::vector<int>& ids = answers[s];
                std::vector<uint32_t> words(prompts[s / size].begin(), prompts[s / size].end());
                for (int id : ids) words.push_back((uint32_t)id | TRAIN);
                answered.push_back(question_of(from.row(list[first + s / size])));
                Answered& a = answered.back();
                a.tokens = ids.size(), a.ended = is_end(ids.back());
                if (a.ended) ids.pop_back();
                a.text = tokenizer->decode(ids, true);
                made.rows.push_back(std::move(words)), made.ended.push_back(a.ended);
            }
        }
        made.reward.assign(answered.size(), 0), made.each.assign(rewards.size(), 0);
        for (size_t k = 0; k < rewards.size() && !answered.empty() && !interrupted; k++) {
            const std::vector<double> r = rewards[k].of(answered);
            for (size_t i = 0; i < r.size(); i++) made.reward[i] += rewards[k].weight * r[i], made.each[k] += r[i];
        }
        return made;
    }

    // The answers of a step, whose prompts are `list`: new ones, or with --iterations those of the step before again.
    // A fault of a reward program ends the run as Ctrl-C does.
    void take_groups(const std::vector<size_t>& list) {
        double time = 0;
        if (step % o.rl.iterations == 0) {
            const double start = seconds();
            const std::vector<size_t> mine = deal_step(list);
            groups = {};
            try {
                groups = draw_groups(data, mine, (size_t)o.rl.group, false);
            } catch (const Error& e) {
                fault = e.what(), interrupted = 1;
            }
            groups.places = places;
            time = seconds() - start;
            for (size_t i = 0; i < groups.reward.size(); i += groups.size) {
                const Advantages some = advantages(&groups.reward[i], groups.size, o.rl.scale == "group");
                groups.advantage.insert(groups.advantage.end(), some.of.begin(), some.of.end());
            }
            if (first_stored) ask_reference();
        }
        places = groups.places;
        rewarded = Rewarded(groups);
        rewarded.time = time;
    }
    void ask_reference() {
        use(first_stored);
        each_batch(groups, all_groups(), [&](const Batch& b, size_t, int R) {
            const std::vector<A> losses = losses_of(b, R);
            std::vector<std::vector<float>>& to = groups.reference;
            int r = 0;
            for (int end : ends)
                for (to.emplace_back(); r < end; r++) to.back().push_back(-(float)losses[r]);
        });
        use(stored);
    }
    std::vector<size_t> all_groups() const {
        std::vector<size_t> list(groups.rows.size() / groups.size);
        std::iota(list.begin(), list.end(), (size_t)0);
        return list;
    }

    // Adds up the loss of a batch's answers, the first of which is number `first`; its gradients go to d.normed and the
    // head's. The step, of all ranks, has so many answers and so many tokens that count.
    double answers_backward(const Batch& b, int R, size_t first, double answers, double tokens) {
        const std::vector<A> losses = losses_of(b, R);
        std::vector<A> scale(R);
        double sum = 0;
        for (size_t s = 0, r = 0; s < ends.size(); s++) {
            const size_t i = first + s, n = (size_t)ends[s] - r;
            const double of = o.rl.loss == "grpo" ? answers * (double)n : o.rl.loss == "dapo" ? tokens
                                                                       : answers * o.rl.max_tokens;
            const double weight = groups.counts(i, o.rl) ? 1 / of : 0;
            const bool drawn_now = groups.old.size() == i;
            if (drawn_now) groups.old.emplace_back();
            for (size_t k = 0; k < n; k++, r++) {
                const float p = -(float)losses[r];
                if (drawn_now) groups.old[i].push_back(p);
                const double ref = groups.reference.empty() ? p : groups.reference[i][k];
                const TokenLoss token = token_loss(p, groups.old[i][k], ref, groups.advantage[i], o.rl);
                sum += weight * token.loss, scale[r] = (A)(-weight * token.slope); // cross entropy is -p
                if (weight > 0) rewarded.add(token);
            }
        }
        copy_in(ctx, by, scale.data(), scale.size());
        loss_backward(ctx, c, w, a, d, &g, loss, named, target, (A)1, b.N, R, by);
        return sum;
    }
    // Adds up the loss of this rank's answers in results[0], and its gradients.
    void add_groups() {
        double all[] = {0, 0}; // answers, tokens that count
        for (size_t i = 0; i < groups.rows.size(); i++)
            all[0]++, all[1] += groups.counts(i, o.rl) ? (double)groups.length(i) : 0;
        ranks.sum(all, 2);
        clear(ctx, results, 2);
        const std::vector<size_t> list = all_groups();
        double sum = 0;
        each_batch(groups, list, [&](const Batch& b, size_t at, int R) {
            sum += answers_backward(b, R, at * groups.size, all[0], all[1]);
            last_batch = at + o.batch >= list.size();
            backward(ctx, c, w, b, a, d, g, kv, rope);
        });
        copy_in(ctx, results, &sum, 1);
    }

    // The mean reward of the likeliest answers to some prompts. Without a meaning if it was interrupted.
    double mean_reward(const Dataset& from, const std::vector<size_t>& list) {
        try {
            rewarded = Rewarded(draw_groups(from, list, 1, true));
        } catch (const Error& e) {
            fault = e.what(), interrupted = 1;
        }
        rewarded.divide();
        return rewarded.value[Rewarded::REWARD];
    }

    // ---- Any step

    // Calls f(batch, first, R) for each batch of some units, after its forward pass; `first` is the place of its first
    // unit in the list. Batches without any unit of `wanted` are passed over; null: none.
    template <class From, class F>
    void each_batch(const From& from, const std::vector<size_t>& list, F f,
                    const std::set<size_t>* wanted = nullptr) {
        for (size_t first = 0; first < list.size() && !interrupted; first += o.batch) {
            int R;
            const int n = (int)std::min((size_t)o.batch, list.size() - first);
            auto is_wanted = [&](size_t unit) { return wanted->count(unit) > 0; };
            if (wanted && std::none_of(&list[first], &list[first] + n, is_wanted)) continue;
            const Batch b = load(from, &list[first], n, (int)first, R);
            forward(ctx, c, w, b, a, kv, rope);
            f(b, first, R);
        }
    }

    // What the loss is a mean over: trained tokens, or pairs.
    size_t weight(const Dataset& from, const std::vector<size_t>& list) const {
        return o.dpo ? list.size() : trained(from, list);
    }

    // Adds up the losses of units in results[0], and the gradients of that sum, divided by `all`, into `to` (null:
    // none).
    void add_rows(const Dataset& from, const std::vector<size_t>& list, const Gradients<T>* to, size_t all) {
        const A scale = 1 / (A)all;
        clear(ctx, results, 2);
        double sum = 0; // of pairs
        preferences = {};
        each_batch(from, list, [&](const Batch& b, size_t first, int R) {
            if (o.dpo) sum += pairs_backward(from, &list[first], b, R, to, scale);
            else {
                loss_backward(ctx, c, w, a, d, to, loss, named, target, scale, b.N, R);
                RUN(add_losses, results, loss, R);
            }
            last_batch = first + o.batch >= list.size();
            if (to) backward(ctx, c, w, b, a, d, *to, kv, rope);
        });
        if (!o.dpo) return;
        copy_in(ctx, results, &sum, 1);
        preferences.divide((double)all);
    }

    // This rank's units of a step; `places` becomes where they stand in it.
    std::vector<size_t> deal_step(const std::vector<size_t>& list) {
        if (ranks.size == 1) return list;
        std::vector<size_t> tokens, mine;
        for (size_t unit : list) tokens.push_back(o.grpo ? 1 : trained(data, {unit}));
        places = deal(tokens, ranks.size)[ranks.rank];
        for (size_t place : places) mine.push_back(list[place]);
        return mine;
    }

    // The gradients of a step, or of a rank's part of it: of the mean over the `all` trained tokens, or pairs, of the
    // whole step.
    void add_gradients(const std::vector<size_t>& list, size_t all) {
        dropout = {o.dropout, o.seed, (uint32_t)step, place};
        use_dropout(true);
        clear(ctx, gradient, count);
        buckets_done = 0;
        if (o.grpo) add_groups();
        else add_rows(data, list, &g, all);
        if (ranks.size == 1) return;
        places.clear();
        add_up(-1);
        ranks.finish();
        clear(ctx, results + 1, 1); // (no kernel after a clear begins before it: see launch_kernel)
    }

    // One step of AdamW. False if a rank was interrupted: then nothing has changed.
    bool train_step() {
        const std::vector<size_t> list = rows_of(step);
        if (o.grpo) take_groups(list);
        const size_t all = o.grpo ? 1 : weight(data, list);
        add_gradients(o.grpo ? std::vector<size_t>() : deal_step(list), all);
        Work work = o.grpo ? work_of(groups, all_groups()) : work_of(data, list);
        if (o.grpo) ranks.sum((double*)&work, 2);
        RUN(grad_norm, results + 1, partial, own_gradient, own);
        double result[2];
        copy_out(ctx, result, results, 2);
        // What the ranks tell each other. (Their parts of the norm are of different parameters if each has a part.)
        ranks.look_at_the_clock();
        struct { double loss, squares, stop, waited; Preferences preferences; } told =
            {result[0], result[1] * result[1], (double)interrupted, ranks.waited, preferences};
        ranks.sum((double*)&told, sizeof told / sizeof(double));
        waited = told.waited / ranks.size, preferences = told.preferences;
        if (o.grpo) rewarded.sum_over(ranks), rewarded.divide();
        if (told.stop > 0) return interrupted = 1, false;
        if (sharded()) {
            result[1] = std::sqrt(told.squares);
            copy_in(ctx, results + 1, result + 1, 1);
        }
        last_loss = told.loss / (double)all, last_norm = result[1];
        if (!std::isfinite(last_loss) || !std::isfinite(last_norm))
            not_finite(data, list, format("step %lld: loss %g, gradient norm %g", (long long)step + 1,
                                          std::fabs(last_loss), last_norm));
        update();
        tokens_fed = work.tokens, tokens_done += (size_t)work.tokens, flops = work.flops;
        step++;
        return true;
    }
    void update() {
        last_lr = o.lr * schedule(o, step, steps);
        AdamW how;
        how.lr = (float)last_lr, how.clip = (float)o.clip, how.step = step + 1;
        for (const Segment& s : segments) {
            how.decay = (float)s.decay, how.copy = s.copy;
            each_own([&](size_t first, size_t at, size_t n) {
                const size_t from = std::max(first, s.first), to = std::min(first + n, s.first + s.n);
                if (from >= to) return;
                at += from - first;
                RUN(adamw, stored + from, p + at, m + at, v + at, own_gradient + at, results + 1, to - from, how);
            });
        }
        const T* mine = stored + ranks.rank * buckets.piece;
        if (sharded()) gather(stored, [&](size_t b) { return mine + b * buckets.bucket; });
    }

    // The mean over all trained tokens of some rows, or over pairs, whatever the batch. Without a meaning if it was
    // interrupted.
    double mean_loss(const Dataset& from, const std::vector<size_t>& list) {
        use_dropout(false);
        const size_t all = weight(from, list);
        add_rows(from, list, nullptr, all);
        double sum;
        copy_out(ctx, &sum, results, 1);
        return sum / (double)all;
    }

    // Names the rows whose loss is not finite, and throws. After such a step the parameters are still those from before
    // it, so that each row can be asked by itself; rank 0 does it.
    [[noreturn]] void not_finite(const Dataset& from, const std::vector<size_t>& list, const std::string& what) {
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
                                                       : "%ss whose loss is not finite", unit(), unit()).c_str(),
            numbers.c_str());
    }

    // Of a step: tokens that are fed; multiplications and additions: forward; backward by the input, and by what is
    // trained; with --grpo a pass more for drawing the answers, and one for the reference.
    struct Work { double tokens, flops; };
    template <class From> Work work_of(const From& from, const std::vector<size_t>& list) const {
        double N = 0, pairs = 0, products = 0, adapters = 0;
        each_row(from, list, [&](DatasetRow row) {
            const double n = (double)row.size() - 1;
            N += n, pairs += n * (n + 1) / 2;
        });
        for (const ModelTensor& t : model_tensors(c))
            if (t.kind < MODULES) {
                products += (double)t.size();
                if (!o.full && o.lora.targets[t.kind]) adapters += (double)o.lora.rank * (t.rows + t.columns);
            }
        const int more = o.grpo + (first_stored != nullptr);
        const double passes = (o.full ? 3 : 2) + o.recompute + more, attention = 4. * c.H * c.D * c.L * pairs;
        const double head = (double)trained(from, list) * c.V * c.C * ((o.full ? 3 : 2) + (o.dpo || o.grpo) + more);
        const double scores = attention * (3.5 + o.recompute + more);
        return {N, 2 * N * (products * passes + adapters * (3 + more)) + scores + 2 * head};
    }

    // ---- Checkpoints: the adapter (or model) for use, and the state to go on from.

    // All of what each rank may have its part of: p, m or v. Every rank calls it, and rank 0 gets the numbers.
    // (`gradient` is free between steps.)
    std::vector<A> host(const A* from) {
        if (sharded()) {
            gather(gradient, [&](size_t b) { return from + b * buckets.piece; });
            from = gradient;
        }
        if (ranks.rank > 0) return {};
        std::vector<A> numbers(count);
        copy_out(ctx, numbers.data(), from, count);
        return numbers;
    }

    // Calls f(first, n) for each range of an array of parameters that files hold: all but what is always zero.
    template <class F> void each_range(F f) {
        if (o.full) return f((size_t)0, count);
        each_adapter_tensor(w, [&](const std::string&, size_t rows, size_t columns, size_t at, size_t stride) {
            for (size_t r = 0; r < rows; r++) f(at + r * stride, columns);
        });
    }

    // With --full, for qwen3: an F16 model stays one, unless a number became too large for that; else T is stored.
    void write_model(const std::string& folder, const Metadata& metadata, const std::vector<A>& numbers) {
        constexpr const char* TYPE = std::is_same_v<T, bf16> ? "BF16" : "F32";
        bool half = file.is_float16();
        if (half && std::any_of(numbers.begin(), numbers.end(), [](A x) { return std::fabs(x) >= 65520; })) {
            ranks.tell("%s/model.bin: a number is too large for F16: stored as %s\n", folder.c_str(), TYPE);
            half = false;
        }
        std::vector<OutTensor> tensors;
        each_tensor([&](const ModelTensor& t, size_t at) {
            auto write = [&numbers, half, at, n = t.size()](OutputFile& out) {
                auto rounded = [&](auto number, auto round) {
                    std::vector<decltype(number)> all(n);
                    for (size_t i = 0; i < n; i++) all[i] = round(numbers[at + i]);
                    out.write(all.data(), n * sizeof number);
                };
                if (half) rounded(uint16_t{}, [](A x) { return float_to_half((float)x); });
                else rounded(T{}, [](A x) { return to_stored<T>(x); });
            };
            tensors.push_back({t.name(), half ? "F16" : TYPE, t.shape(), write});
        });
        write_safetensors(folder + "/model.bin", metadata, tensors);
    }

    // The trained parameters, for PEFT or for qwen3. (This and write_state: all ranks call them, and rank 0 writes.)
    void write_result(const std::string& folder, size_t leaked) {
        const std::vector<A> numbers = host(p);
        if (ranks.rank > 0) return;
        const auto lock = ranks.writing();
        make_folder(folder);
        Metadata metadata = {{"format", "pt"}};
        if (o.full) metadata = model_metadata(file.config_text, file.generation_text);
        if (leaked) metadata["leak"] = counted(leaked, "row") + " of the evaluation file trained on";
        std::vector<OutTensor> tensors;
        if (o.full) return write_model(folder, metadata, numbers);
        each_adapter_tensor(w, [&](const std::string& name, size_t rows, size_t columns, size_t at, size_t stride) {
            auto write = [&numbers, rows, columns, at, stride](OutputFile& out) {
                for (size_t r = 0; r < rows; r++) out.write(&numbers[at + r * stride], columns * sizeof(A));
            };
            tensors.push_back({name, "F32", {(int64_t)rows, (int64_t)columns}, write});
        });
        write_text(folder + "/adapter_config.json", adapter_config_json(o.lora, o.dropout, o.model));
        write_safetensors(folder + "/adapter_model.safetensors", metadata, tensors);
    }

    void write_state(const std::string& path, double best, double elapsed) {
        Metadata metadata = {
            {"format", "pt"}, {"run", run}, {"step", format("%lld", (long long)step)}, {"best", sj::repr(best)},
            {"elapsed", sj::repr(elapsed)}};
        if (step % o.rl.iterations) metadata["answers"] = groups.json(); // that the next step takes again
        if (ranks.rank > 0) {
            for (const A* part : {p, m, v}) host(part);
            return;
        }
        const auto lock = ranks.writing();
        std::vector<OutTensor> tensors;
        for (auto [name, from] : {std::pair("p", p), {"m", m}, {"v", v}})
            tensors.push_back({name, "F32", {(int64_t)trained_parameters()}, [this, from = from](OutputFile& out) {
                const std::vector<A> numbers = host(from);
                each_range([&](size_t first, size_t n) { out.write(&numbers[first], n * sizeof(A)); });
            }});
        write_safetensors(path, metadata, tensors);
    }

    // Whether a state is one of this run's, though perhaps on another number of ranks. Then another --batch or --accum
    // may keep what a step is; if it does not, the run goes on with the same share of its steps done.
    struct Begun { int ranks; int64_t steps; };
    Begun check_state(const char* name, const Metadata& metadata) const {
        sj::Doc theirs, ours;
        const auto was_run = metadata.find("run");
        if (was_run == metadata.end() || !sj::parse(theirs, was_run->second).empty())
            DIE("%s: not a state of train_lora", name);
        sj::parse(ours, run);
        const sj::Value on = theirs.root()["ranks"], of = theirs.root()["steps"];
        const Begun begun = {on ? (int)on.number() : 1, (int64_t)of.number()};
        const std::set<std::string> free = {"ranks", "batch", "accum", "steps"};
        for (auto [key, mine] : ours.root().members()) {
            if (begun.ranks != ranks.size && free.count(std::string(key))) continue;
            if (const std::string was = sj::dump(theirs.root()[key]), is = sj::dump(mine); was != is)
                DIE("%s: begun with %s %s, not %s: --resume goes on with a run as it was begun", name, key.c_str(),
                    was.c_str(), is.c_str());
        }
        return begun;
    }

    void read_state(const std::string& path, double& best, double& elapsed) {
        const MappedFile map(path);
        const char* name = path.c_str();
        Tensors tensors;
        Metadata metadata;
        read_safetensors(map, tensors, metadata);
        const Begun begun = check_state(name, metadata);
        step = parse_integer(name, metadata["step"].c_str(), 0, begun.steps);
        if (begun.ranks != ranks.size) {
            step = std::llround((double)step * (double)steps / (double)std::max<int64_t>(begun.steps, 1));
            ranks.tell("%s: begun on %s, goes on with %d from the same weights at step %lld of %lld, not to the bit\n",
                       name, counted((size_t)begun.ranks, "rank").c_str(), ranks.size, (long long)step,
                       (long long)steps);
        }
        ranks.must_agree(format("step of %s\t%lld\n", name, (long long)step));
        if (o.dpo) make_reference(); // of the first parameters
        best = metadata["best"] == "Infinity" ? INFINITY : parse_number(name, metadata["best"].c_str(), -1e30, 1e30);
        elapsed = parse_number(name, metadata["elapsed"].c_str(), 0, 1e12);
        if (step % o.rl.iterations)
            groups = Groups(name, metadata["answers"], (size_t)o.rl.group, (uint32_t)c.V);
        std::vector<A> numbers(count);
        for (auto [key, to] : {std::pair("p", p), {"m", m}, {"v", v}}) {
            const auto t = tensors.find(key);
            const Shape shape = {(int64_t)trained_parameters()};
            if (t == tensors.end() || t->second.dtype != Dtype::F32 || t->second.shape != shape)
                DIE("%s: no tensor %s of %zu numbers", name, key, trained_parameters());
            const uint8_t* from = t->second.data;
            each_range([&](size_t first, size_t n) {
                memcpy(&numbers[first], from, n * sizeof(A));
                from += n * sizeof(A);
            });
            keep(to, numbers);
            if (to == p) give_copies(stored, numbers);
        }
    }
};

// ========================================================================================= 4 Log and curve

static std::string clock_text(double s) { // as Python's str(timedelta)
    const long long t = (long long)s;
    const std::string days = t >= 86400 ? format("%lld day%s, ", t / 86400, t >= 2 * 86400 ? "s" : "") : "";
    return days + format("%lld:%02lld:%02lld", t / 3600 % 24, t / 60 % 60, t % 60);
}

// trainer_log.jsonl, with LLaMA-Factory's fields, and loss.svg, or reward.svg, which is drawn from it.
struct Log {
    std::string folder, what; // "loss", "reward"
    FILE* file = nullptr;
    struct Point { double step, value; };
    std::vector<Point> losses, evaluations;

    // Goes on after the lines of the first `steps` steps, which exist already if there are any. Without `writes`
    // nothing is read or written.
    Log(const std::string& out, const char* drawn, int64_t steps, bool writes) : folder(out), what(drawn) {
        if (!writes) return;
        const std::string path = folder + "/trainer_log.jsonl";
        std::string kept;
        if (steps > 0) {
            const MappedFile old(path);
            const std::string_view all = old.text();
            for (size_t at = 0, end; (end = all.find('\n', at)) != std::string_view::npos; at = end + 1) {
                sj::Doc doc;
                const std::string_view line = all.substr(at, end - at);
                if (!sj::parse(doc, line).empty()) DIE("%s: a damaged line", path.c_str());
                const sj::Value v = doc.root();
                if (v["current_steps"].number() > (double)steps) break;
                kept += std::string(line) + "\n";
                for (auto [name, list] : {std::pair(what, &losses), {"eval_" + what, &evaluations}})
                    if (const sj::Value x = v[name.c_str()]) list->push_back({v["current_steps"].number(), x.number()});
            }
        }
        write_text(path, kept);
        file = fopen(path.c_str(), "ab");
        if (!file) DIE("%s: %s", path.c_str(), strerror(errno));
    }
    Log(const Log&) = delete;
    ~Log() { if (file) fclose(file); }

    void add(const std::string& line) {
        if (!file) return;
        if (fputs((line + "\n").c_str(), file) < 0 || fflush(file) != 0)
            DIE("%s/trainer_log.jsonl: %s", folder.c_str(), strerror(errno));
    }

    // Steps across, loss or reward upwards: every step thin, their running mean thick, evaluations as dots.
    void draw(int64_t steps) const {
        if (!file) return;
        constexpr double W = 800, H = 400, LEFT = 60, TOP = 20, RIGHT = 20, BOTTOM = 40;
        double most = 0, least = 0;
        for (auto* list : {&losses, &evaluations})
            for (const Point& p : *list) most = std::max(most, p.value), least = std::min(least, p.value);
        // 1, 2 or 5 times a power of ten
        double tick = std::pow(10, std::floor(std::log10(std::max(most - least, 1e-9))));
        for (double more : {0.5, 0.4, 0.5})
            if ((most - least) / tick < 4) tick *= more;
        const double low = std::floor(least / tick) * tick;
        const double high = std::max(low / tick + 1, std::ceil(most / tick)) * tick;
        auto x = [&](double step) { return LEFT + (W - LEFT - RIGHT) * step / (double)steps; };
        auto y = [&](double value) { return H - BOTTOM - (H - TOP - BOTTOM) * (value - low) / (high - low); };
        std::string s = format("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %g %g\" "
                               "font-family=\"sans-serif\" font-size=\"12\">\n"
                               "<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n", W, H);
        for (double at = low; at <= high + tick / 1000; at += tick)
            s += format("<path d=\"M%g %.1fH%g\" stroke=\"#ddd\"/>"
                        "<text x=\"%g\" y=\"%.1f\" text-anchor=\"end\">%g</text>\n",
                        LEFT, y(at), W - RIGHT, LEFT - 6, y(at) + 4, at);
        for (int i = 0; i <= 4; i++)
            s += format("<text x=\"%.1f\" y=\"%g\" text-anchor=\"middle\">%lld</text>\n", x((double)steps * i / 4),
                        H - BOTTOM + 18, (long long)(steps * i / 4));
        s += format("<text x=\"%g\" y=\"%g\" text-anchor=\"middle\">step</text>"
                    "<text x=\"16\" y=\"%g\" transform=\"rotate(-90 16 %g)\" text-anchor=\"middle\">%s</text>\n",
                    (LEFT + W - RIGHT) / 2, H - 6, H / 2, H / 2, what.c_str());
        std::string thin, thick;
        double mean = losses.empty() ? 0 : losses[0].value;
        for (const Point& p : losses) {
            mean += (p.value - mean) * 0.1;
            thin += format("%.1f,%.1f ", x(p.step), y(p.value)), thick += format("%.1f,%.1f ", x(p.step), y(mean));
        }
        s += "<polyline points=\"" + thin + "\" fill=\"none\" stroke=\"#9bd\"/>\n";
        s += "<polyline points=\"" + thick + "\" fill=\"none\" stroke=\"#05a\" stroke-width=\"2\"/>\n";
        for (const Point& p : evaluations)
            s += format("<circle cx=\"%.1f\" cy=\"%.1f\" r=\"4\" fill=\"#c30\"><title>%g</title></circle>\n", x(p.step),
                        y(p.value), p.value);
        s += format("<text x=\"%g\" y=\"36\" text-anchor=\"end\" fill=\"#05a\">training</text>", W - RIGHT - 6);
        if (!evaluations.empty())
            s += format("<text x=\"%g\" y=\"52\" text-anchor=\"end\" fill=\"#c30\">evaluation</text>", W - RIGHT - 6);
        write_text(folder + "/" + what + ".svg", s + "\n</svg>\n");
    }
};

// ==================================================================================================== 5 Merge

// How --merge-as quantises: in groups and with an embedding as the base has them, if it is quantised.
static Quantization merged_as(const Options& o, const ModelFile& file) {
    Quantization how;
    how.format = o.merge_as == "int4" ? Format::INT4 : o.merge_as == "int8" ? Format::INT8 : Format::FP8;
    how.group = 128;
    for (auto& [name, t] : file.tensors) {
        const Kept kept = t.is_quantized() && t.shape.size() == 2 ? kept_as(t) : Kept{};
        if (kept.format == Format::INT4) how.group = std::min(how.group, kept.group);
    }
    const bool packed = file.is_quantized() || file.is_int8();
    how.keep_embedding = packed && readable_tensors(file).at(ModelTensor{EMBED, -1, 0, 0}.name()).is_plain();
    return how;
}

// What would make a merge fail, asked before hours of training.
static void check_merge(const Options& o, const ModelFile& file) {
    const std::string& path = o.merge;
    const char* name = path.c_str();
    bool itself = same_file(file.path, path);
    for (const MappedFile& map : file.maps)
        itself |= same_file(map.path, path) || same_file(map.path, path + "/model.safetensors");
    if (itself) DIE("--merge %s: is the model itself", name);
    struct stat st;
    const bool there = stat(name, &st) == 0 && S_ISREG(st.st_mode);
    if (!o.overwrite && (there || ModelFile::in_folder(path)))
        DIE("--merge %s: there is a model already; --overwrite replaces it", name);
    for (auto& [name, t] : readable_tensors(file))
        if (!t.is_float())
            DIE("%s: tensor %s is not BF16, F16 or F32: nothing can be merged", t.file.c_str(), name.c_str());
    if (!o.merge_as.empty()) check_groups(file, merged_as(o, file));
}

// Writes the merged model: as bf16 (F16, F32), or with --merge-as quantised, of a file beside it that is then removed.
static void write_result(const Options& o, const ModelFile& file, const AdapterFile& adapter) {
    if (o.merge_as.empty()) return write_merged(file, adapter, o.merge);
    struct Removed {
        std::string path;
        ~Removed() { unlink(path.c_str()); }
    } const whole = {format("%s.%d.bin", o.merge.c_str(), (int)getpid())};
    write_merged(file, adapter, whole.path);
    const ModelFile from(whole.path);
    const Quantization how = merged_as(o, file);
    const std::vector<OutTensor> tensors = from.is_float32() ? quantize_model<float>(from, how, {})
                                                             : quantize_model<bf16>(from, how, {});
    write_safetensors(o.merge, model_metadata(quantized_config(from, how), from.generation_text), tensors);
}

// Merges, then compares the model with the adapter and the merged model: the mean KL divergence over the positions of a
// prompt, and how many tokens of their greedy texts after it are the same.
template <class T>
void merge(const Options& o, Context ctx, const ModelFile& file, const std::string& folder, const Dataset* data) {
    constexpr int PROMPT = 64, ANSWER = 64;
    ctx.one_kernel = Context::OFF; // it would merge, too
    const AdapterFile adapter(folder, file.config);
    write_result(o, file, adapter);
    const bool one_file = !ModelFile::in_folder(o.merge);
    const size_t slash = o.merge.rfind('/');
    give_tokenizer(o, file, !one_file ? o.merge : slash == std::string::npos ? "." : o.merge.substr(0, slash + 1),
                   o.overwrite && !one_file);
    const ModelFile merged(o.merge);
    const Config& c = file.config;
    std::vector<int> prompt;
    if (data)
        for (uint32_t word : data->row(0))
            if (prompt.size() < PROMPT) prompt.push_back((int)(word & ~TRAIN));
    for (int i = 0; !data && i < PROMPT; i++) prompt.push_back((int)(philox(0, i, STREAM_SAMPLE).v[0] % (uint32_t)c.V));
    if (prompt.size() > (size_t)c.max_positions) prompt.resize(c.max_positions);
    std::vector<std::vector<acc<T>>> logits; // of the adapter
    std::vector<int> texts[2];
    double kl = 0;
    for (int which = 0; which < 2; which++) {
        const ModelFile& from = which ? merged : file;
        Weights<T> w(from, false, keeps_packed<T>(o, ctx));
#ifdef __CUDACC__
        if constexpr (HAS_GPU<T>) if (ctx.gpu) w.upload(ctx, from);
#endif
        std::unique_ptr<AttachedAdapter<T>> attached;
        const int chunk = ctx.gpu ? Session<T>::GPU_CHUNK : Session<T>::CHUNK;
        if (!which) attached = std::make_unique<AttachedAdapter<T>>(ctx, w, adapter, chunk);
        Session<T> session(c, w, std::min(c.max_positions, (int)prompt.size() + ANSWER), ctx);
        size_t at = 0;
        session.feed(prompt, nullptr, [&](const acc<T>* row) {
            if (!which) return logits.emplace_back(row, row + c.V), void();
            const std::vector<acc<T>>& theirs = logits[at++];
            const double top_p = *std::max_element(theirs.begin(), theirs.end());
            const double top_q = *std::max_element(row, row + c.V);
            double zp = 0, zq = 0, sum = 0;
            for (int v = 0; v < c.V; v++) zp += std::exp(theirs[v] - top_p), zq += std::exp(row[v] - top_q);
            for (int v = 0; v < c.V; v++) {
                const double lp = theirs[v] - top_p - std::log(zp);
                sum += std::exp(lp) * (lp - (row[v] - top_q - std::log(zq)));
            }
            kl += sum / (double)prompt.size();
        });
        Generation how;
        how.sampling.temperature = 0, how.max_tokens = ANSWER;
        generate(session, nullptr, how, [](std::string_view) {});
        texts[which] = how.ids;
    }
    size_t same = 0;
    while (same < texts[0].size() && same < texts[1].size() && texts[0][same] == texts[1][same]) same++;
    fprintf(stderr, "%s: merged; against the adapter: mean KL %.2e over %s, ", o.merge.c_str(), std::max(0., kl),
            counted(prompt.size(), "token").c_str());
    fprintf(stderr, "greedy text the same for %zu of %s\n", same, counted(texts[0].size(), "token").c_str());
}

// ===================================================================================================== 6 main

// Removes what a run leaves in its folder.
static void remove_run(const std::string& out) {
    for (const char* name : {"adapter_config.json", "adapter_model.safetensors", "model.bin", "state.safetensors",
                             "trainer_log.jsonl", "loss.svg", "reward.svg", "best/adapter_config.json",
                             "best/adapter_model.safetensors", "best/model.bin"})
        if (unlink((out + "/" + name).c_str()) != 0 && errno != ENOENT && errno != ENOTDIR)
            DIE("%s/%s: %s", out.c_str(), name, strerror(errno));
}

static void check_folder(const Options& o, const std::string& state) {
    auto exists = [&](const char* name) { return access((o.out + "/" + name).c_str(), F_OK) == 0; };
    const bool old = exists("trainer_log.jsonl") || exists("state.safetensors") || exists("adapter_config.json") ||
                     exists("model.bin");
    const char* out = o.out.c_str();
    if (old && !o.resume && !o.overwrite)
        DIE("%s: holds a run; --resume goes on with it, --overwrite replaces it", out);
    const std::string result = o.out + "/model.bin";
    if (o.overwrite && (same_file(o.model, result) || same_file(o.model + "/model.bin", result)))
        DIE("%s: --overwrite would remove the model that is to be trained", out);
    if (o.resume && access(state.c_str(), F_OK) != 0) DIE("%s: no run to resume: it has no state.safetensors", out);
}

template <class T>
int train(const Options& o, const Context& ctx, const ModelFile& file, const Dataset& data, const Dataset* eval,
          size_t leaked) {
    const std::string state = o.out + "/state.safetensors";
    Ranks& ranks = *o.ranks;
    const bool first = ranks.rank == 0;
    if (first) check_folder(o, state);
    Trainer<T> t(o, ctx, file, data, eval);
    double best = INFINITY, before = 0;
    if (o.resume) t.read_state(state, best, before);
    else if (o.dpo) t.make_reference();
    if (first) make_folder(o.out);
    if (first && o.overwrite) remove_run(o.out);
    for (const std::string& folder : {o.out, o.out + "/best"}) {
        if (!first || !o.full || (folder != o.out && !eval)) continue;
        make_folder(folder);
        give_tokenizer(o, file, folder, o.overwrite);
    }
    Log log(o.out, o.grpo ? "reward" : "loss", t.step, first);
    const std::string lora =
        o.full ? "" : format("LoRA rank %d, alpha %g, dropout %g: ", o.lora.rank, o.lora.alpha, o.dropout);
    const std::string several = ranks.size > 1 ? format("%d x ", ranks.size) : "";
    ranks.tell("%s: %.2f M parameters, %s, %s%s; %s%.2f M of them trained\n", o.model.c_str(),
               (double)parameters(file.config) / 1e6, type_name(t.w), several.c_str(), device_name(ctx).c_str(),
               lora.c_str(), (double)t.trained_parameters() / 1e6);
    const std::string what = o.grpo ? format("%d answers to each, of at most %d tokens", o.rl.group, o.rl.max_tokens)
                                    : counted(t.trained(data, t.rows), "trained token");
    ranks.tell("%s: %s, %s; %s of %s, %lld an epoch, seed %llu\n", o.train.c_str(),
               counted(t.rows.size(), t.unit()).c_str(), what.c_str(),
               counted((size_t)t.steps, "step").c_str(), counted(t.step_units(), t.unit()).c_str(),
               (long long)t.epoch_steps, (unsigned long long)o.seed);
    ranks.tell("%s\n", t.memory.c_str());
    if (o.full && file.is_float16())
        ranks.tell("%s: F16; computed in %s, and model.bin is F16 again\n", o.model.c_str(), type_name(t.w));

    const double start = seconds();
    auto elapsed = [&] { return before + seconds() - start; };
    auto add_to_log = [&](sj::Writer& w) { // with what each line ends in
        const double share = (double)t.step / (double)t.steps;
        w.field("epoch", (double)t.step / (double)t.epoch_steps).field("percentage", std::round(share * 1e4) / 100);
        w.field("elapsed_time", clock_text(elapsed()));
        if (share > 0) w.field("remaining_time", clock_text(elapsed() / share * (1 - share)));
        log.add(w.end().text);
    };
    auto save = [&] {
        t.write_result(o.out, leaked);
        t.write_state(state, best, elapsed());
        const auto lock = ranks.writing();
        log.draw(t.steps);
    };
    auto due = [&](int64_t every) { return t.step == t.steps || t.step % (every ? every : t.epoch_steps) == 0; };
    auto told_beside = [&] { return o.dpo ? t.preferences.text() : o.grpo ? t.rewarded.text() : ""; };
    auto measure = [&] { // whether the model is better than it was at its best; of rewards `best` is the negative
        const double value = o.grpo ? t.mean_reward(*eval, t.eval_rows) : t.mean_loss(*eval, t.eval_rows);
        const double loss = o.grpo ? -value : value;
        if (interrupted) return false;
        if (!std::isfinite(loss))
            t.not_finite(*eval, t.eval_rows, format("after step %lld: loss %g", (long long)t.step, std::fabs(loss)));
        log.evaluations.push_back({(double)t.step, value});
        sj::Writer w;
        w.object().field("current_steps", t.step).field("total_steps", t.steps);
        if (o.grpo) t.rewarded.write(w, o, true);
        else w.field("eval_loss", loss);
        if (o.dpo) t.preferences.write(w, "eval_");
        add_to_log(w);
        ranks.tell("step %lld/%lld  evaluation %s %.6f%s%s\n", (long long)t.step, (long long)t.steps,
                   log.what.c_str(), value, o.dpo ? told_beside().c_str() : "", loss < best ? ", the best so far" : "");
        const bool better = loss < best;
        best = std::min(loss, best);
        return better;
    };
    auto evaluate = [&] { // if it is time, and not done yet
        if (!eval || (t.step == 0 && !o.grpo) || !due(o.eval_every)) return;
        const bool done = !log.evaluations.empty() && log.evaluations.back().step == (double)t.step;
        int better = first && !done && measure();
        ranks.sum(&better, 1);
        if (better) t.write_result(o.out + "/best", leaked);
    };
    evaluate(); // a run may have been stopped in the middle of it
    const double ceiling = multiply_ceiling<T>(ctx, false, 0.02);
    auto speed = [&](double flops) { // a second
        const bool giga = flops < 1e12;
        return format("%.1f %cFLOP/s, %.3g%% of the ceiling", flops / (giga ? 1e9 : 1e12), giga ? 'G' : 'T',
                      100 * flops / (ceiling * ranks.size));
    };
    const int64_t begun_at = t.step;
    int64_t saved = -1;
    size_t told_tokens = 0; // of them the last progress line spoke
    double told_at = start;
    ThreadPace pace(o, ctx);
    while (t.step < t.steps && (!interrupted || ranks.size > 1)) { // (of several all leave in the same step)
        const double begun = seconds();
        pace.begin();
        if (!t.train_step()) break;
        pace.end();
        const double now = seconds(), took = std::max(now - begun, 1e-9);
        log.losses.push_back({(double)t.step, o.grpo ? t.rewarded.value[Rewarded::REWARD] : t.last_loss});
        sj::Writer w;
        w.object().field("current_steps", t.step).field("total_steps", t.steps).field("loss", t.last_loss);
        if (o.dpo) t.preferences.write(w, "");
        if (o.grpo) t.rewarded.write(w, o, false);
        w.field("lr", t.last_lr).field("grad_norm", t.last_norm);
        w.field("throughput", std::round((double)t.tokens_done / (now - start))).field("total_tokens", t.tokens_done);
        if (ranks.size > 1) w.field("waited", std::round(t.waited * 1e3) / 1e3);
        if (const double time = t.rewarded.time; time > 0) { // of this step's answers
            w.field("rollout_throughput", std::round(t.rewarded.drawn / time)).field("rollout_share", time / took);
            w.field("train_throughput", std::round(t.tokens_fed / std::max(took - time, 1e-9)));
        }
        add_to_log(w);
        if (now - told_at >= 1 || t.step == t.steps || t.step == begun_at + 1) {
            const double left = (now - start) * (double)(t.steps - t.step) / (double)(t.step - begun_at);
            const std::string lost = ranks.size > 1 ? format("  waited %.1f%%", 100 * t.waited / (now - start)) : "";
            ranks.tell("step %lld/%lld  loss %.4f%s  lr %.2e  norm %.3f  %.0f tok/s  %s%s  %.1f MB  %s left\n",
                       (long long)t.step, (long long)t.steps, t.last_loss, told_beside().c_str(),
                       t.last_lr, t.last_norm, (double)(t.tokens_done - told_tokens) / std::max(now - told_at, 1e-9),
                       speed(t.flops / took).c_str(), lost.c_str(), (double)t.arena.size / 1e6,
                       clock_text(left).c_str());
            told_tokens = t.tokens_done, told_at = now;
        }
        evaluate();
        if (due(o.save_every)) save(), saved = t.step;
    }
    if (saved != t.step) save();
    int stopped = interrupted != 0; // by a signal to any rank
    ranks.sum(&stopped, 1);
    if (!t.fault.empty()) DIE("%s; step %lld is saved, --resume goes on", t.fault.c_str(), (long long)t.step);
    if (stopped) {
        ranks.tell("stopped after step %lld of %lld; the same command with --resume goes on\n", (long long)t.step,
                   (long long)t.steps);
        return 130;
    }
    ranks.tell("%s: %s in %s\n", o.out.c_str(), o.full ? "model.bin" : "adapter_model.safetensors",
               clock_text(elapsed()).c_str());
    return 0;
}

template <class T>
int run_as(const Options& o, const Context& ctx, const ModelFile& file, const Dataset* data, const Dataset* eval,
           size_t leaked) {
    const int status = data ? train<T>(o, ctx, file, *data, eval, leaked) : 0;
    o.ranks->part();
    if (status == 0 && !o.merge.empty() && o.ranks->rank == 0)
        merge<T>(o, ctx, file, data ? o.out : o.adapter_init, data);
    return status;
}

// Opens TRAIN.bin and --eval's file; returns how many rows of the first are in the second.
static size_t open_datasets(const Options& o, const ModelFile& file, std::unique_ptr<Dataset>& data,
                            std::unique_ptr<Dataset>& eval) {
    const std::string found = tokenizer_path(o);
    const Tokenizer tokenizer(found);
    if (tokenizer.size() > file.config.V || !file.difference(tokenizer).empty())
        not_its_tokenizer(found, tokenizer, file);
    auto open = [&](const std::string& path) {
        auto set = std::make_unique<Dataset>(path);
        set->must_match(tokenizer.hash(), template_hash());
        if (set->id_limit() > (uint32_t)tokenizer.size())
            DIE("%s: id %u is not in the tokenizer's %d", path.c_str(), set->id_limit() - 1, tokenizer.size());
        if (o.dpo && !set->pairs())
            DIE("%s: --dpo trains on pairs, and these rows have no chosen and rejected answers", path.c_str());
        if (!o.dpo && set->pairs()) DIE("%s: pairs of chosen and rejected answers: they need --dpo", path.c_str());
        return set;
    };
    data = open(o.train);
    if (o.eval.empty()) return 0;
    eval = open(o.eval);
    std::set<uint64_t> known;
    size_t leaked = 0;
    for (size_t i = 0; i < eval->rows(); i++) known.insert(eval->hash(i));
    for (size_t i = 0; i < data->rows(); i++) leaked += known.count(data->hash(i));
    if (leaked && !o.allow_leak)
        DIE("%s: %s in %s too, whose loss would mean nothing (--allow-leak)", o.train.c_str(),
            leaked == 1 ? "1 row is" : format("%zu rows are", leaked).c_str(), o.eval.c_str());
    return leaked;
}

// Becomes one of several ranks, if there are to be several.
static void join_ranks(Options& o) {
    Ranks& ranks = *o.ranks;
    if (o.gpus > 1 && getenv("MASTER_ADDR") && getenv("RANK"))
        DIE("--gpus %d: a launcher has started this process as one of several already", o.gpus);
    if (o.gpus > 1 && o.device.empty() && !WITH_GPU)
        DIE("--gpus %d: this program was built without nvcc (-d cpu: processes on the CPU)", o.gpus);
    if (o.gpus > 1) ranks.fork_here(o.gpus);
    else ranks.join_launcher();
    if (ranks.size == 1) return;
#ifdef _OPENMP
    if (o.gpus > 1 && !o.threads) omp_set_num_threads(std::max(1, omp_get_max_threads() / o.gpus));
#endif
    if (o.device.empty()) o.device = "cuda"; // all of them, or none
    o.gpu = ranks.local;
    check_options(o);
}

[[maybe_unused]] static int run(int argc, char** argv) {
    if (told_version("train_lora", argc, argv)) return 0;
    Options o = parse_options(argc, argv);
    if (o.help) return 0;
    o.use_threads();
    const ModelFile file(o.model);
    if (o.full && (file.is_int8() || file.is_quantized()))
        DIE("%s: --full: quantised weights cannot be trained, only adapters on them (qwen3 --convert makes bf16)",
            o.model.c_str());
    if (!o.merge.empty()) check_merge(o, file);
    if (!o.adapter_init.empty()) o.lora = AdapterFile(o.adapter_init, file.config).config;
    std::unique_ptr<Dataset> data, eval;
    const size_t leaked = o.train.empty() ? 0 : open_datasets(o, file, data, eval);
    if (data) join_ranks(o);
    try {
        const Context ctx = choose_device(o, file);
        if (ctx.gpu) o.rank_step = GPU_RANK_STEP;
#ifdef __CUDACC__
        if (ctx.gpu && o.ranks->size > 1) o.ranks->use_gpu(ctx.gpu->stream);
#endif
        return wide(o, file) ? run_as<float>(o, ctx, file, data.get(), eval.get(), leaked)
                             : run_as<bf16>(o, ctx, file, data.get(), eval.get(), leaked);
    } catch (const std::exception& e) {
        if (o.ranks->size > 1) o.ranks->end(e.what());
        throw;
    }
}

#ifndef TRAIN_NO_MAIN
int main(int argc, char** argv) {
    take_signals({SIGINT}, {SIGXFSZ});
    return run_program("train_lora", run, argc, argv);
}
#endif // TRAIN_NO_MAIN
