// train/merge.cpp: merges an adapter into its model, as bf16 or requantised, by write_merged in model/write.cpp, and
// compares both.
#include "train/merge.h"
#include "base/text.h"
#include "model/device.h"
#include "model/instances.h"
#include "model/quantize.h"
#include "model/session.h"
#include "model/write.h"
#include <algorithm>
#include <cmath>
#include <memory>
#include <sys/stat.h>

void give_tokenizer(const TrainOptions& o, const ModelFile& file, const std::string& folder, bool replace) {
    const std::string from = find_tokenizer(o.tokenizer, o.model), to = folder + "/tokenizer.bin";
    if (from.empty() || same_file(from, to)) return;
    const MappedFile bytes(from);
    if (!fits(from, file)) return; // (it belongs to another model)
    if (access(to.c_str(), F_OK) == 0 && !replace) {
        if (MappedFile(to).text() != bytes.text())
            fprintf(stderr, "%s: another tokenizer, and left as it is; ask with -z %s\n", to.c_str(), from.c_str());
        return;
    }
    write_text(to, bytes.text());
}

// Parameters of --merge-as: groups and embedding as in the base, if it is quantised.
static Quantization merged_as(const TrainOptions& o, const ModelFile& file) {
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

void check_merge(const TrainOptions& o, const ModelFile& file) {
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
    must_be_writable("--merge", path, !ends_in(path, ".bin"));
    for (auto& [name, t] : readable_tensors(file))
        if (!t.is_float())
            DIE("%s: tensor %s is not BF16, F16 or F32: nothing can be merged", t.file.c_str(), name.c_str());
    if (!o.merge_as.empty()) check_groups(file, merged_as(o, file));
}

// Writes the merged model: as bf16 (F16, F32), or with --merge-as quantised, from a temporary file that is then
// removed.
static void write_merged_as(const TrainOptions& o, const ModelFile& file, const AdapterFile& adapter) {
    if (o.merge_as.empty()) return write_merged(file, adapter, o.merge);
    struct Removed {
        const std::string path;
        const Unfinished unfinished{path};
        ~Removed() { unlink(path.c_str()); }
    } const whole = {format("%s.%d.bin", o.merge.c_str(), (int)getpid())};
    write_merged(file, adapter, whole.path);
    const ModelFile from(whole.path);
    const Quantization how = merged_as(o, file);
    const std::vector<OutTensor> tensors = from.is_float32() ? quantize_model<float>(from, how, {})
                                                             : quantize_model<bf16>(from, how, {});
    write_safetensors(o.merge, from.metadata(quantized_config(from, how)), tensors);
}

template <class T>
void merge_adapter(const TrainOptions& o, Context ctx, const ModelFile& file, const std::string& folder,
                   const Dataset* data) {
    constexpr int PROMPT = 64, ANSWER = 64;
    ctx.one_kernel = Context::OFF; // it would merge, too
    AdapterFile adapter(folder, file.config);
    if (!o.starters.empty()) adapter.starters = o.starters;
    write_merged_as(o, file, adapter);
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
        Weights<T> w(from, Format::PLAIN, keeps_packed<T>(o, ctx));
        if constexpr (HAS_GPU<T>) if (ctx.gpu) w.upload(ctx, from);
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

#define INSTANTIATE(T) \
    template void merge_adapter<T>(const TrainOptions&, Context, const ModelFile&, const std::string&, const Dataset*);
QWEN3_INSTANCES(INSTANTIATE)
#undef INSTANTIATE
