// train/recipe.cpp: reads a recipe's lines, and translates its keys.
#include "train/recipe.h"
#include "base/file.h"
#include "base/options.h"
#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <string_view>

namespace {

// The lines of a flat YAML file. `null`, `~` and an empty value are as if the key were not there.
struct Lines {
    struct Value { std::string text; int line; bool used; };
    std::string path;
    std::map<std::string, Value> values;

    explicit Lines(const std::string& p);
    [[noreturn]] void refuse(const std::string& key, const std::string& why) const {
        const auto found = values.find(key);
        if (found == values.end()) DIE("%s: %s: %s", path.c_str(), key.c_str(), why.c_str());
        DIE("%s: line %d: %s: %s: %s", path.c_str(), found->second.line, key.c_str(), found->second.text.c_str(),
            why.c_str());
    }
    // A key's value; `otherwise` if it has none.
    std::string take(const std::string& key, const std::string& otherwise = "") {
        const auto found = values.find(key);
        if (found == values.end()) return otherwise;
        found->second.used = true;
        return found->second.text;
    }
    std::string need(const std::string& key) { // a name
        const std::string text = take(key);
        if (text.empty()) refuse(key, "missing");
        if (text[0] == '-') refuse(key, "a name that begins as an option");
        return text;
    }
    bool flag(const std::string& key, bool otherwise = false) {
        std::string text = take(key, otherwise ? "true" : "false");
        std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return (char)tolower(c); });
        if (text != "true" && text != "false") refuse(key, "neither true nor false");
        return text == "true";
    }

  private:
    void add(std::string_view line, int number);
    std::string scalar(std::string_view text, int number) const;
};

std::string_view stripped(std::string_view text) {
    const size_t first = text.find_first_not_of(" \t\r");
    if (first == text.npos) return {};
    return text.substr(first, text.find_last_not_of(" \t\r") + 1 - first);
}

Lines::Lines(const std::string& p) : path(p) {
    const MappedFile file(path);
    int number = 1;
    std::string_view rest = file.text();
    if (rest.substr(0, 3) == "\xEF\xBB\xBF") rest.remove_prefix(3);
    for (; !rest.empty(); number++) {
        const size_t end = std::min(rest.find('\n'), rest.size());
        add(rest.substr(0, end), number);
        rest.remove_prefix(std::min(end + 1, rest.size()));
    }
}

void Lines::add(std::string_view line, int number) {
    const std::string_view text = stripped(line);
    if (text.empty() || text[0] == '#' || text == "---") return;
    for (unsigned char c : text)
        if ((c < 0x20 && c != '\t') || c == 0x7F) DIE("%s: line %d: a control character", path.c_str(), number);
    const size_t colon = text.find(':');
    const bool nested = line[0] == ' ' || line[0] == '\t' || text[0] == '-';
    if (nested || colon == text.npos || (colon + 1 < text.size() && text[colon + 1] != ' ' && text[colon + 1] != '\t'))
        DIE("%s: line %d: not `key: value`; lists and nested keys are not read", path.c_str(), number);
    const std::string key(stripped(text.substr(0, colon))), value = scalar(stripped(text.substr(colon + 1)), number);
    if (values.count(key)) DIE("%s: line %d: %s: given before", path.c_str(), number, key.c_str());
    if (!value.empty() && value != "null" && value != "~") values[key] = {value, number, false};
}

// Without quotes or a comment.
std::string Lines::scalar(std::string_view text, int number) const {
    if (text.empty() || text[0] == '#') return "";
    if (text[0] == '"' || text[0] == '\'') {
        const size_t end = text.find(text[0], 1);
        const std::string_view rest = end == text.npos ? text : stripped(text.substr(end + 1));
        if ((!rest.empty() && rest[0] != '#') || text.substr(0, end).find('\\') != text.npos)
            DIE("%s: line %d: a string in quotes that is not read", path.c_str(), number);
        return std::string(text.substr(1, end - 1));
    }
    if (strchr("[{|>&*!%@`", text[0]))
        DIE("%s: line %d: not `key: value`; lists and nested keys are not read", path.c_str(), number);
    size_t end = 0;
    while (end < text.size() && !(text[end] == '#' && (text[end - 1] == ' ' || text[end - 1] == '\t'))) end++;
    return std::string(stripped(text.substr(0, end)));
}

// Keys with a value that is an option's. otherwise: LLaMA-Factory's default, null if it is ours too. of: the kinds of
// runs that have it; "": all.
const struct { const char *key, *option, *otherwise, *of; } NUMBERS[] = {
    {"lora_rank", "--rank", "8", "lora"}, {"lora_alpha", "--alpha", nullptr, "lora"},
    {"lora_dropout", "--dropout", "0", "lora adapter"},
    {"loraplus_lr_ratio", "--loraplus-ratio", nullptr, "lora adapter"},
    {"neftune_noise_alpha", "--neftune-alpha", nullptr, "sft"}, {"cutoff_len", "--max-len", "2048", ""},
    {"per_device_train_batch_size", "--batch", "8", ""}, {"gradient_accumulation_steps", "--accum", "1", ""},
    {"learning_rate", "--lr", "5e-5", ""}, {"weight_decay", "--weight-decay", "0", ""},
    {"max_grad_norm", "--clip", "1", ""}, {"seed", "--seed", "42", ""}, {"pref_beta", "--beta", "0.1", "dpo kto"},
    {"dpo_label_smoothing", "--label-smoothing", nullptr, "sigmoid"}, {"simpo_gamma", "--gamma", "0.5", "simpo"},
    {"kto_chosen_weight", "--desirable-weight", "1", "kto"},
    {"kto_rejected_weight", "--undesirable-weight", "1", "kto"}};

// Keys whose value changes nothing here.
const char* const WITHOUT_EFFECT[] = {
    "trust_remote_code", "preprocessing_num_workers", "preprocessing_batch_size", "dataloader_num_workers",
    "overwrite_cache", "logging_steps", "logging_first_step", "plot_loss", "save_only_model", "save_total_limit",
    "ddp_timeout", "per_device_eval_batch_size", "gradient_checkpointing", "disable_gradient_checkpointing",
    "flash_attn", "enable_thinking", "run_name", "cache_dir", "low_cpu_mem_usage", "include_num_input_tokens_seen"};

// Keys that may have only their default value.
const struct { const char *key, *value, *why; } FIXED[] = {
    {"pissa_init", "false", "not implemented"},
    {"use_galore", "false", "not implemented"}, {"use_apollo", "false", "not implemented"},
    {"use_badam", "false", "not implemented"}, {"use_muon", "false", "not implemented"},
    {"use_adam_mini", "false", "not implemented"}, {"use_llama_pro", "false", "not implemented"},
    {"packing", "false", "rows are batched without padding, each by itself"},
    {"neat_packing", "false", "rows are batched without padding, each by itself"},
    {"train_on_prompt", "false", "only answers are trained"}, {"mask_history", "false", "every answer is trained"},
    {"streaming", "false", "not implemented"}, {"mix_strategy", "concat", "datasets are joined"},
    {"val_size", "0", "split the rows (datagen split) and name the parts in dataset and eval_dataset"},
    {"pref_ftx", "0", "not implemented"}, {"pref_bco_weight", "0", "not implemented"},
    {"do_eval", "false", "eval_dataset and eval_strategy evaluate in training"},
    {"do_predict", "false", "qwen3 --eval answers a file of questions"},
    {"predict_with_generate", "false", "qwen3 --eval answers a file of questions"},
    {"pure_bf16", "false", "master weights are float32"}, {"fp16", "false", "bf16 and f32 are computed"},
    {"quantization_bit", "none", "qwen3 --quantize makes a quantised model; name it in model_name_or_path"},
    {"warmup_steps", "0", "warmup_ratio says it"},
    {"adam_beta1", "0.9", "it is 0.9"}, {"adam_beta2", "0.999", "it is 0.999"}, {"adam_epsilon", "1e-8", "it is 1e-8"}};

struct Translation {
    Lines in;
    Recipe out;
    std::set<std::string> kinds; // of the run: lora, adapter or full; the stage; the loss of stage dpo

    explicit Translation(const std::string& path) : in(path) {}

    template <class... More> void option(const More&... words) { (out.options.push_back(words), ...); }

    // The model, the adapter and the loss.
    void method() {
        if (!in.flag("do_train")) in.refuse("do_train", "only true is done");
        const std::string stage = in.take("stage", "sft"), type = in.take("finetuning_type", "lora");
        if (stage != "sft" && stage != "dpo" && stage != "kto") in.refuse("stage", "sft, dpo and kto are done");
        if (type != "lora" && type != "full") in.refuse("finetuning_type", "lora and full are done");
        const std::string adapter = in.take("adapter_name_or_path");
        kinds = {stage, type == "full" ? "full" : adapter.empty() ? "lora" : "adapter"};
        option(in.need("model_name_or_path"));
        if (type == "full") option("--full");
        if (!adapter.empty()) option("--adapter-init", adapter);
        if (stage == "kto") option("--kto");
        if (stage == "dpo") {
            const std::string loss = in.take("pref_loss", "sigmoid");
            if (loss != "sigmoid" && loss != "ipo" && loss != "simpo" && loss != "orpo")
                in.refuse("pref_loss", "sigmoid, ipo, simpo and orpo are done");
            option(loss == "sigmoid" ? "--dpo" : "--" + loss), kinds.insert(loss);
        }
        std::string target = in.take("lora_target", "all");
        target.erase(std::remove(target.begin(), target.end(), ' '), target.end());
        std::string more = in.take("additional_target");
        more.erase(std::remove(more.begin(), more.end(), ' '), more.end());
        if (!more.empty() && !kinds.count("lora")) in.refuse("additional_target", "it is for a new adapter");
        if (!more.empty()) option("--modules-to-save", more);
        if (kinds.count("lora")) option("--targets", target);
        else if (in.values.count("lora_target")) in.refuse("lora_target", "it is for a new adapter");
        if (in.flag("use_rslora")) option("--rslora");
        if (in.flag("use_dora")) option("--dora");
    }

    bool applies(const std::string& of) const {
        for (auto& kind : kinds)
            if ((" " + of + " ").find(" " + kind + " ") != of.npos) return true;
        return of.empty();
    }
    void numbers() {
        for (auto& n : NUMBERS) {
            const std::string value = in.take(n.key);
            if (!applies(n.of)) {
                if (!value.empty()) in.refuse(n.key, format("it is for %s", n.of));
            } else if (!value.empty() || n.otherwise) option(n.option, value.empty() ? n.otherwise : value);
        }
    }

    void optimiser() {
        const std::string name = in.take("optim", "adamw_torch");
        const bool in_8_bits = name == "adamw_8bit" || name == "adamw_bnb_8bit";
        if (in_8_bits && !kinds.count("full")) in.refuse("optim", "it is for finetuning_type full");
        if (!in_8_bits && name != "adamw_torch" && name != "adamw_torch_fused")
            in.refuse("optim", "adamw_torch, adamw_torch_fused, adamw_8bit and adamw_bnb_8bit are done");
        if (in_8_bits) option("--moments", "8");
    }

    void schedule() {
        const std::string kind = in.take("lr_scheduler_type", "linear"), warmup = in.take("warmup_ratio", "0");
        const std::set<std::string> known = {"linear", "cosine", "constant", "constant_with_warmup"};
        if (!known.count(kind))
            in.refuse("lr_scheduler_type", "linear, cosine, constant and constant_with_warmup are done");
        option("--schedule", kind.substr(0, kind.find('_')), "--warmup", kind == "constant" ? "0" : warmup);
        const std::string steps = in.take("max_steps", "-1"), epochs = in.take("num_train_epochs", "3.0");
        if (steps[0] == '-' || steps == "0") option("--epochs", epochs);
        else option("--steps", steps);
        if (in.flag("disable_shuffling")) option("--no-shuffle");
        if (in.flag("bf16")) option("--dtype", "bf16");
    }

    // Packs the datasets named in a key to OUT.NAME.bin.
    std::string pack(const std::string& key, const char* name) {
        std::string names = in.need(key);
        names.erase(std::remove(names.begin(), names.end(), ' '), names.end());
        const std::string to = in.need("output_dir") + "." + name + ".bin";
        out.packs.push_back({in.take("dataset_dir", "data") + "/dataset_info.json", to, "--name", names, "--max-len",
                             in.take("cutoff_len", "2048"), "--dropped", to + ".dropped"});
        if (const std::string most = in.take("max_samples"); !most.empty())
            out.packs.back().insert(out.packs.back().end(), {"--max-rows", most});
        return to;
    }
    void data() {
        const std::string chat = in.take("template", "qwen3");
        if (chat != "qwen3" && chat != "qwen3_nothink") in.refuse("template", "qwen3 and qwen3_nothink are read");
        out.remarks.push_back("rows are in Qwen3's own chat template; an answer without a thought follows an empty "
                              "think block, which is not trained");
        option(pack("dataset", "train"));
        const std::string when = in.take("eval_strategy", "no"), every = in.take("eval_steps");
        if (when != "no" && when != "steps" && when != "epoch")
            in.refuse("eval_strategy", "no, steps and epoch are done");
        if (in.values.count("eval_dataset")) {
            if (when == "no") in.refuse("eval_dataset", "eval_strategy (steps or epoch) says when");
            option("--eval", pack("eval_dataset", "eval"));
            if (when == "steps") option("--eval-every", every.empty() ? "500" : every);
        } else if (when != "no") in.refuse("eval_strategy", "eval_dataset names the rows");
    }

    void output() {
        option("-o", in.need("output_dir"));
        const std::string save = in.take("save_strategy", "steps"), steps = in.take("save_steps", "500");
        if (save != "steps" && save != "epoch") in.refuse("save_strategy", "steps and epoch are done");
        if (save == "steps") option("--save-every", steps);
        if (in.flag("overwrite_output_dir")) option("--overwrite");
        if (in.flag("resume_from_checkpoint")) option("--resume");
        const std::string report = in.take("report_to", "none");
        if (report != "none" && report != "tensorboard") in.refuse("report_to", "none and tensorboard are done");
        if (report == "tensorboard") option("--tensorboard");
    }

    void rest() {
        for (auto& fixed : FIXED) {
            const std::string value = in.take(fixed.key, fixed.value);
            char* end;
            const double number = strtod(value.c_str(), &end);
            if (strcmp(fixed.value, "false") == 0) {
                if (in.flag(fixed.key)) in.refuse(fixed.key, fixed.why);
            } else if (value != fixed.value && (*end || number != strtod(fixed.value, nullptr) || !isdigit(*fixed.value)))
                in.refuse(fixed.key, fixed.why);
        }
        std::string idle;
        for (const char* key : WITHOUT_EFFECT)
            if (!in.take(key).empty()) idle += (idle.empty() ? "without effect here: " : ", ") + std::string(key);
        if (!idle.empty()) out.remarks.push_back(idle);
        for (auto& [key, value] : in.values)
            if (!value.used) in.refuse(key, "a key that is not read here");
    }
};

} // namespace

Recipe read_recipe(const std::string& path) {
    Translation t(path);
    t.method(), t.data(), t.output(), t.numbers(), t.optimiser(), t.schedule(), t.rest();
    return std::move(t.out);
}

std::string shell_command(const std::string& program, const Recipe::Words& words) {
    std::string command = program;
    for (std::string word : words) {
        auto plain = [](unsigned char c) { return isalnum(c) || strchr("_-+=.,:/@%", c); };
        if (word.empty() || !std::all_of(word.begin(), word.end(), plain)) {
            for (size_t at = 0; (at = word.find('\'', at)) != word.npos; at += 4) word.replace(at, 1, "'\\''");
            word = "'" + word + "'";
        }
        command += " " + word;
    }
    return command;
}
