// INT8 weights: what int8_scale and Weights make of numbers of every size, that export.py --int8 writes the
// same bytes (without NumPy and, where python3 has it, with NumPy), what the loader refuses, the products.
#include "cpu/step_ceilings.h"
#include "model/model_file.h"
#include "model/quantize.h"
#include "model/safetensors.h"
#include "model/session.h"
#include "model/weights.h"
#include "sj.h"
#include "tests/common.h"
#include "tests/files.h"
#include "tests/packed.h"
#include "tests/process.h"
#include <cfloat>
#include <map>

namespace {
// ----------------------------------------------------------------------------------------- small checkpoints

static size_t size_of(const std::string& dtype) { return dtype == "F32" ? 4 : 2; }

// A number of type `dtype`: random sign, an exponent field that makes it finite, a random fraction.
static int highest_exponent(const std::string& dtype) { return dtype == "F16" ? 30 : 254; }
static uint32_t random_bits(Random& random, const std::string& dtype, int exponent) {
    const int fraction = dtype == "F32" ? 23 : dtype == "F16" ? 10 : 7;
    const uint32_t sign = (uint32_t)random.below(2) << (8 * size_of(dtype) - 1);
    return sign | (uint32_t)exponent << fraction | (uint32_t)random.below(1 << fraction);
}

// Numbers in runs of one magnitude; a run may have any magnitude that the type has, or be zeros.
static std::string numbers(Random& random, const std::string& dtype, size_t n) {
    std::string bytes;
    int left = 0, exponent = 0;
    bool zeros = false;
    for (size_t i = 0; i < n; i++) {
        if (left-- == 0) {
            left = random.below(100), zeros = random.below(5) == 0;
            exponent = random.below(highest_exponent(dtype) + 1);
        }
        const uint32_t bits = zeros ? 0 : random_bits(random, dtype, std::max(0, exponent - random.below(4)));
        bytes.append((const char*)&bits, size_of(dtype));
    }
    return bytes;
}

static double value(const std::string& dtype, const std::string& bytes, size_t i) {
    if (dtype == "F32") {
        float f;
        memcpy(&f, bytes.data() + 4 * i, 4);
        return f;
    }
    uint16_t h;
    memcpy(&h, bytes.data() + 2 * i, 2);
    return dtype == "F16" ? half_to_float(h) : to_acc(bf16{h});
}

struct Entry {
    std::string dtype;
    std::vector<int64_t> shape;
    std::string bytes;
};

static const char* const CONFIG = R"({"model_type": "qwen3", "hidden_size": 35, "num_hidden_layers": 1,
"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 70, "vocab_size": 13,
"max_position_embeddings": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "tie_word_embeddings": false,
"hidden_act": "silu", "eos_token_id": 3})";

// A model whose rows are 35, 64 and 70 numbers long: one group and a bit, two groups, two and a bit.
struct Checkpoint {
    std::map<std::string, Entry> entries;

    Checkpoint(Random& random, const std::string& dtype) {
        const int C = 35, HD = 64, KD = 32, D = 16, F = 70, V = 13;
        auto add = [&](const std::string& name, std::vector<int64_t> shape) {
            size_t n = 1;
            for (int64_t d : shape) n *= (size_t)d;
            entries[name] = {dtype, shape, numbers(random, dtype, n)};
        };
        add("model.embed_tokens.weight", {V, C});
        add("model.norm.weight", {C});
        add("lm_head.weight", {V, C});
        const std::string layer = "model.layers.0.";
        add(layer + "input_layernorm.weight", {C});
        add(layer + "self_attn.q_proj.weight", {HD, C});
        add(layer + "self_attn.k_proj.weight", {KD, C});
        add(layer + "self_attn.v_proj.weight", {KD, C});
        add(layer + "self_attn.q_norm.weight", {D});
        add(layer + "self_attn.k_norm.weight", {D});
        add(layer + "self_attn.o_proj.weight", {C, HD});
        add(layer + "post_attention_layernorm.weight", {C});
        add(layer + "mlp.gate_proj.weight", {F, C});
        add(layer + "mlp.up_proj.weight", {F, C});
        add(layer + "mlp.down_proj.weight", {C, F});
    }
    // Makes a matrix INT8, with whatever numbers.
    void make_int8(const std::string& name) {
        Entry& e = entries.at(name);
        const int64_t rows = e.shape[0], in = e.shape[1], groups = (in + 31) / 32;
        e = {"I8", e.shape, std::string((size_t)(rows * in), '\5')};
        entries[name + "_scale"] = {"BF16", {rows, groups}, std::string((size_t)(rows * groups * 2), '\x3c')};
    }
    void make_int8() {
        const auto all = entries;
        for (auto& [name, entry] : all)
            if (entry.shape.size() == 2) make_int8(name);
    }
    // A safetensors file; with CONFIG inside it is a model.bin. INT8 comes last, as export.py puts it.
    std::string file(bool with_config = true) const {
        std::string header = "{\"__metadata__\":{\"format\":\"pt\"", data;
        if (with_config) header += ",\"config\":", sj::quote(header, CONFIG);
        header += "}";
        auto add = [&](const std::string& name, const Entry& e) {
            std::string dims;
            for (int64_t n : e.shape) dims += format(dims.empty() ? "%lld" : ",%lld", (long long)n);
            header += format(R"(,"%s":{"dtype":"%s","shape":[%s],"data_offsets":[%zu,%zu]})", name.c_str(),
                             e.dtype.c_str(), dims.c_str(), data.size(), data.size() + e.bytes.size());
            data += e.bytes;
        };
        for (auto& [name, e] : entries)
            if (e.dtype != "I8") add(name, e);
        for (auto& [name, e] : entries)
            if (e.dtype == "I8") add(name, e);
        header += "}";
        header.resize((header.size() + 15) / 8 * 8 - 8, ' '); // the data begin at an even address
        const uint64_t length = header.size();
        return std::string((const char*)&length, 8) + header + data;
    }
    void write_folder(const std::string& folder) const {
        fs::create_directories(folder);
        write_file(folder + "/config.json", CONFIG);
        write_file(folder + "/model.safetensors", file(false));
    }
};

// Every matrix of a model: (its name, what it is in the Linear).
template <class T, class F> void for_each_matrix(const Weights<T>& w, F f) {
    auto linear = [&](const std::string& prefix, const Linear<T>& y, std::vector<const char*> names) {
        for (size_t b = 0; b < names.size(); b++) f(prefix + names[b] + ".weight", y, (int)b);
    };
    linear("model.", w.embed, {"embed_tokens"});
    for (size_t l = 0; l < w.layers.size(); l++) {
        const std::string layer = format("model.layers.%zu.", l);
        linear(layer + "self_attn.", w.layers[l].qkv, {"q_proj", "k_proj", "v_proj"});
        linear(layer + "self_attn.", w.layers[l].o, {"o_proj"});
        linear(layer + "mlp.", w.layers[l].gate_up, {"gate_proj", "up_proj"});
        linear(layer + "mlp.", w.layers[l].down, {"down_proj"});
    }
    linear("", w.head, {"lm_head"});
}

// ----------------------------------------------------------------------------------------------- the numbers

// By definition: 127 s reaches `largest`, and no smaller bf16 does.
static bool is_smallest(bf16 s, double largest) {
    const bool enough = s.bits < 0x7f80 && 127. * to_acc(s) >= largest;
    return enough && (s.bits == 0 || 127. * to_acc(bf16{(uint16_t)(s.bits - 1)}) < largest);
}

// By definition: of the smallest scale and the next seven the one with the least squares (the first, if two are equal).
static bool is_best(bf16 s, const std::vector<double>& w) {
    double largest = 0, least = 1e300;
    for (double x : w) largest = std::max(largest, std::fabs(x));
    bf16 first = s;
    while (first.bits && !is_smallest(first, largest)) first.bits--;
    if (!is_smallest(first, largest) || s.bits - first.bits > 7) return false;
    if (first.bits == 0) return s.bits == 0;
    bf16 best = first;
    for (int c = 0; c < 8 && first.bits + c < 0x7f80; c++) {
        const bf16 candidate{(uint16_t)(first.bits + c)};
        const double scale = to_acc(candidate), inverse = 1 / scale;
        double lost = 0;
        for (double x : w) {
            const double off = x - std::nearbyint(x * inverse) * scale;
            lost += off * off;
        }
        if (lost < least) least = lost, best = candidate;
    }
    return s.bits == best.bits;
}

// Compares the INT8 form of `source` with the definition: the best scales; each integer the nearest to w / s (at a tie
// the even one), so that w is at most s / 2 away; groups end with their row.
struct Checked {
    int bad = 0, zero_groups = 0, full_groups = 0; // full: all the range up to 119 is used (127 / (1 + 7 / 128))
    void operator()(const std::string& dtype, const std::string& source, int rows, int in, const int8_t* q,
                    const bf16* scale) {
        REQUIRE(source.size() == (size_t)rows * in * size_of(dtype));
        for (int r = 0; r < rows; r++)
            for (int begin = 0; begin < in; begin += 32, scale++) {
                const double s = to_acc(*scale);
                double largest = 0;
                int largest_q = 0;
                std::vector<double> group;
                for (size_t i = (size_t)r * in + begin; i < (size_t)r * in + std::min(in, begin + 32); i++) {
                    const double w = value(dtype, source, i);
                    const double off = std::fabs(w - q[i] * s); // exact: few bits
                    bad += !(off < s / 2 || (off == s / 2 && q[i] % 2 == 0)) || q[i] < -127;
                    largest = std::max(largest, std::fabs(w));
                    group.push_back(w);
                    largest_q = std::max(largest_q, std::abs(q[i]));
                }
                bad += !is_best(*scale, group);
                if (largest == 0) zero_groups++;
                if (scale->bits < 0x80) continue; // subnormal scales are coarse
                if (largest_q >= 119) full_groups++;
                else bad++;
            }
    }
};

TEST_CASE("int8_scale is the smallest bf16 s with 127 s >= m, for m of every magnitude") {
    CHECK(int8_scale(0).bits == 0);
    CHECK(int8_scale(127).bits == 0x3f80); // 1
    CHECK(int8_scale(std::nextafter(127.f, 128.f)).bits == 0x3f81);
    CHECK(int8_scale(FLT_TRUE_MIN).bits == 1); // 2^-149 needs 2^-133, the least there is
    int failures = 0, reached = 0;
    auto check = [&](float m) { failures += !is_smallest(int8_scale(m), m); };
    for (uint32_t bits = 1; bits < 0x7f80; bits++) { // m = 127 s for every s, and its neighbours
        const double m = 127. * to_acc(bf16{(uint16_t)bits});
        if (m > FLT_MAX) break;
        REQUIRE((double)(float)m == m);
        failures += int8_scale((float)m).bits != bits;
        check(std::nextafter((float)m, 0.f));
        check(std::nextafter((float)m, FLT_MAX));
        reached++;
    }
    CHECK(reached > 254 * 128 - 8 * 128); // but for the 7 exponents that 127 takes beyond the largest float
    Random random{11};
    for (int exponent = 0; exponent < 255; exponent++)
        for (int i = 0; i < 200; i++) {
            const uint32_t bits = random_bits(random, "F32", exponent) & 0x7fffffff;
            float m;
            memcpy(&m, &bits, 4);
            check(m);
        }
    check(FLT_MAX);
    CHECK(failures == 0);
}

TEST_CASE("Weights made INT8: best scales, each integer the nearest (even at a tie), from every type") {
    for (std::string dtype : {"BF16", "F16", "F32"}) {
        CAPTURE(dtype);
        Random random{12};
        Checkpoint checkpoint(random, dtype);
        // Ties by hand, four a row of 35: with 127 in the group, and more whole numbers than halves, the scale is 1.
        // All these numbers exist in every type.
        std::string& ties = checkpoint.entries.at("lm_head.weight").bytes;
        for (int i = 0; i < 4 * 35; i++) {
            const int row = i / 35, at = i % 35;
            const float x = at == 0 ? 127.f : at < 5 ? (float)(4 * row + at - 9) + 0.5f : (float)((i * 37) % 119 + 1);
            uint32_t bits;
            memcpy(&bits, &x, 4);
            if (dtype == "BF16") bits >>= 16;
            if (dtype == "F16")
                bits = (bits >> 16 & 0x8000) | ((bits >> 23 & 255) - 112) << 10 | (bits >> 13 & 1023);
            ties.replace(i * size_of(dtype), size_of(dtype), (const char*)&bits, size_of(dtype));
            REQUIRE(value(dtype, ties, i) == x);
        }
        MemoryFile memory(checkpoint.file());
        ModelFile file(memory.path);
        Weights<float> weights(file, Format::INT8);
        std::vector<int> rounded;
        for (int row = 0; row < 4; row++) {
            CHECK(((const bf16*)weights.head.scale[0])[row * 2].bits == 0x3f80);
            for (int at = 1; at < 5; at++) rounded.push_back(weights.head.q[0][row * 35 + at]);
        }
        CHECK(rounded == std::vector<int>{-8, -6, -6, -4, -4, -2, -2, 0, 0, 2, 2, 4, 4, 6, 6, 8});
        Checked checked;
        int matrices = 0;
        for_each_matrix(weights, [&](const std::string& name, const Linear<float>& y, int b) {
            CHECK(!y.w[b]);
            checked(dtype, checkpoint.entries.at(name).bytes, y.rows[b], y.in, y.q[b], (const bf16*)y.scale[b]);
            matrices++;
        });
        CHECK(matrices == 9);
        CHECK(checked.bad == 0);
        CHECK(checked.zero_groups > 10);
        CHECK(checked.full_groups > 100);
    }
}

// ------------------------------------------------------------------------------------------------- export.py

// How to run it: without NumPy, which -S hides, and with NumPy where there is one.
static std::vector<std::string> pythons() {
    static const bool plain = std::system("python3 -I -S -c pass >/dev/null 2>&1") == 0;
    static const bool numpy = std::system("python3 -I -c 'import numpy' >/dev/null 2>&1") == 0;
    static const char* const missing = plain ? "with NumPy: python3 has none" : "at all: there is no python3";
    static const bool told = (plain && numpy) || printf("skipped: export.py --int8 %s\n", missing) > 0;
    std::vector<std::string> found;
    if (plain && told) found.push_back("python3 -I -S");
    if (numpy && told) found.push_back("python3 -I");
    return found;
}

static void export_int8(const std::string& python, const std::string& folder, const std::string& out) {
    const std::string command = python + " export.py " + folder + " " + out + " --int8 2>" + out + ".err";
    REQUIRE(std::system(command.c_str()) == 0);
    const std::string told = read_file(out + ".err"); // what was written, and no warning
    CHECK(std::count(told.begin(), told.end(), '\n') == 1);
}

template <class T> void check_same(const std::string& folder, const std::string& exported) {
    ModelFile from(folder), to(exported);
    Weights<T> made(from, Format::INT8), read(to);
    std::vector<Linear<T>> want;
    for_each_matrix(made, [&](const std::string&, const Linear<T>& y, int) { want.push_back(y); });
    size_t at = 0;
    for_each_matrix(read, [&](const std::string& name, const Linear<T>& y, int b) {
        CAPTURE(name);
        REQUIRE(at < want.size());
        const Linear<T>& m = want[at++];
        REQUIRE((y.q[b] && m.q[b]));
        CHECK(!y.w[b]);
        const uint8_t *q = (const uint8_t*)y.q[b], *data = to.maps[0].data;
        CHECK((q > data && q < data + to.maps[0].size)); // used where the file maps them
        CHECK((y.rows[b] == m.rows[b] && y.in == m.in));
        CHECK(memcmp(y.q[b], m.q[b], (size_t)y.rows[b] * y.in) == 0);
        CHECK(memcmp(y.scale[b], m.scale[b], (size_t)y.rows[b] * y.groups() * sizeof(bf16)) == 0);
    });
    CHECK(at == want.size());
    const Config& c = to.config;
    auto same_norm = [](const T* a, const T* b, int n) { // the exported one went through bf16
        for (int i = 0; i < n; i++)
            if (to_acc(a[i]) != to_acc(to_bf16((float)to_acc(b[i])))) return false;
        return true;
    };
    CHECK(same_norm(read.norm, made.norm, c.C));
    for (int l = 0; l < c.L; l++) {
        CHECK(same_norm(read.layers[l].norm1, made.layers[l].norm1, c.C));
        CHECK(same_norm(read.layers[l].norm2, made.layers[l].norm2, c.C));
        CHECK(same_norm(read.layers[l].q_norm, made.layers[l].q_norm, c.D));
        CHECK(same_norm(read.layers[l].k_norm, made.layers[l].k_norm, c.D));
    }
    CHECK(c.end_tokens == from.config.end_tokens);
    CHECK(c.tied == from.config.tied);
    CHECK(to.generation_text == from.generation_text);
}

static void check_export(const std::string& folder, const std::vector<std::string>& by = pythons()) {
    CAPTURE(folder);
    std::string first;
    for (const std::string& python : by) {
        CAPTURE(python);
        Scratch s;
        export_int8(python, folder, s / "m.bin");
        if (ModelFile(folder).is_float32()) check_same<float>(folder, s / "m.bin");
        else check_same<bf16>(folder, s / "m.bin");
        const std::string bytes = read_file(s / "m.bin");
        CHECK((first.empty() || bytes == first));
        first = bytes;
    }
}

TEST_CASE("export.py --int8 writes what Weights makes: the fixtures") {
    check_export("tests/fixtures/untied_f32_sharded");
    for (std::string name : {"tied_f32", "tied_bf16", "tied_f16"}) // (with NumPy, if there is one: ten times as fast)
        if (!pythons().empty()) check_export("tests/fixtures/" + name, {pythons().back()});
}

TEST_CASE("export.py --int8 writes what Weights makes: every magnitude, zeros, rows of any length") {
    for (std::string dtype : {"BF16", "F16", "F32"}) {
        Scratch s;
        Random random{13};
        Checkpoint(random, dtype).write_folder(s / "hf");
        check_export(s / "hf");
    }
}

TEST_CASE("export.py --int8 of matrices that are longer than a block of 1 MiB, row by row or not") {
    Scratch s;
    Random random{14};
    Checkpoint checkpoint(random, "F32");
    checkpoint.entries.clear();
    const std::pair<int, int> sizes[] = {{2, 300001}, {40, 8192}, {700, 33}}; // rows, in
    for (int i = 0; i < 3; i++) {
        auto [rows, in] = sizes[i];
        const char* const names[] = {"gate_proj", "up_proj", "down_proj"};
        const std::string name = format("model.layers.0.mlp.%s.weight", names[i]);
        checkpoint.entries[name] = {"F32", {rows, in}, numbers(random, "F32", (size_t)rows * in)};
    }
    checkpoint.write_folder(s / "hf");
    for (const std::string& python : pythons()) {
        CAPTURE(python);
        export_int8(python, s / "hf", s / "m.bin");
        MappedFile map(s / "m.bin");
        Tensors tensors;
        std::map<std::string, std::string> metadata;
        read_safetensors(map, tensors, metadata);
        CHECK(tensors.size() == 6);
        Checked checked;
        for (auto& [name, e] : checkpoint.entries) {
            const Tensor &q = tensors[name], &scale = tensors[name + "_scale"];
            const int64_t rows = e.shape[0], in = e.shape[1];
            REQUIRE((q.dtype == Dtype::I8 && q.shape == e.shape));
            REQUIRE(scale.dtype == Dtype::BF16);
            REQUIRE(scale.shape == std::vector<int64_t>{rows, (in + 31) / 32});
            checked(e.dtype, e.bytes, (int)rows, (int)in, (const int8_t*)q.data, (const bf16*)scale.data);
        }
        CHECK(checked.bad == 0);
        CHECK(checked.full_groups > 10000);
    }
}

// ---------------------------------------------------------------------------------------------- the loader

// One Error, one line, that names the file and holds `word`.
static void check_refused(const Checkpoint& checkpoint, bool int8, const std::string& word) {
    MemoryFile memory(checkpoint.file());
    ModelFile file(memory.path);
    std::string message;
    try {
        Weights<bf16> weights(file, int8 ? Format::INT8 : Format::PLAIN);
    } catch (const Error& e) {
        message = e.what();
    }
    INFO("wanted: " << word << "; got: " << message);
    CHECK(message.compare(0, memory.path.size(), memory.path) == 0);
    CHECK(message.find(word) != std::string::npos);
    CHECK(message.find('\n') == std::string::npos);
}

TEST_CASE("INT8 files that are refused") {
    const std::string layer = "model.layers.0.", up = layer + "mlp.up_proj.weight";
    const std::string q = layer + "self_attn.q_proj.weight", k = layer + "self_attn.k_proj.weight";
    const std::string o = layer + "self_attn.o_proj.weight";
    Random random{15};
    const Checkpoint plain(random, "BF16");
    Checkpoint good = plain;
    good.make_int8();
    {
        MemoryFile memory(good.file()); // so the cases below fail for their fault alone
        ModelFile file(memory.path);
        Weights<bf16> weights(file);
        CHECK((weights.layers[0].qkv.q[0] && weights.embed.q[0] && weights.head.q[0]));
        Weights<bf16> again(file, Format::INT8); // INT8 stays as it is
        CHECK(again.layers[0].qkv.q[2] == weights.layers[0].qkv.q[2]);
        Weights<double> wide(file);
        CHECK(wide.head.scale[0] == weights.head.scale[0]);
    }
    auto changed = [&](const std::string& name, auto change) {
        Checkpoint c = good;
        change(c.entries.at(name));
        return c;
    };
    Checkpoint c = good;
    c.entries.erase(q + "_scale");
    check_refused(c, false, "no tensor " + q + "_scale");
    check_refused(c, true, "no tensor " + q + "_scale");
    auto reshaped = [&](std::vector<int64_t> shape) {
        return changed(q + "_scale", [&](Entry& e) {
            size_t n = 2;
            for (int64_t d : shape) n *= (size_t)d;
            e.shape = shape, e.bytes.resize(n, '\x3c');
        });
    };
    check_refused(reshaped({64, 1}), false, q + "_scale is (64,1), the config needs (64,2)");
    check_refused(reshaped({64, 3}), false, q + "_scale is (64,3)");
    check_refused(reshaped({2, 64}), false, q + "_scale is (2,64)");
    check_refused(reshaped({128}), false, q + "_scale is (128)");
    check_refused(reshaped({64, 2, 1}), false, q + "_scale is (64,2,1)");
    const std::map<std::string, size_t> sizes = {{"F16", 2}, {"F32", 4}, {"I8", 1}, {"U8", 1}, {"I16", 2}};
    for (auto& [dtype, size] : sizes) {
        Entry scale = {dtype, {35, 2}, std::string(35 * 2 * size, '\x3c')};
        check_refused(changed(o + "_scale", [&](Entry& e) { e = scale; }), false, o + "_scale is not BF16");
    }
    check_refused(changed(q, [](Entry& e) { e.dtype = "U8"; }), false, q);
    check_refused(changed(q, [](Entry& e) { e.shape = {35, 64}; }), false, q + " is (35,64)");
    c = good; // one byte before all others: every scale is at an odd address
    c.entries["a.byte"] = {"U8", {1}, "!"};
    check_refused(c, false, "_scale is not BF16 at an even address");
    for (std::string norm : {"model.norm.weight", "model.layers.0.self_attn.q_norm.weight"}) {
        auto to_int8 = [](Entry& e) { e.dtype = "I8", e.bytes.resize(e.bytes.size() / 2); };
        check_refused(changed(norm, to_int8), false, norm + " is not BF16, F16 or F32");
    }

    // The matrices of one product are all INT8, or none is.
    for (const std::string& name : {k, up}) {
        c = plain;
        c.make_int8(name);
        check_refused(c, false, name + " is INT8 and its neighbours are not");
        MemoryFile memory(c.file());
        ModelFile file(memory.path);
        Weights<bf16> weights(file, Format::INT8); // all are now
        CHECK((weights.layers[0].qkv.q[0] && weights.layers[0].gate_up.q[1]));
    }
    c = good;
    c.entries[k] = plain.entries.at(k);
    check_refused(c, false, k);

    // Only INT8 minds numbers that are none.
    for (std::string dtype : {"BF16", "F16", "F32"})
        for (uint32_t bits : {0x7fc00000u, 0x7f800000u, 0xff800000u, 0x7f810000u, 0xffffffffu}) {
            Random again{16};
            c = Checkpoint(again, dtype);
            uint32_t stored = dtype == "F32" ? bits : bits >> 16;
            if (dtype == "F16") stored = (bits >> 16 & 0x8000) | 0x7c00 | (bits >> 16 & 0x7f) << 3;
            std::string& bytes = c.entries.at(o).bytes;
            const size_t size = size_of(dtype);
            for (size_t i : {(size_t)0, bytes.size() / size / 2, bytes.size() / size - 1}) {
                const std::string before = bytes;
                bytes.replace(i * size, size, (const char*)&stored, size);
                check_refused(c, true, o + " has an infinity or a NaN");
                MemoryFile memory(c.file());
                ModelFile file(memory.path);
                CHECK_NOTHROW(Weights<float>(file, Format::PLAIN));
                bytes = before;
            }
        }
}

// ------------------------------------------------------------------------------------------------ the model

// The contents of a fixture's golden.json.
static sj::Value golden(const std::string& folder, sj::Doc& doc, std::string& text) {
    text = read_file(folder + "/golden.json");
    REQUIRE(sj::parse(doc, text) == "");
    return doc.root();
}

// Logarithms of the probabilities at every position of the fixture's prompts, computed in T.
template <class T>
std::vector<double> log_probabilities(const ModelFile& file, sj::Value prompts, bool int8) {
    Weights<T> weights(file, int8 ? Format::INT8 : Format::PLAIN);
    const int V = file.config.V;
    std::vector<double> out;
    for (sj::Value prompt : prompts.items()) {
        std::vector<int> ids;
        for (sj::Value id : prompt.items()) ids.push_back((int)id.number());
        Session<T> session(file.config, weights, 64);
        session.feed(ids, nullptr, [&](const acc<T>* row) {
            const double top = *std::max_element(row, row + V);
            double sum = 0;
            for (int v = 0; v < V; v++) sum += std::exp(row[v] - top);
            for (int v = 0; v < V; v++) out.push_back(row[v] - top - std::log(sum));
        });
    }
    return out;
}

// Mean over the positions of KL(p || q), in nats.
static double mean_kl(const std::vector<double>& p, const std::vector<double>& q, int V) {
    REQUIRE(p.size() == q.size());
    REQUIRE(p.size() > 90 * (size_t)V);
    double sum = 0;
    for (size_t i = 0; i < p.size(); i++) sum += std::exp(p[i]) * (p[i] - q[i]);
    return sum / (double)(p.size() / V);
}

TEST_CASE("a model made INT8: mean KL to itself below 0.005, and bf16 arithmetic adds no more than usual") {
    for (std::string name : {"tied_bf16", "untied_bf16"}) {
        CAPTURE(name);
        const std::string folder = "tests/fixtures/" + name;
        ModelFile file(folder);
        sj::Doc doc;
        std::string text;
        sj::Value gold = golden(folder, doc, text), prompts = gold["prompts"];
        const auto truth = log_probabilities<float>(file, prompts, false);
        const auto exact = log_probabilities<float>(file, prompts, true);
        const auto ours = log_probabilities<bf16>(file, prompts, true);
        const auto bf16s = log_probabilities<bf16>(file, prompts, false);
        const double lost = mean_kl(truth, exact, file.config.V), added = mean_kl(exact, ours, file.config.V);
        const double lost_bf16 = mean_kl(bf16s, ours, file.config.V); // both computed in bf16
        const sj::Value theirs = gold["transformers_bf16_mean_kl"];
        const double usual = std::min(theirs["eager"].number(), theirs["sdpa"].number());
        INFO("INT8 costs " << lost << " in float, " << lost_bf16 << " in bf16, bf16 arithmetic " << added << " (usual: " << usual << ")");
        CHECK(lost < 0.005);
        CHECK(lost_bf16 < 0.005);
        CHECK(lost > 1e-6); // it did something
        CHECK(added > 1e-6);
        CHECK(added <= usual);
        Weights<bf16> plain(file), small(file, Format::INT8);
        CHECK(step_bytes(small) < step_bytes(plain) * 0.55); // 8.5 bits for 16, and scales for ends of rows
    }
}

// ------------------------------------------------------------------------------------------------- products

TEST_CASE_TEMPLATE("products with INT8 weights: linear, linear_add, head", T, bf16, float, double) {
    EACH_WAY;
    Random random{17};
    const std::vector<int> block_sizes[] = {{1}, {7, 3, 3}, {96, 33}};
    const int widths[] = {1, 15, 16, 31, 32, 33, 48, 64, 80, 96, 192, 257, 320, 576};
    for (int in : widths) for (auto& blocks : block_sizes) {
        PackedLinear<T> W(random, Format::INT8, GROUP, false, blocks, in);
        const size_t out = W.out();
        const int most = 65;
        const auto x = random.fill<T>((size_t)most * in);
        std::vector<double> want = WideLinear(W)(as_double(x), most), want_sum;
        const std::vector<double> size = WideLinear(W, true)(magnitudes(x), most);
        const auto residual = random.fill<acc<T>>(want.size());
        for (size_t i = 0; i < want.size(); i++) want_sum.push_back(want[i] + residual[i]);
        for (int N : {65, 17, 3, 1}) { // 65: more than TILE_TOKENS
            want.resize(N * out), want_sum.resize(want.size());
            const int row = N - 1;
            const std::vector<double> want_logits(want.begin() + row * out, want.end());
            on_every_instruction_set([&] {
                CAPTURE(N);
                CAPTURE(in);
                auto error = [&](size_t i) { return packed_error<T>(size[i]); };
                auto rounded = [&](size_t i) { return rounding<acc<T>>(want_sum[i]) + error(i); };
                auto y = poisoned<T>(want.size());
                CALL(linear, y.data(), x.data(), W, N);
                CHECK(wrong(y, want, [&](size_t i) { return rounding<T>(want[i]) + error(i); }) == 0);

                auto sum = poisoned<acc<T>>(want.size());
                CALL(linear_add, sum.data(), residual.data(), x.data(), W, N);
                CHECK(wrong(sum, want_sum, rounded) == 0);

                auto picked = poisoned<T>(in);
                auto logits = poisoned<acc<T>>(out);
                CALL(head, logits.data(), picked.data(), x.data(), &row, W, 1);
                CHECK(wrong(logits, want_logits, [&](size_t i) { return error(row * out + i); }) == 0);
            });
        }
    }
}

TEST_CASE_TEMPLATE("W.at: q times its group's scale, in every block", T, bf16, float, double) {
    Random random{21};
    for (int in : {1, 33, 70}) {
        PackedLinear<T> W(random, Format::INT8, GROUP, false, {3, 2, 4}, in);
        for (int r = 0; r < 9; r++)
            for (int i = 0; i < in; i++)
                REQUIRE(W.at(r, i) == (double)W.all_q[r * in + i] * to_acc(bf16{W.halves[r * W.groups() + i / 32]}));
    }
}
} // namespace
