// Preferences: `datagen pack` of pairs and labelled answers, and `train_lora --dpo`, .., `--kto` from outside and its Trainer by itself (TRAIN_LORA, DATAGEN and
// QWEN3, else the programs here). TRL's numbers are fixtures, made by tests/reference/make_dpo.py.
#include <doctest/doctest.h>
#include "tests/trainer.h"
#include "tests/files.h"
#include "tests/process.h"
#include "model/chat_template.h"
#include <thread>

static const std::string TINY = "tests/fixtures/tiny/model.bin", VOCABULARY = "tests/fixtures/tiny/tokenizer.bin", FIXTURES = "tests/fixtures/dpo/";

static const char* datagen() { return program("DATAGEN", "./datagen"); }
static const Strings ONE = {"-z", VOCABULARY, "-j", "1"};
// Packs rows into `out` beside them, which is returned.
static std::string pack(const Scratch& scratch, const std::string& name, const std::string& rows, const Strings& options = {"--info", "none"}) {
    write_file(scratch / (name + ".jsonl"), rows);
    must(datagen(), Strings{"pack", "-z", VOCABULARY, scratch / (name + ".jsonl"), scratch / (name + ".bin")} + options);
    return scratch / (name + ".bin");
}

// The 40 pairs, the first 32, the last 8; rows without a rejected answer; the 80 labelled answers, the last 16.
struct Pairs {
    Scratch folder;
    std::string all, first, last, rows, labelled, last_labelled;
    Pairs() {
        const std::string text = read_file(FIXTURES + "pairs.jsonl");
        size_t cut = 0;
        for (int i = 0; i < 32; i++) cut = text.find('\n', cut) + 1;
        all = pack(folder, "all", text), first = pack(folder, "first", text.substr(0, cut)), last = pack(folder, "last", text.substr(cut));
        rows = pack(folder, "rows", read_file("tests/fixtures/train/rows.jsonl"));
        std::string both; // each question with its answer, then with the next one's
        for (auto& line : lines(text))
            for (const char* key : {"chosen", "rejected"}) {
                sj::Writer w;
                w.object().field("instruction", Json(line)["instruction"].str()).field("output", Json(line)[key].str());
                both += w.field("kto_tag", *key == 'c').end().text + "\n";
            }
        labelled = pack(folder, "labelled", both);
        for (cut = 0; std::count(both.begin() + (ptrdiff_t)cut, both.end(), '\n') > 16;) cut = both.find('\n', cut) + 1;
        last_labelled = pack(folder, "last_labelled", both.substr(cut));
    }
};
static const Pairs& pairs() {
    static Pairs once;
    return once;
}

// ------------------------------------------------------------------------------------------------ the loss

TEST_CASE("the loss of a pair: its values, its slope, and margins of any size") {
    CHECK(sigmoid_loss(0, 0).loss == doctest::Approx(std::log(2)).epsilon(1e-15));
    CHECK(sigmoid_loss(0, 0.3).loss == doctest::Approx(std::log(2)).epsilon(1e-15));
    for (double smoothing : {0., 0.1, 0.5})
        for (double x : {-30., -2., -0.1, 0., 0.7, 5., 30.}) {
            const double up = 1 / (1 + std::exp(-x)), want = -(1 - smoothing) * std::log(up) - smoothing * std::log1p(-up);
            if (std::fabs(x) < 10) CHECK(sigmoid_loss(x, smoothing).loss == doctest::Approx(want).epsilon(1e-12));
            const double h = 1e-5, slope = (sigmoid_loss(x + h, smoothing).loss - sigmoid_loss(x - h, smoothing).loss) / (2 * h);
            CHECK(std::fabs(sigmoid_loss(x, smoothing).slope - slope) < 1e-8);
        }
    CHECK(sigmoid_loss(-1e4, 0).loss == 1e4);
    CHECK(sigmoid_loss(-1e4, 0).slope == -1);
    CHECK(sigmoid_loss(1e4, 0).loss == 0);
    CHECK(sigmoid_loss(1e4, 0.25).loss == 2500);
    CHECK(sigmoid_loss(1e4, 0.25).slope == 0.25);
}

TEST_CASE("each loss: its derivatives are differences of its values; answers of any likelihood") {
    const PreferenceOptions o = {0.3, 0.1, 0.4, 1.5, 0.75};
    const double h = 1e-5;
    auto moved = [](Likelihood l, double by) { return l.logp += by, l; };
    for (const Likelihood& c : {Likelihood{-7, -9, 4}, {-0.5, -0.25, 1}, {-90, -20, 30}})
        for (const Likelihood& r : {Likelihood{-8, -7.5, 3}, {-1, -2, 2}, {-200, -190, 40}}) {
            INFO(c.logp << ", " << r.logp);
            for (auto& loss : PREFERENCE_LOSSES) {
                INFO(loss.name);
                for (bool desirable : {true, false}) {
                    const double slope = (kto_loss(o, moved(c, h), 0.7, desirable).loss - kto_loss(o, moved(c, -h), 0.7, desirable).loss) / (2 * h);
                    CHECK(kto_loss(o, c, 0.7, desirable).by_logp == doctest::Approx(slope).epsilon(1e-6));
                }
                if (!loss.pairs()) continue;
                const PairLoss at = loss.of_pair(o, c, r);
                const double by_c = (loss.of_pair(o, moved(c, h), r).loss - loss.of_pair(o, moved(c, -h), r).loss) / (2 * h);
                const double by_r = (loss.of_pair(o, c, moved(r, h)).loss - loss.of_pair(o, c, moved(r, -h)).loss) / (2 * h);
                CHECK(at.by_chosen == doctest::Approx(by_c).epsilon(1e-6));
                CHECK(at.by_rejected == doctest::Approx(by_r).epsilon(1e-6));
            }
        }
    // At the reference: IPO's target is 1 / (2 beta) away, KTO's value is in the middle.
    const Likelihood same = {-5, -5, 5};
    CHECK(ipo_loss({0.1}, same, same).loss == 25);
    CHECK(kto_loss({}, same, 0, true).loss == 0.5);
    for (double logp : {0., -1e-9, -1e4}) { // certain, impossible
        const PairLoss one = orpo_loss(o, {logp, 0, 2}, {-3, 0, 2}), other = orpo_loss(o, {-3, 0, 2}, {logp, 0, 2});
        for (double x : {one.loss, one.by_chosen, one.by_rejected, other.loss, other.by_chosen, other.by_rejected}) CHECK(std::isfinite(x));
    }
}

// The rows of a fixture: its pairs, or with labels its first answers, each with its mismatched row.
static void write_fixture(const std::string& path, sj::Value pairs, sj::Value labels, sj::Value mismatched) {
    DatasetWriter writer(path, 0, 0);
    size_t i = 0;
    for (sj::Value pair : pairs.items()) {
        std::vector<uint32_t> row[2];
        for (int k : {0, 1}) {
            for (sj::Value id : pair["prompt_ids"].items()) row[k].push_back((uint32_t)id.number());
            const sj::Value answer = k && labels ? mismatched[i] : pair[k ? "rejected_ids" : "chosen_ids"];
            for (sj::Value id : answer.items()) row[k].push_back((uint32_t)id.number() | TRAIN);
        }
        if (labels) writer.add_labelled(row[0], row[1], labels[i].boolean());
        else writer.add_pair(row[0], row[1]);
        i++;
    }
    writer.commit();
}

TEST_CASE("IPO, SimPO, ORPO and KTO beside TRL: loss, rewards, KL and gradients, however the step is cut") {
    const Json batch(read_file(FIXTURES + "batch.json")), golden(read_file(FIXTURES + "losses.json"));
    const MappedFile map(FIXTURES + "losses.safetensors");
    Tensors theirs;
    Metadata metadata;
    read_safetensors(map, theirs, metadata);
    Scratch scratch;
    write_fixture(scratch / "pairs.bin", batch["pairs"], {}, {});
    write_fixture(scratch / "answers.bin", batch["pairs"], golden["labels"], golden["mismatched_ids"]);
    const ModelFile file("tests/fixtures/train/tied");
    for (auto& loss : PREFERENCE_LOSSES)
        for (int size : {4, 3, 1}) {
            const std::string name = loss.name;
            if (name == "dpo") continue;
            INFO(name << ", " << size << " a batch");
            const Dataset data(scratch / (loss.pairs() ? "pairs.bin" : "answers.bin"));
            TrainOptions o;
            o.full = true, o.preference = &loss, o.batch = size, o.accum = 4;
            o.pref = {golden["beta"].number(), 0, golden["gamma"].number(), golden["weights"][0].number(), golden["weights"][1].number()};
            Trainer<float> t(o, Context(), file, data, nullptr);
            for (sj::Value p : (loss.pairs() ? batch : golden)["reference"].items()) t.reference.push_back(loss.has_reference ? p.number() : 1e9);
            for (sj::Value p : golden["mismatched"].items()) t.mismatched.push_back(p.number());
            t.add_gradients(t.loader.rows, t.weight(data, t.loader.rows));
            t.preferences.divide();
            const sj::Value want = golden[name.c_str()];
            CHECK(std::fabs(t.results[0] / 4 - want["loss"].number()) < 1e-5);
            for (int i = 0; i < Preferences::N; i++) {
                INFO(Preferences::NAMES[i]);
                if (const sj::Value x = want[Preferences::NAMES[i]]) CHECK(std::fabs(t.preferences.value[i] - x.number()) < 1e-5);
                else CHECK((!loss.pairs() && i == Preferences::ACCURACY));
            }
            CHECK(std::fabs(t.preferences.kl - want["kl"].number()) < 1e-5);
            CHECK(same_gradients(t, theirs, name + ".", 1e-4, 1e-5) == 3);
        }
}

TEST_CASE("a batch beside TRL: loss, what is told of it, and gradients; with label smoothing and without") {
    const Json golden(read_file(FIXTURES + "batch.json"));
    const MappedFile map(FIXTURES + "gradients.safetensors");
    Tensors theirs;
    Metadata metadata;
    read_safetensors(map, theirs, metadata);
    Scratch scratch;
    write_fixture(scratch / "pairs.bin", golden["pairs"], {}, {});
    const Dataset data(scratch / "pairs.bin");
    const ModelFile file("tests/fixtures/train/tied");
    for (const char* name : {"sigmoid", "smoothed"})
        for (int batch : {4, 3, 1}) {
            INFO(name << ", " << batch << " pairs a batch");
            TrainOptions o;
            o.full = true, o.preference = &PREFERENCE_LOSSES[0];
            o.batch = batch, o.accum = 4, o.pref.beta = golden["beta"].number();
            if (name == std::string("smoothed")) o.pref.smoothing = golden["smoothing"].number();
            Trainer<float> t(o, Context(), file, data, nullptr);
            for (sj::Value p : golden["reference"].items()) t.reference.push_back(p.number());
            t.add_gradients(t.loader.rows, t.weight(data, t.loader.rows));
            t.preferences.divide();
            CHECK(t.results[0] / 4 == doctest::Approx(golden[name]["loss"].number()).epsilon(1e-6));
            for (int i = 0; i < Preferences::N; i++) {
                INFO(Preferences::NAMES[i]);
                CHECK(std::fabs(t.preferences.value[i] - golden[name][Preferences::NAMES[i]].number()) < 1e-5);
            }
            CHECK(same_gradients(t, theirs, std::string(name) + ".", 1e-4, 1e-5) == (o.pref.smoothing > 0 ? 3 : 24));
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
    const Strings few = {TINY, pairs().last, "--dpo", "--steps", "3", "--lr", "2e-3", "--rank", "4", "--alpha", "8"};
    train(few + Strings{"--batch", "8", "-o", out / "few"});
    const std::string adapter = numbers("few");
    for (const Strings& other : {Strings{"--batch", "2", "--accum", "4"}, {"--batch", "8", "--recompute"}, {"--batch", "8", "-j", "2"}}) {
        train(few + other + Strings{"-o", out / "b", "--overwrite"});
        CHECK(numbers("b") == adapter);
    }
    train(few + Strings{"--batch", "8", "--beta", "0.5", "-o", out / "b", "--overwrite"});
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

TEST_CASE("IPO, SimPO, ORPO, KTO: the margin rises; batches cut otherwise: the same bits; only those with a reference compute one") {
    Scratch out;
    for (auto& loss : PREFERENCE_LOSSES) {
        const std::string name = loss.name;
        if (name == "dpo") continue;
        INFO(name);
        const std::string few = loss.pairs() ? pairs().last : pairs().last_labelled;
        const Strings how = {"--" + name, "--lr", "2e-3", "--rank", "4", "--alpha", "8"};
        const Result r = train(how + Strings{TINY, loss.pairs() ? pairs().all : pairs().labelled, "--steps", "10", "--eval", few, "--allow-leak",
                                             "--eval-every", "5", "--batch", "8", "-o", out / name});
        CHECK((r.err.find(": the reference of ") != std::string::npos) == loss.has_reference);
        const std::vector<double> margin = logged(out / name, "eval_rewards/margins"), losses = logged(out / name, "eval_loss");
        REQUIRE(margin.size() == 2);
        CHECK(margin[1] > margin[0]);
        CHECK(losses[1] < losses[0]);
        if (name == "ipo") CHECK(logged(out / name, "loss")[0] == 25);
        if (name == "kto") CHECK(logged(out / name, "loss")[0] == 0.5);
        CHECK(logged(out / name, "kl").size() == (loss.pairs() ? 0 : 10));
        train(how + Strings{TINY, few, "--steps", "3", "--batch", "8", "-o", out / (name + "8")});
        train(how + Strings{TINY, few, "--steps", "3", "--batch", "2", "--accum", "4", "-o", out / (name + "2")});
        CHECK(read_file(out / (name + "8") + "/adapter_model.safetensors") == read_file(out / (name + "2") + "/adapter_model.safetensors"));
    }
}

TEST_CASE("Ctrl-C and --resume, LoRA and --full: to the bit as if nothing had been, and only with the same loss") {
    Scratch out;
    for (const std::string kind : {"--dpo", "--full", "--orpo", "--kto"}) {
        INFO(kind);
        const bool full = kind == "--full", kto = kind == "--kto";
        Strings how = Strings{TINY, kto ? pairs().labelled : pairs().first, full ? "--dpo" : kind, "--batch", "4", "--accum", "2", "--steps", "10", "--lr", "1e-3", "--eval",
                              kto ? pairs().last_labelled : pairs().last, "--eval-every", "3"} + ONE;
        if (kto) how.push_back("--allow-leak");
        how = how + (full ? Strings{"--full"} : Strings{"--rank", "4", "--alpha", "8", "--dropout", "0.1"});
        const std::string whole = out / ("whole" + kind), parts = out / ("parts" + kind), file = full ? "/model.bin" : "/adapter_model.safetensors";
        train(how + Strings{"-o", whole});
        Process p = start_program(trainer(), how + Strings{"-o", parts});
        interrupt_at_step(4, p, parts);
        CHECK(logged(parts, "loss").size() < 10); // it was really stopped on its way
        for (const Strings& other : {Strings{"--beta", "0.2"}, {kto ? "--desirable-weight" : kind == "--orpo" ? "--beta" : "--label-smoothing", "0.3"}})
            check_refusal(start_program(trainer(), how + other + Strings{"-o", parts, "--resume"}).wait(), "train_lora", format("begun with %s", kto && other[0] != "--beta" ? "desirable" : other[0].c_str() + 2));
        train(how + Strings{"-o", parts, "--resume"});
        CHECK(read_file(parts + file) == read_file(whole + file));
        CHECK(read_file(parts + "/best" + file) == read_file(whole + "/best" + file));
        for (const char* field : {"loss", "grad_norm", "rewards/margins", "eval_loss", "eval_rewards/margins"}) CHECK(logged(parts, field) == logged(whole, field));
    }
}

TEST_CASE("what --dpo cannot train: one line, and nothing is written") {
    Scratch out;
    const std::string long_pair = pack(out, "long", R"({"instruction": "warp?", "chosen": "a b c d e f g h i j k l m n o p", "rejected": "no"})" "\n");
    auto refused = [&](const Strings& arguments, const char* word) {
        check_refusal(start_program(trainer(), Strings{TINY} + arguments + Strings{"-o", out / "o"} + ONE).wait(), "train_lora", word);
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
    refused({pairs().all, "--dpo", "--kto"}, "--dpo or --kto: not both");
    refused({pairs().all, "--ipo", "--grpo", "--reward", "exact"}, "--ipo or --grpo: not both");
    refused({pairs().all, "--ipo", "--label-smoothing", "0.1"}, "--label-smoothing is for --dpo");
    refused({pairs().all, "--dpo", "--gamma", "1"}, "--gamma is for --simpo");
    refused({pairs().all, "--orpo", "--desirable-weight", "2"}, "--desirable-weight is for --kto");
    refused({pairs().rows, "--undesirable-weight", "2"}, "--undesirable-weight is for --kto");
    refused({pairs().rows, "--orpo"}, "rows.bin: --orpo trains on pairs");
    refused({pairs().all, "--kto"}, "all.bin: --kto trains on labelled answers");
    refused({pairs().labelled}, "labelled.bin: labelled answers: they need --kto");
    refused({pairs().labelled, "--kto", "--eval", pairs().labelled}, "80 rows are in");
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

TEST_CASE("pack: labelled answers, each with the answer to another prompt; LLaMA-Factory's entries; unpack and pack again") {
    Scratch scratch;
    const std::string rows = R"({"instruction": "Q", "output": "x", "kto_tag": true})" "\n"
        R"({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "human", "value": "R"}, {"from": "gpt", "value": "y z"}], "kto_tag": false})" "\n"
        R"({"messages": [{"role": "user", "content": "S"}, {"role": "assistant", "content": "x"}], "kto_tag": true})" "\n";
    const std::string path = pack(scratch, "x", rows);
    const Dataset data(path);
    const Tokenizer tokenizer(VOCABULARY);
    REQUIRE(data.labelled());
    REQUIRE(data.rows() == 6);
    auto text = [&](size_t i, bool trained) {
        std::vector<int> ids;
        for (uint32_t word : data.row(i)) if ((word & TRAIN) == (trained ? TRAIN : 0)) ids.push_back((int)(word & ~TRAIN));
        return tokenizer.decode(ids, true);
    };
    const char* answers[] = {"x", "y z", "x"}; // of each row; the mismatched one's is the row's before it
    for (size_t i = 0; i < 3; i++) {
        INFO(i);
        CHECK(data.desirable(i) == (i != 1));
        CHECK(text(2 * i, true) == tokenizer.decode(tokenizer.encode(answers[i], true), true) + tokenizer.decode(tokenizer.encode("<|im_end|>\n", true), true));
        CHECK(text(2 * i + 1, true) == text(i == 0 ? 2 : 2 * i - 2, true));
        CHECK(text(2 * i + 1, false) == text(2 * i, false));
    }
    const std::string again = must(datagen(), {"unpack", "-z", VOCABULARY, path}).out;
    CHECK(lines(again).size() == 3);
    CHECK(read_file(pack(scratch, "again", again)) == read_file(path));
    CHECK(must(datagen(), {"stats", path}).out.find("rows      3, 3 of them different; labelled answers") != std::string::npos);
    // LLaMA-Factory's kto_en_demo, with its entry; and the entry that pack writes for rows with kto_tag.
    write_file(scratch / "demo.json", R"([{"messages": [{"content": "S", "role": "user"}, {"content": "x", "role": "assistant"}], "label": true},)"
        R"({"messages": [{"content": "T", "role": "user"}, {"content": "y", "role": "assistant"}], "label": false}])");
    write_file(scratch / "dataset_info.json", R"({"demo": {"file_name": "demo.json", "formatting": "sharegpt", "columns": {"messages": "messages", "kto_tag": "label"},)"
        R"("tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}}})");
    const Result r = must(datagen(), {"pack", "-z", VOCABULARY, scratch / "dataset_info.json", scratch / "demo.bin", "--name", "demo"});
    CHECK(r.err.find("kto_tag <- label") != std::string::npos);
    const Dataset demo(scratch / "demo.bin");
    CHECK((demo.labelled() && demo.desirable(0) && !demo.desirable(1)));
    pack(scratch, "own", lines(rows)[0] + "\n" + R"({"instruction": "R", "output": "y", "kto_tag": false})" "\n", {"--info", scratch / "dataset_info.json"});
    must(datagen(), {"pack", "-z", VOCABULARY, scratch / "dataset_info.json", scratch / "own2.bin", "--name", "own"});
    CHECK(read_file(scratch / "own2.bin") == read_file(scratch / "own.bin"));
    // Neighbours with the same prompt are not mismatched.
    std::string two;
    for (const char* prompt : {"Q", "R", "S"})
        for (const char* label : {"true", "false"}) two += format(R"({"instruction": "%s", "output": "%s %s", "kto_tag": %s})" "\n", prompt, prompt, label, label);
    const Dataset apart(pack(scratch, "apart", two));
    const size_t from[] = {2, 2, 1, 1, 3, 3}; // whose answer each has
    REQUIRE(apart.rows() == 12);
    for (size_t i = 0; i < 6; i++) {
        const DatasetRow mixed = apart.row(2 * i + 1), other = apart.row(2 * from[i]);
        const auto answer = [](DatasetRow row) { return std::vector<uint32_t>(std::find_if(row.begin(), row.end(), [](uint32_t word) { return word & TRAIN; }), row.end()); };
        CHECK(answer(mixed) == answer(other));
    }
    // A mismatched answer is cut, and never the row's own.
    const std::string long_rows = R"({"instruction": "a b c d e f", "output": "x", "kto_tag": true})" "\n" R"({"instruction": "a", "output": "a b c d e f", "kto_tag": true})" "\n";
    const Dataset uncut(pack(scratch, "uncut", long_rows));
    const size_t longest = std::max(uncut.row(0).size(), uncut.row(2).size());
    const Dataset cut(pack(scratch, "cut", long_rows, {"--info", "none", "--max-len", format("%zu", longest)}));
    CHECK(uncut.row(1).size() > longest);
    CHECK((cut.rows() == 4 && cut.row(1).size() == longest && cut.row(0).size() == uncut.row(0).size()));
    // Refused
    auto refused = [&](const std::string& text, const char* word) {
        write_file(scratch / "bad.jsonl", text + "\n");
        check_refusal(start_program(datagen(), {"pack", "-z", VOCABULARY, scratch / "bad.jsonl", scratch / "bad.bin", "--info", "none"}).wait(), "datagen", word);
        CHECK(!fs::exists(scratch / "bad.bin"));
    };
    const std::string good = lines(rows)[0] + "\n", none = R"({"instruction": "Q", "output": "x"})";
    refused(good + R"({"instruction": "Q", "output": "y", "kto_tag": false})", "labelled answers to one prompt only");
    refused(good + none, "line 2: kto_tag: missing");
    refused(none + "\n" + good, "line 2: a label (kto_tag), and no row before it has one");
    refused(good + R"({"instruction": "Q", "output": "x", "kto_tag": "yes"})", "line 2: kto_tag: neither true nor false");
    refused(R"({"instruction": "Q", "chosen": "x", "rejected": "y", "kto_tag": true})", "line 1: a pair, and a label");
    refused(R"({"text": "Q", "kto_tag": true})", "line 1: a text, and a label");
}

TEST_CASE("pack: what is no pair is named by its line, and nothing is written") {
    Scratch scratch;
    const std::string good = R"({"instruction": "Q", "chosen": "x", "rejected": "y"})" "\n";
    auto refused = [&](const std::string& row, const char* word) {
        write_file(scratch / "x.jsonl", good + row + "\n");
        const Result r = start_program(datagen(), {"pack", "-z", VOCABULARY, scratch / "x.jsonl", scratch / "x.bin", "--info", "none"}).wait();
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
    check_refusal(start_program(datagen(), {"pack", "-z", VOCABULARY, scratch / "y.jsonl", scratch / "x.bin", "--info", "none"}).wait(), "datagen", "line 2: a chosen and a rejected answer");
    check_refusal(start_program(datagen(), {"pack", "-z", VOCABULARY, scratch / "y.jsonl", scratch / "x.bin", "--info", "none", "--max-len", "4"}).wait(), "datagen", "line 2: a chosen and a rejected answer");
    // Too long: one answer, or the prompt.
    write_file(scratch / "z.jsonl", good + R"({"instruction": "Q", "chosen": "a b c d e f g h i j k l m n o p", "rejected": "y"})" "\n");
    const Strings how = {"pack", "-z", VOCABULARY, scratch / "z.jsonl", scratch / "z.bin", "--info", "none", "--max-len", "24"};
    CHECK(must(datagen(), how).err.find("1 dropped") != std::string::npos);
    CHECK(Dataset(scratch / "z.bin").rows() == 2);
    check_refusal(start_program(datagen(), how + Strings{"--over", "refuse"}).wait(), "datagen", "line 2: ");
    check_refusal(start_program(datagen(), how + Strings{"--max-len", "5"}).wait(), "datagen", "all rows are too long");
}
