// modules_to_save: an embedding and a head that are trained as a whole beside LoRA, and adapters that have them: beside
// PEFT, in files, merged, served (TRAIN_LORA, QWEN3, DATAGEN and SERVE, else the programs here). PEFT's numbers are
// fixtures, made by tests/reference/make_train_fixtures.py.
#include <doctest/doctest.h>
#include "model/adapters.h"
#include "model/session.h"
#include "model/write.h"
#include "tests/files.h"
#include "tests/process.h"
#include "tests/trainer.h"
#include <thread>

static const std::string FIXTURES = "tests/fixtures/train/", TINY = "tests/fixtures/tiny/model.bin", VOCABULARY = "tests/fixtures/tiny/tokenizer.bin";


// The rows of a small model's fixture as a dataset.
static void write_rows(const std::string& base, const std::string& path) {
    const Json golden(read_file(FIXTURES + base + "/rows.json"));
    DatasetWriter writer(path, 0, 0);
    for (size_t i = 0; i < golden["ids"].size(); i++) {
        std::vector<uint32_t> row;
        for (size_t k = 0; k < golden["ids"][i].size(); k++)
            row.push_back((uint32_t)golden["ids"][i][k].number() | (golden["trained"][i][k].number() > 0 ? TRAIN : 0));
        writer.add(row);
    }
    writer.commit();
}

TEST_CASE("an embedding and a head beside LoRA: PEFT's gradients, and the losses of 30 steps; tied models are untied as PEFT does") {
    const Json peft(read_file(FIXTURES + "modules.json"));
    Scratch scratch;
    for (auto [name, base] : {std::pair("both", "tied"), {"embed", "tied"}, {"untied", "untied"}}) {
        const std::string kind = name;
        INFO(kind);
        write_rows(base, scratch / "rows.bin");
        const Dataset data(scratch / "rows.bin");
        const ModelFile file(FIXTURES + base);
        const std::string folder = FIXTURES + "modules_" + name;
        TrainOptions o;
        o.lora = AdapterFile(folder, file.config).config;
        CHECK(o.lora.embed);
        CHECK(o.lora.head == (name != std::string("embed")));
        o.adapter_init = folder, o.dropout = 0, o.batch = 3, o.steps = 30, o.lr = peft["lr"].number(), o.shuffle = false;
        Trainer<float> t(o, Context(), file, data, nullptr);
        CHECK(t.params.trained() == adapter_parameters(file.config, o.lora));
        t.add_gradients(t.loader.rows, data.trained());
        const MappedFile map(folder + "/gradients.safetensors");
        Tensors theirs;
        Metadata metadata;
        read_safetensors(map, theirs, metadata);
        size_t compared = 0;
        auto same = [&](const std::string& tensor, size_t rows, size_t columns, size_t at, size_t stride, double s) {
            INFO(tensor);
            const Tensor& want = theirs.at(tensor);
            double off = 0, size = 0;
            for (size_t r = 0; r < rows; r++)
                for (size_t i = 0; i < columns; i++) {
                    const double x = number(want, r * columns + i);
                    off += std::pow(s * t.params.gradient[at + r * stride + i] - x, 2), size += x * x;
                }
            CHECK(size > 1e-6);
            CHECK(std::sqrt(off / size) < 5e-6);
            compared++;
        };
        each_adapter_tensor(t.w, [&](const std::string& tensor, size_t rows, size_t columns, size_t at, size_t stride) {
            same(tensor, rows, columns, at, stride, 1);
        });
        t.params.each_saved([&](const ModelTensor& m, size_t at) { same(saved_name(m), m.rows, m.columns, at, m.columns, 1); });
        CHECK(compared == theirs.size());
        for (int i = 0; i < 30; i++) {
            REQUIRE(t.train_step());
            CHECK(std::fabs(t.last_loss - peft[name]["losses"][i].number()) < 2e-5);
            CHECK(t.last_norm == doctest::Approx(peft[name]["norms"][i].number()).epsilon(2e-4));
        }
        t.write_result(scratch / name, 0);
        const AdapterFile written(scratch / name, file.config);
        CHECK(written.tensors.size() == theirs.size());
        for (auto& [tensor, first] : theirs) CHECK(written.tensors.at(tensor).shape == first.shape);
        const Json config(read_file(scratch / name + "/adapter_config.json"));
        CHECK(config["modules_to_save"].size() == (o.lora.head ? 2u : 1u));
        CHECK(config["modules_to_save"][0].str() == "embed_tokens");

        // In use, and merged: the logits of the trainer's loss.
        Weights<float> w(file);
        const AttachedAdapter<float> attached(t.ctx, w, written, Session<float>::CHUNK);
        write_merged(file, written, scratch / "merged.bin");
        const ModelFile merged(scratch / "merged.bin");
        CHECK(!merged.config.tied);
        CHECK(merged.tensors.count("lm_head.weight") == 1);
        const Weights<float> whole(merged);
        const double loss = t.mean_loss(data, t.loader.rows);
        CHECK(session_loss(file.config, w, data) == doctest::Approx(loss).epsilon(1e-5));
        CHECK(session_loss(merged.config, whole, data) == doctest::Approx(loss).epsilon(1e-5));
    }
}

// 16 rows of `tiny`.
static std::string packed(const Scratch& out) {
    const std::string text = read_file("tests/fixtures/train/rows.jsonl");
    size_t cut = 0;
    for (int i = 0; i < 16; i++) cut = text.find('\n', cut) + 1;
    write_file(out / "rows.jsonl", text.substr(0, cut));
    must(program("DATAGEN", "./datagen"), {"pack", "-z", VOCABULARY, out / "rows.jsonl", out / "rows.bin", "--info", "none"});
    return out / "rows.bin";
}

TEST_CASE("train_lora --modules-to-save: resume to the bit, ranks, the base opened with it, merged; what has no place for it refuses") {
    Scratch out;
    const std::string rows = packed(out);
    const Strings how = {TINY, rows, "--rank", "4", "--lr", "5e-3", "--batch", "8", "--steps", "20", "--modules-to-save", "embed_tokens,lm_head"};
    const Result r = train(how + Strings{"-o", out / "w"});
    CHECK(r.err.find("embed_tokens, lm_head: 0.") != std::string::npos); // M of them trained
    CHECK(logged(out / "w", "loss").back() < 0.5 * logged(out / "w", "loss")[0]);
    Process p = start_training(how + Strings{"-o", out / "parts"});
    interrupt_at_step(4, p, out / "parts");
    CHECK(logged(out / "parts", "loss").size() < 20);
    Strings other = how;
    other.back() = "lm_head";
    check_refusal(start_training(other + Strings{"-o", out / "parts", "--resume"}).wait(), "train_lora", "begun with modules-to-save");
    train(how + Strings{"-o", out / "parts", "--resume"});
    CHECK(adapter(out / "parts") == adapter(out / "w"));
    for (const Strings& cut : {Strings{"--batch", "2", "--accum", "4"}, {"--recompute"}}) { // with a head of its own: up to rounding
        train(how + cut + Strings{"-o", out / "c", "--overwrite"});
        for (size_t i = 0; i < 4; i++) CHECK(logged(out / "c", "loss")[i] == doctest::Approx(logged(out / "w", "loss")[i]).epsilon(1e-3));
    }
    train(how + Strings{"-d", "cpu", "--dropout", "0", "-o", out / "one"});
    train(how + Strings{"-d", "cpu", "--dropout", "0", "--batch", "4", "--gpus", "2", "-o", out / "two"});
    for (size_t i = 0; i < 4; i++) CHECK(logged(out / "two", "loss")[i] == doctest::Approx(logged(out / "one", "loss")[i]).epsilon(1e-3));

    train({TINY, "--adapter-init", out / "w", "--merge", out / "merged"});
    CHECK(read_file(out / "merged" + "/config.json").find("\"tie_word_embeddings\": false") != std::string::npos);
    const Strings ask = {"-d", "cpu", "-z", VOCABULARY, "-t", "0", "-n", "16", "-i", "What is a warp?"};
    const char* qwen3 = program("QWEN3", "./qwen3");
    const std::string said = must(qwen3, Strings{TINY, "--adapter", out / "w"} + ask).out;
    CHECK(said == must(qwen3, Strings{out / "merged"} + ask).out);
    CHECK(said != must(qwen3, Strings{TINY} + ask).out);
    train({TINY, rows, "--adapter-init", out / "w", "--steps", "2", "--batch", "8", "--lr", "1e-4", "-o", out / "on"}); // goes on from it
    CHECK(logged(out / "on", "loss")[0] < 0.7 * logged(out / "w", "loss")[0]);

    check_refusal(Process(qwen3, {TINY, "--adapter", out / "w", "--convert-adapter", out / "a.gguf"}).wait(), "qwen3", "modules_to_save");
    const Result served = Process(program("SERVE", "./serve"), {TINY, "-z", VOCABULARY, "--port", "0", "--adapter", "a=" + out / "w"}).wait();
    CHECK(served.status == 1);
    CHECK(served.err.find("modules_to_save") != std::string::npos);
    auto refused = [&](const Strings& arguments, const std::string& word) { check_refusal(start_training(arguments + Strings{"-o", out / "no"}).wait(), "train_lora", word); };
    refused({TINY, rows, "--modules-to-save", "norm"}, "--modules-to-save: norm is none of embed_tokens, lm_head");
    refused({TINY, rows, "--full", "--modules-to-save", "lm_head"}, "--full trains the model itself: there is no adapter for --modules-to-save");
    refused({TINY, rows, "--reward-model", "--modules-to-save", "lm_head"}, "not with --modules-to-save");
    refused({TINY, rows, "--adapter-init", out / "w", "--modules-to-save", "lm_head"}, "--adapter-init says it already");
    must(qwen3, {TINY, "-z", VOCABULARY, "--quantize", "int8", out / "small.bin"});
    refused({out / "small.bin", rows, "--modules-to-save", "embed_tokens"}, "--modules-to-save: the matrix is quantised");

    // A file that is not whole.
    std::string config = read_file(out / "w" + "/adapter_config.json");
    fs::create_directory(out / "bad");
    fs::copy(out / "w" + "/adapter_model.safetensors", out / "bad" + "/adapter_model.safetensors");
    auto bad = [&](const std::string& from, const std::string& to, const std::string& word) {
        std::string text = config;
        text.replace(text.find(from), from.size(), to);
        write_file(out / "bad" + "/adapter_config.json", text);
        check_refusal(Process(qwen3, {TINY, "-z", VOCABULARY, "--adapter", out / "bad", "-i", "x"}).wait(), "qwen3", word);
    };
    bad("\"lm_head\"", "\"score\"", "modules_to_save has \"score\": embed_tokens and lm_head are supported");
    bad(", \"lm_head\"", "", "lm_head.weight belongs to no module that the config names");
}
