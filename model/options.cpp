// model/options.cpp: the options that all programs around a model have, and the files they name.
#include "model/options.h"
#include "base/file.h"
#include "model/tokenizer_json.h"
#include "sj.h"
#include <sys/stat.h>
#include <unistd.h>
#ifdef _OPENMP
#include <omp.h>
#endif

void ModelOptions::add_to(std::vector<Option>& table, bool inference) {
    table.push_back({"-d", "--device", "NAME", "cpu, cuda, or plain: Book I of qwen3.cu, slow (default: cuda if a GPU\n"
         "is present)", text(device)});
    if (inference)
        table.push_back({"", "--dtype", "NAME",
         "compute in f32 or bf16 (default: as stored); int8 or fp8: quantise at\n"
         "load, to 8.5 or 8 bits a weight", one_of(dtype, {"f32", "bf16", "int8", "fp8"})});
    else
        table.push_back({"", "--dtype", "NAME", "f32 or bf16 (default: as stored; a GPU computes in bf16)",
         one_of(dtype, {"f32", "bf16"})});
    table.push_back({"-j", "--threads", "N", "CPU threads, fixed (default: all; fewer while other programs are busy)",
     whole(threads, 1, 4096)});
    if (inference) {
        table.push_back({"", "--kv-dtype", "NAME", "type of the KV cache: same as the model, or fp8: half the memory",
         one_of(kv_dtype, {"same", "fp8"})});
        table.push_back({"", "--adapter", "DIR", "a LoRA adapter in PEFT's format, for example train_lora's output",
                         existing(adapter)});
        table.push_back({"", "--invariant", "",
         "on a GPU: a row's bits do not depend on its batch (slower; always so on\n"
         "a CPU)", flag(invariant)});
    }
    table.push_back({"", "--packed", "", "keep quantised weights packed on a GPU, as on a CPU (default: unpack to\n"
         "bf16, faster if memory suffices)", flag(packed)});
    if (inference)
        table.push_back({"", "--activations", "NAME",
         "bf16 (default); fp8, on a GPU with FP8 weights: also round those of more\n"
         "than 16 tokens to FP8, faster; int8, on a CPU with packed weights: also\n"
         "round them to bytes, faster",
                         one_of(activations, {"bf16", "fp8", "int8"})});
    table.push_back({"", "--rope-scaling", "NAME",
         "yarn or linear: contexts beyond the model's limit; needs --rope-scale",
         one_of(rope_scaling, {"yarn", "linear"})});
    table.push_back({"", "--rope-scale", "X", "... X times the context of training", number(rope_scale, 1, 1024)});
    table.push_back({"", "--yarn-orig-ctx", "N", "... which is N tokens (default: the config's, or the model's limit)",
         whole(rope_original, 1, 1 << 24)});
    table.push_back({"-z", "--tokenizer", "FILE",
     "default: tokenizer.bin beside the model, beside the program, or here", existing_file(tokenizer)});
    table.push_back({"-h", "--help", "", "print this text", flag(help)});
}

Option ModelOptions::one_kernel_option(const char* what) {
    return {"", "--one-kernel", "on|off|phases", what, [this](const char* name, const char* v) {
        std::string which;
        one_of(which, {"on", "off", "phases"})(name, v);
        one_kernel = which == "off" ? Context::OFF : which == "on" ? Context::TOGETHER : Context::BY_PHASE;
    }};
}

void ModelOptions::use_threads() const {
#ifdef _OPENMP
    if (threads) omp_set_num_threads(threads);
#endif
}

// ------------------------------------------------------------------------------------------------------ Files

ModelFile open_model(const ModelOptions& o) {
    if (o.rope_scaling.empty() && (o.rope_scale || o.rope_original))
        DIE("%s is for --rope-scaling", o.rope_scale ? "--rope-scale" : "--yarn-orig-ctx");
    if (!o.rope_scaling.empty() && !o.rope_scale) DIE("--rope-scaling %s needs --rope-scale X", o.rope_scaling.c_str());
    ModelFile file(o.model);
    if (!o.rope_scaling.empty()) file.scale_rope(o.rope_scaling, o.rope_scale, o.rope_original);
    return file;
}

std::string tokenizer_beside(const std::string& model) {
    struct stat st;
    const bool folder = stat(model.c_str(), &st) == 0 && S_ISDIR(st.st_mode);
    const size_t slash = model.find_last_of('/');
    const std::string path = (folder ? model + "/" : slash == std::string::npos ? "" : model.substr(0, slash + 1));
    return access((path + "tokenizer.bin").c_str(), F_OK) == 0 ? path + "tokenizer.bin" : "";
}

std::string find_tokenizer(const std::string& named, const std::string& model) {
    if (!named.empty()) return named;
    std::vector<std::string> folders;
    if (const std::string found = model.empty() ? "" : tokenizer_beside(model); !found.empty()) return found;
    if (const std::string beside = program_folder(); !beside.empty()) folders.push_back(beside);
    folders.push_back(".");
    for (auto& f : folders)
        if (access((f + "/tokenizer.bin").c_str(), F_OK) == 0) return f + "/tokenizer.bin";
    return "";
}

std::string tokenizer_path(const ModelOptions& o) {
    const std::string path = find_tokenizer(o.tokenizer, o.model);
    if (path.empty())
        DIE("no tokenizer.bin beside the model, beside the program or in this folder (-z FILE names one)");
    return path;
}

// How the model's own tokenizer differs from t, to which its added tokens are given; "": in nothing.
static std::string difference(Tokenizer& t, const ModelFile& file) {
    const std::string own = file.path + "/tokenizer.json"; // of a folder
    if (file.vocabulary) return file.vocabulary->difference(t);
    return ModelFile::exists(own) ? adopt_tokenizer_json(t, own) : "";
}
static bool has_rows(const Tokenizer& t, const Config& c) { return t.size() <= c.V && c.V - t.size() < 1024; }

bool fits(const std::string& path, const ModelFile& file) {
    Tokenizer t(path, file.config.V);
    return has_rows(t, file.config) && difference(t, file).empty();
}

bool same_ids(const std::string& path, const ModelFile& model, const ModelFile& other) {
    const std::string beside = tokenizer_beside(other.path);
    if (model.config.V != other.config.V || !fits(path, other)) return false;
    if (beside.empty() || same_file(beside, path) || !fits(beside, other)) return true; // (or it belongs to a third one)
    return MappedFile(beside).text() == MappedFile(path).text();
}

Tokenizer tokenizer_of(const std::string& path, const ModelFile& file) {
    Tokenizer t(path, file.config.V);
    t.chat = ChatStyle::of(file.chat_template);
    const std::string how = difference(t, file);
    if (has_rows(t, file.config) && how.empty()) return t;
    if (!how.empty())
        DIE("%s: its tokenizer is not %s: %s (-z FILE names another)", file.path.c_str(), path.c_str(), how.c_str());
    DIE("%s: %d ids, but the vocabulary of %s has %d rows: not its tokenizer (-z FILE names another)", path.c_str(),
        t.size(), file.path.c_str(), file.config.V);
}

std::string template_note(const ModelFile& file, const Tokenizer& t) {
    if (t.chat.strange.empty()) return "";
    const std::string& text = t.chat.strange;
    std::string quoted = format("a text of %zu bytes", text.size());
    if (text.size() <= 60) quoted.clear(), sj::quote(quoted, text);
    return format("%s: its chat template is not Qwen3's (it writes %s): conversations are as Qwen3's has them",
                  file.path.c_str(), quoted.c_str());
}

void open_adapter(ModelOptions& o) {
    const std::string config = o.model + "/adapter_config.json";
    if (!ModelFile::exists(config) || ModelFile::in_folder(o.model)) return;
    const char* name = o.model.c_str();
    if (!o.adapter.empty()) DIE("%s: an adapter, as --adapter %s is: which model?", name, o.adapter.c_str());
    const MappedFile file(config);
    sj::Doc doc;
    if (const std::string fault = sj::parse(doc, file.text()); !fault.empty())
        DIE("%s: %s", config.c_str(), fault.c_str());
    const std::string base = doc.root()["base_model_name_or_path"].str();
    if (base.empty() || !ModelFile::exists(base))
        DIE("%s: an adapter of %s, which is not here: name the model, and --adapter %s", name,
            base.empty() ? "a model without a name" : base.c_str(), name);
    o.adapter = o.model, o.model = base;
}

uint64_t adapter_hash(const AdapterFile& a, uint64_t seed) {
    return fnv1a(a.map.data, a.map.size, fnv1a(&a.config.alpha, sizeof a.config.alpha, seed + a.config.rslora));
}
