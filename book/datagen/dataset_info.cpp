#include "book/datagen/dataset_info.h"
#include "base/file.h"
#include "book/report.h"
#include "sj.h"
#include <cstring>
#include <map>
#include <utility>
#include <unistd.h>

namespace book {

namespace {

// A whole JSON file.
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
    layout.ranking = entry["ranking"].boolean();
    if (layout.formatting == "openai")
        for (auto [key, value] : {std::pair("messages", "messages"), {"role_tag", "role"}, {"content_tag", "content"},
                                  {"user_tag", "user"}, {"assistant_tag", "assistant"}, {"observation_tag", "tool"}})
            layout.name[key] = value;
    else if (layout.formatting != "alpaca" && layout.formatting != "sharegpt")
        DIE("%s: formatting %s is not known", where.c_str(), in_quotes(layout.formatting).c_str());
    // Optional columns have no default; if some columns are mapped, the others are not read.
    const bool mapped = entry["columns"].is(sj::Object);
    for (const char* column : {"prompt", "query", "response", "history", "system", "tools", "chosen", "rejected",
                               "kto_tag"}) {
        const bool needed = *column == 'p' || *column == 'q' || !strcmp(column, "response");
        if (mapped || !needed) layout.name[column] = "";
    }
    auto is_tag = [](const std::string& key) { return key != "kto_tag" && key.find("_tag") != key.npos; };
    std::string unread;
    auto leave = [&](const std::string& key) { unread += (unread.empty() ? "" : ", ") + key; };
    for (auto part : {"columns", "tags"})
        for (auto [key, value] : entry[part].members())
            if (!layout.name.count(key) || is_tag(key) != (*part == 't')) leave(key);
            else if (value.is(sj::String)) layout.name[key] = value.str();
            else if (!is_absent(value)) DIE("%s: %s: not a string", where.c_str(), key.c_str());
    static const std::set<std::string> known = {"file_name", "formatting", "ranking", "columns", "tags"};
    for (auto [key, value] : entry.members())
        if (!known.count(key)) leave(key);
    if (!unread.empty()) say(format("%s: not known here, and not read: %s", where.c_str(), unread.c_str()));
    return layout;
}

void write_dataset_info(const std::string& path, const std::string& file, const RowsRead& rows) {
    const std::string name = file.substr(0, file.rfind('.'));
    std::map<std::string, std::string> entries;
    if (access(path.c_str(), F_OK) == 0) {
        const JsonFile old(path);
        for (auto [key, value] : old.doc.root().members()) entries[key] = sj::dump(value);
    }
    const bool turns = rows.kind == "openai" || rows.kind == "sharegpt";
    sj::Writer w;
    w.object().field("file_name", file).field("formatting", turns ? "sharegpt" : "alpaca");
    if (rows.pairs) w.field("ranking", true);
    w.key("columns").object();
    for (auto& [column, key] : Layout().columns_of(rows.kind, rows.pairs))
        if (rows.keys.count(key)) w.field(column, key);
    w.end();
    if (turns) { // the roles that occur, and the usual names of the others
        const bool openai = rows.kind == "openai";
        w.key("tags").object().field("role_tag", openai ? "role" : "from");
        w.field("content_tag", openai ? "content" : "value");
        for (auto [tag, usual] : {std::pair("user_tag", openai ? "user" : "human"),
                                  {"assistant_tag", openai ? "assistant" : "gpt"},
                                  {"observation_tag", openai ? "tool" : "observation"},
                                  {"function_tag", "function_call"}, {"system_tag", "system"}}) {
            const auto found = rows.tags.find(tag);
            w.field(tag, found == rows.tags.end() ? usual : *found->second.begin());
        }
        w.end();
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
