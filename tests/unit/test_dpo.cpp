// Preferences: `datagen pack` of pairs, and `train_lora --dpo` from outside and its Trainer by itself (TRAIN_LORA, DATAGEN and
// QWEN3, else the programs here). TRL's numbers are fixtures, made by tests/reference/make_dpo.py.
#include <doctest/doctest.h>
#include "tests/trainer.h"
#include "tests/files.h"
#include "tests/process.h"
#include "model/chat_template.h"
#include <thread>

static const std::string TINY = "tests/fixtures/tiny/model.bin", VOCABULARY = "tests/fixtures/tiny/tokenizer.bin", FIXTURES = "tests/fixtures/dpo/";

static Process start(const char* name, const Strings& arguments) {
    return Process(name, arguments, "", [] { setenv("OMP_WAIT_POLICY", "passive", 1); });
}
static Result must(const char* name, const Strings& arguments) {
    const Result r = start(name, arguments).wait();
    INFO(r.err);
    REQUIRE(r.status == 0);
    return r;
}
static const char* trainer() { return program("TRAIN_LORA", "./train_lora"); }
static const char* datagen() { return program("DATAGEN", "./datagen"); }
static const Strings ONE = {"-z", VOCABULARY, "-j", "1"};
static Result train(const Strings& arguments) { return must(trainer(), arguments + ONE); }
// Packs rows into `out` beside them, which is returned.
static std::string pack(const Scratch& scratch, const std::string& name, const std::string& rows, const Strings& options = {"--info", "none"}) {
    write_file(scratch / (name + ".jsonl"), rows);
    must(datagen(), Strings{"pack", "-z", VOCABULARY, scratch / (name + ".jsonl"), scratch / (name + ".bin")} + options);
    return scratch / (name + ".bin");
}

// The 40 pairs, the first 32, the last 8; and rows without a rejected answer.
struct Pairs {
    Scratch folder;
    std::string all, first, last, rows;
    Pairs() {
        const std::string text = read_file(FIXTURES + "pairs.jsonl");
        size_t cut = 0;
        for (int i = 0; i < 32; i++) cut = text.find('\n', cut) + 1;
        all = pack(folder, "all", text), first = pack(folder, "first", text.substr(0, cut)), last = pack(folder, "last", text.substr(cut));
        rows = pack(folder, "rows", read_file("tests/fixtures/train/rows.jsonl"));
    }
};
static const Pairs& pairs() {
    static Pairs once;
    return once;
}

// ------------------------------------------------------------------------------------------------ the loss

TEST_CASE("the loss of a pair: its values, its slope, and margins of any size") {
    CHECK(dpo_loss(0, 0).loss == doctest::Approx(std::log(2)).epsilon(1e-15));
    CHECK(dpo_loss(0, 0.3).loss == doctest::Approx(std::log(2)).epsilon(1e-15));
    for (double smoothing : {0., 0.1, 0.5})
        for (double x : {-30., -2., -0.1, 0., 0.7, 5., 30.}) {
            const double up = 1 / (1 + std::exp(-x)), want = -(1 - smoothing) * std::log(up) - smoothing * std::log1p(-up);
            if (std::fabs(x) < 10) CHECK(dpo_loss(x, smoothing).loss == doctest::Approx(want).epsilon(1e-12));
            const double h = 1e-5, slope = (dpo_loss(x + h, smoothing).loss - dpo_loss(x - h, smoothing).loss) / (2 * h);
            CHECK(std::fabs(dpo_loss(x, smoothing).slope - slope) < 1e-8);
        }
    CHECK(dpo_loss(-1e4, 0).loss == 1e4);
    CHECK(dpo_loss(-1e4, 0).slope == -1);
    CHECK(dpo_loss(1e4, 0).loss == 0);
    CHECK(dpo_loss(1e4, 0.25).loss == 2500);
    CHECK(dpo_loss(1e4, 0.25).slope == 0.25);
}

TEST_CASE("a batch beside TRL: loss, what is told of it, and gradients; with label smoothing and without") {
    const Json golden(read_file(FIXTURES + "batch.json"));
    const MappedFile map(FIXTURES + "gradients.safetensors");
    Tensors theirs;
    Metadata metadata;
    read_safetensors(map, theirs, metadata);
    Scratch scratch;
    DatasetWriter writer(scratch / "pairs.bin", 0, 0);
    for (sj::Value pair : golden["pairs"].items()) {
        std::vector<uint32_t> row[2];
        for (int k : {0, 1}) {
            for (sj::Value id : pair["prompt_ids"].items()) row[k].push_back((uint32_t)id.number());
            for (sj::Value id : pair[k ? "rejected_ids" : "chosen_ids"].items()) row[k].push_back((uint32_t)id.number() | TRAIN);
        }
        writer.add_pair(row[0], row[1]);
    }
    writer.commit();
    const Dataset data(scratch / "pairs.bin");
    const ModelFile file("tests/fixtures/train/tied");
    for (const char* name : {"sigmoid", "smoothed"})
        for (int batch : {4, 3, 1}) {
            INFO(name << ", " << batch << " pairs a batch");
            TrainOptions o;
            o.full = o.dpo = true;
            o.batch = batch, o.accum = 4, o.beta = golden["beta"].number();
            if (name == std::string("smoothed")) o.label_smoothing = golden["smoothing"].number();
            Trainer<float> t(o, Context(), file, data, nullptr);
            for (sj::Value p : golden["reference"].items()) t.reference.push_back(p.number());
            t.add_gradients(t.loader.rows, t.weight(data, t.loader.rows));
            CHECK(t.results[0] / 4 == doctest::Approx(golden[name]["loss"].number()).epsilon(1e-6));
            for (int i = 0; i < Preferences::N; i++) {
                INFO(Preferences::NAMES[i]);
                CHECK(std::fabs(t.preferences.value[i] - golden[name][Preferences::NAMES[i]].number()) < 1e-5);
            }
            CHECK(same_gradients(t, theirs, std::string(name) + ".", 1e-4, 1e-5) == (o.label_smoothing ? 3 : 24));
        }
}

// The fixture's adapter is not zero: TRL's reference is a copy of it, and not the base model.
TEST_CASE("50 steps beside TRL: every loss, gradient norm and reward") {
    const Json trl(read_file(FIXTURES + "steps.json"));
    Scratch out;
    train({TINY, pairs().all, "-o", out / "a", "--dpo", "--beta", "0.25", "--adapter-init", "tests/fixtures/train/adapter_bf16", "--no-shuffle", "--dtype", "f32", "--steps", "50",
           "--batch", "4", "--lr", format("%g", trl["lr"].number())});
    auto compare = [&](const std::string& ours, const char* theirs, double limit) {
        const std::vector<double> got = logged(out / "a", ours);
        REQUIRE(got.size() == 50);
        double worst = 0;
        for (size_t i = 0; i < 50; i++) worst = std::max(worst, std::fabs(got[i] - trl[theirs][i].number()));
        INFO(ours << ": " << worst);
        CHECK(worst < limit);
    };
    compare("loss", "losses", 2e-5); // (the issue asks for 1e-4)
    compare("grad_norm", "norms", 2e-4);
    for (const char* name : Preferences::NAMES) compare(name, name, 2e-4);
    CHECK(logged(out / "a", "loss").back() < 0.2);
}

// ------------------------------------------------------------------------------------------------ training

TEST_CASE("the first loss is log 2 to the bit; batches cut otherwise, --recompute: the same bits; the reference is what the run began with") {
    Scratch out;
    const Strings how = {TINY, pairs().all, "--dpo", "--steps", "8", "--lr", "2e-3", "--rank", "4", "--alpha", "8"};
    const Strings one = {"--batch", "8", "--eval", pairs().all, "--allow-leak", "--eval-every", "4"};
    const Result r = train(how + one + Strings{"-o", out / "a"});
    CHECK(r.err.find("the reference of 40/40 pairs") != std::string::npos);
    CHECK(r.err.find("8 steps of 8 pairs") != std::string::npos);
    CHECK(r.err.find("step 8/8  loss ") != std::string::npos);
    const std::vector<double> loss = logged(out / "a", "loss"), margin = logged(out / "a", "rewards/margins");
    CHECK(loss[0] == std::log(2));
    CHECK(margin[0] == 0);
    CHECK(loss.back() < 0.6);
    // The evaluation goes by the same names; one of the same numbers as its parts.
    const std::vector<double> eval = logged(out / "a", "eval_loss"), chosen = logged(out / "a", "eval_rewards/chosen"), rejected = logged(out / "a", "eval_rewards/rejected"),
                              margins = logged(out / "a", "eval_rewards/margins"), right = logged(out / "a", "eval_rewards/accuracies");
    REQUIRE(eval.size() == 2);
    REQUIRE(right.size() == 2);
    CHECK(eval[1] < eval[0]);
    CHECK(right[1] > 0.8);
    CHECK(margins[1] == doctest::Approx(chosen[1] - rejected[1]));
    CHECK(r.err.find(format("evaluation loss %.6f  rewards/margins %.4f  rewards/accuracies %.3f, the best so far", eval[1], margins[1], right[1])) != std::string::npos);
    CHECK(fs::exists(out / "a/best/adapter_model.safetensors"));
    // Dropout is 0 unless it is asked for.
    CHECK(Json(read_file(out / "a/adapter_config.json"))["lora_dropout"].number() == 0);

    auto numbers = [&](const char* run) {
        const MappedFile map(out / run + "/adapter_model.safetensors");
        Tensors tensors;
        Metadata metadata;
        read_safetensors(map, tensors, metadata);
        std::string all;
        for (auto& [name, t] : tensors) all.append((const char*)t.data, t.bytes);
        return all;
    };
    const std::string adapter = numbers("a");
    for (const Strings& other : {Strings{"--batch", "2", "--accum", "4"}, {"--batch", "8", "--recompute"}, {"--batch", "8", "-j", "2"}}) {
        train(how + other + Strings{"-o", out / "b", "--overwrite"});
        CHECK(numbers("b") == adapter);
    }
    train(how + Strings{"--batch", "8", "--beta", "0.5", "-o", out / "b", "--overwrite"});
    CHECK(numbers("b") != adapter);
    // Going on from an adapter begins with log 2 again.
    train({TINY, pairs().all, "--dpo", "--steps", "1", "--adapter-init", out / "a", "-o", out / "c"});
    CHECK(logged(out / "c", "loss")[0] == std::log(2));
    // All parameters: the reference is not what they have become. A run's pairs all have one, in any number of epochs.
    train({TINY, pairs().all, "--dpo", "--full", "--batch", "8", "--epochs", "2", "--lr", "5e-4", "--no-shuffle", "--dtype", "f32", "-o", out / "full"});
    const std::vector<double> full = logged(out / "full", "loss");
    REQUIRE(full.size() == 10);
    CHECK(full[0] == std::log(2));
    CHECK(full.back() < 0.5);
    must(program("QWEN3", "./qwen3"), {out / "full", "-i", "warp?", "-n", "4", "-d", "cpu", "-j", "1"});
}

TEST_CASE("Ctrl-C and --resume, LoRA and --full: to the bit as if nothing had been, and only with the same loss") {
    Scratch out;
    for (bool full : {false, true}) {
        Strings how = Strings{TINY, pairs().first, "--dpo", "--batch", "4", "--accum", "2", "--steps", "10", "--lr", "1e-3", "--eval", pairs().last, "--eval-every", "3"} + ONE;
        how = how + (full ? Strings{"--full"} : Strings{"--rank", "4", "--alpha", "8", "--dropout", "0.1"});
        const std::string whole = out / (full ? "fw" : "w"), parts = out / (full ? "fp" : "p"), file = full ? "/model.bin" : "/adapter_model.safetensors";
        train(how + Strings{"-o", whole});
        Process p = start(trainer(), how + Strings{"-o", parts});
        for (int ms = 0; read_file_if(parts + "/trainer_log.jsonl").find("\"current_steps\": 4,") == std::string::npos; ms++) {
            REQUIRE(ms < 60000);
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        kill(p.pid, SIGINT);
        CHECK(p.wait().status == 130);
        CHECK(logged(parts, "loss").size() < 10); // it was really stopped on its way
        for (const Strings& other : {Strings{"--beta", "0.2"}, {"--label-smoothing", "0.1"}})
            check_refusal(start(trainer(), how + other + Strings{"-o", parts, "--resume"}).wait(), "train_lora", format("begun with %s", other[0].c_str() + 2));
        train(how + Strings{"-o", parts, "--resume"});
        CHECK(read_file(parts + file) == read_file(whole + file));
        CHECK(read_file(parts + "/best" + file) == read_file(whole + "/best" + file));
        for (const char* field : {"loss", "grad_norm", "rewards/margins", "eval_loss", "eval_rewards/accuracies"}) CHECK(logged(parts, field) == logged(whole, field));
    }
}

TEST_CASE("what --dpo cannot train: one line, and nothing is written") {
    Scratch out;
    const std::string long_pair = pack(out, "long", R"({"instruction": "warp?", "chosen": "a b c d e f g h i j k l m n o p", "rejected": "no"})" "\n");
    auto refused = [&](const Strings& arguments, const char* word) {
        check_refusal(start(trainer(), Strings{TINY} + arguments + Strings{"-o", out / "o"} + ONE).wait(), "train_lora", word);
        CHECK(!fs::exists(out / "o"));
    };
    refused({pairs().rows, "--dpo"}, "rows.bin: --dpo trains on pairs");
    refused({pairs().all}, "all.bin: pairs of chosen and rejected answers: they need --dpo");
    refused({pairs().first, "--dpo", "--eval", pairs().rows}, "rows.bin: --dpo trains on pairs");
    refused({pairs().rows, "--eval", pairs().last}, "last.bin: pairs of chosen and rejected answers");
    refused({pairs().all, "--dpo", "--eval", pairs().last}, "16 rows are in");
    refused({pairs().rows, "--beta", "0.1"}, "--beta is for --dpo");
    refused({pairs().rows, "--label-smoothing", "0.1"}, "--label-smoothing is for --dpo");
    refused({pairs().all, "--dpo", "--label-smoothing", "0.6"}, "--label-smoothing");
    refused({pairs().all, "--dpo", "--beta", "0"}, "--beta");
    refused({long_pair, "--dpo", "--max-len", "12"}, "every pair has more than 12 tokens");
    refused({pairs().all, "--dpo", "--batch", "65536", "--max-len", "600"}, "more than 2^26 tokens");
    // A pair goes as a whole, when one of its answers is too long.
    const std::string both = pack(out, "both", read_file(out / "long.jsonl") + R"({"instruction": "a?", "chosen": "b", "rejected": "c"})" "\n");
    const Result r = train({TINY, both, "--dpo", "--steps", "1", "--max-len", "24", "-o", out / "o"});
    CHECK(r.err.find("1 pair left out of 2: more than 24 tokens") != std::string::npos);
}

// ------------------------------------------------------------------------------------------------ data

TEST_CASE("pack: LLaMA-Factory's pairs and TRL's give the same bytes; unpack and pack again, too") {
    const std::string before = R"([{"from": "system", "value": "be brief"}, {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "human", "value": "Q\nmore"}])";
    std::string messages = before;
    for (auto [from, to] : {std::pair("\"from\"", "\"role\""), {"\"value\"", "\"content\""}, {"\"human\"", "\"user\""}, {"\"gpt\"", "\"assistant\""}})
        for (size_t at = 0; (at = messages.find(from, at)) != std::string::npos; at++) messages.replace(at, strlen(from), to);
    auto answer = [](const char* text) { return format(R"({"role": "assistant", "content": "%s"})", text); };
    auto whole = [&](const char* text) { return messages.substr(0, messages.size() - 1) + ", " + answer(text) + "]"; };
    auto row = [](const std::string& prompt, const std::string& chosen, const std::string& rejected) {
        return "{" + prompt + (prompt.empty() ? "" : ", ") + "\"chosen\": " + chosen + ", \"rejected\": " + rejected + "}\n";
    };
    const std::string x = "[" + answer("x") + "]", y = "[" + answer("y") + "]";
    const std::string forms[] = {
        row(R"("instruction": "Q", "input": "more", "system": "be brief", "history": [["a", "b"]])", "\"x\"", "\"y\""),
        row("\"conversations\": " + before, R"({"from": "gpt", "value": "x"})", R"({"from": "gpt", "value": "y"})"),
        row("\"messages\": " + messages, answer("x"), answer("y")),
        row("\"prompt\": " + messages, x, y),
        row("\"prompt\": " + messages, "\"x\"", "\"y\""),
        row("", whole("x"), whole("y")),
        row("\"prompt\": \"Q\\nmore\", \"messages\": []", whole("x"), whole("y")), // as HuggingFaceH4's
    };
    Scratch scratch;
    std::string first;
    for (const std::string& form : forms) {
        INFO(form);
        const std::string bin = pack(scratch, "x", form, {});
        if (first.empty()) first = read_file(bin);
        CHECK(read_file(bin) == first);
        if (!fs::exists(scratch / "dataset_info.json")) { // TRL's have no entry
            CHECK(form.find("\"history\"") == form.npos);
            CHECK(form.find("\"from\"") == form.npos);
            continue;
        }
        const Json info(read_file(scratch / "dataset_info.json"));
        CHECK(info["x"]["ranking"].boolean());
        CHECK(info["x"]["columns"]["rejected"].str() == "rejected");
        must(datagen(), {"pack", "-z", VOCABULARY, scratch / "dataset_info.json", scratch / "y.bin", "--name", "x"});
        CHECK(read_file(scratch / "y.bin") == first);
        fs::remove(scratch / "dataset_info.json");
    }
    const Dataset data(scratch / "x.bin");
    CHECK(data.pairs());
    CHECK(data.rows() == 2);
    // The prompt is what the model is asked with, and the answers are trained with their end.
    const Tokenizer tokenizer(VOCABULARY);
    std::vector<Message> asked = {{"system", "be brief"}, {"user", "a"}, {"assistant", "b"}, {"user", "Q\nmore"}};
    const std::vector<int> prompt = render_chat(tokenizer, asked, {});
    for (int k : {0, 1}) {
        std::vector<int> want = prompt, got;
        tokenizer.encode(want, k ? "y" : "x", false);
        want.push_back(tokenizer.id("<|im_end|>")), tokenizer.encode(want, "\n", false);
        for (uint32_t word : data.row(k)) {
            got.push_back((int)(word & ~TRAIN));
            CHECK((got.size() > prompt.size()) == (word >= TRAIN));
        }
        CHECK(got == want);
    }
    const std::string again = must(datagen(), {"unpack", "-z", VOCABULARY, scratch / "x.bin"}).out;
    CHECK(Json(again)["prompt"][3]["content"].str() == "Q\nmore");
    CHECK(Json(again)["rejected"][0]["content"].str() == "y");
    CHECK(read_file(pack(scratch, "again", again)) == first);
    CHECK(must(datagen(), {"stats", scratch / "x.bin"}).out.find("2 of them different; pairs") != std::string::npos);
    CHECK(must(datagen(), {"stats", scratch / "x.jsonl", "-z", VOCABULARY}).out.find("rows      1, 0 of them no conversation") != std::string::npos);
    // Texts are continued as they are.
    const std::string text = pack(scratch, "text", R"({"prompt": "The sky", "chosen": " is", "rejected": " was"})" "\n");
    const Dataset plain(text);
    std::vector<int> want = tokenizer.encode("The sky", false);
    const size_t n = want.size();
    tokenizer.encode(want, " was", false), want.push_back(tokenizer.id("<|endoftext|>"));
    REQUIRE(plain.row(1).size() == want.size());
    for (size_t i = 0; i < want.size(); i++) CHECK(plain.row(1).first[i] == ((uint32_t)want[i] | (i < n ? 0 : TRAIN)));
    CHECK(read_file(pack(scratch, "text2", must(datagen(), {"unpack", "-z", VOCABULARY, text}).out)) == read_file(text));
    // If one answer thinks, both follow the prompt of a model that may.
    const Dataset thought(pack(scratch, "thought", R"({"instruction": "Q", "chosen": "<think>\nhm\n</think>\n\nx", "rejected": "x"})" "\n"));
    const std::vector<int> open = render_chat(tokenizer, {{"user", "Q"}}, {true, true});
    for (int k : {0, 1}) CHECK((thought.row(k).first[open.size() - 1] < TRAIN && thought.row(k).first[open.size()] == ((uint32_t)tokenizer.id("<think>") | TRAIN)));
}

TEST_CASE("pack: what is no pair is named by its line, and nothing is written") {
    Scratch scratch;
    const std::string good = R"({"instruction": "Q", "chosen": "x", "rejected": "y"})" "\n";
    auto refused = [&](const std::string& row, const char* word) {
        write_file(scratch / "x.jsonl", good + row + "\n");
        const Result r = start(datagen(), {"pack", "-z", VOCABULARY, scratch / "x.jsonl", scratch / "x.bin", "--info", "none"}).wait();
        check_refusal(r, "datagen", word);
        check_refusal(r, "datagen", "x.jsonl: line 2: ");
        CHECK(!fs::exists(scratch / "x.bin"));
    };
    refused(R"({"instruction": "Q", "chosen": "x"})", "rejected: missing");
    refused(R"({"instruction": "Q", "rejected": "x", "chosen": null})", "chosen: missing");
    refused(R"({"instruction": "Q", "chosen": "x", "rejected": []})", "only one is a list");
    refused(R"({"instruction": "Q", "chosen": [], "rejected": []})", "chosen: empty");
    refused(R"({"instruction": "Q", "chosen": "x", "rejected": "x"})", "chosen and rejected are the same");
    refused(R"({"instruction": "Q", "chosen": 1, "rejected": "x"})", "chosen: neither a text nor a message");
    refused(R"({"chosen": "x", "rejected": "y"})", "no prompt: instruction");
    refused(R"({"prompt": "", "chosen": "x", "rejected": "y"})", "prompt: empty");
    refused(R"({"prompt": [], "chosen": "x", "rejected": "y"})", "the prompt does not end with a question");
    refused(R"({"prompt": [{"role": "assistant", "content": "x"}], "chosen": "x", "rejected": "y"})", "the prompt does not end with a question");
    refused(R"({"prompt": [{"role": "user", "content": "Q"}], "chosen": [{"role": "user", "content": "x"}], "rejected": [{"role": "assistant", "content": "y"}]})", "chosen: not the assistant's");
    refused(R"({"prompt": [{"role": "user", "content": "Q"}], "chosen": [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "x"}], "rejected": [{"role": "assistant", "content": "y"}]})",
            "chosen: more than one message");
    refused(R"({"chosen": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "x"}], "rejected": [{"role": "user", "content": "R"}, {"role": "assistant", "content": "y"}]})",
            "not the same up to the last message");
    refused(R"({"conversations": [{"from": "human", "value": "Q"}], "chosen": {"from": "human", "value": "x"}, "rejected": {"from": "gpt", "value": "y"}})", "chosen: not the assistant's");
    refused(R"({"instruction": "Q", "output": "x"})", "no chosen and rejected answer, which the rows before it have");
    write_file(scratch / "y.jsonl", R"({"instruction": "Q", "output": "x"})" "\n" + good);
    check_refusal(start(datagen(), {"pack", "-z", VOCABULARY, scratch / "y.jsonl", scratch / "x.bin", "--info", "none"}).wait(), "datagen", "line 2: a chosen and a rejected answer");
    check_refusal(start(datagen(), {"pack", "-z", VOCABULARY, scratch / "y.jsonl", scratch / "x.bin", "--info", "none", "--max-len", "4"}).wait(), "datagen", "line 2: a chosen and a rejected answer");
    // Too long: one answer, or the prompt.
    write_file(scratch / "z.jsonl", good + R"({"instruction": "Q", "chosen": "a b c d e f g h i j k l m n o p", "rejected": "y"})" "\n");
    const Strings how = {"pack", "-z", VOCABULARY, scratch / "z.jsonl", scratch / "z.bin", "--info", "none", "--max-len", "24"};
    CHECK(must(datagen(), how).err.find("1 dropped") != std::string::npos);
    CHECK(Dataset(scratch / "z.bin").rows() == 2);
    check_refusal(start(datagen(), how + Strings{"--over", "refuse"}).wait(), "datagen", "line 2: ");
    check_refusal(start(datagen(), how + Strings{"--max-len", "5"}).wait(), "datagen", "all rows are too long");
}
