// train/options.cpp: the table of options, and their allowed combinations.
#include "train/options.h"
#include "train/rewards.h"
#include <algorithm>
#include <cstdio>

static const char* USAGE =
    "usage: train_lora MODEL TRAIN.bin -o OUT [options]       fine-tunes; datagen pack makes TRAIN.bin\n"
    "       train_lora MODEL --adapter-init DIR --merge PATH   merges an adapter into the model\n"
    "       train_lora --recipe FILE [options]                 a recipe: LLaMA-Factory's YAML\n"
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

static void parse_saved(AdapterConfig& lora, const std::string& list) {
    for (size_t at = 0, end; at <= list.size(); at = end + 1) {
        end = std::min(list.find(',', at), list.size());
        const std::string one = list.substr(at, end - at);
        if (one != "embed_tokens" && one != "lm_head")
            DIE("--modules-to-save: %.40s is none of embed_tokens, lm_head", one.c_str());
        (one == "lm_head" ? lora.head : lora.embed) = true;
    }
}

static std::vector<Option> option_table(TrainOptions& o) {
    auto lora = [&o](Setter set) { // of the adapter
        return [&o, set](const char* option, const char* v) { o.says_lora = option, set(option, v); };
    };
    auto of_loss = [&o](const char* loss, Setter set) { // "": of any
        return [=, &o](const char* option, const char* v) { o.of_loss.emplace_back(option, loss), set(option, v); };
    };
    auto loss = [&o](const PreferenceLoss& loss) {
        return [&o, &loss](const char* option, const char*) {
            if (o.preference && o.preference != &loss) DIE("--%s or %s: not both", o.preference->name, option);
            o.preference = &loss;
        };
    };
    const PreferenceLoss* const losses = PREFERENCE_LOSSES; // in the order below
    auto grpo = [&o](Setter set) {
        return [&o, set](const char* option, const char* v) { o.says_grpo = option, set(option, v); };
    };
    auto distil = [&o](Setter set) {
        return [&o, set](const char* option, const char* v) { o.says_distil = option, set(option, v); };
    };
    auto sampled = [&o](Setter set) { // of --grpo and --on-policy
        return [&o, set](const char* option, const char* v) { o.says_sampling = option, set(option, v); };
    };
    GrpoOptions& rl = o.rl;
    const Setter targets = [&o](const char*, const char* v) { parse_targets(o.lora, v); };
    const Setter saved = [&o](const char*, const char* v) { parse_saved(o.lora, v); };
    std::vector<Option> table = {
        {"", "--recipe", "FILE", "take model, rows and options from a recipe; further options add to\n"
         "its own",
         existing_file(o.recipe)},
        {"-o", "--output", "DIR", "output folder: adapter, log, loss curve, checkpoint", file_name(o.out)},
        {"", "--full", "", "train all parameters and write OUT/model.bin (default: LoRA)", flag(o.full)},
        {"", "--rank", "N", "LoRA rank (default 32)", lora(whole(o.lora.rank, 1, MAX_RANK))},
        {"", "--alpha", "X", "LoRA scale: adds alpha / rank times the adapter (default 2 x rank)",
         lora(number(o.lora.alpha, 1e-6, 1e6))},
        {"", "--rslora", "", "... alpha / sqrt(rank) times (default: off)", lora(flag(o.lora.rslora))},
        {"", "--dora", "", "DoRA: train the length of each row of the adapted matrices, too", lora(flag(o.lora.dora))},
        {"", "--targets", "LIST", "adapted matrices: all (default), or some of q,k,v,o,gate,up,down", lora(targets)},
        {"", "--modules-to-save", "LIST", "matrices to train as a whole beside LoRA: some of embed_tokens,lm_head\n"
         "(default: none)", lora(saved)},
        {"", "--dropout", "P", "dropout of the adapter's input (default 0.1; 0 on preferences and\n"
         "rewards)",
         number(o.dropout, 0, 0.99)},
        {"", "--loraplus-ratio", "X", "LoRA+: learning rate of B over that of A (default 1)",
         number(o.loraplus, 1e-3, 1e6)},
        {"", "--neftune-alpha", "X", "NEFTune: noise on the embeddings in training (default 0)",
         number(o.neftune, 0, 1e6)},
        {"", "--adapter-init", "DIR", "start from this adapter, with its rank, alpha and targets",
         existing(o.adapter_init)},
        {"", "--dpo", "", "train on pairs of a chosen and a rejected answer; below, read \"row\" as\n"
         "\"pair\"", loss(losses[0])},
        {"", "--ipo", "", "... with IPO's squared loss", loss(losses[1])},
        {"", "--simpo", "", "... without a reference, by log-probabilities per token", loss(losses[2])},
        {"", "--orpo", "", "... without a reference, with the chosen answer's cross entropy", loss(losses[3])},
        {"", "--kto", "", "train on single answers that are labelled desirable or undesirable", loss(losses[4])},
        {"", "--reward-model", "", "train an adapter and a head that scores answers, on pairs: for\n"
         "--reward DIR",
         loss(REWARD_MODEL)},
        {"", "--beta", "X", "... scale of rewards (default 0.1); --orpo: weight of the odds ratio",
         of_loss("", number(o.pref.beta, 1e-6, 1e6))},
        {"", "--label-smoothing", "X", "... --dpo: assumed share of swapped pairs (default 0)",
         of_loss("dpo", number(o.pref.smoothing, 0, 0.5))},
        {"", "--gamma", "X", "... --simpo: target margin of rewards (default 0.5)",
         of_loss("simpo", number(o.pref.gamma, 0, 1e6))},
        {"", "--desirable-weight", "X", "... --kto: weight of desirable answers (default 1)",
         of_loss("kto", number(o.pref.desirable, 0, 1e6))},
        {"", "--undesirable-weight", "X", "... --kto: weight of undesirable answers (default 1)",
         of_loss("kto", number(o.pref.undesirable, 0, 1e6))},
        {"", "--grpo", "", "train on rewards of answers sampled from the model; below, read \"row\"\n"
         "as \"prompt\"", flag(o.grpo)},
        {"", "--reward", "NAME", "... exact, choice, rouge-l, regex:PATTERN, length:N, a program\n"
         "(./NAME) or the folder of a --reward-model, optionally WEIGHT*NAME;\n"
         "may be repeated: rewards are summed", grpo(list(rl.rewards))},
        {"", "--reward-timeout", "S", "... seconds per step for a reward program (default 60)", grpo(number(rl.timeout, 0.01, 1e6))},
        {"", "--group", "N", "... answers per prompt (default 8)", grpo(whole(rl.group, 2, 4096))},
        {"-n", "--max-tokens", "N", "... longest answer in tokens (default 256)", sampled(whole(rl.max_tokens, 1, 1 << 20))},
        {"-t", "--temp", "X", "... sampling temperature (default 1)", sampled(number(rl.temperature, 0.01, 100))},
        {"-p", "--top-p", "X", "... sample from the likeliest tokens that reach this total probability\n"
         "(default 1)",
         sampled(number(rl.top_p, 0.01, 1))},
        {"", "--iterations", "N", "... steps on the same answers (default 1)", grpo(whole(rl.iterations, 1, 1024))},
        {"", "--loss-type", "NAME", "... grpo: mean over answers of token means; dr_grpo: sum over a\n"
         "constant; dapo (default): mean over all tokens", grpo(one_of(rl.loss, {"grpo", "dr_grpo", "dapo"}))},
        {"", "--scale-rewards", "NAME", "... group (default): divide advantages by the group's standard\n"
         "deviation; none: do not",
         grpo(one_of(rl.scale, {"group", "none"}))},
        {"", "--epsilon", "X", "... clip range of a token's probability ratio (default 0.2)",
         grpo(number(rl.epsilon, 0, 1))},
        {"", "--epsilon-high", "X", "... upper clip range (default: as --epsilon)", grpo(number(rl.epsilon_high, 0, 1e6))},
        {"", "--kl-beta", "X", "... weight of the KL divergence from the initial model (default 0)",
         grpo(number(rl.kl_beta, 0, 1e6))},
        {"", "--mask-truncated", "", "... ignore answers without an end token (default: off)", grpo(flag(rl.mask_truncated))},
        {"", "--teacher", "MODEL", "train on the next-token probabilities of a larger model with the same\n"
         "vocabulary, over the rows' answers", existing(o.teacher)},
        {"", "--distil-beta", "X", "... 0: KL from the teacher to the model; 1: the reverse; between:\n"
         "Jensen-Shannon divergence (default 0)", distil(number(o.distil.beta, 0, 1))},
        {"", "--distil-temp", "X", "... temperature of both models' probabilities (default 1)",
         distil(number(o.distil.temperature, 0.01, 100))},
        {"", "--distil-weight", "X", "... weight of the divergence; the rest is the answer's cross entropy\n"
         "(default 1)", distil(number(o.distil.weight, 0, 1))},
        {"", "--on-policy", "X", "... share of steps on answers that the model samples, with -n, -t and -p\n"
         "(default 0)", distil(number(o.distil.on_policy, 0, 1))},
        {"", "--epochs", "X", "passes over the dataset (default 2)", number(o.epochs, 1e-6, 1e6)},
        {"", "--steps", "N", "number of steps, instead of --epochs", whole(o.steps, 1, 1000000000)},
        {"", "--batch", "N", "rows per batch (default 16)", whole(o.batch, 1, 65536)},
        {"", "--accum", "N", "batches per step (default 1)", whole(o.accum, 1, 65536)},
        {"", "--max-len", "N", "leave out rows longer than N tokens (default 512)", whole(o.max_len, 2, 1 << 24)},
        {"", "--lr", "X", "learning rate (default 1.5e-4; preferences 5e-6, --grpo 1e-5,\n"
         "--reward-model 1e-4)", number(o.lr, 0, 10)},
        {"", "--schedule", "NAME", "learning rate schedule: cosine (default), linear or constant",
         one_of(o.schedule, {"cosine", "linear", "constant"})},
        {"", "--warmup", "X", "share of steps with a rising learning rate (default 0.1)", number(o.warmup, 0, 1)},
        {"", "--weight-decay", "X", "decoupled weight decay of AdamW (default 0.01)", number(o.weight_decay, 0, 10)},
        {"", "--moments", "N", "bits of AdamW's moments with --full: 32 (default) or 8, in blocks of 256",
         one_of(o.moments, {"32", "8"})},
        {"", "--clip", "X", "largest gradient norm (default 1; 0: off)", number(o.clip, 0, 1e9)},
        {"", "--no-shuffle", "", "keep the file's order of rows", flag(o.shuffle, false)},
        {"-s", "--seed", "N", "seed of shuffling, dropout and sampling (default 42)", whole(o.seed, 0, INT64_MAX)},
        {"", "--eval", "FILE", "dataset for evaluation: its loss, with --grpo its reward", file_name(o.eval)},
        {"", "--eval-every", "N", "... every N steps (default: every epoch)", whole(o.eval_every, 1, INT64_MAX)},
        {"", "--allow-leak", "", "... even if it shares rows with TRAIN.bin", flag(o.allow_leak)},
        {"", "--save-every", "N", "steps between checkpoints (default: every epoch)",
         whole(o.save_every, 1, INT64_MAX)},
        {"", "--ask", "TEXT", "question that the model answers before training and at each\n"
         "evaluation, for OUT/report.html; may be repeated (default: the\n"
         "first three of --eval)", list(o.questions)},
        {"", "--watch", "PORT", "show the run live at http://127.0.0.1:PORT (0: a free port)", whole(o.watch, 0, 65535)},
        {"", "--tensorboard", "", "also write the log as an event file: tensorboard --logdir OUT",
         flag(o.tensorboard)},
        {"", "--resume", "", "continue the run in OUT", flag(o.resume)},
        {"", "--overwrite", "", "replace the run in OUT; with --merge also the file or folder at PATH", flag(o.overwrite)},
        {"", "--merge", "PATH", "afterwards write the model with the adapter merged: a file (PATH ends\n"
         "in .bin) or a Hugging Face folder with its tokenizer", file_name(o.merge)},
        {"", "--merge-as", "FORMAT", "... quantised to int4, int8 or fp8 (PATH ends in .bin)",
         one_of(o.merge_as, {"int4", "int8", "fp8"})},
        {"", "--starter", "TEXT", "question that a chat with the model suggests first; may be repeated\n"
         "(default: those of MODEL or of --adapter-init)", list(o.starters)},
        {"", "--recompute", "", "less memory: recompute activations in the backward pass", flag(o.recompute)},
        {"", "--gpus", "N", "GPUs of this host: one process each, --batch rows each; with -d cpu N\n"
         "CPU processes (torchrun, mpirun and Slurm need no --gpus)", whole(o.gpus, 1, 1024)},
        {"", "--no-overlap", "", "... reduce gradients after the backward pass, not during it",
         flag(o.overlap, false)},
    };
    o.add_to(table, false);
    return table;
}

static void check_sampling(const TrainOptions& o) {
    if (!o.samples() && !o.says_sampling.empty()) DIE("%s is for --grpo and --on-policy", o.says_sampling.c_str());
    if (o.samples() && o.rl.max_tokens >= o.max_len)
        DIE("--max-tokens %d leaves no room for a prompt in --max-len %d", o.rl.max_tokens, o.max_len);
}

static void check_teacher(const TrainOptions& o) {
    if (o.teacher.empty() && o.distil.on_policy > 0) DIE("--on-policy is for --teacher");
    if (!o.teacher.empty() && (o.preference || o.grpo))
        DIE("--teacher or --%s: not both", o.grpo ? "grpo" : o.preference->name);
    if (!o.teacher.empty() && o.train.empty()) DIE("--teacher is for training");
    if (!o.says_distil.empty() && o.train.empty()) DIE("%s is for training", o.says_distil.c_str());
}

static void check_reward_model(const TrainOptions& o) {
    if (o.full) DIE("--reward-model trains an adapter and a head: not with --full");
    if (!o.merge.empty()) DIE("--reward-model: its result scores answers, and --merge writes a model of text");
    if (o.lora.saves()) DIE("--reward-model trains an adapter and a head: not with --modules-to-save");
    if (!o.of_loss.empty()) DIE("%s is not for --reward-model", o.of_loss[0].first.c_str());
}

static void check_grpo(const TrainOptions& o) {
    const GrpoOptions& rl = o.rl;
    if (o.preference) DIE("--%s or --grpo: not both", o.preference->name);
    if (rl.rewards.empty()) DIE("--grpo: --reward NAME says what an answer is worth");
    for (auto& name : rl.rewards) make_reward(name, rl.timeout); // throws
    if (o.full && rl.temperature != 1) DIE("--temp %g: with --full the temperature is 1", rl.temperature);
    if (rl.iterations > 1 && std::max(o.gpus, o.ranks->size) > 1)
        DIE("--iterations %d: several GPUs take one step on the same answers", rl.iterations);
}

void check_options(const TrainOptions& o) {
    if (o.train.empty() && (o.merge.empty() || o.adapter_init.empty()))
        DIE("no dataset named (without one: --adapter-init DIR --merge PATH)");
    if (o.train.empty() && !o.out.empty())
        DIE("no dataset named, and -o is for training (--merge PATH says where a merged model goes)");
    if (!o.merge_as.empty() && (o.merge.size() < 5 || o.merge.compare(o.merge.size() - 4, 4, ".bin") != 0))
        DIE("--merge-as %s is for --merge PATH where PATH ends in .bin", o.merge_as.c_str());
    check_starters("--starter", o.starters);
    for (auto& question : o.questions)
        if (question.find_first_not_of(" \n\t") == question.npos) DIE("--ask: a question without words");
    if (o.train.empty() && (o.watch >= 0 || !o.questions.empty()))
        DIE("%s is for training", o.watch >= 0 ? "--watch" : "--ask");
    if (!o.train.empty() && o.out.empty()) DIE("-o DIR is needed: the output folder");
    if (o.resume && o.overwrite) DIE("--resume continues a run, --overwrite replaces it: not both");
    const std::string adapter = !o.says_lora.empty() ? o.says_lora : o.merge.empty() ? "--adapter-init" : "--merge";
    if (o.full && (!o.adapter_init.empty() || !o.merge.empty() || !o.says_lora.empty()))
        DIE("--full trains the model itself: there is no adapter for %s", adapter.c_str());
    if (!o.adapter_init.empty() && !o.says_lora.empty()) DIE("%s: --adapter-init says it already", o.says_lora.c_str());
    if (!o.full && o.moments != "32") DIE("--moments 8 is for --full: an adapter's moments are few");
    if (o.full && o.loraplus != 1) DIE("--full trains the model itself: there is no adapter for --loraplus-ratio");
    if (o.neftune > 0 && (o.preference || o.grpo))
        DIE("--neftune-alpha is for training on answers, not with --%s", o.grpo ? "grpo" : o.preference->name);
    if (o.eval.empty() && (o.eval_every || o.allow_leak))
        DIE("--eval FILE names the dataset for --eval-every and --allow-leak");
    if (o.scores()) check_reward_model(o);
    for (auto& [option, loss] : o.of_loss)
        if (!o.preference || (!loss.empty() && loss != o.preference->name))
            DIE("%s is for --%s", option.c_str(),
                loss.empty() ? "dpo, --ipo, --simpo, --orpo and --kto" : loss.c_str());
    if (!o.grpo && !o.says_grpo.empty()) DIE("%s is for --grpo", o.says_grpo.c_str());
    if (o.grpo) check_grpo(o);
    check_teacher(o), check_sampling(o);
    if (o.steps && o.epochs) DIE("--steps %lld or --epochs %g: not both", (long long)o.steps, o.epochs);
    if (o.gpus > 1 && o.train.empty()) DIE("--gpus is for training");
    const bool pairs = o.preference && o.preference->pairs();
    const uint64_t tokens = (uint64_t)o.batch * o.max_len * (o.grpo ? o.rl.group : pairs ? 2 : 1);
    if (tokens > 1 << 26)
        DIE("--batch %d%s with --max-len %d: more than 2^26 tokens at once", o.batch,
            o.grpo ? format(", --group %d", o.rl.group).c_str() : "", o.max_len);
    if (tokens * o.accum * std::max(o.gpus, o.ranks->size) > UINT32_MAX)
        DIE("--batch, --accum, --max-len and the number of GPUs: more than 2^32 tokens a step");
}

// The command that repeats a run, without the options that do not belong to its recipe.
static std::string command_of(int argc, char** argv) {
    Recipe::Words words;
    for (int i = 1; i < argc; i++) {
        const std::string word = argv[i];
        if (word == "--watch") i++;
        else if (word != "--resume" && word.compare(0, 8, "--watch=") != 0) words.push_back(word);
    }
    return shell_command("train_lora", words);
}

// Parses the command line, or the options of its recipe before those of the command line.
static std::vector<std::string> parse_all(TrainOptions& o, const std::vector<Option>& table, int argc, char** argv) {
    TrainOptions first;
    parse(option_table(first), argc, argv);
    o.command = command_of(argc, argv);
    if (first.recipe.empty() || first.help) return parse(table, argc, argv);
    const Recipe recipe = read_recipe(first.recipe);
    std::vector<char*> words = {argv[0]};
    for (auto& word : recipe.options) words.push_back(const_cast<char*>(word.c_str()));
    for (int i = 1; i < argc; i++) { // (what was packed and what is trained are the recipe's)
        const std::string word = argv[i], name = word.substr(0, word.find('='));
        for (auto& row : table)
            if (*row.name && (name == row.brief || name == row.name))
                for (auto& said : recipe.options)
                    if (said == row.brief || said == row.name)
                        DIE("%s: %s is set by the recipe: change it there", first.recipe.c_str(), row.name);
        words.push_back(argv[i]);
    }
    o.packs = recipe.packs;
    for (auto& remark : recipe.remarks) fprintf(stderr, "%s: %s\n", first.recipe.c_str(), remark.c_str());
    fprintf(stderr, "%s: %s\n", first.recipe.c_str(), shell_command("train_lora", recipe.options).c_str());
    o.command = command_of((int)words.size(), words.data());
    return parse(table, (int)words.size(), words.data());
}

TrainOptions parse_options(int argc, char** argv) {
    TrainOptions o;
    o.lora.rank = 32;
    std::fill(o.lora.targets, o.lora.targets + MODULES, true);
    o.lr = o.dropout = -1; // not given
    const std::vector<Option> table = option_table(o);
    const std::vector<std::string> words = parse_all(o, table, argc, argv);
    if (o.help) return print_help(USAGE, table), o;
    if (words.empty()) DIE("no model named (--help lists the options)");
    if (words.size() > 2) DIE("expected one model and one dataset: %s is too much", words[2].c_str());
    o.model = words[0];
    if (words.size() == 2) o.train = words[1];
    if (!o.grpo) o.rl.group = 1; // of --on-policy
    if (!o.lora.alpha) o.lora.alpha = 2 * o.lora.rank;
    if (o.lr < 0) o.lr = o.scores() ? REWARD_LR : o.preference ? PREFERENCE_LR : o.grpo ? GRPO_LR : TrainOptions().lr;
    if (o.dropout < 0) o.dropout = o.preference || o.grpo ? 0 : TrainOptions().dropout;
    if (o.rl.epsilon_high < 0) o.rl.epsilon_high = o.rl.epsilon;
    check_options(o);
    return o;
}

