// train/trainer.h: the trainer: a model, its trained parameters, batches of rows, and steps.
//
//   Trainer<bf16> t(options, ctx, file, data, eval);  plans all memory; first parameters
//   t.train_step();                                   one step of AdamW
//   t.mean_loss(data, rows);                          an evaluation
//   t.write_result(folder, leaked);                   the trained adapter or model, for use
//   t.write_state(path, ...), t.read_state(path, ...) to resume from, bit-exact
//
// parameters.h has the numbers, loader.h the rows. The members are defined by concern: plan.cpp has memory, step.cpp a
// step on rows, preferences.cpp, rollout.cpp and teacher.cpp the steps on preferences, with --grpo and with --teacher,
// questions.cpp the answers to questions, checkpoint.cpp files.
#pragma once
#include "base/arena.h"
#include "model/dataset.h"
#include "model/safetensors.h"
#include "model/tokenizer.h"
#include "qwen3.cu"
#include "train/answers.h"
#include "train/grpo.h"
#include "train/loader.h"
#include "train/log.h"
#include "train/options.h"
#include "train/parameters.h"
#include "train/preferences.h"
#include "train/questions.h"
#include "train/reward_model.h"
#include "train/rewards.h"
#include "train/teacher.h"
#include <algorithm>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

template <class T> struct Trainer {
    using A = acc<T>;
    static constexpr int HEAD_ROWS = 64; // trained tokens that go through the head at once;
    // ... on a GPU: twice as many if they add to a gradient of the head, which is as long as their logits.
    static constexpr int gpu_head_rows(bool full) { return full ? 2048 : 1024; }

    const TrainOptions& o;
    Ranks& ranks;
    Context ctx;
    const ModelFile& file;
    const Config& c;
    Weights<T> w;
    const Dataset &data, *eval;
    const Questions& questions;           // to answer during the run
    std::unique_ptr<Tokenizer> tokenizer; // if answers are sampled
    std::vector<Reward> rewards;          // with --grpo; its models
    std::vector<std::unique_ptr<RewardModel<T>>> reward_models;
    std::unique_ptr<Teacher<T>> teacher;  // with --teacher
    Loader loader;
    Parameters<T> params;
    int64_t steps, step = 0; // in all, done
    std::string run;         // its description, see describe_run

    Trainer(const TrainOptions& options, const Context& where, const ModelFile& f, const Dataset& train,
            const Dataset* evaluation, const Questions& asked = NO_QUESTIONS);

    // ---- Memory: one arena, planned before the first step.
    Arena arena;
    Activations<T> a;
    Flow<T> d;
    KVCache<T> kv;
    T *h, *expert_h;    // of all adapters; on a GPU those of experts have one of their own, (N k, 2 rank)
    T *u, *dora_off, *dora_x; // of all adapters with DoRA, and their scratch: see Dora
    A* dora_norms;            // ... norm, then c
    uint32_t* kept;     // ... and dropout's masks of their inputs, on a GPU
    A *rope, *loss;     // (positions, D/2, 2), (tokens)
    double* results;    // loss and gradient norm of the step; with --teacher sums of divergence and agreement
    Dropout dropout;
    Noise noise;        // of --neftune-alpha
    std::string memory; // the plan, for people
    bool ample = false; // see Activations

    // ---- Steps
    double last_loss = 0, last_norm = 0, last_lr = 0;
    size_t tokens_done = 0;   // that were fed
    double tokens_fed = 0;    // in the last step
    double flops = 0;         // of the last step
    double waited = 0;        // s, as Ranks has it, the mean of all ranks

    // One step of AdamW. False if a rank was interrupted: then nothing has changed.
    bool train_step();
    // The mean over all trained tokens of some rows, or over preferences; it does not depend on the batches. Undefined
    // if it was interrupted.
    double mean_loss(const Dataset& from, const std::vector<size_t>& list);
    // The number of items that the loss averages over: trained tokens, or preferences.
    size_t weight(const Dataset& from, const std::vector<size_t>& list) const;
    // The gradients of a step, or of a rank's part of it: of the mean over the `all` trained tokens, or preferences, of
    // the whole step.
    void add_gradients(const std::vector<size_t>& list, size_t all);
    // Throws Error with the names of the rows whose loss is not finite. After such a step the parameters are unchanged,
    // so each row can be evaluated by itself; rank 0 does it.
    [[noreturn]] void not_finite(const Dataset& from, const std::vector<size_t>& list, const std::string& what);

    // ---- On preferences
    // The reference is the model before the first step: the base, or with --adapter-init the base with that adapter.
    // Its log-probabilities are computed once, for every pair that is still to be seen. Computing them in each step,
    // without the adapter, would cost as much in each epoch, and would not work for --full and --adapter-init.
    std::vector<double> reference, eval_reference;   // of the dataset's answers
    std::vector<double> mismatched, eval_mismatched; // with --kto: of their mismatched rows
    Preferences preferences;                         // of the last step or evaluation
    double kl = 0;                                   // ... with --kto, of all ranks
    void make_reference();

    // ---- With --teacher, or a teacher's log-probabilities in the rows
    bool distils(const Dataset& from) const { return teacher || from.taught(); }
    A *divergences, *agrees; // (tokens)
    A *outcomes, *tails;     // (head_rows, loader.outcomes), (head_rows): see gather_outcomes
    int* first_outcome;      // (head_rows) zeros: the place of each token's own id
    A* ones;                 // (head_rows) head_backward's factor
    double divergence = 0, agreement = 0; // of the last step or evaluation: means over the tokens
    bool on_policy(int64_t k) const;
    void add_own_answers(size_t all);

    // ---- Answers: with --grpo and --on-policy those of a step; those to questions, which change nothing that a step
    // reads
    AnswerEngine<T> engine{ctx, c, w};
    bool answers() const { return o.samples() || !questions.list.empty(); }
    // Undefined if it was interrupted.
    std::vector<TrainLog::Answer> answer_questions();

    // ---- With --grpo
    T *first_stored = nullptr, *norm; // copies of the first parameters, which are the reference; the final norm's
    A* by;                            // (tokens) factor of a token's cross entropy
    Groups groups;                    // this rank's, of this step
    Rewarded rewarded;                // statistics of the last step or evaluation
    std::string fault;                // of a reward program: the run is to end

    bool is_end(int id) const { return std::find(c.end_tokens.begin(), c.end_tokens.end(), id) != c.end_tokens.end(); }
    // Samples `size` answers to each prompt of a list, and computes their rewards. Undefined if interrupted.
    Groups draw_groups(const Dataset& from, const std::vector<size_t>& list, size_t size, bool greedy);
    // The answers of a step, whose prompts are `list`: new ones, or with --iterations the previous step's again. A
    // fault of a reward program ends the run as Ctrl-C does.
    void take_groups(const std::vector<size_t>& list);
    void ask_reference();
    // The mean reward of the likeliest answers to some prompts. Undefined if it was interrupted.
    double mean_reward(const Dataset& from, const std::vector<size_t>& list);

    // ---- Checkpoints: the adapter (or model) for use, and the state to resume from. All ranks call them, and rank 0
    // writes.
    void write_result(const std::string& folder, size_t leaked); // the trained parameters, for PEFT or for qwen3
    void write_state(const std::string& path, double best, double elapsed);
    void read_state(const std::string& path, double& best, double& elapsed);

  private:
    void agree(); // ends all ranks unless they are about to do the same

    struct Part { const char* name; size_t bytes; };
    std::vector<Part> plan();
    void reserve();
    void plan_distillation();
    void plan_answers(size_t scratch);
    int positions() const { return std::max(loader.longest, questions.positions); } // of a sequence
    bool adapts_experts() const {
        const bool* on = o.lora.targets;
        return c.E && !o.full && (on[GATE_PROJ] || on[UP_PROJ] || on[DOWN_PROJ]);
    }
    size_t dora_rows() { return o.full ? 0 : each_adapter(w, [](Linear<T>&, AdapterPlace) {}).u; } // of all matrices
    size_t each_kept(const std::function<void(Linear<T>& linear, size_t at)>& f);
    void fill();

    void use_dropout(bool on); // and noise
    // Calls f(batch, first, R) for each batch of some units, after its forward pass; `first` is the place of its first
    // unit in the list. Batches without a unit of `wanted` are skipped; null: none is. (From: Dataset, Half or Groups.)
    using OnBatch = std::function<void(const Batch& b, size_t first, int R)>;
    template <class From>
    void each_batch(const From& from, const std::vector<size_t>& list, const OnBatch& f,
                    const std::set<size_t>* wanted = nullptr);
    std::vector<A> losses_of(const Batch& b, int R); // of a batch that went forward: of its trained tokens
    void add_rows(const Dataset& from, const std::vector<size_t>& list, const Gradients<T>* to, size_t all);
    struct Work { double tokens, flops; };
    template <class From> Work work_of(const From& from, const std::vector<size_t>& list) const;

    template <class From>
    std::vector<double> reference_of(const From& from, const std::vector<size_t>& list,
                                     const std::set<size_t>* wanted);
    std::vector<double> log_probabilities(const Batch& b, int R);
    std::vector<double> scores(int R);
    void scores_backward(const Batch& b, const std::vector<double>& by, A scale);
    void find_kl(const Dataset& from, const std::vector<size_t>& list, bool of_step, size_t all);
    std::vector<double> preference_slopes(const Dataset& from, const size_t* list, const std::vector<double>& p,
                                          double& loss);
    double preferences_backward(const Dataset& from, const size_t* list, const Batch& b, int R,
                                const Gradients<T>* to, A scale);

    void open_rewards();
    void open_reward_models();
    std::vector<double> scores_of(RewardModel<T>& model, const Groups& made);
    void set_temperature();
    Answered question_of(DatasetRow row) const;
    std::vector<size_t> all_groups() const;
    double answers_backward(const Batch& b, int R, size_t first, double answers, double tokens);
    void add_groups();

    void distil_backward(const Batch& b, int R, const Gradients<T>* to, A scale, const Distillation& how);
    void compare(const Distilled<A>& out, bool gradient, const int* rows, int first, int n, A scale,
                 const Distillation& how);
    size_t drawn_tokens();
    void set_distilled(const double* sums, size_t all);

    void write_model(const std::string& folder, const Metadata& metadata, const std::vector<A>& numbers);
    struct Begun { int ranks; int64_t steps; };
    Begun check_state(const char* name, const Metadata& metadata) const;
};

// The settings of a run: if any of them differs, --resume refuses. (The model's hash covers --rope-scaling.) test_train
// lists every option under them or not.
std::string describe_run(const TrainOptions& o, const ModelFile& file, const Dataset& data, int64_t steps,
                         const char* type);
