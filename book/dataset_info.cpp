#include "book/dataset_info.h"
#include "base/file.h"
#include "sj.h"
#include <map>
#include <unistd.h>

namespace book {

namespace {

// A whole file of JSON.
struct JsonFile {
    const MappedFile file;
    sj::Doc doc;
    explicit JsonFile(const std::string& path) : file(path) {
        if (const std::string fault = sj::parse(doc, file.text()); !fault.empty())
            DIE("%s: %s", path.c_str(), fault.c_str());
    }
};

} // namespace

Layout read_dataset_info(const std::string& path, const std::string& name, std::string* file) {
    const JsonFile info(path);
    const std::string where = path + ": " + in_quotes(name);
    const sj::Value entry = info.doc.root()[name];
    if (!entry.is(sj::Object)) DIE("%s: no such dataset (--name)", where.c_str());
    if (!entry["file_name"].is(sj::String)) DIE("%s: no file_name; other sources are not read", where.c_str());
    *file = path.substr(0, path.rfind('/') + 1) + entry["file_name"].str();
    Layout layout;
    layout.formatting = entry["formatting"].str("alpaca");
    if (layout.formatting != "alpaca" && layout.formatting != "sharegpt")
        DIE("%s: formatting %s is not known", where.c_str(), in_quotes(layout.formatting).c_str());
    for (auto part : {"columns", "tags"})
        for (auto [key, value] : entry[part].members())
            if (layout.name.count(key) && value.is(sj::String)) layout.name[key] = value.str();
    return layout;
}

void write_dataset_info(const std::string& path, const std::string& file, const std::string& kind,
                        const std::set<std::string>& columns, bool pairs) {
    const std::string name = file.substr(0, file.rfind('.'));
    std::map<std::string, std::string> entries;
    if (access(path.c_str(), F_OK) == 0) {
        const JsonFile old(path);
        for (auto [key, value] : old.doc.root().members()) entries[key] = sj::dump(value);
    }
    sj::Writer w;
    w.object().field("file_name", file);
    w.field("formatting", kind == "openai" ? "sharegpt" : kind == "text" ? "alpaca" : kind);
    if (pairs) w.field("ranking", true);
    w.key("columns").object();
    if (kind == "text") w.field("prompt", "text");
    if (kind == "openai") w.field("messages", "messages");
    for (auto& [key, column] : Layout().name) {
        const bool answer = key == "chosen" || key == "rejected";
        if (key.find("_tag") == key.npos && columns.count(column) && (answer ? pairs : kind != "openai"))
            w.field(key, column);
    }
    w.end();
    if (kind == "openai") {
        w.key("tags").object().field("role_tag", "role").field("content_tag", "content").field("user_tag", "user");
        w.field("assistant_tag", "assistant").field("system_tag", "system").end();
    }
    entries[name] = w.end().text;
    OutputFile out(path);
    std::string separator = "{\n  ";
    for (auto& [key, text] : entries) {
        std::string line = separator;
        sj::quote(line, key);
        out.write(line + ": " + text);
        separator = ",\n  ";
    }
    out.write("\n}\n");
    out.commit();
    std::string again;
    read_dataset_info(path, name, &again);
    if (again != path.substr(0, path.rfind('/') + 1) + file)
        DIE("%s: %s does not read back", path.c_str(), name.c_str());
}

} // namespace book
