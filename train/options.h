// train/options.h: the options of a training run, and how the command line sets them.
#pragma once
#include "model/options.h"
#include "train/grpo.h"
#include "train/preferences.h"
#include "train/ranks.h"
#include "train/recipe.h"
#include "train/teacher.h"
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

struct TrainOptions : ModelOptions {
    std::string recipe; // its file
    std::vector<Recipe::Words> packs; // of the recipe
    std::string train, out, eval, adapter_init, merge, merge_as, schedule = "cosine",
                moments = "32"; // bits of AdamW's
    AdapterConfig lora;
    Starters starters;
    std::vector<std::string> questions; // of --ask
    int watch = -1;                     // port; -1: none
    std::string command;                // that repeats the run
    float dropout = 0.1f;
    double lr = 1.5e-4, weight_decay = 0.01, warmup = 0.1, clip = 1, epochs = 0; // 0: not given
    int batch = 16, accum = 1, max_len = 512;
    int64_t steps = 0, eval_every = 0, save_every = 0; // 0: given by epochs, every epoch
    double loraplus = 1, neftune = 0;                  // B's learning rate over A's; noise
    uint64_t seed = 42;
    bool shuffle = true, resume = false, overwrite = false, full = false, recompute = false, allow_leak = false,
         tensorboard = false;
    bool overlap = true;
    int gpus = 1;
    std::shared_ptr<Ranks> ranks = std::make_shared<Ranks>("train_lora");
    const PreferenceLoss* preference = nullptr; // --dpo, --kto, ..
    PreferenceOptions pref;
    bool scores() const { return preference && preference->scores; }
    std::vector<std::pair<std::string, std::string>> of_loss; // given options, and their loss; "": any
    std::string says_grpo; // the last given option that needs --grpo
    bool grpo = false;
    GrpoOptions rl;
    std::string teacher; // its model
    DistilOptions distil;
    std::string says_distil, says_sampling; // the last given option that needs --teacher, or sampled answers
    bool samples() const { return grpo || distil.on_policy > 0; } // answers
    int rank_step = 1; // see adapt: GPU_RANK_STEP on a GPU
    std::string says_lora; // the last given option that --adapter-init and --full exclude
};

constexpr double EPOCHS = 2;
constexpr double PREFERENCE_LR = 5e-6; // LLaMA-Factory's example for LoRA; without dropout, as TRL
constexpr double GRPO_LR = 1e-5;
constexpr double REWARD_LR = 1e-4; // as TRL

// Throws Error. With --help it prints the options, and `help` is set.
TrainOptions parse_options(int argc, char** argv);
void check_options(const TrainOptions& o); // again when the number of ranks is known
