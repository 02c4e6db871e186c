// model/tokenizer_json.cpp: tokenizer.json is compared with tokenizer.bin, token by token and merge by merge.
#include "model/tokenizer_json.h"
#include "model/gguf.h" // bytes_of
#include "sj.h"
#include <map>

// As in all of Qwen3's tokenizer.json; tokenizer.cpp has this expression as code.
static const char WORDS[] = R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*)"
                            R"(|\s*[\r\n]+|\s+(?!\S)|\s+)";

static std::string difference_of_kind(sj::Value j) {
    const sj::Value steps = j["pre_tokenizer"]["pretokenizers"];
    if (j["normalizer"]["type"].str() != "NFC") return "its normalizer is not NFC";
    if (steps.size() != 2 || steps[(size_t)0]["pattern"]["Regex"].str() != WORDS || steps[1]["type"].str() != "ByteLevel")
        return "it splits texts by another rule";
    const std::string kind = j["model"]["type"].str("BPE");
    return kind == "BPE" ? "" : format("it is of the kind %.40s", kind.c_str());
}

static std::string difference_of_vocabulary(const Tokenizer& t, sj::Value model) {
    std::string bytes, right;
    size_t count = 0;
    for (auto [text, v] : model["vocab"].members()) {
        int64_t id = -1;
        if (!v.integer(&id) || id < 0 || id >= t.size() || !bytes_of(text, bytes) || bytes != t.bytes((int)id))
            return format("its token %lld is \"%.60s\"", (long long)id, text.c_str());
        count++;
    }
    if (count != t.vocabulary()) return format("it has %zu tokens that merges make, not %zu", count, t.vocabulary());
    size_t rank = 0;
    for (sj::Value merge : model["merges"].items()) {
        const std::string text = merge.str();
        const size_t space = text.find(' ');
        std::string first = merge[(size_t)0].str(), second = merge[1].str(); // a pair, or a text with a space
        if (space != text.npos) first = text.substr(0, space), second = text.substr(space + 1);
        if (rank == t.merges()) return format("it has more than %zu merges", t.merges());
        const auto [a, b] = t.merged(rank++);
        if (!bytes_of(first, bytes) || !bytes_of(second, right) || bytes != t.bytes(a) || right != t.bytes(b))
            return format("its merge %zu is \"%.60s\"", rank - 1, (first + " " + second).c_str());
    }
    return rank == t.merges() ? "" : format("it has %zu merges, not %zu", rank, t.merges());
}

std::string adopt_tokenizer_json(Tokenizer& t, const std::string& path) {
    const MappedFile file(path);
    sj::Doc doc;
    std::string fault = sj::parse(doc, file.text());
    if (!fault.empty()) DIE("%s: %s", path.c_str(), fault.c_str());
    const sj::Value j = doc.root();
    if (!j["model"].is(sj::Object)) DIE("%s: not a tokenizer.json: it has no model", path.c_str());
    fault = difference_of_kind(j);
    if (fault.empty()) fault = difference_of_vocabulary(t, j["model"]);
    if (!fault.empty()) return fault;
    std::map<int64_t, AddedToken> more;
    for (sj::Value v : j["added_tokens"].items()) {
        int64_t id = -1;
        const std::string text = v["content"].str();
        const std::string who = format("its token %.20s \"%.60s\"", std::string(v["id"].raw()).c_str(), text.c_str());
        if (!v["id"].integer(&id) || id < 0 || text.empty()) return who + " is none";
        if (id < t.size() ? t.bytes((int)id) == text : id >= t.rows()) continue;
        if (id < t.size()) return who + format(" is \"%.60s\" there", std::string(t.bytes((int)id)).c_str());
        for (const char* key : {"single_word", "lstrip", "rstrip"})
            if (v[key].boolean(false)) return who + " has " + key;
        const AddedToken token = {text, v["special"].boolean(false), v["normalized"].boolean(false)};
        if (token.normalized && t.nfc(text) != text) return who + " is not in NFC";
        if (t.has(text) || !more.emplace(id, token).second) return who + " is there twice";
    }
    std::vector<AddedToken> list;
    for (auto& [id, token] : more) {
        if (id != t.size() + (int64_t)list.size()) return format("no token %lld", (long long)(t.size() + list.size()));
        list.push_back(token);
    }
    if (!list.empty()) t.add(list);
    return "";
}
