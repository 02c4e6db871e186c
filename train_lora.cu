/* train_lora.cu: fine-tuning of Qwen3 on answers, preferences, rewards or a teacher, with LoRA or of all parameters.

   Build:  make
   Run:    ./train_lora model.bin train.bin -o out/        (datagen pack makes train.bin)
           ./qwen3 model.bin --adapter out/ -i "..."

   What a step is: `batch` x `accum` rows, in an order that Philox draws for each epoch. `batch` rows at a time are
   packed into one ragged batch, each a sequence of its own that begins at position 0; there is no padding. `forward`
   and `backward` (qwen3.cu) add up the gradients of the loss, which is the sum over the step's trained tokens divided
   by their number in the whole step: so it does not matter into how many batches the step is cut. Then AdamW moves the
   master parameters, which are float32, and their copies of type T, which the products read.

   With --dpo, --ipo, --simpo and --orpo a unit of data is not a row but a pair, two rows with one prompt, and the loss
   is a mean over pairs. Its gradient by the logits of a token is that of cross entropy times a number of its row, so
   that nothing but the head's pass differs: once for the losses, which give the numbers; then row by row, each with its
   number as `scale`. With --kto a unit is one answer with a label, and a second row with the same prompt, which is only
   measured.

   With --grpo a unit is a prompt, and its rows are made in the run: `group` answers that the model samples, each with the
   reward of rewards.h. Every token has a number of its own (grpo.h), which scales its row of the head's gradient.

   With --teacher the loss of a token compares the distributions of two models (model/distillation.h). Rows with a
   teacher's log-probabilities give a part of its distribution: some ids, and all others as one (`gather_outcomes`). With
   --reward-model a pair's loss is of two scores, which a head of C numbers computes from the last token's vector.

   With LoRA the parameters are the A and B of each targeted module and nothing else; with --full all of the model's.
   Either way they are one array, and so are their gradients and AdamW's two moments: p, g, m, v.

   Several GPUs (ranks.h) share each step: every rank has its rows of it, and the sums of gradients over all ranks are
   those of the whole step. With LoRA each rank has all parameters and moments and moves them alike. With --full each
   owns a part of them (ZeRO stage 1; Rajbhandari et al., 2020): it gets the sums of that part, moves its parameters,
   and sends the others their copies of type T. Rank 0 evaluates, and writes all there is to write.

   Random choices (order of rows, first A, dropout, noise) are functions of seed, step and place, so that a run that was
   stopped goes on bit by bit as if it had not been. It is the arithmetic of PEFT and transformers' Trainer: see
   tests/unit/test_train.cpp, which holds it to theirs.

   Where it is, in train/:
     options      what the command line says                 ranks        several processes: sums over all of them;
     run          a run: steps, evaluations, checkpoints                  meeting, sockets, nccl, buckets: how
     trainer.h    the trainer, by concern:                   rewards      what an answer is worth
       plan       its memory                                 answers      draws answers
       step       a step on rows, AdamW                      grpo         advantages, the loss of a token, groups
       preferences  their losses, the reference              log          trainer_log.jsonl and the curve
       rollout    answers, rewards and their gradients       merge        the adapter merged into the model
       teacher    a teacher's logits, distillation           reward_model scores of answers
       checkpoint what was trained; the state of a run   questions    what the model is asked during the run
     parameters   what is trained and where it lies
     loader       rows, their order, batches                 recipe       LLaMA-Factory's keys as options
     watch        the run live in a browser                  report       the run as a page to hand in
*/
#include "base/file.h"
#include "book/arguments.h"
#include "book/datagen/pack.h"
#include "model/chat_template.h"
#include "model/dataset.h"
#include "model/device.h"
#include "train/folder.h"
#include "train/merge.h"
#include "train/options.h"
#include "train/reward_model.h"
#include "train/rewards.h"
#include "train/run.h"
#include <cstdio>
#include <memory>
#include <set>
#include <string>

template <class T>
static int run_as(const TrainOptions& o, const Context& ctx, const ModelFile& file, const Dataset* data,
                  const Dataset* eval, size_t leaked) {
    const int status = data ? train<T>(o, ctx, file, *data, eval, leaked) : 0;
    o.ranks->part();
    if (status == 0 && !o.merge.empty() && o.ranks->rank == 0)
        merge_adapter<T>(o, ctx, file, data ? o.out : o.adapter_init, data);
    return status;
}

// Rows are packed with tokenizer.bin, in Qwen3's own chat template.
static void tell_differences(const TrainOptions& o, const Tokenizer& t) {
    const ChatStyle& style = t.chat;
    if (t.extended())
        fprintf(stderr, "%s: rows have none of the tokens that its tokenizer.json adds\n", o.model.c_str());
    if (!style.thinks || !style.can_be_off || style.opens || !style.system.empty() || !style.strange.empty())
        fprintf(stderr, "%s: rows are in Qwen3's chat template, and its own is another\n", o.model.c_str());
}

// Pairs, labelled answers and other rows are for different losses.
static void must_fit(const TrainOptions& o, const Dataset& set) {
    const bool pairs = o.preference && o.preference->pairs(), labelled = o.preference && !pairs;
    if (pairs && !set.pairs())
        DIE("%s: --%s trains on pairs, and these rows have no chosen and rejected answers", set.path(),
            o.preference->name);
    if (labelled && !set.labelled())
        DIE("%s: --kto trains on labelled answers, and these rows have no kto_tag", set.path());
    if (!pairs && set.pairs())
        DIE("%s: pairs of chosen and rejected answers: they need --dpo, --ipo, --simpo, --orpo or --reward-model",
            set.path());
    if (!labelled && set.labelled()) DIE("%s: labelled answers: they need --kto", set.path());
    if (set.taught() && (o.grpo || !o.teacher.empty()))
        DIE("%s: rows with a teacher's log-probabilities: not with %s", set.path(), o.grpo ? "--grpo" : "--teacher");
}

// Opens TRAIN.bin and --eval's file; returns how many rows of the first are in the second.
static size_t open_datasets(const TrainOptions& o, const ModelFile& file, std::unique_ptr<Dataset>& data,
                            std::unique_ptr<Dataset>& eval) {
    const std::string vocabulary = tokenizer_path(o);
    const Tokenizer tokenizer = tokenizer_of(vocabulary, file);
    tell_differences(o, tokenizer);
    if (!o.teacher.empty() && !same_ids(vocabulary, file, ModelFile(o.teacher)))
        DIE("%s: its vocabulary is not that of %s: --teacher needs the same", o.teacher.c_str(), o.model.c_str());
    for (auto& name : o.rl.rewards)
        if (const Reward reward = make_reward(name, o.rl.timeout); !reward.of) // a reward model reads the same ids
            if (!same_ids(vocabulary, file, ModelFile(reward_base(reward.name))))
                DIE("--reward %s: its vocabulary is not that of %s", reward.name.c_str(), o.model.c_str());
    auto open = [&](const std::string& path) {
        auto set = std::make_unique<Dataset>(path);
        set->must_match(tokenizer.hash(), template_hash(),
                        "datagen pack -z " + vocabulary + " makes it again for this model");
        if (set->id_limit() > (uint32_t)tokenizer.size())
            DIE("%s: id %u is not in the tokenizer's %d", path.c_str(), set->id_limit() - 1, tokenizer.size());
        must_fit(o, *set);
        return set;
    };
    data = open(o.train);
    if (!o.says_distil.empty() && o.teacher.empty() && !data->taught())
        DIE("%s is for --teacher, or rows with a teacher's log-probabilities", o.says_distil.c_str());
    if (o.eval.empty()) return 0;
    eval = open(o.eval);
    std::set<uint64_t> known;
    size_t leaked = 0;
    const size_t each = data->labelled() ? 2 : 1; // (every second one is a mismatched row)
    for (size_t i = 0; i < eval->rows(); i += each) known.insert(eval->hash(i));
    for (size_t i = 0; i < data->rows(); i += each) leaked += known.count(data->hash(i));
    if (leaked && !o.allow_leak)
        DIE("%s: %s in %s too, whose loss would mean nothing (--allow-leak)", o.train.c_str(),
            leaked == 1 ? "1 row is" : format("%zu rows are", leaked).c_str(), o.eval.c_str());
    return leaked;
}

// A recipe's rows, by `datagen pack`.
static void pack_recipe(const TrainOptions& o) {
    if (o.packs.empty()) return;
    if (getenv("MASTER_ADDR") && getenv("RANK"))
        DIE("--recipe: a launcher has started this process as one of several; pack the rows first (datagen pack)");
    const RunFolder checked(o, false); // a run there keeps its rows
    for (auto& words : o.packs) {
        book::Arguments a;
        a.files = {words[0], words[1]};
        for (size_t i = 2; i < words.size(); i += 2) a.given[words[i]] = words[i + 1];
        a.given["-z"] = tokenizer_path(o);
        Recipe::Words shown = words;
        shown.insert(shown.end(), {"-z", a.given["-z"]});
        fprintf(stderr, "%s: %s\n", o.recipe.c_str(), shell_command("datagen pack", shown).c_str());
        const size_t slash = words[1].rfind('/');
        if (slash != std::string::npos && slash > 0) make_folder(words[1].substr(0, slash));
        book::run_pack(a);
    }
}

// Becomes one of several ranks, if there are to be several.
static void join_ranks(TrainOptions& o) {
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
    if (o.device.empty()) o.device = "cuda"; // either all of them compute on GPUs, or none
    o.gpu = ranks.local;
    check_options(o);
}

static int run(int argc, char** argv) {
    if (told_version("train_lora", argc, argv)) return 0;
    TrainOptions o = parse_options(argc, argv);
    if (o.help) return 0;
    o.use_threads();
    const ModelFile file = open_model(o);
    if (o.full && (file.is_int8() || file.is_quantized()))
        DIE("%s: --full: quantised weights cannot be trained, only adapters on them (qwen3 --convert makes bf16)",
            o.model.c_str());
    if (!o.merge.empty()) check_merge(o, file);
    if (!o.adapter_init.empty()) {
        const AdapterFile adapter(o.adapter_init, file.config);
        o.lora = adapter.config;
        if (o.starters.empty()) o.starters = adapter.starters;
    }
    pack_recipe(o);
    std::unique_ptr<Dataset> data, eval;
    const size_t leaked = o.train.empty() ? 0 : open_datasets(o, file, data, eval);
    if (data) join_ranks(o);
    try {
        const Context ctx = choose_device(o, file);
        if (ctx.gpu) o.rank_step = GPU_RANK_STEP;
        if (ctx.gpu && o.ranks->size > 1) o.ranks->use_gpu(ctx);
        return wide(o, file) ? run_as<float>(o, ctx, file, data.get(), eval.get(), leaked)
                             : run_as<bf16>(o, ctx, file, data.get(), eval.get(), leaked);
    } catch (const std::exception& e) {
        const bool full = dynamic_cast<const std::bad_alloc*>(&e);
        if (o.ranks->size > 1) o.ranks->end(full ? "out of memory" : e.what());
        throw;
    }
}

int main(int argc, char** argv) {
    take_signals({SIGINT}, {SIGXFSZ});
    return run_program("train_lora", run, argc, argv);
}
