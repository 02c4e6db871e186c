// RoPE beyond the positions of training: frequencies and logits against transformers' (make_rope_fixtures.py), attention to
// a token 110,000 positions back, --rope-scaling.
#include "tests/common.h"
#include "tests/far.h"
#include "tests/golden.h"
#include "tests/process.h"
#include <numeric>

namespace {
const std::string LAYER = "tests/fixtures/untied_f32_sharded"; // a model of one layer
const char* const YARN = R"({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768})";

TEST_CASE("tables: frequencies, factor of cosines and sines, transformers' to the last bit but one") {
    size_t tables = 0;
    for (const std::string& line : lines(read_file("tests/fixtures/rope/tables.jsonl"))) {
        const Json table(line);
        INFO(std::string(table["rope_scaling"].raw()));
        const int D = (int)table["head_dim"].number();
        double theta = 0;
        const RopeScaling s = parse_rope("f", table.root(), D, (int)table["max_position_embeddings"].number(), theta);
        CHECK(theta == table["rope_theta"].number());
        CHECK(s.attention == doctest::Approx(table["attention_factor"].number()).epsilon(1e-12));
        const int positions = 1000;
        std::vector<float> rope((size_t)positions * D);
        std::vector<double> exact(rope.size());
        fill_rope(rope.data(), positions, D, theta, s), fill_rope(exact.data(), positions, D, theta, s);
        REQUIRE(table["frequencies"].size() == (size_t)D / 2);
        for (int i = 0; i < D / 2; i++) {
            const double f = table["frequencies"][(size_t)i].number();
            for (int p : {0, 1, 10, 999}) {
                const size_t at = (size_t)p * D + 2 * i;
                // Angles in float: of the frequency, of the product.
                const double near = s.attention * (2e-7 + p * f * 2.5e-7);
                CHECK(std::fabs(rope[at] - s.attention * std::cos(p * f)) < near);
                CHECK(std::fabs(rope[at + 1] - s.attention * std::sin(p * f)) < near);
                CHECK(std::fabs(exact[at] - s.attention * std::cos(p * f)) < near);
            }
        }
        tables++;
    }
    CHECK(tables == 17);
}

// The model with another rope_scaling, as a file.
struct Scaled {
    Scratch folder;
    std::unique_ptr<ModelFile> file;
    explicit Scaled(const std::string& scaling) {
        fs::copy(LAYER, folder.path, fs::copy_options::recursive);
        std::string config = read_file(LAYER + "/config.json");
        const size_t begin = config.find("\"rope_parameters\": {"), end = config.find('}', begin);
        REQUIRE(end < config.size());
        config.replace(begin, end + 1 - begin, "\"rope_theta\": 1e4, \"rope_scaling\": " + scaling);
        write_file(folder / "config.json", config);
        file = std::make_unique<ModelFile>(folder.path.string());
    }
};

constexpr int POSITIONS[] = {100, 40000, 120000}, ROWS = 4; // of the fixture
template <class T> std::vector<std::vector<acc<T>>> far_logits(const ModelFile& file, size_t most, const Context& ctx) {
    const Weights<T> weights(file);
    const std::vector<int> text = far_text(POSITIONS[most - 1] + 1);
    Session<T> session(file.config, weights, (int)text.size(), ctx);
    fill_cache(session, {text.begin(), text.end() - ROWS});
    std::vector<std::vector<acc<T>>> all;
    for (size_t i = 0; i < most; i++) {
        const auto end = text.begin() + POSITIONS[i] + 1;
        session.ids.assign(text.begin(), end - ROWS); // later keys are in the cache, too: no row sees them
        all.emplace_back();
        session.feed({end - ROWS, end}, nullptr, [&](const acc<T>* row) {
            all.back().insert(all.back().end(), row, row + file.config.V);
        });
    }
    return all;
}

TEST_CASE("YaRN: logits at positions 100, 40,000 and 120,000 within 2e-4 of transformers'") {
    const Scaled yarn(YARN), plain(R"({"rope_type": "default"})");
    const size_t V = (size_t)yarn.file->config.V, block = ROWS * V;
    CHECK(yarn.file->config.max_positions == 131072);
    const MappedFile golden("tests/fixtures/rope/logits.f32");
    REQUIRE(golden.size == std::size(POSITIONS) * block * sizeof(float));
    const auto off = [&](const auto& logits, size_t i) {
        double most = 0;
        REQUIRE(logits.size() == block);
        for (size_t v = 0; v < block; v++)
            most = std::max(most, std::fabs((double)logits[v] - ((const float*)golden.data)[i * block + v]));
        return most;
    };
    Context defined;
    defined.plain = true;
    // (Book I adds 120,000 weights one by one, in float: at the last position its error is 3.6e-4.)
    for (const Context& ctx : {cpu(), defined}) {
        const auto logits = far_logits<float>(*yarn.file, ctx.plain ? 2 : 3, ctx);
        for (size_t i = 0; i < logits.size(); i++) {
            INFO("position " << POSITIONS[i]);
            CHECK(off(logits[i], i) < 2e-4);
        }
    }
    CHECK(off(far_logits<double>(*yarn.file, 1, cpu())[0], 0) < 2e-4); // (farther, its angles are more exact than float's)
    CHECK(off(far_logits<float>(*plain.file, 3, cpu())[2], 2) > 0.1);  // it can fail
}

TEST_CASE_TEMPLATE("attention finds a token 110,000 positions back by a plane whose frequency is scaled", T, bf16, float, double) {
    EACH_WAY;
    // Query and needle have the slowest plane only, all other keys the fastest: their scores are 0. Scaled, the needle's
    // plane has turned by 5.9, whose cosine is 0.91; unscaled by 14.7, whose cosine is -0.5.
    constexpr int D = 16, NEEDLE = 4000, QUERY = 114000, CHUNK = 1000;
    constexpr double THETA = 26800;
    const RopeScaling scaling = {RopeScaling::YARN, 2.5, 46000, 0.1 * std::log(2.5) + 1, 32, 1, true};
    const std::vector<T> weight(D, to_stored<T>((acc<T>)3));
    const int pages = QUERY / PAGE + 1;
    std::vector<int> table(pages), pos(CHUNK), seq(CHUNK);
    std::iota(table.begin(), table.end(), 0);
    for (const bool scaled : {true, false}) {
        std::vector<acc<T>> rope((size_t)(QUERY + 1) * D);
        fill_rope(rope.data(), QUERY + 1, D, THETA, scaled ? scaling : RopeScaling());
        std::vector<T> keys((size_t)pages * PAGE * D), values = keys, q((size_t)CHUNK * D), qkv((size_t)CHUNK * 3 * D), out(D);
        const LayerCache<T> cache = {keys.data(), values.data()};
        const HeadNorms<T> norms = {weight.data(), weight.data(), rope.data()};
        const HeadShape shape = {1, 1, D, 1e-6f};
        auto batch = [&](int first, int N) {
            std::fill(qkv.begin(), qkv.end(), to_stored<T>((acc<T>)0));
            for (int n = 0; n < N; n++) {
                pos[n] = first + n;
                const bool needle = pos[n] == NEEDLE;
                T* row = &qkv[(size_t)n * 3 * D];
                row[D / 2 - 1] = row[D + (needle ? D / 2 - 1 : 0)] = to_stored<T>((acc<T>)1);
                for (int i = 0; i < D; i++) row[2 * D + i] = to_stored<T>((acc<T>)(needle ? 1 : -1));
            }
            Batch b = {N, 1, nullptr, pos.data(), seq.data(), pos.data(), table.data(), pages, N == 1};
            return b;
        };
        for (int first = 0; first < QUERY; first += CHUNK)
            CALL(qknorm_rope_kv, q.data(), cache, qkv.data(), norms, batch(first, CHUNK), shape);
        CALL(attend, out.data(), (acc<T>*)nullptr, q.data(), cache, qkv.data(), norms, batch(QUERY, 1), shape);
        for (const T& x : out) CHECK(std::fabs((double)to_acc(x) - (scaled ? 1 : -1)) < 1e-3);
    }
}

Result run_qwen3(const Strings& arguments) {
    const char* path = getenv("QWEN3");
    REQUIRE_MESSAGE(path, "QWEN3 is not set: make test sets it");
    return Process(path, arguments).wait();
}
Result run_ids(const std::string& model, const Strings& more = {}) {
    return run_qwen3(Strings{model, "-d", "cpu", "--ids", "5,6,7,8", "--logits-hash"} + more);
}

TEST_CASE("--rope-scaling: the config's own does the same; converted models keep it; the context reaches further") {
    const Scratch s;
    const Strings yarn = {"--rope-scaling", "yarn", "--rope-scale", "4", "--yarn-orig-ctx", "32768"};
    const Scaled yarn_model(YARN);
    const std::string path = yarn_model.folder.path.string();
    const Result by_option = run_ids(LAYER, yarn), by_config = run_ids(path), plain = run_ids(LAYER);
    INFO(by_option.err << by_config.err << plain.err);
    CHECK((by_option.status == 0 && by_option.out.size() > 8));
    CHECK(by_option.out == by_config.out);
    CHECK(by_option.out != plain.out);
    CHECK(run_ids(LAYER, yarn + Strings{"-c", "131072"}).out == by_config.out);
    check_refusal(run_ids(LAYER, yarn + Strings{"-c", "131073"}), "qwen3", "--ctx 131073: the model's limit is 131072");
    check_refusal(run_ids(LAYER, {"-c", "5000"}), "qwen3", "the model's limit is 4096 (--rope-scaling raises it)");

    const Result written = run_qwen3(Strings{LAYER, "--convert", s / "m.bin"} + yarn);
    CHECK(written.status == 0);
    CHECK(run_ids(s / "m.bin").out == by_config.out);
    // A config's scaling, and its positions of training, give way to the option's.
    const Result twice = run_ids(path, {"--rope-scaling", "yarn", "--rope-scale", "2", "-c", "65536"});
    CHECK(twice.status == 0);
    CHECK(twice.out != by_config.out);
    check_refusal(run_ids(path, {"--rope-scaling", "yarn", "--rope-scale", "2", "-c", "65537"}), "qwen3", "limit is 65536");
    CHECK(run_ids(LAYER, {"--rope-scaling", "linear", "--rope-scale", "4"}).out != plain.out);

    check_refusal(run_ids(LAYER, {"--rope-scaling", "dynamic", "--rope-scale", "4"}), "qwen3", "--rope-scaling dynamic");
    check_refusal(run_ids(LAYER, {"--rope-scaling", "yarn"}), "qwen3", "--rope-scaling yarn needs --rope-scale X");
    check_refusal(run_ids(LAYER, {"--rope-scale", "4"}), "qwen3", "--rope-scale is for --rope-scaling");
    check_refusal(run_ids(LAYER, {"--yarn-orig-ctx", "4"}), "qwen3", "--yarn-orig-ctx is for --rope-scaling");
    for (const char* x : {"0", "nan", "0.5", "inf", "-4"}) check_refusal(run_ids(LAYER, {"--rope-scaling", "yarn", "--rope-scale", x}), "qwen3", "--rope-scale");
    check_refusal(run_ids(LAYER, {"--rope-scaling", "yarn", "--rope-scale", "2", "--yarn-orig-ctx", "0"}), "qwen3", "--yarn-orig-ctx");
    const Scaled linear(R"({"rope_type": "linear", "factor": 2})");
    check_refusal(run_ids(linear.folder.path.string(), {"--rope-scaling", "yarn", "--rope-scale", "2"}), "qwen3", "--yarn-orig-ctx N");
}
} // namespace
