// DoRA: its ops by PEFT's formula, in double by finite differences; beside PEFT (gradients, losses, files, merged); and by
// train_lora and the other programs (TRAIN_LORA, QWEN3, DATAGEN, SERVE, else those here). PEFT's numbers are fixtures,
// made by tests/reference/make_train_fixtures.py.
#include <doctest/doctest.h>
#include "model/adapters.h"
#include "model/session.h"
#include "model/write.h"
#include "tests/dora.h"
#include "tests/files.h"
#include "tests/process.h"
#include "tests/trainer.h"

static const std::string FIXTURES = "tests/fixtures/train/", TINY = "tests/fixtures/tiny/model.bin", VOCABULARY = "tests/fixtures/tiny/tokenizer.bin";

static const std::pair<std::vector<int>, std::vector<int>> BLOCKS[] = {{{9}, {0}}, {{6, 4, 4}, {0, 1, 2}}, {{6, 4, 4}, {1, 2}}, {{5, 5}, {1}}};

TEST_CASE_TEMPLATE("DoRA's product: PEFT's formula, with dropout or without; rows without a module", T, bf16, float, double) {
    EACH_WAY;
    Random random{3};
    for (float p : {0.f, 0.3f})
        for (auto& [rows, blocks] : BLOCKS) {
            const int N = 5, in = 40;
            DoraProduct<T> d(random, rows, blocks, in, 3, N, p, 0.3);
            const int out = d.W.out();
            const std::vector<T> x = random.fill<T>((size_t)N * in);
            const std::vector<acc<T>> residual = random.fill<acc<T>>((size_t)N * out);
            std::vector<T> y((size_t)N * out);
            std::vector<acc<T>> sum((size_t)N * out);
            CALL(dora_norm, d.W);
            CALL(linear, y.data(), x.data(), d.W, N);
            std::vector<double> want, want_u, size, total;
            for (int n = 0; n < N; n++)
                for (int r = 0; r < out; r++) {
                    want_u.emplace_back(), size.emplace_back();
                    want.push_back(d.row(x, n, r, &want_u.back(), &size.back()));
                    total.push_back(want.back() + residual[want.size() - 1]);
                }
            auto near = [&](size_t i) { return 2 * rounding<T>(size[i]) + sum_error<T>(size[i]); };
            CHECK(wrong(y, want, near) == 0);
            CHECK(wrong(d.u, want_u, near) == 0);
            CALL(linear_add, sum.data(), residual.data(), x.data(), d.W, N);
            CHECK(wrong(sum, total, near) == 0);
            for (int r = 0; r < out; r++) CHECK((d.W.module_of(r) < 0) == (d.c[r] == 1 && std::isinf(d.norm[r])));
        }
}

// dL/dx by central differences, against `got`.
static void check_gradient(const char* name, std::vector<double>& x, const std::vector<double>& got, const std::function<double()>& f) {
    REQUIRE(x.size() == got.size());
    double size = 0, worst = 0;
    for (size_t i = 0; i < x.size(); i++) {
        const double was = x[i], h = 1e-5;
        if (was == 0 && got[i] == 0) continue; // a number of B or m that no module has
        x[i] = was + h;
        const double above = f();
        x[i] = was - h;
        const double want = (above - f()) / (2 * h);
        x[i] = was, size = std::max(size, std::fabs(want)), worst = std::max(worst, std::fabs(got[i] - want));
    }
    INFO(std::string(name) << ": largest gradient " << size << ", largest difference " << worst);
    CHECK(size > 1e-3);
    CHECK(worst < 1e-7 * std::max(size, 1.));
}

TEST_CASE("DoRA: finite differences by x, A, B and m, with the norm as a constant; what no module has stays as it is") {
    EACH_WAY;
    Random random{7};
    for (float p : {0.f, 0.4f})
        for (auto& [rows, blocks] : BLOCKS) {
            const int N = 4, in = 21;
            DoraProduct<double> d(random, rows, blocks, in, 3, N, p);
            const int out = d.W.out();
            std::vector<double> x = random.fill<double>((size_t)N * in), y((size_t)N * out), du((size_t)N * out), dx(x.size()), dh(d.h.size());
            std::vector<double> dA(d.A.size()), dB(d.B.size()), dm(out);
            const std::vector<double> g = random.fill<double>((size_t)N * out);
            CALL(dora_norm, d.W);
            auto f = [&] {
                d.use();
                for (int r = 0; r < out; r++) d.c[r] = std::isinf(d.norm[r]) ? 1 : d.m[r] / d.norm[r];
                CALL(linear, y.data(), x.data(), d.W, N);
                double sum = 0;
                for (size_t i = 0; i < y.size(); i++) sum += y[i] * g[i];
                return sum;
            };
            f();
            dora_backward(du.data(), dm.data(), g.data(), d.W, N);
            CALL(linear_backward_input, dx.data(), dh.data(), dB.data(), du.data(), d.W, N);
            CALL(lora_backward_weight, dA.data(), dh.data(), x.data(), d.W, N);
            check_gradient("x", x, dx, f);
            check_gradient("A", d.A, dA, f);
            check_gradient("B", d.B, dB, f);
            check_gradient("m", d.m, dm, f);
            for (int r = 0; r < out; r++) CHECK((d.W.module_of(r) < 0) == (dm[r] == 0));
        }
}

TEST_CASE_TEMPLATE("DoRA's gradients: the definition in double", T, bf16, float) {
    EACH_WAY;
    Random random{8};
    for (float p : {0.f, 0.3f})
        for (auto& [rows, blocks] : BLOCKS) {
            const int N = 7, in = 40;
            DoraProduct<T> d(random, rows, blocks, in, 3, N, p, 0.3);
            Random unused{1};
            DoraProduct<double> wide(unused, rows, blocks, in, 3, N, p);
            const int out = d.W.out();
            const std::vector<T> x = random.fill<T>((size_t)N * in), dy = random.fill<T>((size_t)N * out);
            wide.w = as_double(d.w), wide.A = as_double(d.A), wide.B = as_double(d.B), wide.m = as_double(d.m);
            for (size_t b = 0, row = 0; b < rows.size(); row += (size_t)rows[b++]) wide.W.w[b] = &wide.w[row * in];
            wide.use();
            CALL(dora_norm, d.W), dora_norm(wide.W);
            std::vector<T> y((size_t)N * out), du((size_t)N * out), dx(x.size()), dh(d.h.size());
            std::vector<double> want_y(y.size()), want_u(du.size()), want_x(dx.size()), want_h(dh.size()), want_B(d.B.size()), want_m(out);
            std::vector<acc<T>> dB(d.B.size()), dm(out);
            CALL(linear, y.data(), x.data(), d.W, N);
            linear(want_y.data(), as_double(x).data(), wide.W, N);
            dora_backward(du.data(), dm.data(), dy.data(), d.W, N);
            dora_backward(want_u.data(), want_m.data(), as_double(dy).data(), wide.W, N);
            CALL(linear_backward_input, dx.data(), dh.data(), dB.data(), du.data(), d.W, N);
            linear_backward_input(want_x.data(), want_h.data(), want_B.data(), want_u.data(), wide.W, N);
            auto off = [](const auto& got, const std::vector<double>& want) { // |got - want| / |want|
                double sum = 0, all = 0;
                for (size_t i = 0; i < want.size(); i++) sum += std::pow((double)to_acc(got[i]) - want[i], 2), all += want[i] * want[i];
                return std::sqrt(sum / all);
            };
            const double most = std::is_same_v<T, float> ? 2e-6 : 8e-3;
            CHECK(off(du, want_u) < most);
            CHECK(off(dm, want_m) < most);
            CHECK(off(dx, want_x) < most);
            CHECK(off(dh, want_h) < most);
            CHECK(off(dB, want_B) < most);
        }
}

// ---- Beside PEFT

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

TEST_CASE("DoRA beside PEFT: gradients, the losses of 30 steps, with LoRA+ and rsLoRA, recomputed too; in use and merged") {
    const Json peft(read_file(FIXTURES + "dora.json"));
    Scratch scratch;
    for (auto [name, base] : {std::pair("all", "tied"), {"some", "untied"}})
        for (bool recompute : {false, true}) {
            const std::string kind = name;
            INFO(kind);
            const bool some = kind == "some";
            write_rows(base, scratch / "rows.bin");
            const Dataset data(scratch / "rows.bin");
            const ModelFile file(FIXTURES + base);
            TrainOptions o;
            o.adapter_init = FIXTURES + "dora_" + name;
            o.lora = AdapterFile(o.adapter_init, file.config).config;
            CHECK(o.lora.dora);
            CHECK(o.lora.rslora == some);
            o.dropout = 0, o.batch = 3, o.steps = 30, o.lr = peft["lr"].number(), o.shuffle = false, o.recompute = recompute;
            if (some) o.loraplus = peft["ratio"].number();
            Trainer<float> t(o, Context(), file, data, nullptr);
            CHECK(t.params.trained() == adapter_parameters(file.config, o.lora));
            t.add_gradients(t.loader.rows, data.trained());
            const MappedFile map(o.adapter_init + "/gradients.safetensors");
            Tensors theirs;
            Metadata metadata;
            read_safetensors(map, theirs, metadata);
            size_t compared = 0;
            each_adapter_tensor(t.w, [&](const std::string& tensor, size_t rows, size_t columns, size_t at, size_t apart) {
                INFO(tensor);
                double off = 0, size = 0;
                for (size_t i = 0; i < rows * columns; i++) {
                    const double x = number(theirs.at(tensor), i);
                    off += std::pow(t.params.gradient[at + i / columns * apart + i % columns] - x, 2), size += x * x;
                }
                CHECK(size > 1e-9);
                CHECK(std::sqrt(off / size) < 5e-6);
                compared++;
            });
            CHECK(compared == theirs.size());
            double worst = 0;
            for (int i = 0; i < 30; i++) {
                REQUIRE(t.train_step());
                worst = std::max(worst, std::fabs(t.last_loss - peft[name]["losses"][i].number()));
                CHECK(t.last_norm == doctest::Approx(peft[name]["norms"][i].number()).epsilon(2e-4));
            }
            INFO("largest difference of a loss " << worst);
            CHECK(worst < 2e-6);
            t.write_result(scratch / name, 0);
            const AdapterFile written(scratch / name, file.config);
            CHECK(written.tensors.size() == theirs.size());
            for (auto& [tensor, first] : theirs) CHECK(written.tensors.at(tensor).shape == first.shape);
            CHECK(Json(read_file(scratch / name + "/adapter_config.json"))["use_dora"].boolean());

            // In use, and merged: the trainer's loss.
            Weights<float> w(file);
            const AttachedAdapter<float> attached(t.ctx, w, written, Session<float>::CHUNK);
            write_merged(file, written, scratch / "merged.bin");
            const ModelFile merged(scratch / "merged.bin");
            const Weights<float> whole(merged);
            const double loss = t.mean_loss(data, t.loader.rows);
            CHECK(session_loss(file.config, w, data) == doctest::Approx(loss).epsilon(1e-5));
            CHECK(session_loss(merged.config, whole, data) == doctest::Approx(loss).epsilon(1e-5));
        }
}

// ---- The programs

TEST_CASE("train_lora --dora: m begins as W's lengths; resume to the bit; the same bits however a step is cut, recomputed, on any threads; ranks") {
    Scratch out;
    const std::string text = read_file(FIXTURES + "rows.jsonl");
    write_file(out / "rows.jsonl", text.substr(0, text.find('\n', text.size() * 2 / 5) + 1));
    const std::string rows = out / "rows.bin";
    must(program("DATAGEN", "./datagen"), {"pack", "-z", VOCABULARY, out / "rows.jsonl", rows, "--info", "none"});
    const Strings how = {TINY, rows, "-d", "cpu", "--rank", "4", "--lr", "5e-3", "--batch", "8", "--steps", "12", "--dora"};
    train(how + Strings{"-o", out / "w"});
    train({TINY, rows, "-d", "cpu", "--rank", "4", "--lr", "5e-3", "--batch", "8", "--steps", "12", "-o", out / "lora"});
    const std::vector<double> losses = logged(out / "w", "loss");
    CHECK(losses[0] == doctest::Approx(logged(out / "lora", "loss")[0]).epsilon(1e-3)); // c is 1
    CHECK(std::fabs(losses.back() - logged(out / "lora", "loss").back()) > 1e-4);
    CHECK(losses.back() < 0.7 * losses[0]);
    train(how + Strings{"--steps", "1", "--lr", "0", "--dtype", "f32", "-o", out / "first"});
    const ModelFile base(TINY);
    const AdapterFile first(out / "first", base.config);
    for (const ModelTensor& t : targeted(base.config, first.config)) {
        double off = 0;
        for (int r = 0; r < t.rows; r++) {
            double sum = 0;
            for (int i = 0; i < t.columns; i++) sum += std::pow((double)number(base.tensors.at(t.name()), (size_t)r * t.columns + i), 2);
            off = std::max(off, std::fabs(number(first.tensors.at(adapter_tensor(t, 'm')), (size_t)r) / std::sqrt(sum) - 1));
        }
        CHECK(off < 1e-6);
    }

    Process p = start_training(how + Strings{"-o", out / "parts"});
    interrupt_at_step(4, p, out / "parts");
    CHECK(logged(out / "parts", "loss").size() < 12);
    Strings other = how;
    other.pop_back();
    check_refusal(start_training(other + Strings{"-o", out / "parts", "--resume"}).wait(), "train_lora", "begun with dora true, not unset");
    train(how + Strings{"-o", out / "parts", "--resume"});
    CHECK(adapter(out / "parts") == adapter(out / "w"));
    for (const Strings& cut : {Strings{"--batch", "2", "--accum", "4"}, {"--recompute"}, {"-j", "2"}}) {
        train(how + cut + Strings{"-o", out / "c", "--overwrite"});
        CHECK(adapter(out / "c") == adapter(out / "w"));
    }
    train(how + Strings{"--batch", "4", "--gpus", "2", "-o", out / "two"});
    for (size_t i = 0; i < 4; i++) CHECK(logged(out / "two", "loss")[i] == doctest::Approx(losses[i]).epsilon(1e-3));

    // In use, merged, trained on, on packed weights, on preferences.
    const Strings ask = {"-d", "cpu", "-z", VOCABULARY, "-t", "0", "-n", "16", "-i", "What is a warp?", "--dtype", "f32"};
    const char* qwen3 = program("QWEN3", "./qwen3");
    train({TINY, "--adapter-init", out / "w", "--dtype", "f32", "--merge", out / "merged"});
    const std::string said = must(qwen3, Strings{TINY, "--adapter", out / "w"} + ask).out;
    CHECK(said == must(qwen3, Strings{out / "merged"} + ask).out);
    CHECK(said != must(qwen3, Strings{TINY} + ask).out);
    train({TINY, rows, "--adapter-init", out / "w", "--steps", "2", "--batch", "8", "--lr", "1e-4", "-o", out / "on"});
    CHECK(logged(out / "on", "loss")[0] < 0.8 * losses[0]);
    CHECK(Json(read_file(out / "on" + "/adapter_config.json"))["use_dora"].boolean());
    must(qwen3, {TINY, "-z", VOCABULARY, "--quantize", "int8", out / "small.bin"});
    Strings packed = how;
    packed[0] = out / "small.bin";
    train(packed + Strings{"-o", out / "packed"});
    CHECK(logged(out / "packed", "loss").back() < 0.7 * losses[0]);

    // What has no place for it.
    check_refusal(Process(qwen3, {TINY, "--adapter", out / "w", "--convert-adapter", out / "a.gguf"}).wait(), "qwen3", "DoRA (use_dora) has no place in a GGUF adapter");
    const Result served = Process(program("SERVE", "./serve"), {TINY, "-z", VOCABULARY, "--port", "0", "--adapter", "a=" + out / "w"}).wait();
    CHECK(served.status == 1);
    CHECK(served.err.find("DoRA (use_dora) beside other adapters") != std::string::npos);
    auto refused = [&](const Strings& arguments, const std::string& word) { check_refusal(start_training(arguments + Strings{"-o", out / "no"}).wait(), "train_lora", word); };
    refused({TINY, rows, "--full", "--dora"}, "--full trains the model itself: there is no adapter for --dora");
    refused({TINY, rows, "--adapter-init", out / "w", "--dora"}, "--dora: --adapter-init says it already");
    const ModelFile experts("tests/fixtures/moe/odd_f32");
    write_rows("tied", out / "small.rows");
    const Dataset few(out / "small.rows");
    TrainOptions o;
    o.lora.rank = 2, o.lora.alpha = 4, o.lora.dora = true, o.steps = 1;
    std::fill(o.lora.targets, o.lora.targets + GATE_PROJ, true);
    Trainer<float> attention(o, Context(), experts, few, nullptr); // (their q, k, v and o can have it)
    CHECK(attention.train_step());
    o.lora.targets[DOWN_PROJ] = true;
    CHECK_THROWS_WITH((Trainer<float>(o, Context(), experts, few, nullptr)), "--dora: DoRA of experts is not supported: q, k, v and o_proj alone can have it");
}
