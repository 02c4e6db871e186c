// QLoRA: adapters trained on INT4, INT8 and FP8 weights that stay as they are stored. Gradients are those of the same
// numbers unpacked; runs go on to the bit; what is merged can be quantised anew; what cannot be is refused by name.
#include <doctest/doctest.h>
#include "model/quantize.h"
#include "model/write.h"
#include "tests/gradients.h"
#include "tests/trainer.h"
#include "model/chat_template.h"
#include "model/weights.h"

static const std::string TINY = "tests/fixtures/tiny/model.bin", VOCABULARY = "tests/fixtures/tiny/tokenizer.bin";

// The tiny model in a format.
static std::string quantized_tiny(const Scratch& s, const std::string& format) {
    const std::string path = s / format + ".bin";
    const ModelFile from(TINY);
    Quantization how;
    how.format = format == "int4" ? Format::INT4 : format == "int8" ? Format::INT8 : Format::FP8;
    how.group = 64;
    write_safetensors(path, model_metadata(quantized_config(from, how), from.generation_text), quantize_model<bf16>(from, how, {}));
    return path;
}
static const Strings FORMATS = {"int4", "int8", "fp8"};

TEST_CASE("adapters on packed models in bf16: each gradient is as near to the truth on the same numbers as PyTorch's bf16, or nearer") {
    const Scratch s;
    const Tensor64 other = whole_gradients<float>(Context(), false, TINY); // (the test sees that the weights are others)
    for (auto& format : FORMATS) {
        CAPTURE(format);
        const std::string model = quantized_tiny(s, format);
        CHECK(Weights<bf16>(ModelFile(model), Format::PLAIN, true).layers[0].qkv.format != Format::PLAIN);
        Context plain;
        plain.plain = true;
        const Tensor64 truth = whole_gradients<float>(Context(), false, model);
        no_worse_than_pytorch(distances(whole_gradients<bf16>(Context(), false, model), truth, truth), false);
        no_worse_than_pytorch(distances(whole_gradients<bf16>(plain, false, model), truth, truth), false);
        CHECK(distances(other, truth, truth).at("all") > (format == "int4" ? 0.05 : 0.002));
    }
}

// ---- runs

static TrainOptions run_options(const std::string& adapter) {
    TrainOptions o;
    o.dropout = 0.1f, o.batch = 2, o.accum = 2, o.lr = 1e-2, o.steps = 8, o.warmup = 0;
    o.adapter_init = adapter;
    o.lora = AdapterFile(adapter, ModelFile(TINY).config).config;
    return o;
}
static void write_rows(const std::string& path) {
    DatasetWriter writer(path, Tokenizer(VOCABULARY).hash(), template_hash());
    for (int row = 0; row < 9; row++) {
        std::vector<uint32_t> words;
        for (int i = 0; i < 12 + row; i++) words.push_back(philox(73, (uint64_t)(100 * row + i), 99).v[0] % 900 | (i > 4 ? TRAIN : 0));
        writer.add(words);
    }
    writer.commit();
}

TEST_CASE("steps on packed weights: the loss falls, recomputed or not to the bit, and a saved run goes on to the bit") {
    const Scratch s;
    write_rows(s / "rows.bin");
    const Dataset data(s / "rows.bin");
    for (auto& format : FORMATS) {
        CAPTURE(format);
        const ModelFile file(quantized_tiny(s, format));
        TrainOptions o = run_options("tests/fixtures/train/adapter_bf16");
        auto steps = [](Trainer<bf16>& t, int n) { for (int i = 0; i < n; i++) REQUIRE(t.train_step()); };
        Trainer<bf16> whole(o, Context(), file, data, nullptr);
        CHECK(whole.run.find("\"" + format + "\"") != std::string::npos);
        const double before = whole.mean_loss(data, whole.loader.rows);
        steps(whole, 4);
        whole.write_state(s / "state", 0, 0);
        steps(whole, 4);
        CHECK(whole.mean_loss(data, whole.loader.rows) < before - 0.2);
        Trainer<bf16> second(o, Context(), file, data, nullptr);
        double best = 0, elapsed = 0;
        second.read_state(s / "state", best, elapsed);
        CHECK(second.step == 4);
        steps(second, 4);
        CHECK(second.params.host(second.params.p) == whole.params.host(whole.params.p));
        CHECK(second.params.host(second.params.m) == whole.params.host(whole.params.m));
        o.recompute = true;
        Trainer<bf16> again(o, Context(), file, data, nullptr);
        steps(again, 8);
        CHECK(again.params.host(again.params.p) == whole.params.host(whole.params.p));
        const ModelFile other(TINY); // a state is of its own base
        Trainer<bf16> wrong_base(o, Context(), other, data, nullptr);
        CHECK_THROWS_AS(wrong_base.read_state(s / "state", best, elapsed), Error);
    }
}

static Result run_trainer(const Strings& arguments) { return Process(program("TRAIN_LORA", "./train_lora"), arguments + Strings{"-j", "1", "-d", "cpu"}).wait(); }

TEST_CASE("--merge of an adapter on packed weights: bf16 is W + s B A rounded once; --merge-as quantises it anew; the difference is printed") {
    const Scratch s;
    const std::string adapter = "tests/fixtures/train/adapter_bf16";
    const AdapterFile from(adapter, ModelFile(TINY).config);
    for (auto& format : FORMATS) {
        CAPTURE(format);
        const std::string model = quantized_tiny(s, format), whole = s / format + "_merged.bin", anew = s / format + "_anew.bin";
        Result r = run_trainer({model, "-z", VOCABULARY, "--adapter-init", adapter, "--merge", whole});
        INFO(r.err);
        REQUIRE(r.status == 0);
        CHECK(r.err.find("merged; against the adapter: mean KL ") != std::string::npos);
        const ModelFile merged(whole), base(model);
        CHECK((!merged.is_quantized() && !merged.is_int8()));
        const Weights<float> W(base), M(merged);
        const Tensor &A = from.tensors.at(adapter_tensor(1, DOWN_PROJ, 'A')), &B = from.tensors.at(adapter_tensor(1, DOWN_PROJ, 'B'));
        const Linear<float>& down = W.layers[1].down;
        const size_t rank = (size_t)A.shape[0];
        for (int row = 0; row < down.out(); row++)
            for (int k = 0; k < down.in; k++) {
                float sum = 0;
                for (size_t j = 0; j < rank; j++) sum += number(B, (size_t)row * rank + j) * number(A, j * (size_t)down.in + k);
                REQUIRE(M.layers[1].down.at(row, k) == to_acc(to_bf16(down.at(row, k) + (float)from.config.scale() * sum)));
            }
        r = run_trainer({model, "-z", VOCABULARY, "--adapter-init", adapter, "--merge", anew, "--merge-as", format});
        INFO(r.err);
        REQUIRE(r.status == 0);
        CHECK(r.err.find("merged; against the adapter: mean KL ") != std::string::npos);
        const ModelFile again(anew);
        const Weights<bf16> N(again, Format::PLAIN, true), P(base, Format::PLAIN, true);
        CHECK(type_name(N) == format);
        CHECK(N.embed.format == P.embed.format);
        CHECK(N.layers[0].qkv.group == P.layers[0].qkv.group);
        for (auto& entry : fs::directory_iterator(s.path)) CHECK(entry.path().string().find("_anew.bin.") == std::string::npos); // the bf16 file is gone
    }
    // A base of bf16, quantised when merged: the model's own 64 columns are no groups of 128.
    check_refusal(run_trainer({TINY, "-z", VOCABULARY, "--adapter-init", adapter, "--merge", s / "x.bin", "--merge-as", "int4"}), "train_lora", "groups of 128");
    CHECK(run_trainer({TINY, "-z", VOCABULARY, "--adapter-init", adapter, "--merge", s / "y.bin", "--merge-as", "fp8"}).status == 0);
    CHECK(ModelFile(s / "y.bin").is_quantized());
    CHECK(!fs::exists(s / "x.bin"));
}

TEST_CASE("QLoRA's bad input: one line each, nothing written") {
    const Scratch s;
    write_rows(s / "rows.bin");
    for (auto& format : FORMATS)
        check_refusal(run_trainer({quantized_tiny(s, format), s / "rows.bin", "-z", VOCABULARY, "-o", s / "out", "--full"}), "train_lora",
                      "--full: quantised weights cannot be trained");
    const Strings merge = {TINY, "--adapter-init", "tests/fixtures/train/adapter_bf16", "--merge-as", "int8"};
    check_refusal(run_trainer(merge), "train_lora", "");
    check_refusal(run_trainer(merge + Strings{"--merge", s / "folder"}), "train_lora", "where PATH ends in .bin");
    check_refusal(run_trainer({TINY, s / "rows.bin", "-o", s / "out", "--merge", s / "m.bin", "--merge-as", "int5"}), "train_lora", "int4");
    // An adapter of another shape, and a packed base whose scales are missing.
    const std::string model = quantized_tiny(s, "int8");
    std::string bytes = read_file(model);
    const std::string name = "layers.1.mlp.down_proj.weight_scale";
    for (size_t at; (at = bytes.find(name)) != std::string::npos;) bytes[at + name.size() - 1] = 'x';
    write_file(s / "broken.bin", bytes);
    check_refusal(run_trainer({s / "broken.bin", s / "rows.bin", "-z", VOCABULARY, "-o", s / "out"}), "train_lora", "down_proj.weight_scale");
    CHECK(!fs::exists(s / "out"));
    CHECK(!fs::exists(s / "folder"));
}
