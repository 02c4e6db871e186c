// search/embed.cpp: the input texts of an embedding model, and its vectors; see embed.h.
#include "search/embed.h"
#include "base/error.h"
#include "base/file.h"
#include "model/model_file.h"
#include "sj.h"
#include <algorithm>
#include <cmath>
#include <cstdio>

std::string with_task(const std::string& task, std::string_view query) {
    return "Instruct: " + task + "\nQuery:" + std::string(query);
}

int end_of_text(const Tokenizer& t) {
    const int id = t.id("<|endoftext|>");
    if (id < 0) DIE("the vocabulary has no <|endoftext|>");
    return id;
}

void cut_text(std::vector<int>& ids, size_t most, bool keep_last) {
    if (ids.size() <= most) return;
    if (keep_last) ids.erase(ids.begin(), ids.end() - (ptrdiff_t)most);
    else ids.resize(most);
}

std::vector<int> embedding_ids(const Tokenizer& t, std::string_view text, size_t most,
                               bool keep_last) {
    std::vector<int> ids = t.encode(text, false);
    if (most) cut_text(ids, most - 1, keep_last);
    ids.push_back(end_of_text(t));
    return ids;
}

bool says_it_embeds(const ModelFile& file) {
    struct Json {
        MappedFile file; // holds the text of the values
        sj::Doc doc;
        explicit Json(const std::string& path) : file(path) {
            const std::string fault = sj::parse(doc, file.text());
            if (!fault.empty()) DIE("%s: %s", path.c_str(), fault.c_str());
        }
    };
    const std::string path = file.path + "/modules.json";
    if (!ModelFile::exists(path)) {
        sj::Doc config;
        sj::parse(config, file.config_text);
        return config.root()["architectures"][(size_t)0].str() == "Qwen3Model";
    }
    bool pools = false;
    const Json modules(path);
    for (sj::Value module : modules.doc.root().items()) {
        const std::string type = module["type"].str(), name = type.substr(type.rfind('.') + 1);
        if (name != "Transformer" && name != "Pooling" && name != "Normalize")
            DIE("%s: the module %s is not supported", path.c_str(), name.c_str());
        if (name != "Pooling") continue;
        const std::string config = file.path + "/" + module["path"].str() + "/config.json";
        const Json pooling(config);
        const sj::Value how = pooling.doc.root();
        if (!how["pooling_mode_lasttoken"].boolean(false) && how["pooling_mode"].str() != "lasttoken")
            DIE("%s: only the last token's vector is supported (pooling_mode_lasttoken)", config.c_str());
        pools = true;
    }
    return pools;
}

bool all_finite(const std::vector<float>& x) {
    return std::all_of(x.begin(), x.end(), [](float v) { return std::isfinite(v); });
}

std::vector<float> unit_vector(const std::vector<float>& hidden, size_t dimensions) {
    double squares = 0;
    for (size_t i = 0; i < dimensions; i++) squares += (double)hidden[i] * hidden[i];
    const double length = std::max(std::sqrt(squares), 1e-12);
    std::vector<float> v(dimensions);
    for (size_t i = 0; i < dimensions; i++) v[i] = (float)(hidden[i] / length);
    return v;
}

void write_numbers(std::string& out, const std::vector<float>& v) {
    char number[32];
    for (size_t i = 0; i < v.size(); i++)
        out.append(number, (size_t)snprintf(number, sizeof number, i ? ", %.9g" : "[%.9g", v[i]));
    out += ']';
}
