#include "base/json_lines.h"

using namespace std::literals;

std::string parse_line(sj::Doc& doc, std::string_view line) {
    std::string fault = sj::parse(doc, line);
    if (const size_t at = fault.find("byte "); at != fault.npos) fault.erase(0, at); // it begins with "line 1, "
    return fault;
}

size_t mark_of(const std::string& path, std::string_view beginning) {
    auto begins = [&](std::string_view with) { return beginning.substr(0, with.size()) == with; };
    if (begins("\xEF\xBB\xBF")) return 3;
    // A byte order mark, or a first ASCII character stored in two or four bytes.
    const std::string_view nothing("\0\0\0", 3);
    const char* name = begins("\xFF\xFE") || begins("\xFE\xFF") ? "UTF-16" : nullptr;
    if (beginning.size() >= 4) {
        const bool first = beginning[0], second = beginning[1], third = beginning[2];
        if (begins(nothing) || (first && beginning.substr(1, 3) == nothing) || begins("\xFF\xFE\0\0"sv))
            name = "UTF-32";
        else if (first != second && third == first) name = first ? "UTF-16LE" : "UTF-16BE";
    }
    if (name) DIE("%s: %s; convert it first: iconv -f %s -t UTF-8", path.c_str(), name, name);
    return 0;
}

void each_json_line(const MappedFile& file, const std::function<void(size_t, std::string_view, sj::Value)>& f) {
    each_numbered_line(file.text().substr(mark_of(file.path, file.text())), [&](std::string_view s, size_t line) {
        if (s.find_first_not_of(" \t\r") == std::string::npos) return;
        sj::Doc doc;
        if (const std::string fault = parse_line(doc, s); !fault.empty())
            DIE("%s: line %zu, %s", file.path.c_str(), line, fault.c_str());
        f(line, s, doc.root());
    });
}
