// Reward models: `train_lora --reward-model` from outside and its Trainer by itself, and --grpo with such a reward (TRAIN_LORA,
// QWEN3 and DATAGEN, else the programs here). TRL's numbers are fixtures, made by tests/reference/make_reward.py.
#include <doctest/doctest.h>
#include "tests/files.h"
#include "tests/process.h"
#include "tests/trainer.h"
#include <thread>

static const std::string TINY = "tests/fixtures/tiny/model.bin", VOCABULARY = "tests/fixtures/tiny/tokenizer.bin", FIXTURES = "tests/fixtures/reward/";

static Process start(const char* name, const Strings& arguments) {
    return Process(name, arguments, "", [] { setenv("OMP_WAIT_POLICY", "passive", 1); });
}
static std::string pack(const Scratch& scratch, const std::string& name, const std::string& rows) {
    write_file(scratch / (name + ".jsonl"), rows);
    const Result r = start(program("DATAGEN", "./datagen"), {"pack", "-z", VOCABULARY, scratch / (name + ".jsonl"), scratch / (name + ".bin"), "--info", "none"}).wait();
    INFO(r.err);
    REQUIRE(r.status == 0);
    return scratch / (name + ".bin");
}
// Pairs whose chosen answers are short, questions, and a reward model of the pairs.
struct Lesson {
    Scratch folder;
    std::string all, pairs, rows, model;
    Lesson() {
        const std::string text = read_file("tests/fixtures/dpo/pairs.jsonl");
        std::string brief;
        for (auto& line : lines(text)) {
            const Json pair(line);
            sj::Writer w;
            const std::string answer(pair["chosen"].str());
            w.object().field("instruction", pair["instruction"].str()).field("chosen", answer.substr(0, answer.size() / 4) + "!").field("rejected", answer + " " + answer);
            brief += w.end().text + "\n";
        }
        all = pack(folder, "all", text), pairs = pack(folder, "brief", brief), rows = pack(folder, "rows", read_file("tests/fixtures/train/rows.jsonl"));
        model = folder / "model";
        train({TINY, pairs, "--reward-model", "--rank", "4", "--lr", "5e-3", "--warmup", "0", "--steps", "12", "--batch", "8", "-o", model, "--eval", pairs, "--allow-leak"});
    }
};
static const Lesson& lesson() {
    static Lesson once;
    return once;
}
static std::string adapter(const std::string& out) { return read_file(out + "/adapter_model.safetensors"); }

TEST_CASE("a batch beside TRL's RewardTrainer: scores, loss and gradients, however the batch is cut") {
    const Json golden(read_file(FIXTURES + "batch.json"));
    const MappedFile map(FIXTURES + "gradients.safetensors");
    Tensors theirs;
    Metadata metadata;
    read_safetensors(map, theirs, metadata);
    const ModelFile file(TINY);
    const Dataset data(lesson().all);
    for (int batch : {6, 4}) {
        TrainOptions o;
        o.preference = &REWARD_MODEL, o.adapter_init = "tests/fixtures/train/adapter_bf16", o.dropout = 0, o.batch = batch, o.max_len = 512;
        o.lora = AdapterFile(o.adapter_init, file.config).config;
        REQUIRE(o.scores());
        Trainer<float> t(o, Context(), file, data, nullptr);
        for (int i = 0; i < t.c.C; i++) t.params.p[t.params.score + (size_t)i] = (float)number(theirs.at("score"), (size_t)i);
        const std::vector<size_t> list = {0, 1, 2, 3, 4, 5};
        t.add_gradients(list, 6);
        CHECK(t.results[0] / 6 == doctest::Approx(golden["loss"].number()).epsilon(1e-5));
        t.preferences.divide();
        for (int k : {0, 1}) {
            double mean = 0;
            for (sj::Value x : golden[k ? "rejected" : "chosen"].items()) mean += x.number() / 6;
            CHECK(t.preferences.value[k] == doctest::Approx(mean).epsilon(1e-5));
        }
        CHECK(t.preferences.value[Preferences::ACCURACY] == doctest::Approx(golden["accuracy"].number()));
        CHECK(t.preferences.value[Preferences::MARGIN] == doctest::Approx(golden["margin"].number()).epsilon(1e-5));
        int compared = 0;
        auto same = [&](const std::string& name, size_t rows, size_t columns, size_t at, size_t stride) {
            const auto want = theirs.find(name);
            if (want == theirs.end()) return;
            double off = 0, size = 0;
            for (size_t i = 0; i < rows * columns; i++) {
                const double x = number(want->second, i), y = t.params.gradient[at + i / columns * stride + i % columns];
                off += (x - y) * (x - y), size += x * x;
            }
            INFO(name);
            CHECK(size > 1e-6);
            CHECK(std::sqrt(off / size) < 2e-5);
            compared++;
        };
        each_adapter_tensor(t.w, same);
        same(SCORE_TENSOR, 1, (size_t)t.c.C, t.params.score, 0);
        CHECK(compared == 7);
    }
}

TEST_CASE("pairs are told apart; PEFT's files; batches, threads and Ctrl-C change no bit; two ranks have one's curve") {
    const std::vector<double> loss = logged(lesson().model, "loss"), accuracy = logged(lesson().model, "rewards/accuracies"), eval = logged(lesson().model, "eval_rewards/accuracies");
    REQUIRE(loss.size() == 12);
    CHECK(loss[0] == doctest::Approx(std::log(2)).epsilon(1e-6)); // the head begins with zeros
    CHECK(loss[11] < 0.3);
    CHECK(accuracy[11] == 1);
    CHECK(eval.back() > 0.9);
    CHECK(logged(lesson().model, "logps/chosen").empty());
    const Json config(read_file(lesson().model + "/adapter_config.json"));
    CHECK(config["task_type"].str() == "SEQ_CLS");
    CHECK(sj::dump(config["modules_to_save"]) == R"(["classifier", "score"])");
    const ModelFile file(TINY);
    CHECK(AdapterFile(lesson().model, file.config, false, true).tensors.at(SCORE_TENSOR).shape == Shape{1, file.config.C});
    Scratch out;
    const Strings how = {TINY, lesson().pairs, "--reward-model", "--rank", "4", "--lr", "5e-3", "--warmup", "0", "--steps", "6", "--dropout", "0.1"};
    train(how + Strings{"--batch", "8", "-o", out / "a"});
    for (const Strings& other : {Strings{"--batch", "2", "--accum", "4"}, {"--batch", "8", "--recompute"}, {"--batch", "8", "-j", "2"}}) {
        train(how + other + Strings{"-o", out / "b", "--overwrite"});
        CHECK(adapter(out / "b") == adapter(out / "a"));
    }
    Process p = start_training(how + Strings{"--batch", "8", "-o", out / "c"});
    for (int ms = 0; read_file_if(out / "c" + "/trainer_log.jsonl").find("\"current_steps\": 2,") == std::string::npos; ms++) {
        REQUIRE(ms < 60000);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    kill(p.pid, SIGINT);
    CHECK(p.wait().status == 130);
    train(how + Strings{"--batch", "8", "-o", out / "c", "--resume"});
    CHECK(adapter(out / "c") == adapter(out / "a"));
    train(how + Strings{"--batch", "4", "--gpus", "2", "-d", "cpu", "-o", out / "two"});
    const std::vector<double> one = logged(out / "a", "loss"), two = logged(out / "two", "loss");
    REQUIRE(two.size() == 6);
    for (size_t i : {0, 1, 2}) CHECK(two[i] == doctest::Approx(one[i]).epsilon(1e-2));
}

TEST_CASE("--grpo with a reward model: rewards are its scores, and rise; what is no reward model is refused") {
    Scratch out;
    const ModelFile file(TINY);
    const Dataset data(lesson().rows);
    TrainOptions o;
    o.grpo = true, o.tokenizer = VOCABULARY, o.batch = 2, o.rl.group = 3, o.rl.max_tokens = 12, o.rl.rewards = {"0.5*" + lesson().model}, o.lora.rank = 4, o.lora.alpha = 8;
    std::fill(o.lora.targets, o.lora.targets + MODULES, true);
    Trainer<float> t(o, Context(), file, data, nullptr);
    const Groups g = t.draw_groups(data, {0, 1, 5}, 3, false);
    REQUIRE(g.reward.size() == 9);
    // The same rows, each by itself, by the trainer of reward models.
    Scratch scratch;
    DatasetWriter writer(scratch / "rows.bin", 0, 0);
    for (size_t i = 0; i < 9; i++) writer.add_pair(g.rows[i], g.rows[i / 3 * 3 + (i + 1) % 3]);
    writer.commit();
    const Dataset pairs(scratch / "rows.bin");
    TrainOptions scoring;
    scoring.preference = &REWARD_MODEL, scoring.batch = 1, scoring.lora = AdapterFile(lesson().model, file.config, false, true).config;
    Trainer<float> judge(scoring, Context(), file, pairs, nullptr);
    std::vector<float> numbers = adapter_numbers(judge.w, AdapterFile(lesson().model, file.config, false, true));
    numbers.resize(judge.params.count, 0);
    for (int i = 0; i < file.config.C; i++)
        numbers[judge.params.score + (size_t)i] = (float)number(AdapterFile(lesson().model, file.config, false, true).tensors.at(SCORE_TENSOR), (size_t)i);
    judge.params.keep(judge.params.p, numbers), judge.params.give_copies(judge.params.stored, numbers);
    for (size_t i = 0; i < 9; i++) {
        judge.mean_loss(pairs, {i});
        CHECK(g.reward[i] == doctest::Approx(0.5 * judge.preferences.value[0]).epsilon(1e-4));
    }
    const Strings how = {TINY, lesson().rows, "--grpo", "--reward", lesson().model, "-n", "12", "--group", "4", "--rank", "4", "--lr", "1e-2", "--warmup", "0", "--batch", "4"};
    train(how + Strings{"--steps", "10", "-o", out / "o"});
    const std::vector<double> reward = logged(out / "o", "reward");
    REQUIRE(reward.size() == 10);
    CHECK(reward[7] + reward[8] + reward[9] > reward[0] + reward[1] + reward[2]);
    auto refused = [&](const Strings& arguments, const std::string& word) {
        check_refusal(start_training(Strings{TINY} + arguments + Strings{"-o", out / "x"}).wait(), "train_lora", word);
        CHECK(!fs::exists(out / "x"));
    };
    refused({lesson().rows, "--grpo", "--reward", out / "o"}, "task_type is not \"SEQ_CLS\"");
    refused({lesson().rows, "--reward-model"}, "--reward-model trains on pairs, and these rows have no chosen and rejected answers");
    refused({lesson().pairs, "--reward-model", "--full"}, "--reward-model trains an adapter and a head: not with --full");
    refused({lesson().pairs, "--reward-model", "--beta", "0.2"}, "--beta is not for --reward-model");
    refused({lesson().pairs, "--reward-model", "--merge", out / "m.bin"}, "--reward-model: its result scores answers");
    refused({lesson().pairs, "--reward-model", "--dpo"}, "not both");
    check_refusal(start(program("QWEN3", "./qwen3"), {TINY, "-z", VOCABULARY, "--adapter", lesson().model, "-i", "x"}).wait(), "qwen3", "a reward model, which scores answers");
}
