#include "model/safetensors.h"

// The value v of one tensor's name in the header: its type, shape and place, which must lie within the data.
static Tensor read_tensor_entry(const std::string& file, const std::string& tensor, sj::Value v, const uint8_t* data,
                         uint64_t data_size) {
    const char *name = file.c_str(), *k = tensor.c_str();
    const sj::Value at = v["data_offsets"];
    if (!v.is(sj::Object) || !v["dtype"].is(sj::String) || !v["shape"].is(sj::Array) || !at.is(sj::Array))
        DIE("%s: tensor %s lacks dtype, shape or data_offsets", name, k);
    const DtypeName* type = dtype_named(v["dtype"].str());
    if (!type) DIE("%s: tensor %s has the unknown dtype %.40s", name, k, v["dtype"].str().c_str());
    Tensor t;
    t.file = file;
    t.dtype = type->dtype;
    auto natural = [](sj::Value x, int64_t* n) { return x.integer(n) && x.raw()[0] != '-'; }; // (-0 is none either)
    uint64_t bytes = type->size;
    for (sj::Value d : v["shape"].items()) {
        int64_t n = 0;
        if (!natural(d, &n)) DIE("%s: tensor %s has a bad shape", name, k);
        if (__builtin_mul_overflow(bytes, (uint64_t)n, &bytes))
            DIE("%s: the shape of tensor %s overflows 64 bits", name, k);
        t.shape.push_back(n);
    }
    int64_t begin, end;
    if (at.size() != 2 || !natural(at[(size_t)0], &begin) || !natural(at[1], &end) || end < begin)
        DIE("%s: tensor %s has bad data_offsets", name, k);
    if ((uint64_t)end > data_size)
        DIE("%s: truncated: tensor %s ends at byte %lld of %llu", name, k, (long long)end,
            (unsigned long long)data_size);
    if ((uint64_t)(end - begin) != bytes)
        DIE("%s: tensor %s has %lld bytes, its shape needs %llu", name, k, (long long)(end - begin),
            (unsigned long long)bytes);
    t.data = data + begin;
    t.bytes = bytes;
    return t;
}

void read_safetensors(const MappedFile& map, Tensors& out, Metadata& metadata) {
    const char* name = map.path.c_str();
    uint64_t length = 0;
    if (map.size < 8) DIE("%s: %zu bytes are too few for a safetensors file", name, map.size);
    memcpy(&length, map.data, 8);
    if (length > 100'000'000)
        DIE("%s: not a safetensors file: its header would be %llu bytes", name, (unsigned long long)length);
    if (length > map.size - 8)
        DIE("%s: truncated: the header is %llu bytes, the file %zu", name, (unsigned long long)length, map.size);
    const std::string_view header((const char*)map.data + 8, length);
    const uint8_t* data = map.data + 8 + length;
    const uint64_t data_size = map.size - 8 - length;
    if (header.empty() || header[0] != '{') DIE("%s: not a safetensors file: its header is no JSON object", name);
    sj::Doc doc;
    const std::string fault = sj::parse(doc, header);
    if (!fault.empty()) DIE("%s: header: %s", name, fault.c_str());

    struct Span { uint64_t begin, end; std::string name; };
    std::vector<Span> spans;
    std::set<std::string> seen;
    for (auto [key, v] : doc.root().members()) {
        if (!seen.insert(key).second) DIE("%s: header names %s twice", name, key.c_str());
        if (key == "__metadata__") {
            if (!v.is(sj::Object)) DIE("%s: __metadata__ is not an object", name);
            for (auto [mk, mv] : v.members()) {
                if (!mv.is(sj::String)) DIE("%s: __metadata__: %s is not a string", name, mk.c_str());
                metadata[mk] = mv.str();
            }
            continue;
        }
        const Tensor t = read_tensor_entry(map.path, key, v, data, data_size);
        spans.push_back({(uint64_t)(t.data - data), (uint64_t)(t.data - data) + t.bytes, key});
        auto [where, fresh] = out.emplace(key, t);
        if (!fresh) DIE("%s: tensor %s is also in %s", name, key.c_str(), where->second.file.c_str());
    }
    std::sort(spans.begin(), spans.end(),
              [](const Span& a, const Span& b) { return std::tie(a.begin, a.end) < std::tie(b.begin, b.end); });
    uint64_t expected = 0;
    for (const Span& s : spans) {
        if (s.begin != expected)
            DIE("%s: %s before tensor %s", name, s.begin < expected ? "overlap" : "hole", s.name.c_str());
        expected = s.end;
    }
    if (expected != data_size)
        DIE("%s: the tensors end at byte %llu, the data at %llu", name, (unsigned long long)expected,
            (unsigned long long)data_size);
}

size_t write_safetensors(const std::string& path, const Metadata& metadata,
                         const std::vector<OutTensor>& tensors) {
    sj::Writer w;
    w.object().key("__metadata__").object();
    for (auto& [key, value] : metadata) w.field(key, value);
    w.end();
    size_t at = 0;
    for (const OutTensor& t : tensors) {
        w.key(t.name).object().field("dtype", t.dtype).key("shape").array();
        for (int64_t d : t.shape) w.value(d);
        w.end().key("data_offsets").array().value(at).value(at + t.bytes()).end().end();
        at += t.bytes();
    }
    std::string header = w.end().text;
    header.append((64 - (8 + header.size()) % 64) % 64, ' '); // the data begin at a multiple of 64
    OutputFile out(path);
    const uint64_t length = header.size();
    out.write(&length, 8);
    out.write(header);
    for (const OutTensor& t : tensors) t.write(out);
    out.commit();
    return 8 + header.size() + at;
}
