// cli/quantize.cpp: --quantize: its options, calibration on the device, its messages.
#include "cli/quantize.h"
#include "base/file.h"
#include "base/options.h"
#include "base/progress.h"
#include "model/device.h"
#include "model/model_file.h"
#include "model/pace.h"
#include "model/quantize.h"
#include "model/tokenizer.h"
#include "model/write.h"
#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

namespace cli {

int quantize(const Options& o, bool asks_more) {
    if (asks_more || !o.adapter.empty() || !o.dtype.empty())
        DIE("--quantize goes with a model alone: no question, --dtype or --adapter (train_lora --merge merges)");
    if (o.quantize != "int4" && o.quantize != "int8" && o.quantize != "fp8")
        DIE("--quantize %s: int4, int8 or fp8", o.quantize.c_str());
    if (o.group && (o.quantize != "int4" || (o.group != 32 && o.group != 64 && o.group != 128)))
        DIE("--group %d: 32, 64 or 128, of int4", o.group);
    const ModelFile file = open_model(o);
    for (const MappedFile& map : file.maps)
        if (same_file(map.path, o.quantize_to)) DIE("--quantize %s: is the model itself", o.quantize_to.c_str());
    must_be_new("--quantize", o.quantize_to, o.overwrite);
    Quantization how;
    how.format = o.quantize == "int4" ? Format::INT4 : o.quantize == "int8" ? Format::INT8 : Format::FP8;
    how.group = o.group ? o.group : 128;
    how.keep_embedding = o.embedding == "same";
    how.window = std::min(how.window, file.config.max_positions);
    if (!o.calibrate.empty()) {
        const Tokenizer tokenizer = tokenizer_of(tokenizer_path(o), file);
        how.text = tokenizer.encode(text_of(o.calibrate), false);
        if (how.windows() == 0)
            DIE("%s: %s; one window takes %d", o.calibrate.c_str(), counted(how.text.size(), "token").c_str(),
                how.window);
    }
    Context ctx;
    // (Experts are calibrated on the CPU.)
    if (!o.device.empty() || (!how.text.empty() && !file.config.E)) ctx = choose_device(o, file);
    ctx.stop = &interrupted;
    auto progress = std::make_unique<Progress>();
    ThreadPace pace(o, Context()); // (most of it is the CPU's in any case)
    const bool paced = !how.text.empty(); // (else threads wait for the disk, which looks like a lack of cores)
    if (paced) pace.begin();
    how.progress = [&](size_t done, size_t all, int layer) {
        if (paced) pace.step();
        progress->show(done, all, [&](double) { return format("layer %d of %d", layer + 1, file.config.L); });
    };
    const double start = seconds();
    RoundedExperts experts;
    const auto quantize = [&] {
        return wide(o, file) ? quantize_model<float>(file, how, ctx, &experts)
                             : quantize_model<bf16>(file, how, ctx, &experts);
    };
    std::vector<OutTensor> tensors;
    try {
        tensors = quantize();
    } catch (const Error& e) { // a GPU that was not requested may be too small
        if (!ctx.gpu || !o.device.empty() || interrupted) throw;
        fprintf(stderr, "%s; on the CPU\n", e.what());
        ctx = Context(), ctx.stop = &interrupted;
        tensors = quantize();
    }
    progress.reset(); // its line ends
    const size_t size = write_safetensors(o.quantize_to, file.metadata(quantized_config(file, how)), tensors);
    const std::string by = how.text.empty() ? "to the nearest" : format("GPTQ with %zu windows of %d tokens",
                                                                        how.windows(), how.window);
    if (experts.some)
        fprintf(stderr, "%d of %d experts have fewer of the text's tokens than columns, %d of them none: rounded to "
                        "the nearest\n", experts.some, experts.all, experts.unreached);
    fprintf(stderr, "%s: %.1f M parameters, %.0f MB, %s, %.1f s\n", o.quantize_to.c_str(),
            (double)parameters(file.config) / 1e6, (double)size / 1e6, by.c_str(), seconds() - start);
    return 0;
}

} // namespace cli
