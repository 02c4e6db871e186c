// Training mixtures of experts: gradients and losses beside PEFT's and PyTorch's (tests/fixtures/moe/train.json).
#include "model/write.h"
#include "tests/gradients.h"
#include "tests/trainer.h"

namespace {
const std::string FOLDER = "tests/fixtures/moe/odd_f32", ADAPTER = "tests/fixtures/moe/adapter";

const Json& fixture() {
    static const Json once(read_file("tests/fixtures/moe/train.json"));
    return once;
}

// A trainer on the fixture's rows, all in one batch unless said; balanced: the config asks for the load-balancing loss.
template <class T> struct Run {
    Scratch scratch;
    std::unique_ptr<ModelFile> file;
    std::unique_ptr<Dataset> data;
    TrainOptions o;
    Context ctx;
    std::unique_ptr<Trainer<T>> t;
    explicit Run(bool balanced, bool full = false, int batch = 16, float dropout = 0, bool recompute = false, bool plain = false) {
        std::string config = read_file(FOLDER + "/config.json");
        if (balanced) config.insert(config.rfind('}'), format(R"(, "output_router_logits": true, "router_aux_loss_coef": %g)", fixture()["coefficient"].number()));
        write_file(scratch / "config.json", config);
        fs::create_symlink(fs::absolute(FOLDER + "/model.safetensors"), scratch / "model.safetensors");
        file = std::make_unique<ModelFile>(scratch.path.string());
        DatasetWriter writer(scratch / "rows.bin", 0, 0);
        for (size_t row = 0; row < fixture()["ids"].size(); row++) {
            std::vector<uint32_t> words;
            for (size_t i = 0; i < fixture()["ids"][row].size(); i++)
                words.push_back((uint32_t)fixture()["ids"][row][i].number() | (fixture()["trained"][row][i].number() ? TRAIN : 0));
            writer.add(words);
        }
        writer.commit();
        data = std::make_unique<Dataset>(scratch / "rows.bin");
        o.dropout = dropout, o.full = full, o.shuffle = false, o.recompute = recompute;
        o.batch = batch, o.accum = 16 / batch, o.steps = (int64_t)fixture()["steps"].number(), o.lr = fixture()["lr"].number();
        o.adapter_init = ADAPTER, o.lora = AdapterFile(ADAPTER, file->config).config;
        ctx.plain = plain;
        t = std::make_unique<Trainer<T>>(o, ctx, *file, *data, nullptr);
    }
    std::vector<acc<T>> gradient() {
        t->add_gradients(t->loader.rows, data->trained());
        return t->params.host(t->params.gradient);
    }
};

Tensors tensors_of(const MappedFile& map) {
    Tensors tensors;
    Metadata metadata;
    read_safetensors(map, tensors, metadata);
    return tensors;
}

TEST_CASE("experts: the gradient of every adapter's number within 1e-5 of PEFT's, with and without the load-balancing loss") {
    for (bool balanced : {false, true})
        for (int how = 0; how < 4; how++) { // as it comes; in batches of 16 rows; recomputed; by the definitions
            CAPTURE(balanced);
            CAPTURE(how);
            Run<float> run(balanced, false, 16, 0, how == 2, how == 3);
            const auto g = run.gradient();
            const MappedFile map(ADAPTER + (balanced ? "/balanced.safetensors" : "/plain.safetensors"));
            const Tensors theirs = tensors_of(map);
            size_t compared = 0;
            double off = 0, size = 0;
            each_adapter_tensor(run.t->w, [&](const std::string& name, size_t rows, size_t columns, size_t at, size_t apart) {
                const auto want = theirs.find(name);
                INFO(name);
                REQUIRE(want != theirs.end());
                compared++;
                for (size_t r = 0; r < rows; r++)
                    for (size_t i = 0; i < columns; i++) {
                        const double x = number(want->second, r * columns + i), ours = g[at + r * apart + i];
                        off += (ours - x) * (ours - x), size += x * x;
                    }
            });
            CHECK(compared == theirs.size());
            CHECK(compared == 2u * 2 * (4 + 7 * 3));
            INFO("relative error " << std::sqrt(off / size));
            CHECK(std::sqrt(off / size) < 1e-5);
        }
}

TEST_CASE("experts: router, experts and norms with --full within 1e-5 of PyTorch's") {
    Run<float> run(true, true);
    const auto g = run.gradient();
    const MappedFile map(ADAPTER + "/full.safetensors");
    const Tensors theirs = tensors_of(map);
    size_t compared = 0;
    run.t->params.each_tensor([&](const ModelTensor& tensor, size_t at) {
        const auto want = theirs.find(tensor.name());
        if (want == theirs.end()) return;
        double off = 0, size = 0;
        for (size_t i = 0; i < tensor.size(); i++) {
            const double x = number(want->second, i);
            off += std::pow(g[at + i] - x, 2), size += x * x;
        }
        INFO(tensor.name() << ": " << std::sqrt(off / size));
        CHECK(std::sqrt(off / size) < 1e-5);
        compared++;
    });
    CHECK(compared == theirs.size());
}

TEST_CASE("experts: the losses of twelve steps are PEFT's within 1e-6") {
    for (const char* name : {"plain", "balanced"}) {
        Run<float> run(std::string(name) == "balanced");
        const sj::Value peft = fixture()[name];
        for (size_t step = 0; step < peft["losses"].size(); step++) {
            REQUIRE(run.t->train_step());
            const double want = peft["losses"][step].number();
            INFO(name << " " << step << ": " << run.t->last_loss << " " << want);
            CHECK(std::fabs(run.t->last_loss - want) < 1e-6 * want);
            CHECK(run.t->last_norm == doctest::Approx(peft["norms"][step].number()).epsilon(1e-4));
        }
    }
}

TEST_CASE("experts: a step's bits do not depend on how it is cut into batches, with dropout; masks differ by expert") {
    Run<float> whole(false, false, 16, 0.3f), cut(false, false, 2, 0.3f), none(false);
    const auto a = whole.gradient(), b = cut.gradient(), c = none.gradient();
    CHECK(a == b);
    CHECK(a != c);
    std::set<int> numbers;
    each_adapter(whole.t->w, [&](Linear<float>& linear, AdapterPlace) {
        for (int j = 0; j < linear.adapter.modules; j++) {
            CHECK(numbers.insert(linear.adapter.module[j]).second);
            const ModuleOf m = module_numbered(linear.adapter.module[j], 2);
            CHECK(module_number(m, 2) == linear.adapter.module[j]);
        }
    });
    CHECK(numbers.size() == 2 * (4 + 7 * 3));
}

TEST_CASE("experts in bf16: gradients near to float's; packed experts (QLoRA) train") {
    Run<float> exact(false);
    Run<bf16> rounded(false);
    const auto a = exact.gradient(), b = rounded.gradient();
    REQUIRE(a.size() == b.size());
    double off = 0, size = 0;
    for (size_t i = 0; i < a.size(); i++) off += std::pow(a[i] - b[i], 2), size += a[i] * (double)a[i];
    INFO(std::sqrt(off / size));
    CHECK(std::sqrt(off / size) < 0.1);
    CHECK(off > 0);
}

TEST_CASE("experts: an adapter is written, read, merged and served as PEFT's; what it cannot be is refused") {
    const Scratch s;
    const char* const qwen3 = program("QWEN3", "./qwen3");
    auto logits = [&](const Strings& arguments) {
        const Result r = Process(qwen3, arguments + Strings{"-d", "cpu", "--dtype", "f32", "--ids", "5 6 7 200 12", "--logits", s / "logits"}).wait();
        INFO(r.err);
        REQUIRE(r.status == 0);
        const std::string bytes = read_file(s / "logits");
        std::vector<float> v(bytes.size() / 4);
        memcpy(v.data(), bytes.data(), 4 * v.size());
        return v;
    };
    const auto base = logits({FOLDER}), with = logits({FOLDER, "--adapter", ADAPTER});
    double moved = 0;
    for (size_t i = 0; i < base.size(); i++) moved = std::max(moved, std::fabs((double)base[i] - with[i]));
    CHECK(moved > 0.05);
    // As PEFT merges it: W + s B A, in float.
    const ModelFile file(FOLDER);
    const AdapterFile adapter(ADAPTER, file.config);
    write_merged(file, adapter, s / "by_hand.bin");
    const auto merged = logits({s / "by_hand.bin"});
    double off = 0;
    for (size_t i = 0; i < base.size(); i++) off = std::max(off, std::fabs((double)merged[i] - with[i]));
    CHECK(off < 1e-4);
    // An adapter without an expert; names that PEFT would not match.
    std::string bytes = read_file(ADAPTER + "/adapter_model.safetensors");
    const std::string one = "layers.1.mlp.experts.6.up_proj.lora_A.weight";
    bytes[bytes.find(one) + one.size() - 1] = 'x';
    fs::create_directory(s / "a");
    write_file(s / "a/adapter_model.safetensors", bytes), write_file(s / "a/adapter_config.json", read_file(ADAPTER + "/adapter_config.json"));
    check_refusal(Process(qwen3, {FOLDER, "--adapter", s / "a", "--ids", "1"}).wait(), "qwen3", one);
    std::string config = read_file(ADAPTER + "/adapter_config.json");
    config.replace(config.find("\"down_proj\""), strlen("\"down_proj\""), "\"mlp.down_proj\"");
    write_file(s / "a/adapter_config.json", config);
    check_refusal(Process(qwen3, {FOLDER, "--adapter", s / "a", "--ids", "1"}).wait(), "qwen3", "mlp.down_proj");
    check_refusal(Process(qwen3, {FOLDER, "--adapter", ADAPTER, "--convert-adapter", s / "a.gguf"}).wait(), "qwen3", "adapter of experts");
    CHECK_THROWS_WITH_AS(([&] {
        Run<float> run(true);
        run.o.preference = &PREFERENCE_LOSSES[0];
        Trainer<float>(run.o, run.ctx, *run.file, *run.data, nullptr);
    }()), doctest::Contains("load-balancing loss"), Error);
}
} // namespace
