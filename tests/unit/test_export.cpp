// export.py run as a user runs it (python3 -I -S: the standard library only): what it writes, byte for byte,
// and what it refuses. Where there is no python3 every case is skipped, and a line says so.
#include "sj.h"
#include "tests/files.h"
#include <cmath>
#include <doctest/doctest.h>
#include <map>
#include <sys/wait.h>
#include <vector>

using namespace std::literals; // ""sv may hold \0

static bool no_python() {
    static const bool missing = std::system("python3 -I -S -c pass >/dev/null 2>&1") != 0;
    static const bool told = missing && fputs("python3 is missing: export.py is NOT tested\n", stderr) >= 0;
    return missing || told;
}
#define EXPORT_TEST(name) TEST_CASE(name * doctest::skip(no_python()))

// ------------------------------------------------------------------------------------------------- tools
struct Result {
    int status;
    std::string out, err;
};

static Result shell(const std::string& command) {
    Scratch s;
    int status = std::system(("( " + command + " ) >" + s / "out" + " 2>" + s / "err").c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read_file(s / "out"), read_file(s / "err")};
}
static Result run(const std::string& arguments) { return shell("python3 -I -S export.py " + arguments); }

static void check_done(const Result& r) {
    INFO(r.err);
    CHECK(r.status == 0);
}

// Exit status 1, and one line that names the file (or option) and holds the fault.
static void check_refused(const Result& r, const std::string& file, const std::string& fault) {
    INFO(r.err);
    CHECK(r.status == 1);
    CHECK(std::count(r.err.begin(), r.err.end(), '\n') == 1);
    CHECK(r.err.find(file) != std::string::npos);
    CHECK(r.err.find(fault) != std::string::npos);
    CHECK(r.err.find("Traceback") == std::string::npos);
    CHECK(r.out == "");
}

// -------------------------------------------------------------------------------------- safetensors files
struct Tensor {
    std::string dtype, shape, bytes; // shape: "[2, 3]"
    bool operator==(const Tensor& o) const {
        return dtype == o.dtype && shape == o.shape && bytes == o.bytes;
    }
};
using Tensors = std::map<std::string, Tensor>;

struct File {
    size_t data_begin = 0;
    std::map<std::string, std::string> metadata;
    std::vector<std::string> order; // tensors as their bytes lie in the file
    Tensors tensors;
};

static File parse_safetensors(const std::string& bytes) {
    File file;
    uint64_t size;
    REQUIRE(bytes.size() >= 8);
    memcpy(&size, bytes.data(), 8);
    REQUIRE(size <= bytes.size() - 8);
    file.data_begin = 8 + size;
    sj::Doc doc;
    REQUIRE(sj::parse(doc, std::string_view(bytes).substr(8, size)) == "");
    std::map<int64_t, std::string> by_place;
    for (auto [name, entry] : doc.root().members()) {
        if (name == "__metadata__") {
            for (auto [key, value] : entry.members()) file.metadata[key] = value.str();
            continue;
        }
        int64_t begin = 0, end = 0;
        REQUIRE(entry["data_offsets"][size_t(0)].integer(&begin));
        REQUIRE(entry["data_offsets"][size_t(1)].integer(&end));
        REQUIRE(size_t(end) <= bytes.size() - file.data_begin);
        file.tensors[name] = {entry["dtype"].str(), sj::dump(entry["shape"]),
                              bytes.substr(file.data_begin + size_t(begin), size_t(end - begin))};
        by_place[begin] = name;
    }
    for (auto& [begin, name] : by_place) file.order.push_back(name);
    return file;
}
static File load(const std::string& path) { return parse_safetensors(read_file(path)); }

// All tensors of a Hugging Face folder, whatever the number of its files.
static Tensors load_folder(const std::string& folder) {
    Tensors all;
    for (auto& entry : fs::directory_iterator(folder))
        if (entry.path().extension() == ".safetensors") all.merge(load(entry.path().string()).tensors);
    return all;
}

static std::string safetensors(std::string_view header, std::string_view data) {
    uint64_t size = header.size();
    return std::string((const char*)&size, 8) + std::string(header) + std::string(data);
}

// A folder with one tensor "x" and the smallest config there is.
static void write_checkpoint(const std::string& folder, const std::string& dtype, std::string_view data) {
    std::string header = format(R"({"x":{"dtype":"%s","shape":[%zu],"data_offsets":[0,%zu]}})", dtype.c_str(),
                                data.size() / (dtype == "F32" ? 4 : 2), data.size());
    fs::create_directories(folder);
    write_file(folder + "/config.json", R"({"model_type": "qwen3"})");
    write_file(folder + "/model.safetensors", safetensors(header, data));
}

// ------------------------------------------------------------------------------------------------ rounding
template <class T> static T item(const std::string& bytes, size_t i) {
    T value;
    memcpy(&value, bytes.data() + i * sizeof(T), sizeof(T));
    return value;
}

static double value_of_bf16(uint16_t h) {
    uint32_t bits = (uint32_t)h << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static double value_of_f16(uint16_t h) {
    int exponent = h >> 10 & 31, fraction = h & 1023;
    double magnitude = exponent == 31 ? (fraction ? NAN : INFINITY)
                       : exponent == 0 ? std::ldexp(fraction, -24)
                                       : std::ldexp(1024 + fraction, exponent - 25);
    return h >> 15 ? -magnitude : magnitude;
}

// The definition: the nearer of the two neighbours, the even one if both are as near. The upper neighbour of
// the largest number counts as 2^128.
static uint16_t nearest_bf16(double x) {
    uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    double a = std::fabs(x);
    if (std::isnan(x)) return 0x7fc0;
    if (std::isinf(x)) return sign | 0x7f80;
    uint16_t low = 0, high = 0x7f80; // low <= a < high
    while (high - low > 1) {
        uint16_t middle = (uint16_t)((low + high) / 2);
        (value_of_bf16(middle) <= a ? low : high) = middle;
    }
    double next = high == 0x7f80 ? std::ldexp(1, 128) : value_of_bf16(high);
    double down = a - value_of_bf16(low), up = next - a;
    return sign | (down < up || (down == up && low % 2 == 0) ? low : high);
}

static std::string rounded(const Tensor& t) {
    std::string out;
    for (size_t i = 0; i < t.bytes.size() / (t.dtype == "F32" ? 4 : 2); i++) {
        uint16_t h = item<uint16_t>(t.bytes, t.dtype == "F32" ? 0 : i);
        if (t.dtype == "F32") h = nearest_bf16(item<float>(t.bytes, i));
        if (t.dtype == "F16") h = nearest_bf16(value_of_f16(h));
        out.append((const char*)&h, 2);
    }
    return out;
}

// ---------------------------------------------------------------------------------------------- round trips
static const char* const fixtures[] = {"tied_f32", "untied_f32_sharded", "tied_bf16", "untied_bf16",
                                       "tied_f16"};

EXPORT_TEST("--keep-dtype: every tensor and every text is the same, in model.bin and back in a folder") {
    for (std::string name : fixtures) {
        CAPTURE(name);
        Scratch s;
        std::string from = "tests/fixtures/" + name;
        Tensors tensors = load_folder(from);
        REQUIRE(tensors.size() >= 13);

        check_done(run(from + " " + s / "m.bin --keep-dtype"));
        File model = load(s / "m.bin");
        CHECK(model.tensors == tensors);
        CHECK(model.metadata["format"] == "pt");
        CHECK(model.metadata["config"] == read_file(from + "/config.json"));
        CHECK(model.metadata["generation_config"] == read_file(from + "/generation_config.json"));
        CHECK(model.metadata.size() == 3);

        check_done(run("--to-hf " + s / "m.bin" + " " + s / "hf"));
        File back = load(s / "hf/model.safetensors");
        CHECK(back.tensors == tensors);
        CHECK(back.metadata == std::map<std::string, std::string>{{"format", "pt"}});
        CHECK(read_file(s / "hf/config.json") == read_file(from + "/config.json"));
        CHECK(read_file(s / "hf/generation_config.json") == read_file(from + "/generation_config.json"));
        CHECK(std::distance(fs::directory_iterator(s / "hf"), {}) == 3);
    }
}

EXPORT_TEST("bf16 by default: F32 and F16 are rounded, BF16 keeps its bytes, the config says so") {
    for (std::string name : fixtures) {
        CAPTURE(name);
        Scratch s;
        std::string from = "tests/fixtures/" + name;
        check_done(run(from + " " + s / "m.bin"));
        File model = load(s / "m.bin");
        Tensors tensors = load_folder(from);
        CHECK(model.tensors.size() == tensors.size());
        for (auto& entry : tensors) {
            CAPTURE(entry.first);
            Tensor& t = model.tensors[entry.first];
            CHECK(t.dtype == "BF16");
            CHECK(t.shape == entry.second.shape);
            CHECK((t.bytes == rounded(entry.second)));
        }
        std::string config = read_file(from + "/config.json");
        for (std::string dtype : {R"("float32")", R"("float16")"})
            if (size_t at = config.find(dtype); at != std::string::npos)
                config.replace(at, dtype.size(), R"("bfloat16")");
        CHECK(model.metadata["config"] == config);

        check_done(run("--to-hf " + s / "m.bin" + " " + s / "hf"));
        CHECK(load(s / "hf/model.safetensors").tensors == model.tensors);
        check_done(run(s / "hf" + " " + s / "again.bin"));
        CHECK((read_file(s / "again.bin") == read_file(s / "m.bin")));
    }
}

EXPORT_TEST("the layout: data at a multiple of 64, tensors in the order in which the model runs") {
    Scratch s;
    check_done(run("tests/fixtures/untied_f32_sharded " + s / "m.bin"));
    File model = load(s / "m.bin");
    CHECK(model.data_begin % 64 == 0);
    std::vector<std::string> order = {"model.embed_tokens.weight"};
    for (std::string part : {"input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
                             "self_attn.q_norm", "self_attn.k_norm", "self_attn.o_proj",
                             "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"})
        order.push_back("model.layers.0." + part + ".weight");
    order.insert(order.end(), {"model.norm.weight", "lm_head.weight"});
    CHECK(model.order == order);

    // With types mixed the wider come first, so that each tensor stays aligned to its items.
    fs::create_directory(s / "hf");
    write_file(s / "hf/config.json", R"({"model_type": "qwen3"})");
    write_file(s / "hf/model.safetensors",
               safetensors(R"({"a.stranger":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                           R"("model.layers.10.mlp.up_proj.weight":)"
                           R"({"dtype":"BF16","shape":[1],"data_offsets":[1,3]},)"
                           R"("model.layers.9.mlp.up_proj.weight":)"
                           R"({"dtype":"BF16","shape":[1,1],"data_offsets":[3,5]},)"
                           R"("model.norm.weight":{"dtype":"F32","shape":[1],"data_offsets":[5,9]},)"
                           R"("none":{"dtype":"I64","shape":[3,0],"data_offsets":[5,5]}})",
                           "\x01\x02\x03\x04\x05\x06\x07\x08\x09"));
    check_done(run(s / "hf" + " " + s / "m.bin --keep-dtype"));
    model = load(s / "m.bin");
    CHECK(model.tensors == load_folder(s / "hf"));
    model.tensors.erase("none"); // no bytes: no place of its own
    CHECK(model.order.back() == "a.stranger");
    std::string text = read_file(s / "m.bin");
    CHECK(text.substr(model.data_begin) == "\x06\x07\x08\x09\x04\x05\x02\x03\x01");
}

EXPORT_TEST("rounding of F32: ties, carries, overflow, subnormals, signs, infinities, NaN") {
    const std::pair<uint32_t, uint16_t> vectors[] = {
        {0x00000000, 0x0000}, {0x80000000, 0x8000}, {0x3f800000, 0x3f80}, {0xbf800000, 0xbf80},
        {0x3f807fff, 0x3f80}, {0x3f808000, 0x3f80}, {0x3f808001, 0x3f81}, // around a tie: even stays
        {0x3f817fff, 0x3f81}, {0x3f818000, 0x3f82}, {0x3f818001, 0x3f82}, // a tie goes up to even
        {0xbf808000, 0xbf80}, {0xbf818000, 0xbf82}, {0x3fffffff, 0x4000}, // the carry reaches the exponent
        {0x7f7f0000, 0x7f7f}, {0x7f7f7fff, 0x7f7f}, {0x7f7f8000, 0x7f80}, // the largest number; overflow
        {0x7f7fffff, 0x7f80}, {0xff7fffff, 0xff80}, {0x7f800000, 0x7f80}, {0xff800000, 0xff80},
        {0x00000001, 0x0000}, {0x00008000, 0x0000}, {0x00008001, 0x0001}, {0x00018000, 0x0002},
        {0x80018000, 0x8002}, {0x007fffff, 0x0080}, {0x00800000, 0x0080}, // subnormals and beyond
        {0x7fc00000, 0x7fc0}, {0x7f800001, 0x7fc0}, {0x7fffffff, 0x7fc0}, // NaN: quiet, signalling, and those
        {0xffffffff, 0x7fc0}, {0xffc00000, 0x7fc0}, {0xffff8000, 0x7fc0}, // that a carry would turn into zero
        {0x7f808000, 0x7fc0}, {0xff800001, 0x7fc0},
    };
    std::string data, expected;
    for (auto [x, y] : vectors) {
        for (int i = 0; i < 2; i++) { // beside its like and between ones: no lane may touch another
            data.append((const char*)&x, 4), expected.append((const char*)&y, 2);
        }
        data.append("\x00\x00\x80\x3f", 4), expected.append("\x80\x3f", 2);
    }
    std::string many_data, many; // longer than one block of 4 MiB
    while (many_data.size() <= 4 << 20) many_data += data, many += expected;

    for (auto& [input, output] : {std::pair(data, expected), std::pair(many_data, many)}) {
        Scratch s;
        write_checkpoint(s / "hf", "F32", input);
        check_done(run(s / "hf" + " " + s / "m.bin"));
        CHECK((load(s / "m.bin").tensors["x"].bytes == output));
    }
}

EXPORT_TEST("rounding of F16: all 65536 of them") {
    Scratch s;
    std::string data;
    for (uint32_t h = 0; h < 65536; h++) data.append((const char*)&h, 2); // little-endian
    write_checkpoint(s / "hf", "F16", data);
    check_done(run(s / "hf" + " " + s / "m.bin"));
    File model = load(s / "m.bin");
    CHECK((model.tensors["x"].bytes == rounded({"F16", "", data})));
    CHECK(item<uint16_t>(model.tensors["x"].bytes, 1) == 0x3380);      // 2^-24, F16's least
    CHECK(item<uint16_t>(model.tensors["x"].bytes, 0x3c04) == 0x3f80); // 1 + 4/1024 is a tie, even stays
    CHECK(item<uint16_t>(model.tensors["x"].bytes, 0x3c0c) == 0x3f82); // 1 + 12/1024 is a tie, odd goes up
}

EXPORT_TEST("the same bytes from every run, with NumPy or without") {
    Scratch s;
    check_done(run("tests/fixtures/tied_f16 " + s / "a.bin"));
    check_done(run("tests/fixtures/tied_f16 " + s / "b.bin"));
    check_done(shell("python3 export.py tests/fixtures/tied_f16 " + s / "c.bin")); // NumPy, if installed
    CHECK((read_file(s / "a.bin") == read_file(s / "b.bin")));
    CHECK((read_file(s / "a.bin") == read_file(s / "c.bin")));
}

EXPORT_TEST("--tokenizer-from copies the tokenizer's files; generation_config.json only if there is none") {
    Scratch s;
    fs::create_directory(s / "tok");
    const std::vector<std::string> files = {
        "tokenizer.json",      "tokenizer_config.json",   "vocab.json",       "merges.txt",
        "chat_template.jinja", "special_tokens_map.json", "added_tokens.json"};
    for (auto& name : files) write_file(s / ("tok/" + name), name);
    for (std::string name : {"README.md", "generation_config.json", "config.json"})
        write_file(s / ("tok/" + name), name);
    check_done(run("tests/fixtures/tied_bf16 " + s / "m.bin"));
    check_done(run("--to-hf " + s / "m.bin" + " " + s / "hf --tokenizer-from " + s / "tok"));
    for (auto& name : files) CHECK(read_file(s / ("hf/" + name)) == name);
    CHECK(!fs::exists(s / "hf/README.md"));
    for (std::string name : {"config.json", "generation_config.json"}) // the model's own
        CHECK(read_file(s / ("hf/" + name)) == read_file("tests/fixtures/tied_bf16/" + name));

    write_checkpoint(s / "bare", "BF16", "");
    check_done(run(s / "bare" + " " + s / "bare.bin"));
    // The chat template is part of the model.
    write_checkpoint(s / "chat", "BF16", "");
    for (const char* file : {R"({"chat_template": "{{ 1 }}"})", R"({"chat_template": [{"name": "tools", "template": "2"}, {"name": "default", "template": "{{ 1 }}"}]})"}) {
        write_file(s / "chat/tokenizer_config.json", file);
        check_done(run(s / "chat" + " " + s / "chat.bin"));
        check_done(run("--to-hf " + s / "chat.bin" + " " + s / "chat_back"));
        CHECK(read_file(s / "chat_back/chat_template.jinja") == "{{ 1 }}");
    }
    write_file(s / "chat/chat_template.jinja", "{{ 3 }}");
    check_done(run(s / "chat" + " " + s / "chat.bin"));
    CHECK(load(s / "chat.bin").metadata.at("chat_template") == "{{ 3 }}");
    // So are the questions that a chat begins with.
    std::string model = read_file(s / "chat.bin");
    const std::string starters = R"("starters": "[\"a\"]", )";
    model.insert(model.find('{', model.find("__metadata__")) + 1, starters);
    const uint64_t header = *(const uint64_t*)model.data() + starters.size();
    model.replace(0, 8, (const char*)&header, 8);
    write_file(s / "asks.bin", model);
    check_done(run("--to-hf " + s / "asks.bin" + " " + s / "asks"));
    check_done(run(s / "asks" + " " + s / "asks_again.bin"));
    for (const char* name : {"asks/model.safetensors", "asks_again.bin"})
        CHECK(load(s / name).metadata.at("starters") == "[\"a\"]");
    check_done(run("--to-hf " + s / "bare.bin" + " " + s / "hf2 --tokenizer-from " + s / "tok"));
    CHECK(read_file(s / "hf2/generation_config.json") == "generation_config.json");

    check_refused(run("--to-hf " + s / "m.bin" + " " + s / "hf3 --tokenizer-from " + s / "bare"), s / "bare",
                  "no tokenizer.json");
    CHECK(!fs::exists(s / "hf3"));
}

// tests/unit/test_int8.cpp has the numbers; here: which tensors, where they lie, and what is refused.
EXPORT_TEST("--int8: matrices as I8 and their scales, the wider types first; nothing else changes") {
    for (std::string name : {"tied_bf16", "untied_f32_sharded"}) {
        CAPTURE(name);
        Scratch s;
        check_done(run("tests/fixtures/" + name + " " + s / "plain.bin"));
        check_done(run("tests/fixtures/" + name + " " + s / "m.bin --int8"));
        File plain = load(s / "plain.bin"), model = load(s / "m.bin");
        CHECK(model.data_begin % 64 == 0);
        CHECK(model.metadata == plain.metadata);
        std::vector<std::string> first, last;
        for (auto& key : plain.order) {
            CAPTURE(key);
            const Tensor& before = plain.tensors[key];
            if (key.find("norm") != std::string::npos) {
                CHECK(model.tensors[key] == before);
                first.push_back(key);
                continue;
            }
            CHECK(model.tensors[key].dtype == "I8");
            CHECK(model.tensors[key].shape == before.shape);
            int rows = 0, in = 0;
            REQUIRE(sscanf(before.shape.c_str(), "[%d, %d]", &rows, &in) == 2);
            CHECK(model.tensors[key + "_scale"].dtype == "BF16");
            CHECK(model.tensors[key + "_scale"].shape == format("[%d, %d]", rows, (in + 31) / 32));
            first.push_back(key + "_scale"), last.push_back(key);
        }
        first.insert(first.end(), last.begin(), last.end());
        CHECK(model.order == first);
        CHECK(last.size() % 7 == (plain.tensors.count("lm_head.weight") ? 2 : 1));

        check_refused(run("--to-hf " + s / "m.bin" + " " + s / "hf"), s / "m.bin", "has INT8 weights");
        CHECK(!fs::exists(s / "hf"));
    }
}

EXPORT_TEST("--int8: matrices that cannot be, one line and no file, with NumPy or without") {
    Scratch s;
    fs::create_directory(s / "hf");
    write_file(s / "hf/config.json", R"({"model_type": "qwen3"})");
    const std::string file = s / "hf/model.safetensors", arguments = s / "hf" + " " + s / "m.bin --int8";
    auto write = [&](const std::string& dtype, const std::string& shape, const std::string& data) {
        const char* header = R"({"lm_head.weight":{"dtype":"%s","shape":%s,"data_offsets":[0,%zu]}})";
        write_file(file, safetensors(format(header, dtype.c_str(), shape.c_str(), data.size()), data));
    };
    auto refused = [&](const std::string& fault) {
        check_refused(run(arguments), file, fault);
        check_refused(shell("python3 export.py " + arguments), file, fault);
        CHECK(!fs::exists(s / "m.bin"));
    };
    struct { std::string dtype, number; } cases[] = {
        {"BF16", "\x80\x7f"}, {"BF16", "\x80\xff"}, {"BF16", "\x81\x7f"}, {"BF16", "\xff\xff"},
        {"F16", {"\x00\x7c", 2}}, {"F16", {"\x00\xfc", 2}}, {"F16", "\x01\x7c"}, {"F16", "\xff\xff"},
        {"F32", {"\x00\x00\x80\x7f", 4}}, {"F32", {"\x01\x00\x80\xff", 4}}, {"F32", "\xff\xff\xff\xff"}};
    for (auto& c : cases) {
        CAPTURE(c.dtype);
        std::string zeros(c.number.size() * 2 * 33, '\0');
        zeros.replace(zeros.size() - c.number.size(), c.number.size(), c.number);
        write(c.dtype, "[2,33]", zeros);
        refused("tensor 'lm_head.weight' has an infinity or a NaN");
    }
    write("F64", "[1,1]", std::string(8, '\0'));
    refused("tensor 'lm_head.weight' is F64");
    write("I8", "[1,1]", std::string(1, '\0'));
    refused("tensor 'lm_head.weight' is I8");
    write("BF16", "[4]", std::string(8, '\0'));
    refused("tensor 'lm_head.weight' is not a matrix");
    write("BF16", "[1,2,2]", std::string(8, '\0'));
    refused("tensor 'lm_head.weight' is not a matrix");
    write_file(file, safetensors(R"({"lm_head.weight":{"dtype":"BF16","shape":[1,1],"data_offsets":[0,2]},)"
                                 R"("lm_head.weight_scale":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})",
                                 "1234"));
    check_refused(run(arguments), s / "hf", "a matrix together with its _scale");
    for (std::string shape : {"[0,5]", "[5,0]", "[1,2]"}) { // so the cases above failed for their fault alone
        const size_t n = shape == "[1,2]" ? 2 : 0;
        write("BF16", shape, std::string(2 * n, '\0'));
        check_done(run(arguments));
        CHECK(load(s / "m.bin").tensors["lm_head.weight"].bytes == std::string(n, '\0'));
    }
}

// -------------------------------------------------------------------------------------------------- refusals
EXPORT_TEST("hostile safetensors files: one line, and nothing is left") {
    auto with = [](std::string_view entry, std::string_view data) { return safetensors(entry, data); };
    auto x = [](const std::string& entry, size_t data) {
        return safetensors(R"({"x":)" + entry + "}", std::string(data, '\0'));
    };
    std::string good = x(R"({"dtype":"BF16","shape":[2,2],"data_offsets":[0,8]})", 8), deep(100000, '[');
    struct { std::string bytes, fault; } cases[] = {
        {"", "too few"},
        {good.substr(0, 7), "too few"},
        {good.substr(0, 8), "truncated"},
        {good.substr(0, 30), "truncated"},
        {good.substr(0, good.size() - 9), "truncated"},
        {good.substr(0, good.size() - 8), "truncated"},
        {good.substr(0, good.size() - 1), "truncated"},
        {good + '\0', "bytes after the last tensor"},
        {"\x01\xe1\xf5\x05\0\0\0\0{}"s, "100000001 bytes (limit 100 MB)"},
        {"\xff\xff\xff\xff\xff\xff\xff\xff{}"s, "18446744073709551615 bytes (limit 100 MB)"},
        {with("", ""), "begin with '{'"},
        {with(" {}", ""), "begin with '{'"},
        {with("[]", ""), "begin with '{'"},
        {with("{", ""), "JSON"},
        {with("{}x", ""), "JSON"},
        {with("{}\0"sv, ""), "JSON"},
        {with(R"({"a":1,})", ""), "JSON"},
        {with(R"({"a":NaN})", ""), "JSON"},
        {with("{\"a\nb\":1}", ""), "JSON"},
        {with(R"({"a":)" + deep, ""), "nested too deeply"},
        {with(R"({"a":)" + std::string(5000, '1') + "}", ""), "too large"},
        {with("{\"\xc3\x28\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}", ""), "UTF-8"},
        {with("{\"\\ud800\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}", ""), "UTF-8"},
        {with("{\"__metadata__\":{\"a\":\"\\udfff\"}}", ""), "UTF-8"},
        {with(R"({"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},)"
              R"("x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})", ""), "duplicate key 'x'"},
        {with(R"({"__metadata__":{},"__metadata__":{}})", ""), "duplicate key"},
        {with(R"({"__metadata__":[]})", ""), "strings to strings"},
        {with(R"({"__metadata__":{"a":1}})", ""), "strings to strings"},
        {x("[]", 0), "'x': not an object"},
        {x(R"({"shape":[2],"data_offsets":[0,4]})", 4), "unknown dtype"},
        {x(R"({"dtype":"BF17","shape":[2],"data_offsets":[0,4]})", 4), "unknown dtype 'BF17'"},
        {x(R"({"dtype":[],"shape":[2],"data_offsets":[0,4]})", 4), "unknown dtype"},
        {x(R"({"dtype":"BF16","data_offsets":[0,4]})", 4), "not a list of sizes"},
        {x(R"({"dtype":"BF16","shape":2,"data_offsets":[0,4]})", 4), "not a list of sizes"},
        {x(R"({"dtype":"BF16","shape":[-2],"data_offsets":[0,4]})", 4), "not a list of sizes"},
        {x(R"({"dtype":"BF16","shape":[2.0],"data_offsets":[0,4]})", 4), "not a list of sizes"},
        {x(R"({"dtype":"BF16","shape":[true],"data_offsets":[0,2]})", 2), "not a list of sizes"},
        {x(R"({"dtype":"BF16","shape":[4294967296,4294967296],"data_offsets":[0,0]})", 0), "overflows"},
        {x(R"({"dtype":"BF16","shape":[9223372036854775808],"data_offsets":[0,0]})", 0), "overflows"},
        {x(R"({"dtype":"BF16","shape":[4294967296,4294967296,0],"data_offsets":[0,0]})", 0), "overflows"},
        {x(R"({"dtype":"BF16","shape":[2]})", 4), "not [begin, end]"},
        {x(R"({"dtype":"BF16","shape":[2],"data_offsets":[0,4,4]})", 4), "not [begin, end]"},
        {x(R"({"dtype":"BF16","shape":[2],"data_offsets":[4,0]})", 4), "not [begin, end]"},
        {x(R"({"dtype":"BF16","shape":[2],"data_offsets":[-4,0]})", 4), "not [begin, end]"},
        {x(R"({"dtype":"BF16","shape":[2],"data_offsets":[0,"4"]})", 4), "not [begin, end]"},
        {x(R"({"dtype":"BF16","shape":[2],"data_offsets":[-0,4]})", 4), "not [begin, end]"},
        {x(R"({"dtype":"BF16","shape":[3],"data_offsets":[0,4]})", 4), "4 bytes for a shape of 6"},
        {x(R"({"dtype":"F32","shape":[2],"data_offsets":[0,4]})", 4), "4 bytes for a shape of 8"},
        {x(R"({"dtype":"BF16","shape":[2],"data_offsets":[0,4]})", 2), "truncated"},
        {x(R"({"dtype":"BF16","shape":[2],"data_offsets":[2,6]})", 6), "a hole before it"},
        {with(R"({"x":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
              R"("y":{"dtype":"U8","shape":[2],"data_offsets":[3,5]}})", "12345"), "'y': a hole before it"},
        {with(R"({"x":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
              R"("y":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})", "123"), "'y': overlaps another"},
        {with(R"({"x":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
              R"("y":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})", "12"), "overlaps another"},
    };
    Scratch s;
    fs::create_directory(s / "hf");
    fs::create_directory(s / "out");
    write_file(s / "hf/config.json", R"({"model_type": "qwen3"})");
    std::string file = s / "hf/model.safetensors";
    for (auto& c : cases) {
        write_file(file, c.bytes);
        check_refused(run(s / "hf" + " " + s / "out/m.bin"), file, c.fault);
        CHECK(fs::is_empty(s / "out"));
    }
    check_refused(run("--to-hf " + file + " " + s / "out/hf"), file, cases[std::size(cases) - 1].fault);
    CHECK(fs::is_empty(s / "out"));

    write_file(file, good);
    check_done(run(s / "hf" + " " + s / "out/m.bin")); // so the cases above failed for their fault alone
}

EXPORT_TEST("folders that are no Qwen3 checkpoint") {
    Scratch s;
    std::string hf = s / "hf", out = " " + s / "m.bin";
    check_refused(run(hf + out), hf, "no such folder");
    fs::create_directory(hf);
    check_refused(run(hf + out), hf + "/config.json", "No such file");
    write_checkpoint(hf, "BF16", "1234");
    for (auto& [config, fault] : std::map<std::string, std::string>{
             {R"({"model_type": "llama"})", "model_type 'llama' is not supported"},
             {R"({"model_type": "qwen2_moe"})", "model_type 'qwen2_moe' is not supported"},
             {"{}", "model_type 'None' is not supported"},
             {R"({"model_type": "qwen3", "quantization_config": {}})", "quantization_config"},
             {"[]", "not a JSON object"},
             {"{", "JSON"},
             {"", "JSON"},
             {"{\"model_type\": \"qwen3\", \"x\": \"\xff\"}", "UTF-8"}}) {
        write_file(hf + "/config.json", config);
        check_refused(run(hf + out), hf + "/config.json", fault);
    }
    write_checkpoint(hf, "BF16", "1234");
    write_file(hf + "/generation_config.json", "nothing");
    check_refused(run(hf + out), hf + "/generation_config.json", "JSON");
    fs::remove(hf + "/generation_config.json");

    fs::remove(hf + "/model.safetensors");
    check_refused(run(hf + out), hf, "no model.safetensors");
    fs::create_directory(hf + "/model.safetensors");
    check_refused(run(hf + out), hf + "/model.safetensors", "not a regular file");
    fs::remove(hf + "/model.safetensors");

    std::string index = hf + "/model.safetensors.index.json";
    std::string one = safetensors(R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", "1");
    write_file(hf + "/a.safetensors", one);
    write_file(hf + "/b.safetensors", one);
    struct { std::string map, file, fault; } cases[] = {
        {"[]", index, "weight_map"},
        {R"({"x": 1})", index, "weight_map"},
        {R"({"x": "c.safetensors"})", hf + "/c.safetensors", "No such file"},
        {R"({"x": "../hf/a.safetensors"})", index, "not the name of a file"},
        {R"({"x": ".."})", index, "not the name of a file"},
        {R"({"x": ""})", index, "not the name of a file"},
        {"{\"x\": \"a\\u0000.safetensors\"}", index, "not the name of a file"},
        {R"({"x": "a.safetensors", "y": "a.safetensors"})", index, "'y' is not in"},
        {R"({"x": "a.safetensors", "y": "b.safetensors"})", hf + "/b.safetensors", "in two shards"},
    };
    for (auto& c : cases) {
        write_file(index, R"({"metadata": {}, "weight_map": )" + c.map + "}");
        check_refused(run(hf + out), c.file, c.fault);
    }
    CHECK(!fs::exists(s / "m.bin"));
    write_file(index, R"({"weight_map": {"x": "a.safetensors"}})");
    check_done(run(hf + out));

    // Config and tensors that contradict each other
    const char* config = R"({"model_type": "qwen3", "num_hidden_layers": 1, "tie_word_embeddings": true})";
    auto with = [&](const std::string& name, const std::string& bytes) { // beside an embedding of zeros
        write_checkpoint(hf, "BF16", "1234");
        write_file(hf + "/config.json", config);
        write_file(hf + "/model.safetensors", safetensors(R"({"model.embed_tokens.weight":{"dtype":"BF16","shape":[1,2],"data_offsets":[0,4]},")" + name +
                                                              R"(":{"dtype":"BF16","shape":[1,2],"data_offsets":[4,8]}})", std::string(4, '\0') + bytes));
        return run(hf + out);
    };
    fs::remove(index);
    const std::string zeros(4, '\0');
    for (const char* name : {"model.layers.1.mlp.up_proj.weight", "model.layers.0.mlp.other.weight", "score.weight", "score.bias"})
        check_refused(with(name, zeros), hf + "/model.safetensors", "tensor '" + std::string(name) + "' is none of the model that");
    check_refused(with("lm_head.weight", "1234"), hf + "/model.safetensors", "tie_word_embeddings is true, and it is not model.embed_tokens.weight");
    check_refused(with("model.layers.0.mlp.up_proj.bias", "1234"), hf + "/model.safetensors", "is not zero");
    for (const char* name : {"lm_head.weight", "model.layers.0.mlp.up_proj.bias"}) {
        check_done(with(name, zeros));
        CHECK(load(s / "m.bin").tensors.size() == 1);
    }
    check_done(with("model.layers.0.mlp.up_proj.weight", "1234"));
    CHECK(load(s / "m.bin").tensors.size() == 2);

    // --to-hf of a safetensors file that is not a model.bin
    std::string plain = "tests/fixtures/tied_bf16/model.safetensors";
    check_refused(run("--to-hf " + plain + " " + s / "back"), plain, "no config");
    write_file(s / "odd.bin", safetensors(R"({"__metadata__":{"config":"{\"model_type\": \"gpt2\"}"}})", ""));
    check_refused(run("--to-hf " + s / "odd.bin" + " " + s / "back"), s / "odd.bin", "'gpt2' is not");
    CHECK(!fs::exists(s / "back"));
}

EXPORT_TEST("a full disk, and other places that cannot be written") {
    Scratch s;
    std::string from = "tests/fixtures/tied_bf16";
    fs::create_directory(s / "out");
    write_file(s / "out/m.bin", "precious");
    // 64 blocks of 512 bytes: the file may not grow further
    const std::string limited = "ulimit -f 64; exec python3 -I -S export.py ";
    check_refused(shell(limited + from + " " + s / "out/m.bin"), s / "out/m.bin", "File too large");
    CHECK(read_file(s / "out/m.bin") == "precious");
    CHECK(std::distance(fs::directory_iterator(s / "out"), {}) == 1);
    check_refused(run(from + " /dev/full"), "/dev/full", "No space left on device");
    check_refused(run(from + " " + s / "out"), s / "out", "is a folder");
    check_refused(run(from + " " + s / "none/m.bin"), s / "none/m.bin", "No such file");

    check_done(run(from + " " + s / "m.bin"));
    check_refused(shell(limited + "--to-hf " + s / "m.bin" + " " + s / "hf"), s / "hf", "File too large");
    CHECK(!fs::exists(s / "hf"));
    check_refused(run("--to-hf " + s / "m.bin" + " " + s / "out/m.bin"), s / "out/m.bin", "File exists");
    CHECK(read_file(s / "out/m.bin") == "precious");
}

EXPORT_TEST("the command line") {
    Result help = run("--help");
    check_done(help);
    for (auto word : {"HF_DIR model.bin", "--keep-dtype", "--int8", "--to-hf", "--tokenizer-from",
                      "tokenizer.bin"})
        CHECK(help.out.find(word) != std::string::npos);
    CHECK(help.err == "");
    check_refused(run(""), "--help", "needs two paths, got 0");
    check_refused(run("a"), "--help", "needs two paths, got 1");
    check_refused(run("a b c"), "--help", "needs two paths, got 3");
    check_refused(run("a b --quick"), "--quick", "unknown option");
    check_refused(run("--to-hf a b --tokenizer-from"), "--tokenizer-from", "needs a folder");
    check_refused(run("--to-hf a b --keep-dtype"), "--keep-dtype and --to-hf", "do not go together");
    check_refused(run("a b --keep-dtype --int8"), "--int8 and --keep-dtype", "do not go together");
    check_refused(run("--to-hf a b --int8"), "--int8 and --to-hf", "do not go together");
    check_refused(run("a b --tokenizer-from c"), "--tokenizer-from", "do not go together");
    check_refused(run("--tokenizer --to-hf a b"), "--to-hf and --tokenizer", "do not go together");
    check_refused(run("--to-hf /nonexistent.bin /nonexistent"), "/nonexistent.bin", "No such file");
}
