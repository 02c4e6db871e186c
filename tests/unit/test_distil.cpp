// Distillation: its loss as an op, the trainer's part by itself, and `train_lora --teacher` from outside (TRAIN_LORA, QWEN3
// and DATAGEN, else the programs here). TRL's numbers are fixtures, made by tests/reference/make_distil.py.
#include <doctest/doctest.h>
#include "model/quantize.h"
#include "model/write.h"
#include "tests/common.h"
#include "tests/files.h"
#include "tests/process.h"
#include "tests/trainer.h"
#include <thread>

static const std::string TINY = "tests/fixtures/tiny/model.bin", VOCABULARY = "tests/fixtures/tiny/tokenizer.bin", FIXTURES = "tests/fixtures/distil/";


// 32 rows, 8 rows, and a teacher: `tiny`, trained on the former.
struct Lesson {
    Scratch folder;
    std::string first, last, teacher;
    Lesson() {
        const std::string text = read_file("tests/fixtures/train/rows.jsonl");
        size_t cut = 0;
        for (int i = 0; i < 32; i++) cut = text.find('\n', cut) + 1;
        auto pack = [&](const std::string& name, const std::string& rows) {
            write_file(folder / (name + ".jsonl"), rows);
            must(program("DATAGEN", "./datagen"), {"pack", "-z", VOCABULARY, folder / (name + ".jsonl"), folder / (name + ".bin"), "--info", "none"});
            return folder / (name + ".bin");
        };
        first = pack("first", text.substr(0, cut)), last = pack("last", text.substr(cut));
        train({TINY, first, "--full", "--steps", "24", "--batch", "8", "--lr", "2e-3", "-o", folder / "teacher"});
        teacher = folder / "teacher/model.bin";
    }
};
static const Lesson& lesson() {
    static Lesson once;
    return once;
}

// ------------------------------------------------------------------------------------------------ the loss

static Distillation how_of(sj::Value one) {
    return {(float)one["beta"].number(), (float)one["temperature"].number(), (float)one["weight"].number()};
}
static std::vector<double> numbers_of(sj::Value list) {
    std::vector<double> all;
    for (sj::Value x : list.items()) all.push_back(x.number());
    return all;
}
// The loss, divergence and gradient of rows of logits.
template <class T> struct DistilledRows {
    std::vector<acc<T>> loss, divergence, agrees, logits;
    DistilledRows(const std::vector<double>& student, const std::vector<double>& teacher, const std::vector<int>& target, const Distillation& how, double scale)
        : logits(student.begin(), student.end()) {
        const int R = (int)target.size(), V = (int)student.size() / R;
        const std::vector<acc<T>> t(teacher.begin(), teacher.end());
        for (auto* list : {&loss, &divergence, &agrees}) list->resize(R);
        const Distilled<acc<T>> out = {loss.data(), divergence.data(), agrees.data()};
        const DistillationRows<acc<T>> of = {t.data(), target.data(), how, (acc<T>)scale, R, V};
        CALL(distillation, out, (T*)logits.data(), logits.data(), of);
    }
};

TEST_CASE("distillation: TRL's divergences and autograd's gradients, in double and within 1e-6 in float") {
    EACH_WAY;
    const Json golden(read_file(FIXTURES + "ops.json"));
    const std::vector<double> student = numbers_of(golden["student"]), teacher = numbers_of(golden["teacher"]);
    std::vector<int> target;
    for (double x : numbers_of(golden["target"])) target.push_back((int)x);
    const double scale = golden["scale"].number();
    for (const sj::Value one : golden["cases"].items()) {
        const Distillation how = how_of(one);
        INFO("beta " << how.beta << ", temperature " << how.temperature << ", weight " << how.weight);
        const DistilledRows<double> exact(student, teacher, target, how, scale);
        // (beta, temperature and weight are floats.)
        CHECK(wrong(exact.loss, numbers_of(one["loss"]), [](size_t) { return 1e-6; }) == 0);
        CHECK(wrong(exact.divergence, numbers_of(one["divergence"]), [](size_t) { return 1e-6; }) == 0);
        CHECK(wrong(exact.logits, numbers_of(one["gradient"]), [](size_t) { return 1e-7; }) == 0);
        const DistilledRows<float> single(student, teacher, target, how, scale);
        CHECK(wrong(single.loss, numbers_of(one["loss"]), [](size_t) { return 1e-5; }) == 0);
        CHECK(wrong(single.logits, numbers_of(one["gradient"]), [](size_t) { return 1e-6; }) == 0);
    }
}

TEST_CASE("distillation: finite differences; a bf16 gradient in the first halves of rows; equal rows; large logits; a NaN is not lost") {
    EACH_WAY;
    Random random{5};
    for (const Distillation& how : {Distillation{0, 1, 1}, {1, 0.5f, 0.75f}, {0.25f, 2, 0.5f}}) {
        const int R = 2, V = 21;
        const std::vector<double> student = random.fill<double>(R * V, 4), teacher = random.fill<double>(R * V, 4);
        const std::vector<int> target = {20, 3};
        const DistilledRows<double> got(student, teacher, target, how, 0.5);
        for (int i = 0; i < R * V; i++) {
            double of[2];
            for (int side : {0, 1}) {
                std::vector<double> moved = student;
                moved[(size_t)i] += side ? 1e-5 : -1e-5;
                of[side] = DistilledRows<double>(moved, teacher, target, how, 0.5).loss[(size_t)i / V];
            }
            CHECK(got.logits[(size_t)i] == doctest::Approx(0.5 * (of[1] - of[0]) / 2e-5).epsilon(1e-6).scale(1));
        }
        const DistilledRows<float> wide(student, teacher, target, how, 0.5);
        const DistilledRows<bf16> narrow(student, teacher, target, how, 0.5);
        CHECK(same_bits(wide.loss, narrow.loss));
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) {
                bf16 g;
                memcpy(&g, (const uint8_t*)(narrow.logits.data() + r * V) + 2 * v, 2);
                CHECK(g.bits == to_bf16(wide.logits[(size_t)(r * V + v)]).bits);
            }
        std::vector<double> far = student;
        for (double& x : far) x *= 200;
        const DistilledRows<float> certain(far, teacher, target, how, 1), alike(far, far, target, {how.beta, how.temperature, 1}, 1);
        for (int r = 0; r < R; r++) {
            CHECK(std::isfinite(certain.loss[(size_t)r]));
            CHECK(alike.divergence[(size_t)r] == doctest::Approx(0));
            CHECK(alike.agrees[(size_t)r] == 1);
        }
        for (float g : alike.logits) CHECK(g == doctest::Approx(0));
        far[V + 4] = NAN;
        const DistilledRows<float> lost(far, teacher, target, how, 1);
        CHECK(std::isfinite(lost.loss[0]));
        CHECK(std::isnan(lost.loss[1]));
    }
}

// ------------------------------------------------------------------------------------------------ the trainer

TEST_CASE("a batch beside TRL's GKDTrainer: losses and gradients, on rows and as the student's own answers") {
    const Json golden(read_file(FIXTURES + "batch.json"));
    const MappedFile map(FIXTURES + "gradients.safetensors");
    Tensors theirs;
    Metadata metadata;
    read_safetensors(map, theirs, metadata);
    Scratch scratch;
    std::vector<std::vector<uint32_t>> rows;
    for (size_t i = 0; i < golden["prompts"].size(); i++) {
        rows.emplace_back();
        for (double id : numbers_of(golden["prompts"][i])) rows[i].push_back((uint32_t)id);
        for (double id : numbers_of(golden["answers"][i])) rows[i].push_back((uint32_t)id | TRAIN);
    }
    DatasetWriter writer(scratch / "rows.bin", 0, 0);
    for (auto& row : rows) writer.add(row);
    writer.commit();
    const Dataset data(scratch / "rows.bin");
    const ModelFile file("tests/fixtures/train/tied");
    size_t number = 0;
    for (const sj::Value one : golden["cases"].items()) {
        const std::string prefix = std::to_string(number++) + ".";
        for (int batch : {4, 3}) {
            TrainOptions o;
            o.full = true, o.teacher = "tests/fixtures/train/untied", o.batch = batch, o.accum = 4 / batch;
            (Distillation&)o.distil = how_of(one);
            INFO("case " << prefix << " batch " << batch);
            Trainer<float> t(o, Context(), file, data, nullptr);
            CHECK(t.memory.find("the teacher ") != std::string::npos);
            const size_t all = data.trained();
            t.add_gradients(t.loader.rows, all);
            CHECK(t.results[0] / (double)all == doctest::Approx(one["loss"].number()).epsilon(1e-5));
            CHECK(same_gradients(t, theirs, prefix, 1e-6, 2e-5) == 4);
            if (batch == 4) CHECK(t.mean_loss(data, t.loader.rows) == doctest::Approx(one["loss"].number()).epsilon(1e-5));
            if (one["weight"].number() != 1) continue;
            t.groups.rows = rows;
            t.params.clear_gradient();
            t.add_own_answers(all);
            CHECK(t.results[0] / (double)all == doctest::Approx(one["loss"].number()).epsilon(1e-5));
            CHECK(same_gradients(t, theirs, prefix, 1e-6, 2e-5) == 4);
            CHECK(t.divergence >= 0);
        }
    }
}

// ------------------------------------------------------------------------------------------------ runs

static const Strings HOW = {"--rank", "4", "--alpha", "8", "--lr", "5e-3", "--warmup", "0", "--dropout", "0"};

TEST_CASE("the divergence falls, agreement rises; batches cut otherwise and --recompute: the same bits; every option changes something") {
    Scratch out;
    const Strings how = Strings{TINY, lesson().first, "--teacher", lesson().teacher, "--steps", "12"} + HOW;
    const Result r = train(how + Strings{"--batch", "8", "-o", out / "a", "--eval", lesson().last, "--eval-every", "6"});
    CHECK(r.err.find("model.bin: the teacher, ") != std::string::npos);
    CHECK(r.err.find("agreement") != std::string::npos);
    const std::vector<double> divergence = logged(out / "a", "divergence"), agreement = logged(out / "a", "agreement"), share = logged(out / "a", "teacher_share");
    REQUIRE(divergence.size() == 12);
    CHECK(logged(out / "a", "loss") == divergence); // weight 1
    CHECK(divergence[11] < 0.7 * divergence[0]);
    CHECK(agreement[11] > agreement[0]);
    CHECK(logged(out / "a", "eval_agreement").size() == 2);
    CHECK(logged(out / "a", "eval_divergence")[1] == doctest::Approx(logged(out / "a", "eval_loss")[1]));
    for (double x : share) CHECK((x > 0 && x < 1));
    const std::string result = adapter(out / "a");
    for (const Strings& other : {Strings{"--batch", "2", "--accum", "4"}, {"--batch", "8", "--recompute"}, {"--batch", "8", "-j", "2"}}) {
        train(how + other + Strings{"-o", out / "b", "--overwrite"});
        CHECK(adapter(out / "b") == result);
    }
    const Strings brief = Strings{TINY, lesson().first, "--teacher", lesson().teacher, "--steps", "2", "--batch", "4", "-o", out / "b", "--overwrite"} + HOW;
    train(brief);
    std::set<std::string> all = {adapter(out / "b")};
    for (const Strings& other : std::vector<Strings>{{"--distil-beta", "1"}, {"--distil-beta", "0.5"}, {"--distil-temp", "2"}, {"--distil-weight", "0.5"}, {"--on-policy", "1", "-n", "8"},
                                                     {"--on-policy", "1", "-n", "9"}, {"--on-policy", "1", "-n", "8", "-t", "0.5"}, {"--on-policy", "1", "-n", "8", "-p", "0.5"}}) {
        INFO(other[0] << " " << other.back());
        train(brief + other);
        CHECK(all.insert(adapter(out / "b")).second);
    }
    CHECK(logged(out / "b", "completions/mean_length").size() == 2);
    // All weight on the cross entropy: ordinary training.
    train(brief + Strings{"--distil-weight", "0"});
    const std::vector<double> mixed = logged(out / "b", "loss");
    train(Strings{TINY, lesson().first, "--steps", "2", "--batch", "4", "-o", out / "b", "--overwrite"} + HOW);
    const std::vector<double> plain = logged(out / "b", "loss");
    for (int i : {0, 1}) CHECK(mixed[(size_t)i] == doctest::Approx(plain[(size_t)i]).epsilon(1e-4));
}

TEST_CASE("a teacher in every format; a model that is its own teacher has nothing to learn; --full") {
    Scratch out;
    const char* qwen3 = program("QWEN3", "./qwen3");
    const ModelFile from(TINY);
    for (auto [name, format] : {std::pair("int4.bin", Format::INT4), {"int8.bin", Format::INT8}, {"fp8.bin", Format::FP8}}) {
        Quantization how;
        how.format = format, how.group = 64;
        write_safetensors(out / name, model_metadata(quantized_config(from, how), from.generation_text), quantize_model<bf16>(from, how, {}));
    }
    must(qwen3, {out / "int8.bin", "-z", VOCABULARY, "--convert", out / "teacher.gguf"});
    const Strings how = Strings{TINY, lesson().first, "--steps", "2", "--batch", "4", "-o", out / "o", "--overwrite"} + HOW;
    for (const std::string name : {"int4.bin", "int8.bin", "fp8.bin", "teacher.gguf"}) {
        INFO(name);
        must(qwen3, {out / name, "-z", VOCABULARY, "--convert", out / name + ".whole.bin"});
        double divergence[2]; // as it is stored; the same numbers in bf16
        for (int k : {0, 1}) {
            train(how + Strings{"--teacher", k ? out / name + ".whole.bin" : out / name});
            divergence[k] = logged(out / "o", "divergence")[0];
        }
        CHECK(divergence[0] > 1e-6); // its numbers are rounded
        CHECK(divergence[0] == doctest::Approx(divergence[1]).epsilon(0.05));
    }
    train(how + Strings{"--teacher", TINY});
    CHECK(std::fabs(logged(out / "o", "divergence")[0]) < 1e-6);
    CHECK(logged(out / "o", "agreement")[0] == 1);
    CHECK(logged(out / "o", "grad_norm")[0] < 1e-3);
    train({TINY, lesson().first, "--teacher", lesson().teacher, "--full", "--lr", "1e-3", "--steps", "8", "--batch", "8", "--warmup", "0", "-o", out / "full"});
    const std::vector<double> divergence = logged(out / "full", "divergence");
    CHECK(divergence[7] < 0.7 * divergence[0]);
}

TEST_CASE("Ctrl-C and --resume with steps on own answers: to the bit as if nothing had been; two ranks have one's curve") {
    Scratch out;
    const Strings how = Strings{TINY, lesson().first, "--teacher", lesson().teacher, "--on-policy", "0.5", "-n", "8", "--steps", "10", "--batch", "4", "--distil-beta", "1", "--dropout", "0.1"} + HOW;
    train(how + Strings{"-o", out / "w"});
    const size_t own = logged(out / "w", "completions/mean_length").size();
    CHECK((own > 1 && own < 9)); // of 10 steps
    Process p = start_training(how + Strings{"-o", out / "parts"});
    interrupt_at_step(4, p, out / "parts");
    CHECK(logged(out / "parts", "loss").size() < 10);
    check_refusal(start_training(how + Strings{"--distil-temp", "2", "-o", out / "parts", "--resume"}).wait(), "train_lora", "begun with distil-temp 1.0, not 2.0");
    check_refusal(start_training(how + Strings{"--teacher", TINY, "-o", out / "parts", "--resume"}).wait(), "train_lora", "begun with teacher ");
    train(how + Strings{"-o", out / "parts", "--resume"});
    CHECK(adapter(out / "parts") == adapter(out / "w"));
    for (const char* field : {"loss", "divergence", "agreement", "grad_norm", "completions/mean_length"}) CHECK(logged(out / "parts", field) == logged(out / "w", field));
    const Strings ranked = Strings{TINY, lesson().first, "--teacher", lesson().teacher, "--on-policy", "0.5", "-n", "8", "--steps", "4", "-d", "cpu"} + HOW;
    train(ranked + Strings{"--batch", "4", "-o", out / "one"});
    train(ranked + Strings{"--batch", "2", "--gpus", "2", "-o", out / "two"});
    for (const char* field : {"loss", "divergence", "agreement", "grad_norm"}) {
        INFO(field);
        const std::vector<double> one = logged(out / "one", field), two = logged(out / "two", field);
        REQUIRE(two.size() == 4);
        CHECK(two[0] == doctest::Approx(one[0]).epsilon(1e-4));
        CHECK(two[1] == doctest::Approx(one[1]).epsilon(1e-2));
    }
}

TEST_CASE("teachers that do not fit, options that do not belong together: one line, and nothing is written") {
    Scratch out;
    auto refused = [&](const Strings& arguments, const std::string& word) {
        check_refusal(start_training(Strings{TINY, lesson().first} + arguments + Strings{"-o", out / "o"}).wait(), "train_lora", word);
        CHECK(!fs::exists(out / "o"));
    };
    refused({"--teacher", "tests/fixtures/train/untied"}, "tests/fixtures/train/untied: its vocabulary is not that of " + TINY + ": --teacher needs the same");
    fs::create_directory(out / "odd");
    fs::copy(TINY, out / "odd/model.bin"), fs::copy("tests/fixtures/odd/tokenizer.json", out / "odd/tokenizer.json");
    refused({"--teacher", out / "odd"}, "odd: its vocabulary is not that of " + TINY + ": --teacher needs the same");
    fs::create_directory(out / "other"); // the same rows, and a tokenizer.bin that gives other ids
    fs::copy(TINY, out / "other/model.bin");
    std::string vocabulary = read_file(VOCABULARY);
    fs::copy(VOCABULARY, out / "other/tokenizer.bin");
    CHECK(same_ids(VOCABULARY, ModelFile(TINY), ModelFile(out / "other/model.bin")));
    const size_t word = vocabulary.find("<|fim_pad|>");
    REQUIRE(word != std::string::npos);
    vocabulary[word + 6] = 'q', write_file(out / "other/tokenizer.bin", vocabulary);
    refused({"--teacher", out / "other"}, "other: its vocabulary is not that of " + TINY + ": --teacher needs the same");
    refused({"--teacher", "tests/fixtures/train/adapter"}, "adapter: an adapter, not a model (train_lora MODEL --adapter-init ");
    CHECK_THROWS_AS(Teacher<float>("tests/fixtures/train/untied", Context(), ModelFile(TINY)), Error);
    refused({"--teacher", out / "none"}, "none");
    refused({"--distil-beta", "0.5"}, "--distil-beta is for --teacher");
    refused({"--on-policy", "0.5"}, "--on-policy is for --teacher");
    refused({"-n", "5"}, "-n is for --grpo and --on-policy");
    refused({"--teacher", TINY, "-t", "0.5"}, "-t is for --grpo and --on-policy");
    refused({"--teacher", TINY, "--distil-beta", "1.5"}, "--distil-beta");
    refused({"--teacher", TINY, "--distil-temp", "0"}, "--distil-temp");
    refused({"--teacher", TINY, "--dpo"}, "--teacher or --dpo: not both");
    refused({"--teacher", TINY, "--grpo", "--reward", "exact"}, "--teacher or --grpo: not both");
    refused({"--teacher", TINY, "--on-policy", "1", "-n", "512"}, "--max-tokens 512 leaves no room");
}
