// Recipes: LLaMA-Factory's keys as commands of datagen and train_lora, from outside (TRAIN_LORA, DATAGEN, else the programs
// here).
#include <doctest/doctest.h>
#include "tests/trainer.h"
#include "tests/files.h"
#include "tests/process.h"

static const std::string TINY = "tests/fixtures/tiny/model.bin", VOCABULARY = "tests/fixtures/tiny/tokenizer.bin";
static const Strings ONE = {"-z", VOCABULARY, "-j", "1", "-d", "cpu"};

static Result run(const char* name, const Strings& arguments) { return start_program(name, arguments).wait(); }

// A folder of rows as LLaMA-Factory has them: three datasets and their dataset_info.json.
struct Folder {
    Scratch scratch;
    Folder() {
        const std::string rows = read_file("tests/fixtures/train/rows.jsonl");
        const size_t cut = rows.find('\n', rows.size() / 2) + 1;
        write_file(scratch / "first.jsonl", rows.substr(0, cut)), write_file(scratch / "second.jsonl", rows.substr(cut));
        std::string labelled;
        for (auto& line : lines(read_file("tests/fixtures/dpo/pairs.jsonl"))) {
            const Json pair(line);
            for (bool label : {true, false}) {
                sj::Writer w;
                w.object().field("instruction", pair["instruction"].str()).field("output", pair[label ? "chosen" : "rejected"].str()).field("good", label).end();
                labelled += w.text + "\n";
            }
        }
        write_file(scratch / "labelled.jsonl", labelled);
        write_file(scratch / "pairs.jsonl", read_file("tests/fixtures/dpo/pairs.jsonl"));
        write_file(scratch / "dataset_info.json", R"({"first": {"file_name": "first.jsonl"}, "second": {"file_name": "second.jsonl"},
            "pairs": {"file_name": "pairs.jsonl", "ranking": true, "columns": {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"}},
            "labelled": {"file_name": "labelled.jsonl", "columns": {"prompt": "instruction", "response": "output", "kto_tag": "good"}}})");
    }
    // A recipe with these lines; its model and folders are given, and its template if no line has one.
    std::string recipe(const std::string& name, const std::string& text) const {
        const std::string path = scratch / (name + ".yaml");
        write_file(path, "### model\nmodel_name_or_path: " + TINY + "\ntrust_remote_code: true\ndo_train: true\ndataset_dir: " + (scratch / "") +
                             (text.find("template:") == text.npos ? "\ntemplate: qwen3" : "") + "\noutput_dir: " + (scratch / ("deep/er/" + name)) + "\n" + text);
        return path;
    }
};

TEST_CASE("a recipe is the same run as its commands: answers of two datasets, with an evaluation") {
    const Folder f;
    const std::string path = f.recipe("sft", R"(
### method
stage: sft
finetuning_type: lora
lora_rank: 4
lora_target: q_proj, v_proj   # two of seven
loraplus_lr_ratio: 4.0
neftune_noise_alpha: 5

### dataset
dataset: first,second
eval_dataset: "second"
cutoff_len: 64
max_samples: 12
preprocessing_num_workers: 16

### output
logging_steps: 10
save_steps: 2
plot_loss: true
overwrite_output_dir: true
report_to: none  # choices: [none, tensorboard]

### train
per_device_train_batch_size: 3
gradient_accumulation_steps: 2
learning_rate: 1.0e-3
num_train_epochs: 2.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null
eval_strategy: steps
eval_steps: 3
)");
    const Result r = must(trainer(), Strings{"--recipe", path, "--allow-leak"} + ONE);
    const std::string out = f.scratch / "deep/er/sft", own = f.scratch / "own";
    CHECK(r.err.find("without effect here: trust_remote_code, preprocessing_num_workers, logging_steps, plot_loss, ddp_timeout\n") != std::string::npos);
    const std::string train = out + ".train.bin", eval = out + ".eval.bin";
    CHECK(r.err.find("sft.yaml: train_lora " + TINY + " --targets q_proj,v_proj " + train + " --eval " + eval + " --eval-every 3 -o " + out + " --save-every 2 --overwrite ") !=
          std::string::npos);
    // The same by hand.
    const char* datagen = program("DATAGEN", "./datagen");
    const Strings pack = {"pack", f.scratch / "dataset_info.json"}, with = {"-z", VOCABULARY, "--max-len", "64", "--max-rows", "12"};
    must(datagen, pack + Strings{own + ".bin", "--name", "first,second"} + with);
    must(datagen, pack + Strings{own + ".eval.bin", "--name", "second"} + with);
    CHECK(Dataset(own + ".bin").rows() == 24);
    CHECK(read_file(own + ".bin") == read_file(train));
    CHECK(read_file(own + ".eval.bin") == read_file(eval));
    must(trainer(), Strings{TINY, own + ".bin", "--eval", own + ".eval.bin", "-o", own, "--rank", "4", "--targets", "q,v", "--loraplus-ratio", "4", "--neftune-alpha", "5", "--dropout",
                            "0", "--max-len", "64", "--batch", "3", "--accum", "2", "--lr", "1e-3", "--epochs", "2", "--schedule", "cosine", "--warmup", "0.1", "--weight-decay", "0",
                            "--clip", "1", "--seed", "42", "--dtype", "bf16", "--eval-every", "3", "--save-every", "2", "--allow-leak"} + ONE);
    CHECK(read_file(own + "/adapter_model.safetensors") == read_file(out + "/adapter_model.safetensors"));
    CHECK(logged(own, "eval_loss") == logged(out, "eval_loss"));
    CHECK(logged(out, "loss").size() == 8);
    // An option adds to the recipe's, and does not contradict it. A run's rows are not packed anew.
    check_refusal(run(trainer(), Strings{"--recipe", path, "--lr", "2e-3"} + ONE), "train_lora", "--lr is set by the recipe");
    std::string keeps = read_file(path);
    const std::string overwrite = "overwrite_output_dir: true\n";
    REQUIRE(keeps.find(overwrite) != keeps.npos);
    write_file(path, keeps.erase(keeps.find(overwrite), overwrite.size()));
    write_file(out + ".train.bin", "other");
    const Result again = run(trainer(), Strings{"--recipe", path, "--allow-leak"} + ONE);
    CHECK((again.status == 1 && again.err.find("holds a run") != again.err.npos));
    CHECK(read_file(out + ".train.bin") == "other");
}

TEST_CASE("recipes of every stage and loss; the defaults are LLaMA-Factory's") {
    const Folder f;
    auto options = [&](const std::string& text) {
        const Recipe r = read_recipe(f.recipe("x", text));
        std::string all = shell_command("", r.options);
        const std::string out = f.scratch / "deep/er/x";
        for (size_t at; (at = all.find(out)) != all.npos;) all.replace(at, out.size(), "OUT");
        return all;
    };
    const std::string rest = " --max-len 2048 --batch 8 --accum 1 --lr 5e-5 --weight-decay 0 --clip 1 --seed 42", end = " --schedule linear --warmup 0 --epochs 3.0";
    const std::string lora = " " + TINY + " --targets all OUT.train.bin -o OUT --save-every 500 --rank 8 --dropout 0" + rest;
    CHECK(options("dataset: first\n") == lora + end);
    CHECK(options("dataset: first\nfinetuning_type: full\nmax_steps: 7\nsave_strategy: epoch\nlr_scheduler_type: constant\nwarmup_ratio: 0.5\n") ==
          " " + TINY + " --full OUT.train.bin -o OUT" + rest + " --schedule constant --warmup 0 --steps 7");
    CHECK(options("dataset: first\nadapter_name_or_path: a b\nlr_scheduler_type: constant_with_warmup\nwarmup_ratio: 0.5\n").find("--adapter-init 'a b' OUT.train.bin") != std::string::npos);
    CHECK(options("dataset: first\noverwrite_output_dir: True\nresume_from_checkpoint: false\nreport_to: tensorboard\nuse_rslora: true\nuse_dora: true\nlora_alpha: 16\n")
              .find("--rslora --dora OUT.train.bin -o OUT --save-every 500 --overwrite --tensorboard --rank 8 --alpha 16 ") != std::string::npos);
    const Recipe two = read_recipe(f.recipe("two", "dataset: first , second\n"));
    REQUIRE(two.packs.size() == 1);
    CHECK(two.packs[0][3] == "first,second");
    // Each trains, in two steps.
    const std::string how = "max_steps: 2\nper_device_train_batch_size: 4\nlora_rank: 4\nlearning_rate: 1e-3\n";
    for (const char* loss : {"sigmoid", "ipo", "simpo", "orpo"}) {
        const std::string name = loss;
        const Result r = must(trainer(), Strings{"--recipe", f.recipe(name, how + "stage: dpo\ndataset: pairs\npref_beta: 0.2\npref_loss: " + name + "\n")} + ONE);
        CHECK(r.err.find((name == "sigmoid" ? "--dpo" : "--" + name) + " ") != std::string::npos);
        CHECK(logged(f.scratch / ("deep/er/" + name), "rewards/margins").size() == 2);
    }
    must(trainer(), Strings{"--recipe", f.recipe("kto", how + "stage: kto\ndataset: labelled\nkto_rejected_weight: 0.5\n")} + ONE);
    CHECK(logged(f.scratch / "deep/er/kto", "kl").size() == 2);
}

TEST_CASE("what a recipe cannot have is named with its line, and nothing is written") {
    const Folder f;
    auto refused = [&](const std::string& line, const char* word) {
        const Result r = run(trainer(), Strings{"--recipe", f.recipe("bad", "dataset: first\n" + line + "\n")} + ONE);
        check_refusal(r, "train_lora", word);
        CHECK(!fs::exists(f.scratch / "deep"));
    };
    refused("lora_rnak: 8", "bad.yaml: line 9: lora_rnak: 8: a key that is not read here");
    refused("optim: adamw_8bit", "line 9: optim: adamw_8bit: it is for finetuning_type full");
    refused("optim: sgd", "line 9: optim: sgd: adamw_torch, adamw_torch_fused, adamw_8bit and adamw_bnb_8bit are done");
    refused("finetuning_type: full\nadditional_target: lm_head", "additional_target: lm_head: it is for a new adapter");
    refused("use_dora: yes", "line 9: use_dora: yes: neither true nor false");
    refused("val_size: 0.1", "line 9: val_size: 0.1: split the rows");
    refused("stage: rm", "line 9: stage: rm: sft, dpo and kto are done");
    refused("finetuning_type: freeze", "lora and full are done");
    refused("stage: dpo\npref_loss: hinge", "line 10: pref_loss: hinge: sigmoid, ipo");
    refused("pref_beta: 0.1", "pref_beta: 0.1: it is for dpo kto");
    refused("stage: dpo\nsimpo_gamma: 1", "simpo_gamma: 1: it is for simpo");
    refused("finetuning_type: full\nlora_rank: 4", "lora_rank: 4: it is for lora");
    refused("template: llama3", "template: llama3: qwen3 and");
    refused("report_to: wandb", "report_to: wandb: none and tensorboard");
    refused("packing: true", "packing: true: rows are batched");
    refused("eval_dataset: second", "eval_strategy (steps or epoch) says when");
    refused("eval_strategy: epoch", "eval_dataset names the rows");
    refused("resume_from_checkpoint: saves/x", "neither true nor false");
    refused("adam_beta2: 0.95", "adam_beta2: 0.95: it is 0.999");
    refused("dataset: second", "line 9: dataset: given before");
    refused("lora_target:\n  - q_proj", "line 10: not `key: value`");
    refused("lora_target: [q_proj]", "line 9: not `key: value`");
    refused("seed: \"4\\x\"", "line 9: a string in quotes");
    write_file(f.scratch / "none.yaml", "do_train: true\n");
    check_refusal(run(trainer(), {"--recipe", f.scratch / "none.yaml"}), "train_lora", "none.yaml: model_name_or_path: missing");
    check_refusal(run(trainer(), {"--recipe", f.scratch / "absent.yaml"}), "train_lora", "absent.yaml");
    auto later = [&](const std::string& name, const std::string& text, const char* word) { // after the recipe is told
        const Result r = run(trainer(), Strings{"--recipe", f.recipe(name, text)} + ONE);
        INFO(r.err);
        CHECK(r.status == 1);
        CHECK(r.err.find(word) != std::string::npos);
        CHECK(!fs::exists(f.scratch / ("deep/er/" + name)));
    };
    later("seed", "dataset: first\nseed: 1.0\n", "train_lora: --seed");
    later("many", "dataset: first\nper_device_train_batch_size: many\n", "train_lora: --batch");
    later("target", "dataset: first\nlora_target: q_proj,x\n", "train_lora: --targets: x is none of");
    later("third", "dataset: third\n", "no such dataset");
    later("more", "dataset: first\nadditional_target: norm\n", "train_lora: --modules-to-save: norm is none of");
    auto options = [&](const std::string& name, const std::string& text) {
        std::string all;
        for (auto& word : read_recipe(f.recipe(name, text)).options) all += word + " ";
        return all;
    };
    CHECK(options("saved", "dataset: first\nadditional_target: embed_tokens, lm_head\n").find("--modules-to-save embed_tokens,lm_head ") != std::string::npos);
    CHECK(options("eight", "dataset: first\nfinetuning_type: full\noptim: adamw_8bit\n").find("--moments 8 ") != std::string::npos);
    // Values that mean the default are read.
    read_recipe(f.recipe("fine", "dataset: first\nuse_dora: false\nval_size: 0.0\nadam_epsilon: 1.0e-8\nquantization_bit: null\npacking: false\noptim: adamw_torch\nwarmup_steps: 0 # no\n"));
}
