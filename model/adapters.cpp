#include "model/adapters.h"
#include "base/text.h"

int module_of(const std::string& name) {
    for (int m = 0; m < MODULES; m++)
        if (name == TENSOR_NAMES[m] || name == module_name(m)) return m;
    return -1;
}

std::string adapter_tensor(const ModuleOf& m, char matrix) {
    std::string name = ModelTensor{(TensorKind)m.kind, m.layer, 0, 0, m.expert}.name();
    name.resize(name.size() - strlen("weight"));
    if (matrix == 'm') return "base_model.model." + name + "lora_magnitude_vector";
    return format("base_model.model.%slora_%c.weight", name.c_str(), matrix);
}

// target_modules as PEFT matches them: a name is a module's path, or its end. On a model of few layers PEFT writes
// "all-linear" as the whole path of each module. Modules of experts have their last name only, as all of them do.
static void read_targets(const char* file, sj::Value targets, const Config& c, AdapterConfig& a) {
    const int layers = c.L;
    std::vector<bool> named((size_t)layers * MODULES);
    for (sj::Value v : targets.items()) {
        std::string name = v.str();
        const size_t at = name.rfind("layers.");
        if (at != name.npos && (at == 0 || name[at - 1] == '.')) name.erase(0, at);
        bool any = false;
        for (size_t i = 0; i < named.size(); i++) {
            const std::string path = format(".layers.%zu.%s", i / MODULES, TENSOR_NAMES[i % MODULES]), end = "." + name;
            const bool of_experts = c.E && i % MODULES >= GATE_PROJ;
            if (of_experts ? name == module_name((int)(i % MODULES)) : ends_in(path, end)) named[i] = any = true;
        }
        if (!any)
            DIE("%s: target_modules has %.100s; q, k, v, o, gate, up and down_proj of %d layers can have an adapter",
                file, std::string(v.raw()).c_str(), layers);
    }
    for (int m = 0; m < MODULES; m++) {
        int n = 0;
        for (int l = 0; l < layers; l++) n += named[(size_t)(l * MODULES + m)];
        if (n > 0 && n < layers)
            DIE("%s: target_modules names %s in %d of %d layers: all or none is supported", file,
                module_name(m).c_str(), n, layers);
        a.targets[m] = n > 0;
    }
}

// A name in modules_to_save, as PEFT matches it: a module's path, or its end.
static void read_saved(const char* file, sj::Value v, AdapterConfig& a) {
    const std::string name = v.str();
    if (name == "embed_tokens" || name == "model.embed_tokens") a.embed = true;
    else if (name == "lm_head") a.head = true;
    else
        DIE("%s: modules_to_save has %.60s: embed_tokens and lm_head are supported", file,
            std::string(v.raw()).c_str());
}

void check_dora(const char* name, const Config& c, const AdapterConfig& a) {
    if (a.dora && c.E && (a.targets[GATE_PROJ] || a.targets[UP_PROJ] || a.targets[DOWN_PROJ]))
        DIE("%s: DoRA of experts is not supported: q, k, v and o_proj alone can have it", name);
}

// Reads adapter_config.json. As with a model's config, keys that change the computation are read or must be off. An
// unknown key may change it: it must be off too.
static AdapterConfig parse_adapter_config(const std::string& file, std::string_view text, const Config& c,
                                          bool scores) {
    const char* name = file.c_str();
    sj::Doc doc;
    const std::string fault = sj::parse(doc, text);
    if (!fault.empty()) DIE("%s: %s", name, fault.c_str());
    const sj::Value j = doc.root();
    if (!j.is(sj::Object)) DIE("%s: not a JSON object", name);
    if (j["peft_type"].str() != "LORA")
        DIE("%s: peft_type is %.60s, only \"LORA\" is supported", name,
            j["peft_type"] ? std::string(j["peft_type"].raw()).c_str() : "missing");
    static const std::set<std::string> read_below = {"peft_type", "r", "lora_alpha", "use_rslora", "use_dora",
                                                     "target_modules", "init_lora_weights"};
    static const std::set<std::string> bookkeeping = {
        "auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout", "megatron_core", "peft_version",
        "qalora_group_size", "revision", "task_type"};
    AdapterConfig a;
    for (auto [key, v] : j.members()) {
        if (read_below.count(key) || bookkeeping.count(key)) continue;
        if (scores && key == "modules_to_save") continue;
        if (key == "modules_to_save" && v.is(sj::Array) && j["task_type"].str() != "SEQ_CLS") {
            for (sj::Value one : v.items()) read_saved(name, one, a);
            continue;
        }
        if (key == "modules_to_save" && j["task_type"].str() == "SEQ_CLS")
            DIE("%s: a reward model, which scores answers: train_lora --grpo --reward FOLDER", name);
        const bool empty = (v.is(sj::Object) || v.is(sj::Array)) && v.size() == 0;
        if (!(v.is(sj::Null) || v.is(sj::False) || empty || (key == "bias" && v.str() == "none")))
            DIE("%s: %s = %.60s is not supported", name, key.c_str(), std::string(v.raw()).c_str());
    }
    if (scores && j["task_type"].str() != "SEQ_CLS")
        DIE("%s: task_type is not \"SEQ_CLS\": not a reward model's (train_lora --reward-model)", name);
    // PiSSA, OLoRA and similar methods move a part of the base model's weights into the adapter: it fits no other base.
    const sj::Value init = j["init_lora_weights"];
    if (init && !init.is_bool() && !init.is(sj::Null) && init.str() != "gaussian")
        DIE("%s: init_lora_weights = %.60s is not supported", name, std::string(init.raw()).c_str());
    int64_t rank;
    if (!j["r"].integer(&rank) || rank < 1 || rank > MAX_RANK)
        DIE("%s: r is not a whole number from 1 to %d", name, MAX_RANK);
    a.rank = (int)rank;
    if (!j["lora_alpha"].is(sj::Number)) DIE("%s: no lora_alpha", name);
    a.alpha = j["lora_alpha"].number();
    if (!(std::fabs(a.alpha) < 1e6)) DIE("%s: lora_alpha is not between -1e6 and 1e6", name);
    const sj::Value targets = j["target_modules"];
    for (auto [key, to] : {std::pair("use_rslora", &a.rslora), {"use_dora", &a.dora}}) {
        if (j[key] && !j[key].is_bool()) DIE("%s: %s is not true or false", name, key);
        *to = j[key].boolean(false);
    }
    if (targets.str() == "all-linear") std::fill(a.targets, a.targets + MODULES, true);
    else if (!targets.is(sj::Array) || targets.size() == 0)
        DIE("%s: target_modules is neither a list of modules nor \"all-linear\"", name);
    else read_targets(name, targets, c, a);
    check_dora(name, c, a);
    return a;
}

std::string adapter_config_json(const AdapterConfig& a, double dropout, const std::string& base, bool scores) {
    sj::Writer w;
    w.object().field("base_model_name_or_path", base).field("bias", "none").field("fan_in_fan_out", false);
    w.field("inference_mode", true).field("init_lora_weights", true).field("lora_alpha", a.alpha);
    w.field("lora_dropout", dropout);
    if (scores) w.key("modules_to_save").array().value("classifier").value("score").end();
    else if (a.saves()) {
        w.key("modules_to_save").array();
        for (auto [saved, name] : {std::pair(a.embed, "embed_tokens"), {a.head, "lm_head"}})
            if (saved) w.value(name);
        w.end();
    } else w.field("modules_to_save", nullptr);
    w.field("peft_type", "LORA").field("r", a.rank);
    w.key("target_modules").array();
    for (int m = 0; m < MODULES; m++)
        if (a.targets[m]) w.value(module_name(m));
    w.end().field("task_type", scores ? "SEQ_CLS" : "CAUSAL_LM").field("use_dora", a.dora);
    w.field("use_rslora", a.rslora).end();
    return w.text + "\n";
}

std::vector<ModelTensor> targeted(const Config& c, const AdapterConfig& a) {
    std::vector<ModelTensor> all;
    for (const ModelTensor& t : model_tensors(c))
        if (t.kind < MODULES && a.targets[t.kind]) all.push_back(t);
    return all;
}

std::vector<ModelTensor> saved_tensors(const Config& c, const AdapterConfig& a) {
    std::vector<ModelTensor> all;
    if (a.embed) all.push_back({EMBED, -1, c.V, c.C});
    if (a.head) all.push_back({HEAD, -1, c.V, c.C});
    return all;
}

size_t adapter_parameters(const Config& c, const AdapterConfig& a) {
    size_t n = 0;
    for (const ModelTensor& t : saved_tensors(c, a)) n += t.size();
    for (const ModelTensor& t : targeted(c, a)) n += a.rank * ((size_t)t.rows + t.columns) + (a.dora ? t.rows : 0);
    return n;
}

// A copy of a file in memory. (A mapping would end the process by SIGBUS if another program truncates the file.)
static MappedFile copy_of_file(const std::string& path, size_t most) {
    struct Open { // closed on every path
        int fd;
        ~Open() { if (fd >= 0) close(fd); }
    };
    const Open from{open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
    struct stat st;
    if (from.fd < 0 || fstat(from.fd, &st) != 0) DIE("%s: %s", path.c_str(), strerror(errno));
    if (!S_ISREG(st.st_mode)) DIE("%s: not a regular file", path.c_str());
    if ((size_t)st.st_size > std::min(most, available_memory()))
        DIE("%s: %zu bytes are too many", path.c_str(), (size_t)st.st_size);
    const Open to{memfd_create("copy", MFD_CLOEXEC)};
    std::vector<char> some(1 << 20);
    for (ssize_t n; (n = read(from.fd, some.data(), some.size())) != 0;)
        if (n < 0 || write(to.fd, some.data(), (size_t)n) != n) DIE("%s: %s", path.c_str(), strerror(errno));
    MappedFile copy(format("/proc/self/fd/%d", to.fd));
    copy.path = path;
    return copy;
}

AdapterFile::AdapterFile(const std::string& folder, const Config& c, bool copied, bool scores) : path(folder) {
    const std::string text = folder + "/adapter_config.json", numbers = folder + "/adapter_model.safetensors";
    constexpr size_t TEXT = 1 << 20; // bytes of a JSON text, at most
    auto mapped = [&](const std::string& p, size_t most) { return copied ? copy_of_file(p, most) : MappedFile(p); };
    config = parse_adapter_config(text, mapped(text, TEXT).text(), c, scores);
    map = mapped(numbers, adapter_parameters(c, config) * sizeof(float) + 8 * TEXT);
    read_safetensors(map, tensors, metadata);
    starters = read_starters(map.path, metadata);
    name_as_usual();
    std::set<std::string> expected;
    for (const ModelTensor& t : targeted(c, config))
        for (char matrix : {'A', 'B', 'm'}) {
            if (matrix == 'm' && !config.dora) continue;
            const std::string name = adapter_tensor(t, matrix);
            check(name, matrix == 'A'   ? Shape{config.rank, t.columns}
                        : matrix == 'B' ? Shape{t.rows, config.rank}
                                        : Shape{t.rows});
            expected.insert(name);
        }
    for (const ModelTensor& t : saved_tensors(c, config))
        check(saved_name(t), t.shape()), expected.insert(saved_name(t));
    if (scores) check(SCORE_TENSOR, {1, c.C}), expected.insert(SCORE_TENSOR);
    for (auto& [name, t] : tensors)
        if (!expected.count(name))
            DIE("%s: tensor %s belongs to no module that the config names", map.path.c_str(), name.c_str());
}

std::vector<ModelTensor> AdapterFile::saved() const {
    std::vector<ModelTensor> all;
    for (auto [has, kind] : {std::pair(config.embed, EMBED), {config.head, HEAD}})
        if (has) {
            const Shape& shape = tensors.at(saved_name({kind, -1, 0, 0})).shape;
            all.push_back({kind, -1, (int)shape[0], (int)shape[1]});
        }
    return all;
}

void AdapterFile::name_as_usual() {
    const std::string usual = "base_model.model.model.", layers = "layers.";
    const auto of_layer = std::find_if(tensors.begin(), tensors.end(), [&](auto& entry) {
        return entry.first.find("." + layers) != entry.first.npos;
    });
    const std::string first = of_layer == tensors.end() ? "" : of_layer->first;
    const size_t at = first.find("." + layers);
    if (at == first.npos || first.substr(0, at + 1) == usual) return;
    const std::string prefix = first.substr(0, at + 1);
    Tensors renamed;
    for (auto& [name, t] : tensors)
        renamed.emplace(name.compare(0, prefix.size(), prefix) == 0 ? usual + name.substr(prefix.size()) : name, t);
    tensors.swap(renamed);
}

void AdapterFile::check(const std::string& name, const Shape& shape) const {
    const char* file = map.path.c_str();
    const auto found = tensors.find(name);
    if (found == tensors.end()) DIE("%s: no tensor %s", file, name.c_str());
    const Tensor& t = found->second;
    need_shape(name, t, shape);
    if (!t.is_float()) DIE("%s: tensor %s is not BF16, F16 or F32", file, name.c_str());
    for (size_t i = 0; i < count_of(shape); i++)
        if (!std::isfinite(number(t, i))) DIE("%s: tensor %s has an infinity or a NaN", file, name.c_str());
}
