// Rewards (rewards.h), the loss of GRPO and the engine that draws answers (grpo.h), and `train_lora --grpo` from outside
// (TRAIN_LORA and DATAGEN, else the programs here). TRL's numbers are fixtures, made by tests/reference/make_grpo.py.
#include <doctest/doctest.h>
#include "tests/trainer.h"
#include "tests/files.h"
#include "tests/process.h"
#include "model/session.h"
#include <thread>

static const std::string TINY = "tests/fixtures/tiny/model.bin", VOCABULARY = "tests/fixtures/tiny/tokenizer.bin", FIXTURES = "tests/fixtures/grpo/";

static Process start(const Strings& arguments) {
    return Process(program("TRAIN_LORA", "./train_lora"), arguments + Strings{"-z", VOCABULARY, "-j", "1"}, "", [] { setenv("OMP_WAIT_POLICY", "passive", 1); });
}
static std::string pack(const std::string& to, const std::string& rows) {
    write_file(to + ".jsonl", rows);
    const Result r = Process(program("DATAGEN", "./datagen"), {"pack", "-z", VOCABULARY, to + ".jsonl", to + ".bin", "--info", "none"}).wait();
    INFO(r.err);
    REQUIRE(r.status == 0);
    return to + ".bin";
}
// 40 questions, 32 and 8 of them.
struct QuestionFiles {
    Scratch folder;
    std::string first, last;
    QuestionFiles() {
        const std::string text = read_file("tests/fixtures/train/rows.jsonl");
        size_t cut = 0;
        for (int i = 0; i < 32; i++) cut = text.find('\n', cut) + 1;
        first = pack(folder / "first", text.substr(0, cut)), last = pack(folder / "last", text.substr(cut));
    }
};
static const QuestionFiles& questions() {
    static QuestionFiles once;
    return once;
}
static std::string script(const Scratch& scratch, const char* name, const std::string& text) {
    write_file(scratch / name, "#!/bin/sh\n" + text + "\n");
    fs::permissions(scratch / name, fs::perms::owner_all);
    return scratch / name;
}

// ---------------------------------------------------------------------------------------------- rewards

static double worth(const std::string& spec, const std::string& text, const std::string& reference = "", const std::string& prompt = "", size_t tokens = 0) {
    const Reward r = make_reward(spec, 5);
    const double x = r.of({{prompt, text, reference, tokens, true}})[0];
    CHECK(r.of({{prompt, text, reference, tokens, true}, {prompt, text, reference, tokens, true}}) == std::vector<double>{x, x});
    return x;
}

TEST_CASE("rewards: each of them, what it leaves out, and its weight") {
    CHECK(worth("exact", " 12\n", "12") == 1);
    CHECK(worth("exact", "<think>\nhm\n</think>\n\n12", "12") == 1);
    CHECK(worth("exact", "12.", "12") == 0);
    CHECK(worth("exact", "", "12") == 0);
    const std::string choices = "Which?\nA. one\nB. two\nC. three\nonly the letter";
    CHECK(worth("choice", "B", "B. two", choices) == 1);
    CHECK(worth("choice", "The answer is B.", "B", choices) == 1);
    CHECK(worth("choice", "C", "B. two", choices) == 0);
    CHECK(worth("choice", "D", "B. two", choices) == 0);
    CHECK(worth("choice", "two", "B. two", choices) == 0);
    CHECK(count_choices(choices) == 3);
    CHECK(count_choices("A. x\nC. y") == 1);
    CHECK(count_choices("A、一\nB：二\nC) z") == 3);
    CHECK(count_choices("A\nB\n") == 0);
    CHECK(worth("rouge-l", "一个 warp 有 32 个线程", "一个 warp 有 32 个线程") == doctest::Approx(1).epsilon(1e-6));
    CHECK(worth("rouge-l", "", "warp") == 0);
    const double half = worth("rouge-l", "the warp has threads", "the warp has 32 lanes");
    CHECK((half > 0.3 && half < 0.9));
    CHECK(worth("regex:^[^。]*。$", "一句话。") == 1); // characters, not bytes
    CHECK(worth("regex:^[^。]*。$", "一句话。两句话。") == 0);
    CHECK(worth("regex:^.$", "话") == 1);
    CHECK(worth("regex:a/b", "xa/by") == 1);
    CHECK(worth("regex:b$", std::string("a\0b", 3)) == 1);
    CHECK(worth("regex:(a|b)+:", "ab:") == 1);
    CHECK(worth("length:10", "", "", "", 10) == 0);
    CHECK(worth("length:10", "", "", "", 15) == -0.5);
    CHECK(worth("length:10", "", "", "", 40) == -1);
    CHECK(make_reward("0.25*regex:a*b", 5).weight == 0.25);
    CHECK(make_reward("0.25*regex:a*b", 5).name == "regex:a*b");
    CHECK(make_reward("regex:a*b", 5).weight == 1);
    CHECK(make_reward("-1*exact", 5).weight == -1);
    for (const char* bad : {"exactly", "", "length:", "length:0", "length:x", "regex:", "regex:(", "length", "x*exact", "exact:1", "./no/such/program"}) {
        INFO(bad);
        CHECK_THROWS_AS(make_reward(bad, 5), Error);
    }
    // A row that is not a question with choices is named before a run.
    const Reward choice = make_reward("choice", 5);
    CHECK_THROWS_AS(choice.check({"no choices", "", "B", 0, true}), Error);
    CHECK_THROWS_AS(choice.check({choices, "", "none of them", 0, true}), Error);
    choice.check({choices, "", "B", 0, true});
}

TEST_CASE("a program's rewards: JSON in, numbers out; one that hangs, dies or talks nonsense is one line, and nothing of it lives on") {
    Scratch scratch;
    const std::vector<Answered> answers = {{"p\n", "a \"x\"", "r", 3, true}, {"q", "b", "s", 4, false}};
    auto ask = [&](const std::string& text, double limit = 5) { return make_reward(script(scratch, "r", text), limit).of(answers); };
    auto fault = [&](const std::string& text, const std::string& word, double limit = 5) {
        try {
            ask(text, limit);
            FAIL("no fault: " << text);
        } catch (const Error& e) {
            INFO(e.what());
            CHECK(std::string(e.what()).find(word) != std::string::npos);
            CHECK(std::string(e.what()).find('\n') == std::string::npos);
        }
    };
    CHECK(ask("cat > " + (scratch / "asked") + "; echo 0.5; echo -2e-1") == std::vector<double>{0.5, -0.2});
    const Strings asked = lines(read_file(scratch / "asked"));
    REQUIRE(asked.size() == 2);
    CHECK(asked[0] == R"({"prompt": "p\n", "answer": "a \"x\"", "reference": "r", "tokens": 3, "finish": "stop"})");
    CHECK(Json(asked[1])["finish"].str() == "length");
    CHECK(ask("echo ' 1 '; printf 2") == std::vector<double>{1, 2}); // without reading; without a last line feed
    fault("echo 1; echo one", "line 2 is no number: one");
    fault("echo 1; echo nan", "line 2 is no number");
    fault("echo 1; printf '\\033[31m\\377'", "line 2 is no number");
    fault("echo 1; echo; echo 2", "line 2 is no number");
    fault("echo 1", "1 number for 2 answers");
    fault("seq 3", "3 numbers for 2 answers");
    fault("true", "0 numbers for 2 answers");
    fault("seq 2; exit 3", "exit status 3");
    fault("seq 2; kill -9 $$", "ended by signal 9");
    fault("yes 1", "wrote more than 64 MiB");
    const double begun = seconds();
    fault("sleep 100 & echo $! > " + (scratch / "child") + "; wait", "no end within 0.2 s", 0.2);
    fault("exec >&-; sleep 100", "no end within 0.2 s", 0.2);
    CHECK(seconds() - begun < 5);
    const pid_t child = (pid_t)atoi(read_file(scratch / "child").c_str());
    REQUIRE(child > 1);
    for (int ms = 0; kill(child, 0) == 0 && ms < 5000; ms++) { // (a zombie until its new parent has reaped it)
        const std::string state = read_file_if(format("/proc/%d/stat", child));
        if (state.find(") Z") != std::string::npos) break;
        usleep(1000);
    }
    CHECK((kill(child, 0) != 0 || read_file_if(format("/proc/%d/stat", child)).find(") Z") != std::string::npos));
    write_file(scratch / "plain", "echo 1");
    CHECK_THROWS_AS(make_reward(scratch / "plain", 5), Error); // not executable
}

// ------------------------------------------------------------------------------------------------ the loss

TEST_CASE("a token's loss: its slope, where it is clipped, the divergence; advantages of a group") {
    GrpoOptions o;
    o.epsilon = 0.2, o.epsilon_high = 0.3;
    for (double beta : {0., 0.5})
        for (double A : {-1.5, 0., 2.})
            for (double d : {-1., -0.3, -0.1, 0., 0.1, 0.25, 0.4, 1.}) { // p - old
                o.kl_beta = beta;
                const double p = -1.2, h = 1e-6, ref = -0.9;
                const TokenLoss t = token_loss(p, p - d, ref, A, o);
                const double ratio = std::exp(d), want = -std::min(ratio * A, std::clamp(ratio, 0.8, 1.3) * A);
                CHECK(t.kl == doctest::Approx(std::exp(ref - p) - (ref - p) - 1));
                CHECK(t.loss == doctest::Approx(want + beta * t.kl));
                const double slope = (token_loss(p + h, p - d, ref, A, o).loss - token_loss(p - h, p - d, ref, A, o).loss) / (2 * h);
                CHECK(t.slope == doctest::Approx(slope).epsilon(1e-6));
                CHECK(t.low == (A < 0 && ratio < 0.8));
                CHECK(t.high == (A > 0 && ratio > 1.3));
            }
    const double rewards[] = {1, 0, 0, 0.25, 0.1, 0.1, 0.1, 7};
    const Advantages a = advantages(rewards, 4, true), plain = advantages(rewards, 4, false);
    CHECK(a.deviation == doctest::Approx(0.473242));
    CHECK(a.of[0] == doctest::Approx(0.6875 / (0.473242 + 1e-4)).epsilon(1e-5));
    CHECK(plain.of == std::vector<double>{0.6875, -0.3125, -0.3125, -0.0625});
    CHECK(advantages(rewards + 4, 3, true).of == std::vector<double>{0, 0, 0}); // 0.1 three times: exactly zero
    CHECK(advantages(rewards + 4, 3, true).deviation == 0);
    CHECK(advantages(rewards + 7, 1, true).of == std::vector<double>{0});
}

TEST_CASE("a batch beside TRL: losses, advantages, what is told, and gradients, for every loss, with the divergence and without") {
    const Json golden(read_file(FIXTURES + "batch.json"));
    const MappedFile map(FIXTURES + "gradients.safetensors");
    Tensors theirs;
    Metadata metadata;
    read_safetensors(map, theirs, metadata);
    const size_t group = (size_t)golden["group"].number();
    auto ids = [](sj::Value list, uint32_t bit) {
        std::vector<uint32_t> words;
        for (sj::Value id : list.items()) words.push_back((uint32_t)id.number() | bit);
        return words;
    };
    Scratch scratch;
    DatasetWriter writer(scratch / "prompts.bin", 0, 0);
    for (sj::Value prompt : golden["prompts"].items()) {
        std::vector<uint32_t> row = ids(prompt, 0);
        row.push_back(1 | TRAIN), writer.add(row);
    }
    writer.commit();
    const Dataset data(scratch / "prompts.bin");
    const ModelFile file("tests/fixtures/train/tied");
    for (const auto& one : golden["cases"].members())
        for (int batch : {2, 1}) {
            const std::string& name = one.key;
            const sj::Value want = one.value; // (a structured binding is nothing that a lambda can take)
            INFO(name << ", " << batch << " groups a batch");
            TrainOptions o;
            o.full = o.grpo = true, o.tokenizer = VOCABULARY;
            o.batch = batch, o.accum = 2 / batch, o.rl.group = (int)group, o.rl.max_tokens = (int)golden["max_tokens"].number();
            o.rl.epsilon = golden["epsilon"].number(), o.rl.epsilon_high = golden["epsilon_high"].number();
            o.rl.loss = want["loss_type"].str(), o.rl.kl_beta = want["beta"].number(), o.rl.scale = want["scale"].str();
            o.rl.mask_truncated = want["mask"].boolean();
            Trainer<float> t(o, Context(), file, data, nullptr);
            Groups& g = t.groups;
            g.size = group;
            auto floats = [](sj::Value list) {
                std::vector<float> all;
                for (sj::Value x : list.items()) all.push_back((float)x.number());
                return all;
            };
            for (size_t i = 0; i < 2 * group; i++) {
                g.rows.push_back(ids(golden["prompts"][i / group], 0));
                const std::vector<uint32_t> answer = ids(golden["answers"][i], TRAIN);
                g.rows[i].insert(g.rows[i].end(), answer.begin(), answer.end());
                g.ended.push_back(t.is_end((int)(answer.back() & ~TRAIN)));
                g.reward.push_back(golden["rewards"][i].number());
                g.old.push_back(floats(want["old"][i]));
                if (o.rl.kl_beta > 0) g.reference.push_back(floats(want["reference"][i]));
            }
            for (size_t i = 0; i < 2 * group; i += group)
                for (double a : advantages(&g.reward[i], group, o.rl.scale == "group").of) g.advantage.push_back(a);
            for (size_t i = 0; i < 2 * group; i++) CHECK(g.advantage[i] == doctest::Approx(want["advantages"][i].number()).epsilon(1e-5));
            // Written into a state and read again, they are the same.
            const std::string text = g.json();
            t.groups = Groups("state", text, group, 96);
            CHECK(t.groups.json() == text);
            t.rewarded = Rewarded(t.groups);
            t.add_gradients({}, 1);
            t.rewarded.divide();
            CHECK(t.results[0] == doctest::Approx(want["loss"].number()).epsilon(1e-5));
            for (int i = 0; i < Rewarded::N; i++)
                if (const sj::Value x = want[Rewarded::NAMES[i]]) {
                    INFO(Rewarded::NAMES[i]);
                    CHECK(t.rewarded.value[i] == doctest::Approx(x.number()).epsilon(1e-5));
                }
            CHECK(same_gradients(t, theirs, name + ".", 1e-6, 2e-5) == (name == "dapo_kl" ? 24 : 3));
        }
    for (const char* bad : {"", "{}", "[1]", R"({"rows": [[1, 2147483650]], "ended": [true], "reward": [1], "advantage": [0], "old": [[]]})",
                            R"({"rows": [[1, 2147483750]], "ended": [true], "reward": [1], "advantage": [0], "old": [[1]]})"})
        CHECK_THROWS_AS(Groups("state", bad, 1, 96), Error);
}

// ------------------------------------------------------------------------------------------------ answers

template <class T> static void check_answers(const TrainOptions& o, const ModelFile& file, const Dataset& data) {
    Trainer<T> t(o, Context(), file, data, nullptr);
    const std::vector<size_t> list = {0, 1, 5};
    const Groups g = t.draw_groups(data, list, 3, false);
    REQUIRE(g.rows.size() == 9);
    Session<T> session(t.c, t.w, t.loader.longest + 1);
    std::set<std::vector<uint32_t>> different;
    for (size_t s = 0; s < 9; s++) {
        INFO("answer " << s);
        const std::vector<int> prompt = prompt_of(data.row(list[s / 3]));
        const Philox bits = philox(o.seed, s, STREAM_ROLLOUT);
        Generation how;
        how.sampling.temperature = 1, how.sampling.top_k = 0, how.sampling.top_p = (float)o.rl.top_p, how.sampling.seed = (uint64_t)bits.v[1] << 32 | bits.v[0];
        how.max_tokens = (size_t)o.rl.max_tokens;
        session.rewind(0), session.feed(prompt);
        generate(session, t.tokenizer.get(), how, [](std::string_view) {});
        const bool ended = how.finish == std::string("stop");
        CHECK(g.ended[s] == ended);
        std::vector<int> got;
        for (uint32_t word : g.rows[s]) got.push_back((int)(word & ~TRAIN));
        REQUIRE(std::equal(prompt.begin(), prompt.end(), got.begin()));
        got.erase(got.begin(), got.begin() + (ptrdiff_t)prompt.size());
        CHECK(g.length(s) == got.size());
        if (ended) {
            CHECK(t.is_end(got.back()));
            got.pop_back();
        }
        CHECK(got == how.ids);
        different.insert(g.rows[s]);
    }
    CHECK(different.size() > 6);
}

TEST_CASE("answers drawn side by side on shared pages are those of a session by itself") {
    const ModelFile file(TINY);
    const Dataset data(questions().first);
    TrainOptions o;
    o.grpo = true, o.tokenizer = VOCABULARY, o.batch = 4, o.rl.group = 3, o.rl.max_tokens = 30, o.rl.rewards = {"length:4"}, o.rl.top_p = 0.9;
    o.lora.rank = 4, o.lora.alpha = 8, o.adapter_init = "tests/fixtures/train/adapter_bf16";
    o.lora = AdapterFile(o.adapter_init, file.config).config;
    check_answers<bf16>(o, file, data);
    check_answers<float>(o, file, data);
    o.batch = 1; // the prompts in turn
    check_answers<bf16>(o, file, data);
}

TEST_CASE("--temp: what is drawn and trained is the model with its logits divided") {
    const ModelFile file(TINY);
    const Dataset data(questions().first);
    TrainOptions o;
    o.grpo = true, o.tokenizer = VOCABULARY, o.batch = 2, o.rl.group = 2, o.rl.max_tokens = 6, o.rl.rewards = {"length:4"};
    std::fill(o.lora.targets, o.lora.targets + MODULES, true);
    o.lora.rank = 4, o.lora.alpha = 8, o.rl.temperature = 0.7;
    Trainer<float> t(o, Context(), file, data, nullptr);
    t.take_groups({3, 4});
    t.add_gradients({}, 1);
    const Weights<float> plain(file);
    Session<float> session(t.c, plain, t.loader.longest + 1);
    for (size_t s = 0; s < 4; s++) {
        std::vector<int> all;
        for (uint32_t word : t.groups.rows[s]) all.push_back((int)(word & ~TRAIN));
        const size_t first = all.size() - t.groups.length(s);
        session.rewind(0);
        std::vector<std::vector<double>> logits;
        session.feed(all, nullptr, [&](const float* row) { logits.emplace_back(row, row + t.c.V); });
        for (size_t k = 0; k < t.groups.length(s); k++) {
            std::vector<double>& row = logits[first + k - 1];
            double sum = 0;
            for (double& x : row) x /= 0.7;
            const double top = *std::max_element(row.begin(), row.end());
            for (double x : row) sum += std::exp(x - top);
            CHECK(t.groups.old[s][k] == doctest::Approx(row[all[first + k]] - top - std::log(sum)).epsilon(1e-4));
        }
    }
}

// ------------------------------------------------------------------------------------------------ training

static const Strings HOW = {"--grpo", "-n", "8", "--group", "4", "--rank", "4", "--alpha", "8", "--lr", "1e-2", "--warmup", "0"};
static const std::string REWARD = "-1*regex:[a-z][^a-z]*[a-z]"; // no two small letters

TEST_CASE("the reward rises; batches cut otherwise, --recompute and other threads: the same bits; every option changes something") {
    Scratch out;
    const Strings how = Strings{TINY, questions().first, "--reward", REWARD, "--steps", "12"} + HOW;
    const Result r = train(how + Strings{"--batch", "4", "-o", out / "a", "--eval", questions().last, "--eval-every", "6"});
    CHECK(r.err.find("32 prompts, 4 answers to each, of at most 8 tokens; 12 steps of 4 prompts") != std::string::npos);
    const std::vector<double> reward = logged(out / "a", "reward"), eval = logged(out / "a", "eval_reward");
    REQUIRE(reward.size() == 12);
    REQUIRE(eval.size() == 3); // before the first step, too
    MESSAGE("reward " << reward.front() << " -> " << reward.back() << ", evaluation " << eval.front() << " -> " << eval.back());
    CHECK(reward[0] + reward[1] + reward[2] + 1 < reward[9] + reward[10] + reward[11]);
    for (const char* field : {"reward_std", "frac_reward_zero_std", "completions/mean_length", "completions/clipped_ratio", "clip_ratio/region_mean", "rollout_throughput",
                              "rollout_share", "train_throughput", "grad_norm"})
        CHECK(logged(out / "a", field).size() == 12);
    CHECK(logged(out / "a", "kl").empty());
    CHECK(fs::exists(out / "a/reward.svg"));
    CHECK(fs::exists(out / "a/best/adapter_model.safetensors"));
    CHECK(Json(read_file(out / "a/adapter_config.json"))["lora_dropout"].number() == 0);
    const std::string result = adapter(out / "a");
    for (const Strings& other : {Strings{"--batch", "1", "--accum", "4"}, {"--batch", "4", "--recompute"}, {"--batch", "4", "-j", "2"}}) {
        train(how + other + Strings{"-o", out / "b", "--overwrite"});
        CHECK(adapter(out / "b") == result);
        CHECK(logged(out / "b", "reward") == reward);
    }
    const Strings brief = Strings{TINY, questions().first, "--reward", REWARD, "--steps", "3", "--batch", "4", "-o", out / "b", "--overwrite"} + HOW;
    train(brief);
    std::set<std::string> all = {adapter(out / "b")};
    for (const Strings& other : std::vector<Strings>{{"--loss-type", "grpo"}, {"--loss-type", "dr_grpo"}, {"--scale-rewards", "none"}, {"--kl-beta", "1"}, {"--iterations", "2"}, {"--temp", "0.5"},
                                                     {"--top-p", "0.5"}, {"--mask-truncated"}, {"--group", "5"}, {"-s", "1"}, {"--reward", "length:2"}, {"--reward", "0.5*length:2"}}) {
        INFO(other[0] << " " << other.back());
        train(brief + other);
        CHECK(all.insert(adapter(out / "b")).second);
    }
    CHECK(logged(out / "b", "rewards/0.5*length:2/mean").size() == 3);
    train(brief + Strings{"--kl-beta", "1"});
    const std::vector<double> kl = logged(out / "b", "kl");
    CHECK(kl[0] == 0); // the reference is what the run begins with
    CHECK(kl[2] > 0);
    train({TINY, questions().first, "--grpo", "--reward", REWARD, "--steps", "3", "--batch", "4", "-n", "8", "--group", "4", "--warmup", "0", "--full", "--kl-beta", "0.1", "--lr", "1e-3", "-o", out / "b",
           "--overwrite"});
    CHECK(logged(out / "b", "kl")[0] == 0);
    CHECK(logged(out / "b", "kl")[2] > 0);
    // Rewards that are all alike teach nothing.
    train(brief + Strings{"--reward", REWARD.substr(3)});
    for (double norm : logged(out / "b", "grad_norm")) CHECK(norm == 0);
    CHECK(logged(out / "b", "frac_reward_zero_std") == std::vector<double>{1, 1, 1});
}

TEST_CASE("Ctrl-C and --resume, also between steps on the same answers: to the bit as if nothing had been") {
    Scratch out;
    const Strings how = Strings{TINY, questions().first, "--reward", REWARD, "--steps", "9", "--batch", "2", "--accum", "2", "--iterations", "3", "--kl-beta", "0.1", "--epsilon", "0.05",
                                "--eval", questions().last, "--eval-every", "4"} + HOW;
    train(how + Strings{"-o", out / "w"});
    for (const char* at : {"4", "6"}) { // in the middle of a rollout's steps, at their end
        const std::string parts = out / at;
        Process p = start(how + Strings{"-o", parts});
        for (int ms = 0; read_file_if(parts + "/trainer_log.jsonl").find(format("\"current_steps\": %s,", at)) == std::string::npos; ms++) {
            REQUIRE(ms < 60000);
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        kill(p.pid, SIGINT);
        CHECK(p.wait().status == 130);
        CHECK(logged(parts, "loss").size() < 9);
        check_refusal(start(how + Strings{"--kl-beta", "0.2", "-o", parts, "--resume"}).wait(), "train_lora", "begun with kl-beta 0.1, not 0.2");
        train(how + Strings{"-o", parts, "--resume"});
        CHECK(adapter(parts) == adapter(out / "w"));
        for (const char* field : {"loss", "grad_norm", "reward", "kl", "clip_ratio/region_mean", "eval_reward"}) CHECK(logged(parts, field) == logged(out / "w", field));
    }
    double clipped = 0;
    for (double x : logged(out / "w", "clip_ratio/region_mean")) clipped += x;
    CHECK(clipped > 0);
}

TEST_CASE("a reward program that dies in the middle of a run: one line, and --resume goes on as if it had not") {
    Scratch out;
    const std::string good = "sed -E 's/.*\"tokens\": ([0-9]+).*/-\\1/'";
    const Strings how = Strings{TINY, questions().first, "--steps", "5", "--batch", "2", "--reward"} + Strings{script(out, "reward", good)} + HOW;
    train(how + Strings{"-o", out / "w"});
    CHECK(logged(out / "w", "reward")[0] == -logged(out / "w", "completions/mean_length")[0]);
    script(out, "reward", "n=$(cat " + (out / "n") + " 2>/dev/null || echo 0); echo $((n + 1)) > " + (out / "n") + "; [ $n -lt 3 ] || exit 7; " + good);
    const Result r = start(how + Strings{"-o", out / "p"}).wait();
    CHECK(r.status == 1);
    CHECK(r.err.find("reward: exit status 7; step 3 is saved, --resume goes on\n") != std::string::npos);
    script(out, "reward", good);
    train(how + Strings{"-o", out / "p", "--resume"});
    CHECK(adapter(out / "p") == adapter(out / "w"));
    // In the first step, and in an evaluation.
    script(out, "reward", "echo none");
    CHECK(start(how + Strings{"-o", out / "q"}).wait().err.find("line 1 is no number: none; step 0 is saved") != std::string::npos);
    CHECK(start(how + Strings{"-o", out / "e", "--eval", questions().last}).wait().status == 1);
    script(out, "reward", "sleep 60");
    CHECK(start(how + Strings{"-o", out / "q", "--resume", "--reward-timeout", "0.3"}).wait().err.find("no end within 0.3 s (--reward-timeout)") != std::string::npos);
    script(out, "reward", good);
    train(how + Strings{"-o", out / "q", "--resume"});
    CHECK(adapter(out / "q") == adapter(out / "w"));
}

TEST_CASE("two ranks draw what one draws, and have its curve") {
    Scratch out;
    for (const Strings& kind : {Strings{"--kl-beta", "0.1"}, {"--full", "--lr", "1e-3", "--dtype", "f32"}}) {
        Strings how = Strings{TINY, questions().first, "--reward", REWARD, "--steps", "4", "-d", "cpu", "--grpo", "-n", "12", "--group", "4", "--warmup", "0"} + kind;
        train(how + Strings{"--batch", "4", "-o", out / "one", "--overwrite"});
        train(how + Strings{"--batch", "2", "--gpus", "2", "-o", out / "two", "--overwrite"});
        for (const char* field : {"reward", "reward_std", "completions/mean_length", "grad_norm"}) {
            INFO(field);
            const std::vector<double> one = logged(out / "one", field), two = logged(out / "two", field);
            REQUIRE(two.size() == 4);
            CHECK(two[0] == doctest::Approx(one[0]).epsilon(1e-4));
            CHECK(two[1] == doctest::Approx(one[1]).epsilon(1e-2));
        }
    }
}

TEST_CASE("what --grpo cannot train: one line, and nothing is written") {
    Scratch out;
    const std::string pairs = pack(out / "pairs", R"({"instruction": "Q", "chosen": "x", "rejected": "y"})" "\n");
    auto refused = [&](const Strings& arguments, const char* word) {
        check_refusal(start(Strings{TINY} + arguments + Strings{"-o", out / "o"}).wait(), "train_lora", word);
        CHECK(!fs::exists(out / "o"));
    };
    const std::string& rows = questions().first;
    refused({rows, "--grpo"}, "--grpo: --reward NAME says what an answer is worth");
    refused({rows, "--reward", "exact"}, "--reward is for --grpo");
    refused({rows, "--group", "4"}, "--group is for --grpo");
    refused({rows, "--grpo", "--dpo", "--reward", "exact"}, "--dpo or --grpo: not both");
    refused({rows, "--grpo", "--reward", "exactly"}, "--reward exactly: none of exact, choice");
    refused({rows, "--grpo", "--reward", "regex:["}, "--reward regex:[: ");
    refused({rows, "--grpo", "--reward", out / "none"}, "none: No such file");
    refused({rows, "--grpo", "--reward", "tests/fixtures/train/adapter"}, "tests/fixtures/train/adapter: an adapter of tiny, which is not here");
    fs::create_directory(out / "judge");
    write_file(out / "judge/adapter_config.json", "{\"base_model_name_or_path\": \"tests/fixtures/train/untied\"}");
    refused({rows, "--grpo", "--reward", out / "judge"}, "judge: its vocabulary is not that of ");
    refused({rows, "--grpo", "--reward", out.path.string()}, ": neither a program nor the folder of a --reward-model");
    refused({rows, "--grpo", "--reward", "choice"}, "first.bin: row 0: --reward choice: no choices");
    refused({rows, "--grpo", "--reward", "exact", "--group", "1"}, "--group: 1 is not a whole number from 2");
    refused({rows, "--grpo", "--reward", "exact", "--loss-type", "ppo"}, "--loss-type ppo: grpo, dr_grpo or dapo");
    refused({rows, "--grpo", "--reward", "exact", "-n", "512"}, "--max-tokens 512 leaves no room");
    refused({rows, "--grpo", "--reward", "exact", "-n", "500"}, "every prompt has more than 512 tokens with --max-tokens");
    refused({rows, "--grpo", "--reward", "exact", "--full", "--temp", "0.5"}, "--temp 0.5: with --full");
    refused({rows, "--grpo", "--reward", "exact", "--gpus", "2", "-d", "cpu", "--iterations", "2"}, "--iterations 2: several GPUs");
    refused({rows, "--grpo", "--reward", "exact", "--batch", "65536", "--group", "64"}, "--group 64 with --max-len 512: more than 2^26 tokens");
    refused({pairs, "--grpo", "--reward", "exact"}, "pairs.bin: pairs of chosen and rejected answers");
}
