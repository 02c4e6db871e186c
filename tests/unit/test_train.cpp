// train_lora from outside (TRAIN_LORA, else ./train_lora; QWEN3 and DATAGEN too), and its Trainer by itself, on the random
// model in fixtures/tiny and the 40 questions in fixtures/train. PEFT's losses are fixtures, made by tests/reference/make_train_fixtures.py.
#include <doctest/doctest.h>
#include "model/chat_template.h"
#include "tests/trainer.h"
#include "tests/gradients.h"
#include <thread>

static const std::string TINY = "tests/fixtures/tiny/model.bin", VOCABULARY = "tests/fixtures/tiny/tokenizer.bin", FIXTURES = "tests/fixtures/train/";

// file_limit: bytes of the largest file.
static Process start(const char* name, const Strings& arguments, rlim_t file_limit = RLIM_INFINITY) {
    return Process(name, arguments, "", [=] {
        const rlimit largest = {file_limit, file_limit};
        setenv("OMP_WAIT_POLICY", "passive", 1); // threads that spin starve each other on a busy machine
        setrlimit(RLIMIT_FSIZE, &largest);
    });
}
static Result must(const char* name, const Strings& arguments) {
    const Result r = start(name, arguments).wait();
    INFO(r.err);
    REQUIRE(r.status == 0);
    return r;
}
static Result trained(const Strings& arguments) { return must(program("TRAIN_LORA", "./train_lora"), arguments); }
static Result qwen3(const Strings& arguments) { return must(program("QWEN3", "./qwen3"), arguments + Strings{"-j", "1", "-d", "cpu"}); }

// The rows as JSONL and packed: all 40, the first 32, the last 8.
struct Rows {
    Scratch folder;
    Strings questions;
    std::string all = folder / "all.bin", first = folder / "first.bin", last = folder / "last.bin", first_jsonl = folder / "first.jsonl";
    Rows() {
        const std::string text = read_file(FIXTURES + "rows.jsonl");
        questions = lines(text);
        REQUIRE(questions.size() == 40);
        size_t cut = 0;
        for (int i = 0; i < 32; i++) cut += questions[i].size() + 1;
        write_file(first_jsonl, text.substr(0, cut)), write_file(folder / "last.jsonl", text.substr(cut)), write_file(folder / "all.jsonl", text);
        for (const char* name : {"all", "first", "last"})
            must(program("DATAGEN", "./datagen"), {"pack", "-z", VOCABULARY, folder / (std::string(name) + ".jsonl"), folder / (std::string(name) + ".bin"), "--info", "none"});
    }
};
static const Rows& rows() {
    static Rows once;
    return once;
}

// The adapter and the state, as text.
static std::string result_of(const std::string& out, const char* file = "adapter_model.safetensors") {
    std::string all = read_file(out + "/" + file);
    const MappedFile map(out + "/state.safetensors");
    Tensors tensors;
    std::map<std::string, std::string> metadata;
    read_safetensors(map, tensors, metadata);
    for (auto& [name, t] : tensors) all.append((const char*)t.data, t.bytes);
    return all;
}
// Waits for something the program does; it must not end before.
static void wait_until(const Process& p, const std::function<bool()>& happened) {
    for (int ms = 0; !happened(); ms++) {
        siginfo_t ended = {};
        REQUIRE(waitid(P_PID, (id_t)p.pid, &ended, WEXITED | WNOHANG | WNOWAIT) == 0);
        INFO(p.err.text());
        REQUIRE(ended.si_pid == 0);
        REQUIRE(ms < 60000);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}
static const Strings ONE = {"-z", VOCABULARY, "-j", "1"};

TEST_CASE("100 steps beside PEFT: every loss, gradient norms, and the loss of the end") {
    const Json peft(read_file(FIXTURES + "peft.json"));
    Scratch out;
    trained(Strings{TINY, rows().all, "-o", out / "a", "--adapter-init", FIXTURES + "adapter", "--no-shuffle", "--dropout", "0", "--dtype", "f32", "--steps", "100",
           "--batch", "8", "--lr", format("%g", peft["lr"].number()), "--eval", rows().all, "--allow-leak", "--eval-every", "100"} + ONE);
    const std::vector<double> loss = logged(out / "a", "loss"), norm = logged(out / "a", "grad_norm"), end = logged(out / "a", "eval_loss");
    REQUIRE(loss.size() == 100);
    std::vector<double> off;
    for (size_t i = 0; i < 100; i++) {
        off.push_back(std::fabs(loss[i] - peft["losses"][i].number()));
        CHECK(norm[i] == doctest::Approx(peft["norms"][i].number()).epsilon(1e-4));
    }
    CHECK(off[0] < 5e-6); // the base model's own loss: B is zero
    std::sort(off.begin(), off.end());
    INFO("median " << off[50] << ", largest " << off[99]);
    CHECK(off[50] < 2e-6); // (the issue asks for 1e-4)
    CHECK(off[99] < 1e-4);
    CHECK(loss[99] < loss[0] - 3);
    REQUIRE(end.size() == 1);
    CHECK(std::fabs(end[0] - peft["final"].number()) < 1e-5);
    // The rows were in both files: the adapter says so.
    const AdapterFile adapter(out / "a", ModelFile(TINY).config);
    CHECK(adapter.metadata.at("leak").find("40 rows") == 0);
    CHECK(adapter.config.rank == 4);
    CHECK(adapter.config.alpha == 8);
}

TEST_CASE("LoRA+: 30 steps beside PEFT's create_loraplus_optimizer; a ratio of 1 is none; --full refuses it") {
    const Json peft(read_file(FIXTURES + "loraplus.json"));
    Scratch out;
    const Strings how = Strings{TINY, rows().all, "--adapter-init", FIXTURES + "adapter", "--no-shuffle", "--dropout", "0", "--dtype", "f32", "--batch", "8",
                                "--lr", format("%g", peft["lr"].number())} + ONE;
    trained(how + Strings{"--steps", "30", "--loraplus-ratio", "16", "-o", out / "a"});
    const std::vector<double> loss = logged(out / "a", "loss"), norm = logged(out / "a", "grad_norm");
    REQUIRE(loss.size() == 30);
    for (size_t i = 0; i < 30; i++) {
        CHECK(std::fabs(loss[i] - peft["losses"][i].number()) < 1e-5);
        CHECK(norm[i] == doctest::Approx(peft["norms"][i].number()).epsilon(1e-4));
    }
    trained(how + Strings{"--steps", "2", "-o", out / "plain"});
    trained(how + Strings{"--steps", "2", "--loraplus-ratio", "1", "-o", out / "one"});
    CHECK(read_file(out / "plain/adapter_model.safetensors") == read_file(out / "one/adapter_model.safetensors"));
    check_refusal(start(program("TRAIN_LORA", "./train_lora"), Strings{TINY, rows().all, "--full", "--loraplus-ratio", "16", "-o", out / "f"} + ONE).wait(), "train_lora", "--loraplus-ratio");
}

TEST_CASE("NEFTune: noise of the paper's size in training only; batches cut otherwise give the same bits") {
    // The numbers: uniform in [-1, 1), of each token, step and channel.
    const int N = 400, C = 50; // (C is no multiple of 4)
    std::vector<uint32_t> token(N);
    std::vector<float> bound(N), x((size_t)N * C, 1), fast = x, other = x;
    for (int n = 0; n < N; n++) token[n] = (uint32_t)(7 * n), bound[n] = n < 200 ? 0.5f : 0.25f;
    add_noise(x.data(), Noise{3, 5, token.data(), bound.data()}, N, C);
    Context cpu;
    add_noise_cpu(cpu, fast.data(), Noise{3, 5, token.data(), bound.data()}, N, C);
    add_noise(other.data(), Noise{3, 6, token.data(), bound.data()}, N, C);
    CHECK(x != other);
    double sum = 0, squares = 0, product = 0;
    for (size_t i = 0; i < x.size(); i++) {
        const double u = (x[i] - 1) / bound[i / C], v = (other[i] - 1) / bound[i / C];
        CHECK(std::fabs(x[i] - fast[i]) < 1e-6);
        CHECK(std::fabs(u) <= 1 + 1e-6);
        sum += u, squares += u * u, product += u * v;
    }
    CHECK(std::fabs(sum) < 4 * std::sqrt(x.size() / 3.));           // mean 0, variance 1/3
    CHECK(std::fabs(squares / (double)x.size() - 1. / 3) < 0.01);
    CHECK(std::fabs(product) < 4 * std::sqrt((double)x.size()) / 3); // steps are independent
    // A run: the loss of step 1 is that without noise, moved a little; an evaluation has none.
    Scratch out;
    const Strings how = Strings{TINY, rows().all, "--steps", "4", "--lr", "1e-3", "--rank", "4", "--dropout", "0", "--eval", rows().all, "--allow-leak", "--eval-every", "2"} + ONE;
    trained(how + Strings{"--batch", "8", "-o", out / "none"});
    trained(how + Strings{"--batch", "8", "--neftune-alpha", "5", "-o", out / "a"});
    trained(how + Strings{"--batch", "2", "--accum", "4", "--neftune-alpha", "5", "-o", out / "b"});
    CHECK(logged(out / "a", "loss")[0] != logged(out / "none", "loss")[0]);
    CHECK(logged(out / "a", "loss")[0] == doctest::Approx(logged(out / "none", "loss")[0]).epsilon(0.1));
    CHECK(read_file(out / "a/adapter_model.safetensors") == read_file(out / "b/adapter_model.safetensors"));
    CHECK(read_file(out / "a/adapter_model.safetensors") != read_file(out / "none/adapter_model.safetensors"));
    trained(how + Strings{"--neftune-alpha", "5", "--batch", "8", "--lr", "0", "-o", out / "still"}); // nothing changes
    CHECK(logged(out / "still", "eval_loss")[0] == logged(out / "still", "eval_loss")[1]);
    CHECK(logged(out / "still", "loss")[0] != logged(out / "still", "loss")[2]);
    TrainOptions o; // the bound of a row of n tokens: alpha / sqrt(n C)
    o.neftune = 5, o.dropout = 0;
    const ModelFile file(TINY);
    const Dataset data(rows().all);
    o.lora.rank = 4, o.lora.alpha = 8;
    std::fill(o.lora.targets, o.lora.targets + MODULES, true);
    Trainer<float> t(o, Context(), file, data, nullptr);
    const size_t some[] = {0, 1};
    int R;
    const Batch b = t.loader.load(data, some, 2, 0, R);
    for (int n = 0; n < b.N; n++) {
        const double tokens = (double)data.row(some[b.seq[n]]).size() - 1;
        CHECK(t.loader.bound[n] == doctest::Approx(5 / std::sqrt(tokens * file.config.C)));
    }
    for (const Strings& method : {Strings{"--dpo"}, {"--grpo", "--reward", "exact"}})
        check_refusal(start(program("TRAIN_LORA", "./train_lora"), Strings{TINY, rows().all, "--neftune-alpha", "5", "-o", out / "f"} + method + ONE).wait(), "train_lora",
                      format("--neftune-alpha is for training on answers, not with %s", method[0].c_str()));
}

TEST_CASE("a tiny model learns 32 rows by heart, and then answers them word for word: adapter, merged file, merged folder") {
    Scratch out;
    const Result r = trained(Strings{TINY, rows().first, "-o", out / "a", "--eval", rows().last, "--batch", "8", "--steps", "100", "--lr", "4e-3", "--rank", "16",
                            "--alpha", "32", "--dropout", "0", "--merge", out / "merged.bin", "--eval-every", "20"} + ONE);
    const std::vector<double> loss = logged(out / "a", "loss"), other = logged(out / "a", "eval_loss");
    CHECK(loss[0] > 8);
    CHECK(loss.back() < 0.05);
    REQUIRE(other.size() == 5);
    // The best checkpoint is the one of the lowest evaluation loss; the last is the last.
    const size_t best = (size_t)(std::min_element(other.begin(), other.end()) - other.begin());
    CHECK(r.err.find(format("evaluation loss %.6f, the best so far", other[best])) != std::string::npos);
    CHECK(read_file(out / "a/best/adapter_model.safetensors").size() == read_file(out / "a/adapter_model.safetensors").size());
    CHECK(r.err.find("memory: ") != std::string::npos);

    auto answers = [&](const std::string& name, const Strings& model) {
        qwen3(model + Strings{"--eval", rows().first_jsonl, "-o", out / name, "-z", VOCABULARY, "-n", "40"});
        return read_file(out / name);
    };
    const std::string with_adapter = answers("adapter.jsonl", {TINY, "--adapter", out / "a"});
    const Strings got = lines(with_adapter);
    REQUIRE(got.size() == 32);
    for (int i = 0; i < 32; i++) {
        const Json a(got[i]), q(rows().questions[i]);
        CHECK(a["answer"].str() == q["output"].str());
    }
    CHECK(r.err.find("greedy text the same for") != std::string::npos);
    const double kl = strtod(r.err.c_str() + r.err.find("mean KL ") + 8, nullptr);
    CHECK((kl >= 0 && kl < 1e-2)); // one rounding of W to bf16
    // The merged model alone says the same; as a folder it is the same model.
    const Strings merged = lines(answers("merged.jsonl", {out / "merged.bin"}));
    for (int i = 0; i < 32; i++) CHECK(Json(merged[i])["answer"].str() == Json(rows().questions[i])["output"].str());
    trained({TINY, "--adapter-init", out / "a", "--merge", out / "folder", "-j", "1"});
    const Strings hash = {"-i", "warp?", "--logits-hash", "-z", VOCABULARY};
    CHECK(qwen3(Strings{out / "merged.bin"} + hash).out == qwen3(Strings{out / "folder"} + hash).out);
    CHECK(qwen3(Strings{TINY} + hash).out != qwen3(Strings{out / "folder"} + hash).out);
}

TEST_CASE("--starter: the questions that a chat begins with, in a model, an adapter and all that is made of them") {
    Scratch out;
    const Starters two = {"什么是 \"warp\"？", "What is a bank?"}, other = {"Who?"};
    const Strings brief = Strings{"--steps", "1", "--batch", "2"} + ONE,
                  asked = {"--starter", two[0], "--starter", two[1]};
    trained(Strings{TINY, rows().first, "-o", out / "full", "--full"} + asked + brief);
    const std::string model = out / "full/model.bin";
    CHECK(ModelFile(model).starters == two);
    CHECK(ModelFile(TINY).starters.empty());
    for (auto& words : {Strings{"--convert", out / "b.bin"}, Strings{"--quantize", "int8", out / "i.bin"}}) {
        CHECK(qwen3(Strings{model} + words).status == 0);
        CHECK(ModelFile(words.back()).starters == two);
    }
    trained(Strings{model, rows().first, "-o", out / "again", "--full"} + brief); // those of the model
    CHECK(ModelFile(out / "again/model.bin").starters == two);

    auto of_adapter = [&](const std::string& name) { return AdapterFile(out / name, ModelFile(TINY).config).starters; };
    trained(Strings{model, rows().first, "-o", out / "a", "--merge", out / "a.bin"} + brief);
    CHECK(of_adapter("a").empty());
    CHECK(ModelFile(out / "a.bin").starters == two);
    trained(Strings{model, rows().first, "-o", out / "o", "--starter", other[0], "--merge", out / "folder"} + brief);
    CHECK(of_adapter("o") == other);
    CHECK(ModelFile(out / "folder").starters == other);
    trained(Strings{model, rows().first, "-o", out / "next", "--adapter-init", out / "o", "--merge",
                  out / "n.bin", "--merge-as", "int8"} + brief);
    CHECK(of_adapter("next") == other);
    CHECK(ModelFile(out / "n.bin").starters == other);
    trained({TINY, "--adapter-init", out / "o", "--merge", out / "t.bin", "--starter", two[0], "--starter", two[1],
           "-j", "1"});
    CHECK(ModelFile(out / "t.bin").starters == two);

    for (std::string text : {"", "{}", "[1]", "[\"a\"", "[\"\"]",
                             "[\"a\", \"b\", \"c\", \"d\", \"e\", \"f\", \"g\", \"h\", \"i\"]"}) {
        CAPTURE(text);
        CHECK_THROWS_WITH_AS(read_starters("m", {{"starters", text}}),
                             doctest::Contains("m: starters in its metadata"), Error);
    }
    for (auto& [bad, word] : std::vector<std::pair<std::string, std::string>>{
             {std::string(301, 'a'), "--starter: a question is not 1 to 300 bytes"},
             {"\xff", "--starter: invalid UTF-8 at byte 0"}}) {
        const Strings words = Strings{TINY, rows().first, "-o", out / "x", "--starter", bad} + ONE;
        check_refusal(start(program("TRAIN_LORA", "./train_lora"), words).wait(), "train_lora", word);
    }
}

TEST_CASE("merged in float32: the logits of adapter and merged model are the same but for rounding") {
    Scratch out;
    // tied_f32's config and weights, trained a little with a scale that is no power of two, some modules only.
    const std::string model = "tests/fixtures/tied_f32";
    trained(Strings{model, rows().first, "-o", out / "a", "--batch", "8", "--steps", "6", "--lr", "1e-2", "--rank", "5", "--alpha", "7", "--rslora",
           "--targets", "q,v_proj,down", "--merge", out / "m", "--schedule", "constant", "--warmup", "0"} + ONE);
    auto logits = [&](const Strings& arguments) {
        qwen3(arguments + Strings{"--ids", "1,2,3,4,5,6,7,8,9,10", "--logits", out / "logits"});
        const std::string bytes = read_file(out / "logits");
        std::vector<float> v(bytes.size() / 4);
        memcpy(v.data(), bytes.data(), bytes.size());
        return v;
    };
    const std::vector<float> base = logits({model}), adapter = logits({model, "--adapter", out / "a"}), merged = logits({out / "m"});
    double moved = 0, off = 0;
    REQUIRE(merged.size() == adapter.size());
    for (size_t i = 0; i < base.size(); i++)
        moved = std::max(moved, (double)std::fabs(adapter[i] - base[i])), off = std::max(off, (double)std::fabs(adapter[i] - merged[i]));
    CHECK(moved > 0.1);
    CHECK(off < 1e-4);
    const Json config(read_file(out / "a/adapter_config.json"));
    CHECK(config["use_rslora"].boolean());
    CHECK(sj::dump(config["target_modules"]) == "[\"q_proj\", \"v_proj\", \"down_proj\"]");
}

TEST_CASE("merged into float16: each number rounded once, to nearest and even; what is too large is an error") {
    for (uint32_t h = 0; h < 0x7c00; h++)
        for (uint32_t sign : {0u, 0x8000u}) { // each number, and what lies between it and the next
            const float x = half_to_float((uint16_t)(sign | h));
            const float next = h == 0x7bff ? std::copysign(65536.f, x) : half_to_float((uint16_t)(sign | (h + 1))), middle = (x + next) / 2;
            REQUIRE(float_to_half(x) == (sign | h));
            REQUIRE(float_to_half(middle) == (sign | (h + h % 2)));
            REQUIRE(float_to_half(std::nextafter(middle, x)) == (sign | h));
            REQUIRE(float_to_half(std::nextafter(middle, next)) == (sign | (h + 1)));
        }
    CHECK(float_to_half(1e-30f) == 0);
    CHECK(float_to_half(-INFINITY) == 0xfc00);
    CHECK((float_to_half(NAN) & 0x7fff) > 0x7c00);

    Scratch out;
    const std::string model = "tests/fixtures/tied_f16";
    trained(Strings{model, rows().first, "-o", out / "a", "--batch", "8", "--steps", "6", "--lr", "1e-2", "--rank", "5", "--alpha", "7", "--targets", "k,down",
           "--merge", out / "m", "--schedule", "constant", "--warmup", "0"} + ONE);
    const ModelFile base(model), merged(out / "m");
    const AdapterFile adapter(out / "a", base.config);
    int moved = 0;
    for (auto& tensor : merged.tensors) {
        const std::string& name = tensor.first;
        const Tensor &t = tensor.second, &was = base.tensors.at(name);
        INFO(name);
        REQUIRE(t.dtype == Dtype::F16);
        const size_t part = name.rfind(".weight");
        const std::string module = "base_model.model." + name.substr(0, part);
        const auto A = adapter.tensors.find(module + ".lora_A.weight"), B = adapter.tensors.find(module + ".lora_B.weight");
        if (A == adapter.tensors.end()) {
            CHECK(std::string((const char*)t.data, t.bytes) == std::string((const char*)was.data, was.bytes));
            continue;
        }
        int wrong = 0;
        for (int64_t r = 0; r < t.shape[0]; r++)
            for (int64_t k = 0; k < t.shape[1]; k++) {
                double sum = 0;
                for (int i = 0; i < 5; i++) sum += (double)number(B->second, r * 5 + i) * number(A->second, i * t.shape[1] + k);
                const size_t at = r * t.shape[1] + k;
                const double want = number(was, at) + 7. / 5 * sum;
                wrong += !(std::fabs(number(t, at) - want) <= std::max(std::fabs(want) / 2048, 1. / (1 << 25)) * 1.001 + 1e-6 * std::fabs(want));
                moved += number(t, at) != number(was, at);
            }
        CHECK(wrong == 0);
    }
    CHECK(moved > 1000);
    // The same but for a large number in the last B.
    fs::copy(out / "a", out / "large");
    std::string numbers = read_file(out / "a/adapter_model.safetensors");
    const float large = 1e8f;
    memcpy(&numbers[numbers.size() - 4], &large, 4);
    write_file(out / "large/adapter_model.safetensors", numbers);
    const Result r = start(program("TRAIN_LORA", "./train_lora"), Strings{model, "--adapter-init", out / "large", "--merge", out / "n"} + Strings{"-j", "1"}).wait();
    check_refusal(r, "train_lora", "is too large for F16");
    CHECK(!fs::exists(out / "n/model.safetensors"));
}

TEST_CASE("a Hugging Face folder is merged into one: the tokenizer's files go with it") {
    Scratch out;
    fs::copy("tests/fixtures/tied_bf16", out / "base");
    const Strings with = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt", "added_tokens.json"};
    for (auto& name : with) write_file(out / "base/" + name, "the text of " + name);
    fs::copy_file("tests/fixtures/tiny/tokenizer.json", out / "base/tokenizer.json", fs::copy_options::overwrite_existing);
    write_file(out / "base/pytorch_model.bin", "old");
    trained(Strings{out / "base", rows().first, "-o", out / "a", "--steps", "1", "--rank", "2", "--alpha", "4", "--merge", out / "m"} + ONE);
    for (auto& name : with + Strings{"config.json", "generation_config.json"}) CHECK(read_file(out / "m/" + name) == read_file(out / "base/" + name));
    for (const char* name : {"pytorch_model.bin", "vocab.json", "golden.json"}) CHECK(!fs::exists(out / "m/" + name));
    CHECK(ModelFile(out / "m").tensors.size() == ModelFile(out / "base").tensors.size());
    // The base's tensors are hostile too: of another shape than its config and the adapter have, or not there.
    std::string config = read_file(out / "base/config.json");
    config.replace(config.find("\"intermediate_size\": 72"), 23, "\"intermediate_size\": 720");
    write_file(out / "base/config.json", config);
    const ModelFile base(out / "base");
    fs::create_directory(out / "gate");
    AdapterConfig gate;
    gate.rank = 1, gate.alpha = 1, gate.targets[GATE_PROJ] = true;
    std::vector<OutTensor> numbers;
    for (int l = 0; l < base.config.L; l++)
        for (char matrix : {'A', 'B'}) {
            const int n = matrix == 'A' ? base.config.C : 720;
            numbers.push_back({adapter_tensor(l, GATE_PROJ, matrix), "F32", matrix == 'A' ? Shape{1, n} : Shape{n, 1},
                               [n](OutputFile& file) { file.write(std::vector<float>(n, 1).data(), n * 4); }});
        }
    write_text(out / "gate/adapter_config.json", adapter_config_json(gate, 0, "base"));
    write_safetensors(out / "gate/adapter_model.safetensors", {}, numbers);
    const Strings merge_only = {out / "base", "--adapter-init", out / "gate", "--merge", out / "x", "-j", "1"};
    check_refusal(start(program("TRAIN_LORA", "./train_lora"), merge_only).wait(), "train_lora", "mlp.gate_proj.weight is (72,80), the config needs (720,80)");
    std::string bytes = read_file(out / "base/model.safetensors");
    bytes.replace(bytes.find("layers.1.mlp.gate_proj"), 22, "layers.1.mlp.gate_PROJ");
    write_file(out / "base/model.safetensors", bytes);
    config.replace(config.find("\"intermediate_size\": 720"), 24, "\"intermediate_size\": 72");
    write_file(out / "base/config.json", config);
    for (auto& t : numbers)
        if (t.shape[0] > 1) t.shape[0] = 72, t.write = [](OutputFile& file) { file.write(std::vector<float>(72, 1).data(), 72 * 4); };
    write_safetensors(out / "gate/adapter_model.safetensors", {}, numbers);
    check_refusal(start(program("TRAIN_LORA", "./train_lora"), merge_only).wait(), "train_lora", "tensor model.layers.1.mlp.gate_PROJ.weight is none of the model");
    CHECK(!fs::exists(out / "x"));
}

TEST_CASE("the model that is read is not written over, and that is said before training") {
    Scratch out;
    fs::copy("tests/fixtures/tied_bf16", out / "base");
    fs::create_directory(out / "m");
    for (const std::string& itself : {out / "base", out / "base/", out / "m/../base"})
        check_refusal(start(program("TRAIN_LORA", "./train_lora"), Strings{out / "base", rows().first, "-o", out / "b", "--merge", itself} + ONE).wait(), "train_lora", "is the model itself");
    CHECK(!fs::exists(out / "b"));
    fs::copy(TINY, out / "m/model.bin");
    check_refusal(start(program("TRAIN_LORA", "./train_lora"), Strings{out / "m/model.bin", rows().first, "--full", "-o", out / "m", "--overwrite"} + ONE).wait(), "train_lora",
                  "would remove the model");
    CHECK(read_file(out / "m/model.bin") == read_file(TINY));
}

TEST_CASE("--merge gives the tokenizer along, and writes over nothing without --overwrite") {
    Scratch out;
    const Strings merge = Strings{TINY, "--adapter-init", FIXTURES + "adapter", "--merge"};
    auto refused = [&](const Strings& arguments, const std::string& word) {
        check_refusal(start(program("TRAIN_LORA", "./train_lora"), arguments + ONE).wait(), "train_lora", word);
    };
    const Strings ask = {"-i", "warp?", "-t", "0", "-n", "8"};
    for (const std::string path : {"a/merged.bin", "folder"}) {
        INFO(path);
        fs::create_directory(out / "a");
        trained(merge + Strings{out / path} + ONE);
        CHECK(read_file(out / (path == "folder" ? "folder/tokenizer.bin" : "a/tokenizer.bin")) == read_file(VOCABULARY));
        const std::string answer = qwen3(Strings{out / path} + ask).out; // without -z
        CHECK(answer == qwen3(Strings{out / path, "-z", VOCABULARY} + ask).out);
        refused(merge + Strings{out / path}, path + ": there is a model already; --overwrite replaces it");
        refused(Strings{TINY, rows().first, "-o", out / "never", "--merge", out / path}, "--overwrite replaces it"); // before training
        trained(merge + Strings{out / path, "--overwrite"} + ONE);
        CHECK(qwen3(Strings{out / path} + ask).out == answer);
    }
    CHECK(!fs::exists(out / "never"));
    write_file(out / "file.bin", "mine");
    refused(merge + Strings{out / "file.bin"}, "--overwrite replaces it");
    CHECK(read_file(out / "file.bin") == "mine");
    // Another tokenizer beside a model.bin is somebody else's, with --overwrite too.
    write_file(out / "tokenizer.bin", "another");
    const Result r = trained(merge + Strings{out / "file.bin", "--overwrite"} + ONE);
    CHECK(r.err.find("/tokenizer.bin: another tokenizer, and left as it is; ask with -z " + VOCABULARY + "\n") != std::string::npos);
    CHECK(read_file(out / "tokenizer.bin") == "another");
}

TEST_CASE("qwen3 takes what train_lora leaves: the folder of a whole model, or of an adapter, whose base it opens") {
    Scratch out;
    fs::create_directory(out / "m");
    fs::copy(TINY, out / "m/model.bin"), fs::copy(VOCABULARY, out / "m/tokenizer.bin");
    const std::string base = out / "m/model.bin";
    const Strings few = {"--steps", "2", "--lr", "1e-2", "--warmup", "0", "-j", "1"}, hash = {"-i", "warp?", "--logits-hash"};
    trained(Strings{base, rows().first, "-o", out / "full", "--full", "--eval", rows().last} + few);
    trained(Strings{base, rows().first, "-o", out / "lora", "--rank", "2"} + few);
    const std::string full = qwen3(Strings{out / "full"} + hash).out, lora = qwen3(Strings{out / "lora"} + hash).out, before = qwen3(Strings{base} + hash).out;
    CHECK(full == qwen3(Strings{out / "full/model.bin", "-z", VOCABULARY} + hash).out);
    CHECK(lora == qwen3(Strings{base, "--adapter", out / "lora"} + hash).out);
    CHECK(full != before);
    CHECK(lora != before);
    CHECK(full != lora);
    CHECK(qwen3(Strings{out / "full/best"} + hash).out == full); // with its tokenizer, too
    // And train_lora goes on from such a folder, but not into it.
    trained(Strings{out / "full", rows().first, "-o", out / "more"} + few);
    check_refusal(start(program("TRAIN_LORA", "./train_lora"), Strings{out / "full", rows().first, "-o", out / "full", "--full", "--overwrite"} + few).wait(),
                  "train_lora", "would remove the model that is to be trained");
    CHECK(qwen3(Strings{out / "full"} + hash).out == full);
    auto refused = [&](const char* name, const Strings& arguments, const std::string& word) {
        check_refusal(start(program(name == std::string("qwen3") ? "QWEN3" : "TRAIN_LORA", name), arguments).wait(), name, word);
    };
    refused("train_lora", {out / "lora", rows().first, "-o", out / "x"}, "lora: an adapter, not a model");
    refused("qwen3", Strings{out / "lora", "--adapter", out / "lora"} + hash, "which model?");
    fs::rename(out / "m", out / "elsewhere");
    refused("qwen3", Strings{out / "lora"} + hash, "lora: an adapter of " + base + ", which is not here: name the model, and --adapter " + (out / "lora"));
    write_file(out / "lora/adapter_config.json", "{");
    refused("qwen3", Strings{out / "lora"} + hash, "adapter_config.json: line 1");
}

TEST_CASE("--full: a float16 model stays one, from its own numbers; unless one became too large for it") {
    Scratch out;
    const std::string model = "tests/fixtures/tied_f16";
    const Strings how = Strings{model, rows().first, "--full", "--steps", "1", "-o"};
    const Result r = trained(how + Strings{out / "same", "--lr", "0"} + ONE);
    CHECK(r.err.find(model + ": F16; computed in bfloat16, and model.bin is F16 again\n") != std::string::npos);
    trained(how + Strings{out / "moved", "--lr", "1e-2", "--warmup", "0"} + ONE);
    const ModelFile base(model), same(out / "same"), moved(out / "moved");
    int changed = 0;
    for (auto& tensor : base.tensors) {
        const std::string& name = tensor.first;
        const Tensor &t = tensor.second, &a = same.tensors.at(name), &b = moved.tensors.at(name);
        INFO(name);
        REQUIRE(a.dtype == Dtype::F16);
        REQUIRE(b.dtype == Dtype::F16);
        CHECK(std::string((const char*)a.data, a.bytes) == std::string((const char*)t.data, t.bytes)); // no rounding to bf16 on the way
        changed += memcmp(b.data, t.data, t.bytes) != 0;
    }
    CHECK(changed > 10);
    const char* words[] = {"train_lora", "m", "d", "-o", "o", "--full"};
    const TrainOptions o = parse_options((int)std::size(words), (char**)words);
    const Dataset data(rows().first);
    Trainer<bf16> t(o, Context(), base, data, nullptr);
    t.params.p[0] = 65520; // would be rounded to infinity
    t.write_result(out / "large", 0);
    for (auto& [name, tensor] : ModelFile(out / "large").tensors) CHECK(tensor.dtype == Dtype::BF16);
}

TEST_CASE("--alpha is twice the rank unless it is said; epochs are two unless steps are said") {
    auto parsed = [](Strings more) {
        more = Strings{"train_lora", "m", "d", "-o", "o"} + more;
        std::vector<char*> argv;
        for (auto& a : more) argv.push_back(a.data());
        return parse_options((int)argv.size(), argv.data());
    };
    CHECK(parsed({}).lora.rank == 32);
    CHECK(parsed({}).lora.alpha == 64);
    CHECK(parsed({"--rank", "8"}).lora.alpha == 16);
    CHECK(parsed({"--rank", "8", "--alpha", "5"}).lora.alpha == 5);
    CHECK(parsed({"--alpha", "5", "--rank", "8"}).lora.alpha == 5);
    const Dataset data(rows().first);
    const ModelFile file(TINY);
    CHECK(Trainer<bf16>(parsed({}), Context(), file, data, nullptr).steps == 4); // 32 rows, 16 a step
    CHECK(Trainer<bf16>(parsed({"--epochs", "0.6"}), Context(), file, data, nullptr).steps == 2);
    CHECK(Trainer<bf16>(parsed({"--steps", "3"}), Context(), file, data, nullptr).steps == 3);
    check_refusal(start(program("TRAIN_LORA", "./train_lora"), {TINY, rows().first, "-o", "o", "--steps", "3", "--epochs", "2"}).wait(), "train_lora",
                  "--steps 3 or --epochs 2: not both");
}

TEST_CASE("a step does not depend on how it is cut: 16 x 1, 4 x 4, 1 x 16, threads, recomputed; to the bit, with dropout") {
    std::string first;
    std::vector<double> losses;
    struct How { const char *batch, *accum, *threads; bool recompute; };
    for (const How& how : {How{"16", "1", "1", false}, {"1", "16", "1", false}, {"4", "4", "2", false}, {"16", "1", "2", true}}) {
        Scratch out;
        Strings arguments = {TINY, rows().first, "-o", out / "a", "--batch", how.batch, "--accum", how.accum, "-j", how.threads, "--steps", "5", "--lr", "1e-2",
                             "--rank", "4", "--alpha", "8", "-z", VOCABULARY, "--eval", rows().last, "--eval-every", "5"};
        if (how.recompute) arguments.push_back("--recompute");
        trained(arguments);
        const std::string result = result_of(out / "a");
        std::vector<double> log = logged(out / "a", "loss");
        log.push_back(logged(out / "a", "eval_loss")[0]);
        if (first.empty()) first = result, losses = log;
        CHECK(result == first);
        CHECK(log == losses);
    }
}

TEST_CASE("ranks rounded up in memory, as the GPU's are: the same losses to the bit, the same files, which either goes on from") {
    auto check = [](auto type, const char* rank) {
        using T = decltype(type);
        const ModelFile file(TINY);
        const Dataset data(rows().first);
        Scratch out;
        std::vector<double> losses[2], norms[2];
        for (int step : {1, 8}) {
            // (The norm's sum is cut into other pieces, so that its last bits are others; --clip 0 leaves it out.)
            const char* words[] = {"train_lora", "m", "d", "-o", "o", "--rank", rank, "--alpha", "7", "--batch", "8", "--steps", "4", "--lr", "1e-2", "--warmup", "0", "--clip", "0"};
            TrainOptions o = parse_options((int)std::size(words), (char**)words);
            o.rank_step = step;
            auto trainer = [&] { return std::make_unique<Trainer<T>>(o, Context(), file, data, nullptr); };
            std::unique_ptr<Trainer<T>> t = trainer();
            CHECK(t->params.rank == (step == 1 ? o.lora.rank : (o.lora.rank + 7) / 8 * 8));
            CHECK(t->params.trained() == adapter_parameters(file.config, o.lora));
            auto one = [&] {
                REQUIRE(t->train_step());
                losses[step > 1].push_back(t->last_loss), norms[step > 1].push_back(t->last_norm);
            };
            one(), one(), one();
            const std::string folder = out / std::to_string(step);
            t->write_result(folder, 0);
            t->write_state(folder + "/state.safetensors", 1, 2);
            // The fourth step from the other one's state.
            t = trainer();
            double best, elapsed;
            t->read_state(out / "1/state.safetensors", best, elapsed);
            one();
        }
        CHECK(losses[0] == losses[1]);
        CHECK(losses[0][3] != losses[0][2]);
        for (size_t i = 0; i < norms[0].size(); i++) CHECK(norms[0][i] == doctest::Approx(norms[1][i]).epsilon(1e-12));
        for (const char* name : {"adapter_config.json", "adapter_model.safetensors", "state.safetensors"})
            CHECK(read_file(out / "1/" + name) == read_file(out / "8/" + name));
        CHECK(AdapterFile(out / "8", file.config).config.rank == atoi(rank));
    };
    check(bf16{}, "4"), check(bf16{}, "19"), check(0.f, "5");
}

TEST_CASE("a whole model in bf16, all its parameters and an adapter: each gradient is as near to fp32's as PyTorch's, or nearer") {
    for (bool full : {false, true}) {
        const Tensor64 truth = whole_gradients<float>(Context(), full), ours = whole_gradients<bf16>(Context(), full);
        const auto error = distances(ours, truth, truth);
        CHECK(error.at("all") > 1e-4); // it is not fp32
        no_worse_than_pytorch(error, full);
    }
}

TEST_CASE("Ctrl-C saves and leaves; --resume goes on: as if nothing had been, to the bit") {
    Scratch out;
    const Strings how = Strings{TINY, rows().first, "--batch", "8", "--steps", "30", "--lr", "1e-2", "--rank", "4", "--alpha", "8", "--loraplus-ratio", "2",
                                "--neftune-alpha", "5", "--eval", rows().last, "--eval-every", "7"} + ONE;
    trained(how + Strings{"-o", out / "whole"});
    Strings arguments = how + Strings{"-o", out / "parts"};
    int stops = 0;
    for (size_t after : {6, 17}) {
        Process p = start(program("TRAIN_LORA", "./train_lora"), arguments);
        auto steps = [&] {
            const std::string log = read_file_if(out / "parts/trainer_log.jsonl");
            size_t n = 0;
            for (size_t at = 0; (at = log.find("\"loss\"", at)) != std::string::npos; at++) n++;
            return n;
        };
        wait_until(p, [&] { return steps() >= after; });
        kill(p.pid, SIGINT);
        const Result r = p.wait();
        INFO(r.err);
        CHECK(r.status == 130);
        CHECK(r.err.find("--resume goes on\n") == r.err.size() - 17);
        stops += logged(out / "parts", "loss").size() < 30;
        arguments = how + Strings{"-o", out / "parts", "--resume"};
    }
    CHECK(stops == 2); // it was really stopped on its way
    trained(arguments);
    CHECK(result_of(out / "parts") == result_of(out / "whole"));
    CHECK(read_file(out / "parts/best/adapter_model.safetensors") == read_file(out / "whole/best/adapter_model.safetensors"));
    for (const char* field : {"loss", "grad_norm", "lr", "eval_loss", "current_steps", "epoch"}) CHECK(logged(out / "parts", field) == logged(out / "whole", field));
    // A finished run stays finished.
    trained(arguments);
    CHECK(result_of(out / "parts") == result_of(out / "whole"));
    for (const Strings& other : {Strings{"--lr", "1e-3"}, {"--seed", "7"}, {"--batch", "4"}, {"--schedule", "linear"}, {"--loraplus-ratio", "3"}, {"--neftune-alpha", "4"}})
        check_refusal(start(program("TRAIN_LORA", "./train_lora"), arguments + other).wait(), "train_lora", format("begun with %s", other[0].c_str() + 2));
}

TEST_CASE("one run in a folder at a time; leftovers of a run that was killed are removed, those of the living are not") {
    Scratch s;
    const std::string out = s / "out";
    const Strings how = Strings{TINY, rows().first, "--batch", "8", "--steps", "100000", "--rank", "2", "--save-every", "1", "-o", out} + ONE;
    const char* program_name = program("TRAIN_LORA", "./train_lora");
    Process first = start(program_name, how);
    wait_until(first, [&] { return fs::exists(out + "/state.safetensors"); });
    for (const char* option : {"--resume", "--overwrite"}) {
        const Result second = start(program_name, how + Strings{option}).wait();
        CHECK(second.status == 1);
        CHECK(second.err.find(out + ": another train_lora is using it") != std::string::npos);
    }
    kill(first.pid, SIGKILL);
    first.wait();
    const std::string dead = std::to_string(first.pid), living = std::to_string(getpid());
    fs::create_directories(out + "/best");
    for (const char* name : {"/state.safetensors.tmp", "/adapter_model.safetensors.tmp", "/best/adapter_model.safetensors.tmp", "/loss.svg.tmp", "/mine.tmp"})
        write_file(out + name + dead, "half"), write_file(out + name + living, "half");
    write_file(out + "/state.safetensors.tmpx" + dead, "");
    Process again = start(program_name, how + Strings{"--resume"});
    wait_until(again, [&] { return !fs::exists(out + "/loss.svg.tmp" + dead); });
    const auto steps = [&] { return lines(whole(read_file(out + "/trainer_log.jsonl"))).size(); };
    const size_t before = steps();
    wait_until(again, [&] { return steps() > before + 1; });
    kill(again.pid, SIGINT);
    CHECK(again.wait().status == 130);
    std::set<std::string> left;
    for (auto& entry : fs::recursive_directory_iterator(out))
        if (const std::string name = entry.path().filename(); name.find(".tmp") != name.npos) left.insert(entry.path().string().substr(out.size()));
    const std::set<std::string> right = {"/state.safetensors.tmp" + living, "/adapter_model.safetensors.tmp" + living, "/best/adapter_model.safetensors.tmp" + living,
                                         "/loss.svg.tmp" + living, "/mine.tmp" + living, "/mine.tmp" + dead, "/state.safetensors.tmpx" + dead};
    CHECK(left == right);
}

TEST_CASE("--full: a model from nothing learns its rows; model.bin is one that qwen3 answers with") {
    Scratch out;
    write_file(out / "config.json", R"({"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 32, "intermediate_size": 96, "vocab_size": 1024, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000,
        "tie_word_embeddings": true, "dtype": "float32", "eos_token_id": [)" + std::to_string(Tokenizer(VOCABULARY).id("<|im_end|>")) + "]}");
    qwen3({"--synthesize", out / "config.json", out / "model.bin", "-s", "3"});
    const Strings how = Strings{out / "model.bin", rows().first, "--full", "--batch", "16", "--lr", "5e-3", "--steps", "150", "--weight-decay", "0"} + ONE;
    trained(how + Strings{"-o", out / "a"});
    CHECK(logged(out / "a", "loss")[0] == doctest::Approx(std::log(1024)).epsilon(0.02)); // it knows nothing
    CHECK(logged(out / "a", "loss").back() < 0.05);
    qwen3({out / "a/model.bin", "--eval", rows().first_jsonl, "-o", out / "answers.jsonl", "-z", VOCABULARY, "-n", "40"});
    const Strings got = lines(read_file(out / "answers.jsonl"));
    for (int i = 0; i < 32; i++) CHECK(Json(got[i])["answer"].str() == Json(rows().questions[i])["output"].str());
    // Stopped or not. (A tied embedding is summed from both ends of the model: cut differently it is equal but for rounding.)
    Strings few = Strings{out / "model.bin", rows().first, "--full", "--batch", "16", "--lr", "1e-3", "--steps", "6", "--save-every", "3"} + ONE;
    trained(few + Strings{"-o", out / "b"});
    Process p = start(program("TRAIN_LORA", "./train_lora"), few + Strings{"-o", out / "c"});
    wait_until(p, [&] { return read_file_if(out / "c/trainer_log.jsonl").find("\"current_steps\": 2,") != std::string::npos; });
    kill(p.pid, SIGINT);
    CHECK(p.wait().status == 130);
    trained(few + Strings{"-o", out / "c", "--resume"});
    CHECK(result_of(out / "b", "model.bin") == result_of(out / "c", "model.bin"));
    few = Strings{out / "model.bin", rows().first, "--full", "--batch", "2", "--accum", "8", "--lr", "1e-3", "--steps", "6", "-o", out / "d"} + ONE;
    trained(few);
    const std::vector<double> one = logged(out / "b", "loss"), other = logged(out / "d", "loss");
    for (size_t i = 0; i < 6; i++) CHECK(one[i] == doctest::Approx(other[i]).epsilon(1e-5));
}

TEST_CASE("the log has LLaMA-Factory's fields; schedules; the curve; rows in another order each epoch") {
    Scratch out;
    const Result r = trained(Strings{TINY, rows().first, "-o", out / "a", "--batch", "8", "--epochs", "2.5", "--warmup", "0.2", "--schedule", "linear", "--lr", "1e-3", "--rank", "2", "--alpha", "4"} + ONE);
    const Strings log = lines(read_file(out / "a/trainer_log.jsonl"));
    REQUIRE(log.size() == 10);
    for (size_t i = 0; i < 10; i++) {
        const Json j(log[i]);
        CHECK(j["current_steps"].number() == (double)i + 1);
        CHECK(j["total_steps"].number() == 10);
        CHECK(j["epoch"].number() == doctest::Approx((double)(i + 1) / 4));
        CHECK(j["percentage"].number() == doctest::Approx(10. * ((double)i + 1)));
        CHECK(j["elapsed_time"].str().find("0:00:0") == 0);
        CHECK(j["remaining_time"].is(sj::String));
        CHECK(j["lr"].number() == doctest::Approx(1e-3 * (i < 2 ? (double)i / 2 : (double)(10 - i) / 8)));
    }
    const std::string svg = read_file(out / "a/loss.svg");
    CHECK(svg.find("<svg xmlns") == 0);
    CHECK(svg.find("</svg>\n") == svg.size() - 7);
    // Progress, of the first step and the last.
    Strings told;
    for (auto& line : lines(r.err))
        if (line.find("step ") == 0) told.push_back(line);
    REQUIRE(told.size() >= 2);
    CHECK(told.front().find("step 1/10  loss ") == 0);
    CHECK(told.back().find("step 10/10  loss ") == 0);
    for (auto& line : told) {
        INFO(line);
        for (const char* part : {"  lr ", "  norm ", " tok/s  ", "GFLOP/s, ", " MB  ", " left"}) CHECK(line.find(part) != std::string::npos);
        char* end;
        const double share = strtod(line.c_str() + line.find("FLOP/s, ") + 8, &end);
        CHECK(std::string(end).find("% of the ceiling  ") == 0);
        CHECK((share > 0 && share <= 100));
    }
    // Epochs see the same rows (the sums of tokens are equal), in another order; --no-shuffle in the file's.
    const std::vector<double> tokens = logged(out / "a", "total_tokens");
    CHECK(tokens[7] == 2 * tokens[3]);
    CHECK(tokens[4] - tokens[3] != tokens[0]);
    trained(Strings{TINY, rows().first, "-o", out / "b", "--batch", "8", "--steps", "5", "--no-shuffle", "--rank", "2", "--alpha", "4"} + ONE);
    const std::vector<double> in_order = logged(out / "b", "total_tokens");
    CHECK(in_order[4] - in_order[3] == in_order[0]);
    // A run of one step has no warm-up, which would be all of it.
    trained(Strings{TINY, rows().first, "-o", out / "c", "--batch", "8", "--steps", "1", "--lr", "1e-3", "--rank", "2", "--alpha", "4"} + ONE);
    CHECK(logged(out / "c", "lr") == std::vector<double>{1e-3});
    for (double rate : logged(out / "b", "lr")) CHECK((rate == 0) == (rate == logged(out / "b", "lr")[0]));
}

TEST_CASE("bad input: one line each") {
    Scratch out;
    auto refused = [&](const Strings& arguments, const std::string& word) {
        const Result r = start(program("TRAIN_LORA", "./train_lora"), arguments + ONE).wait();
        check_refusal(r, "train_lora", word);
    };
    const Strings good = {TINY, rows().first, "-o", out / "a"};
    refused({}, "no model named");
    refused({TINY}, "no dataset named");
    refused({TINY, rows().first}, "-o DIR");
    refused({TINY, "-o", out / "a", "--adapter-init", FIXTURES + "adapter", "--merge", out / "m"}, "-o is for training");
    refused({TINY, rows().first, "-o", out / "a", "--merge", ""}, "--merge needs a value");
    refused({TINY, rows().first, "--output="}, "--output needs a value");
    refused({TINY, rows().first, "x", "-o", out / "a"}, "expected one model and one dataset");
    refused({TINY, "/nowhere.bin", "-o", out / "a"}, "/nowhere.bin: No such file");
    refused({TINY, TINY, "-o", out / "a"}, "not a dataset");
    refused(good + Strings{"--wings"}, "unknown option --wings");
    refused(good + Strings{"--targets", "q,head"}, "head is none of");
    refused(good + Strings{"--lr", "fast"}, "--lr: fast is not a number");
    refused(good + Strings{"--batch", "0"}, "--batch: 0 is not a whole number");
    refused(good + Strings{"--schedule", "step"}, "cosine, linear or constant");
    refused(good + Strings{"--full", "--rank", "4"}, "--full trains the model itself");
    refused(good + Strings{"--adapter-init", FIXTURES + "adapter", "--alpha", "4"}, "--adapter-init says it already");
    refused(good + Strings{"--resume"}, "no run to resume");
    fs::create_directory(out.path / "a");
    write_file(out / "a/trainer_log.jsonl", "{}\n"); // a run that was killed before its first checkpoint
    refused(good, "holds a run without a checkpoint; --overwrite replaces it");
    refused(good + Strings{"--resume"}, "no run to resume: it has no state.safetensors; --overwrite begins anew");
    fs::remove_all(out.path / "a");
    refused(good + Strings{"--eval-every", "3"}, "--eval FILE");
    refused(good + Strings{"--eval", rows().all}, "32 rows are in");
    refused(good + Strings{"--max-len", "5"}, "every row has more than 5 tokens");
    refused({TINY, "--adapter-init", FIXTURES + "adapter", "--merge", "/proc/x/y.bin"}, "/proc/x/y.bin");
    refused({TINY, rows().first, "-o", rows().first}, "first.bin");
    refused(good + Strings{"--batch", "65536", "--max-len", "2000"}, "more than 2^26 tokens at once");
    CHECK(!fs::exists(out / "a"));
    {
        DatasetWriter w(out / "other.bin", 1, 2);
        w.add({1, 2 | TRAIN});
        w.commit();
    }
    refused({TINY, out / "other.bin", "-o", out / "a"}, "made with another tokenizer; datagen pack -z " + VOCABULARY + " makes it again for this model");
    const Tokenizer tokenizer(VOCABULARY);
    {
        DatasetWriter w(out / "high.bin", tokenizer.hash(), template_hash());
        w.add({1, 5000 | TRAIN});
        w.commit();
    }
    refused({TINY, out / "high.bin", "-o", out / "a"}, "id 5000 is not in the tokenizer's");
    // A folder that holds a run is not trampled on, and replaced on demand.
    trained(good + Strings{"--steps", "1", "--rank", "2", "--alpha", "4"} + ONE);
    const std::string before = result_of(out / "a");
    refused(good, "holds a run: --resume continues it, --overwrite replaces it");
    CHECK(result_of(out / "a") == before);
    trained(good + Strings{"--steps", "1", "--rank", "3", "--overwrite"} + ONE);
    CHECK(result_of(out / "a") != before);
}

TEST_CASE("a full disk: one line, and what was whole stays whole") {
    Scratch out;
    const Strings how = Strings{TINY, rows().first, "-o", out / "a", "--steps", "4", "--save-every", "2", "--rank", "4", "--alpha", "8"} + ONE;
    for (rlim_t limit : {20000, 100000}) { // no adapter; an adapter, but no state
        const Result r = start(program("TRAIN_LORA", "./train_lora"), how + Strings{"--overwrite"}, limit).wait();
        INFO(limit << ": " << r.err);
        CHECK(r.status == 1);
        CHECK(lines(r.err).back().find("File too large") != std::string::npos);
        for (auto& entry : fs::recursive_directory_iterator(out.path)) CHECK(entry.path().string().find(".tmp") == std::string::npos);
        if (fs::exists(out / "a/adapter_model.safetensors")) AdapterFile(out / "a", ModelFile(TINY).config);
        CHECK(!fs::exists(out / "a/state.safetensors"));
        CHECK(fs::exists(out / "a/adapter_model.safetensors") == (limit == 100000));
    }
}

TEST_CASE("a loss that is not finite stops the run and names the rows") {
    Scratch out;
    const Tokenizer tokenizer(VOCABULARY);
    {
        DatasetWriter w(out / "d.bin", tokenizer.hash(), template_hash());
        for (uint32_t id : {10, 500, 30, 40, 500, 60}) w.add({7, id, 9 | TRAIN});
        w.commit();
    }
    // The embedding of id 500 becomes a NaN.
    fs::copy("tests/fixtures/untied_bf16", out / "m");
    const std::string path = out / "m/model.safetensors";
    std::string bytes = read_file(path);
    {
        const MappedFile map(path);
        Tensors tensors;
        std::map<std::string, std::string> metadata;
        read_safetensors(map, tensors, metadata);
        const Tensor& t = tensors.at("model.embed_tokens.weight");
        bytes[(size_t)(t.data - map.data) + 500 * (size_t)t.shape[1] * 2 + 1] = 0x7f;
        bytes[(size_t)(t.data - map.data) + 500 * (size_t)t.shape[1] * 2] = (char)0xff;
    }
    write_file(path, bytes);
    auto stopped = [&](const Strings& data, const std::string& word) {
        const Result r = start(program("TRAIN_LORA", "./train_lora"), Strings{out / "m"} + data + Strings{"-o", out / "a", "--batch", "6", "--no-shuffle", "--overwrite"} + ONE).wait();
        INFO(r.err);
        CHECK(r.status == 1);
        CHECK(lines(r.err).back().find(word) != std::string::npos);
    };
    stopped({out / "d.bin"}, "d.bin: step 1: loss nan, gradient norm nan; rows whose loss is not finite: 1, 4");
    {
        DatasetWriter w(out / "good.bin", tokenizer.hash(), template_hash());
        w.add({7, 8, 9 | TRAIN});
        w.commit();
    }
    stopped({out / "good.bin", "--eval", out / "d.bin"}, "d.bin: after step 1: loss nan; rows whose loss is not finite: 1, 4");
}

TEST_CASE("adapters of whatever class PEFT wraps, with modules named by their ends or by whole paths, are the same") {
    const Config c = ModelFile(TINY).config;
    const AdapterFile usual(FIXTURES + "adapter", c);
    const std::string config = read_file(FIXTURES + "adapter/adapter_config.json");
    Scratch s;
    auto write = [&](const std::string& prefix, const std::function<std::string(int layer, int m)>& target) {
        std::vector<OutTensor> all;
        for (auto& [name, t] : usual.tensors)
            all.push_back({prefix + name.substr(name.find("layers.")), "F32", t.shape, [t = t](OutputFile& out) { out.write(t.data, t.bytes); }});
        write_safetensors(s / "adapter_model.safetensors", {{"format", "pt"}}, all);
        sj::Writer w;
        w.array();
        for (int l = 0; l < c.L; l++)
            for (int m = 0; m < MODULES; m++)
                if (const std::string name = usual.config.targets[m] ? target(l, m) : ""; !name.empty()) w.value(name);
        std::string text = config;
        const size_t at = text.find('[', text.find("target_modules"));
        write_file(s / "adapter_config.json", text.replace(at, text.find(']', at) + 1 - at, w.end().text));
        return AdapterFile(s / "", c);
    };
    const std::function<std::string(int, int)> paths = [](int l, int m) { return format("model.layers.%d.%s", l, TENSOR_NAMES[m]); },
                                               ends = [](int, int m) { return module_name(m); },
                                               some = [](int l, int m) { return format("%d.%s", l, TENSOR_NAMES[m]); };
    for (const char* prefix : {"base_model.model.model.", "base_model.model.", "base_model.model.0.auto_model.", "model."})
        for (auto& target : {paths, ends, some}) {
            const AdapterFile other = write(prefix, target);
            REQUIRE(other.tensors.size() == usual.tensors.size());
            CHECK(std::equal(other.config.targets, other.config.targets + MODULES, usual.config.targets));
            for (auto& [name, t] : usual.tensors) CHECK(!memcmp(other.tensors.at(name).data, t.data, t.bytes));
        }
    const auto not_all = [&](int l, int m) { return l == 1 && m == Q_PROJ ? std::string() : paths(l, m); };
    CHECK_THROWS_WITH_AS(write("base_model.model.", not_all), (s / "" + "/adapter_config.json: target_modules names q_proj in 1 of 2 layers: all or none is supported").c_str(), Error);
    for (const char* name : {"model.layers.9.mlp.up_proj", "layers.0", "proj", "lm_head", "olayers.0.mlp.up_proj", ""})
        CHECK_THROWS_AS(write("base_model.model.", [&](int l, int m) { return l || m != Q_PROJ ? paths(l, m) : std::string(name); }), Error);
}

TEST_CASE("adapters are hostile files: what is not supported is refused by name") {
    const Config c = ModelFile(TINY).config;
    const std::string config = read_file(FIXTURES + "adapter/adapter_config.json"), numbers = read_file(FIXTURES + "adapter/adapter_model.safetensors");
    Scratch out;
    auto fault = [&](const std::string& text, const std::string& bytes) {
        write_file(out / "adapter_config.json", text), write_file(out / "adapter_model.safetensors", bytes);
        try {
            AdapterFile(out.path.string(), c);
        } catch (const Error& e) {
            CHECK(std::string(e.what()).find(out.path.string()) == 0);
            return std::string(e.what());
        }
        return std::string();
    };
    auto with = [&](const std::string& from, const std::string& to) {
        std::string s = config;
        const size_t at = s.find(from);
        INFO(from);
        REQUIRE(at != std::string::npos);
        return s.replace(at, from.size(), to);
    };
    CHECK(fault(config, numbers) == "");
    auto refused = [&](const std::string& text, const std::string& bytes, const std::string& word) {
        const std::string got = fault(text, bytes);
        INFO("wanted: " << word << ", got: " << got);
        CHECK(got.find(word) != std::string::npos);
    };
    for (auto& [from, to, word] : std::vector<std::array<std::string, 3>>{
             {"\"use_dora\": false", "\"use_dora\": true", "no tensor base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"},
             {"\"use_dora\": false", "\"use_dora\": 1", "use_dora is not true or false"},
             {"\"bias\": \"none\"", "\"bias\": \"all\"", "bias = \"all\" is not supported"},
             {"\"modules_to_save\": null", "\"modules_to_save\": [\"norm\"]", "modules_to_save has \"norm\": embed_tokens and lm_head are supported"},
             {"\"rank_pattern\": {}", "\"rank_pattern\": {\"q_proj\": 8}", "rank_pattern = {\"q_proj\": 8} is not supported"},
             {"\"alpha_pattern\": {}", "\"alpha_pattern\": {\"q_proj\": 8}", "alpha_pattern = {\"q_proj\": 8} is not supported"},
             {"\"fan_in_fan_out\": false", "\"fan_in_fan_out\": true", "fan_in_fan_out"},
             {"\"layers_to_transform\": null", "\"layers_to_transform\": [0]", "layers_to_transform"},
             {"\"lora_bias\": false", "\"lora_bias\": true", "lora_bias"},
             {"\"use_dora\": false", "\"use_next_years_idea\": true", "use_next_years_idea = true is not supported"},
             {"\"init_lora_weights\": true", "\"init_lora_weights\": \"pissa\"", "init_lora_weights = \"pissa\""},
             {"\"peft_type\": \"LORA\"", "\"peft_type\": \"IA3\"", "peft_type is \"IA3\""},
             {"\"q_proj\"", "\"embed_tokens\"", "target_modules has \"embed_tokens\""},
             {"\"q_proj\"", "7", "target_modules has 7"},
             {"\"r\": 4", "\"r\": 0", "r is not a whole number"},
             {"\"r\": 4", "\"r\": 4.5", "r is not a whole number"},
             {"\"r\": 4", "\"r\": 8", "is (4,"},
             {"\"lora_alpha\": 8", "\"lora_alpha\": \"8\"", "no lora_alpha"},
             {"\"lora_alpha\": 8", "\"lora_alpha\": 1e300", "lora_alpha is not between"},
             {"\"use_rslora\": false", "\"use_rslora\": 1", "use_rslora is not true or false"},
             {"{", "[", ""}})
        refused(with(from, to), numbers, word);
    refused("[]", numbers, "not a JSON object");
    auto renamed = [&](const std::string& from, const std::string& to) {
        std::string s = numbers;
        s.replace(s.find(from), from.size(), to);
        return s;
    };
    refused(config, renamed("layers.1.mlp.up_proj.lora_B", "layers.7.mlp.up_proj.lora_B"), "no tensor base_model.model.model.layers.1.mlp.up_proj.lora_B.weight");
    std::string fewer = config;
    const size_t q = fewer.find("\"q_proj\"");
    fewer.replace(q, 8, "\"k_proj\""); // named twice: q is missing now
    refused(fewer, numbers, "belongs to no module that the config names");
    refused(config, numbers.substr(0, numbers.size() - 8), "truncated");
    std::string nan = numbers;
    memset(&nan[nan.size() - 4], 0xff, 4);
    refused(config, nan, "has an infinity or a NaN");
    // The program itself: one line.
    check_refusal(start(program("QWEN3", "./qwen3"), {TINY, "-i", "x", "-z", VOCABULARY, "--adapter", "/nowhere"}).wait(), "qwen3", "--adapter /nowhere: No such file");
    check_refusal(start(program("QWEN3", "./qwen3"), {"tests/fixtures/tied_f32", "--ids", "1", "--adapter", FIXTURES + "adapter"}).wait(), "qwen3", "the config needs");
}

TEST_CASE("--resume: every option is known to change a run, or not to") {
    Scratch s;
    DatasetWriter writer(s / "rows.bin", 0, 0);
    writer.add({1, 2 | TRAIN});
    writer.commit();
    const Dataset data(s / "rows.bin");
    auto described = [&](const Strings& words) {
        Strings all = Strings{"train_lora", TINY, s / "rows.bin", "-o", s / "out"} + words;
        std::vector<char*> argv;
        for (auto& word : all) argv.push_back(word.data());
        const TrainOptions o = parse_options((int)argv.size(), argv.data());
        return describe_run(o, open_model(o), data, 10, o.dtype.c_str());
    };
    const Strings none, dpo = {"--dpo"}, simpo = {"--simpo"}, kto = {"--kto"}, grpo = {"--grpo", "--reward", "exact"}, teacher = {"--teacher", TINY},
                  rope = {"--rope-scaling", "yarn", "--rope-scale", "2"};
    const struct { Strings base, more; } changes[] = {
        {none, {"--full"}}, {none, {"--rank", "4"}}, {none, {"--alpha", "5"}}, {none, {"--rslora"}}, {none, {"--dora"}}, {none, {"--targets", "q"}}, {none, {"--dropout", "0.3"}},
        {none, {"--loraplus-ratio", "2"}}, {none, {"--neftune-alpha", "5"}}, {dpo, {"--adapter-init", FIXTURES + "adapter"}}, {none, dpo}, {none, {"--ipo"}}, {none, simpo},
        {none, {"--orpo"}}, {none, kto}, {none, {"--reward-model"}}, {dpo, {"--beta", "0.2"}}, {dpo, {"--label-smoothing", "0.1"}}, {simpo, {"--gamma", "1"}},
        {kto, {"--desirable-weight", "2"}}, {kto, {"--undesirable-weight", "2"}}, {none, grpo}, {grpo, {"--reward", "choice"}}, {grpo, {"--group", "4"}},
        {grpo, {"--max-tokens", "20"}}, {grpo, {"--temp", "0.5"}}, {grpo, {"--top-p", "0.5"}}, {grpo, {"--iterations", "2"}}, {grpo, {"--loss-type", "grpo"}},
        {grpo, {"--scale-rewards", "none"}}, {grpo, {"--epsilon", "0.1"}}, {grpo, {"--epsilon-high", "0.5"}}, {grpo, {"--kl-beta", "0.1"}}, {grpo, {"--mask-truncated"}},
        {none, teacher}, {teacher, {"--distil-beta", "0.5"}}, {teacher, {"--distil-temp", "2"}}, {teacher, {"--distil-weight", "0.5"}}, {teacher, {"--on-policy", "0.5"}},
        {none, {"--batch", "4"}}, {none, {"--accum", "2"}}, {none, {"--max-len", "300"}}, {none, {"--lr", "0.1"}}, {none, {"--schedule", "linear"}}, {none, {"--warmup", "0.2"}},
        {none, {"--weight-decay", "0.2"}}, {none, {"--clip", "2"}}, {none, {"--no-shuffle"}}, {none, {"--seed", "7"}}, {none, {"--dtype", "f32"}}, {none, rope},
        {none, {"--modules-to-save", "embed_tokens"}}, {{"--full"}, {"--moments", "8"}},
        {rope, {"--rope-scale", "3"}}, {rope, {"--yarn-orig-ctx", "64"}}};
    // Those of the number of steps, which is an argument; of ranks, which may change; of the machine; of other outputs. (A tokenizer is bound to the rows.)
    std::set<std::string> known = {"--epochs", "--steps", "--gpus", "--no-overlap", "--device", "--threads", "--packed", "--recompute", "--recipe", "--output", "--reward-timeout",
        "--eval", "--eval-every", "--allow-leak", "--save-every", "--ask", "--watch", "--tensorboard", "--resume", "--overwrite", "--merge", "--merge-as", "--starter",
        "--tokenizer", "--help"};
    for (auto& [base, more] : changes) {
        const std::string what = more[0];
        INFO(what);
        CHECK(described(base) == described(base));
        CHECK(described(base) != described(base + more));
        known.insert(more[0]);
    }
    for (auto& name : options_of(program("TRAIN_LORA", "./train_lora"))) {
        INFO(name << ": does it change a run? If so, describe_run needs it");
        CHECK(known.count(name) == 1);
    }
}
