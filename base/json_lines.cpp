#include "base/json_lines.h"

std::string parse_line(sj::Doc& doc, std::string_view line) {
    std::string fault = sj::parse(doc, line);
    if (const size_t at = fault.find("byte "); at != fault.npos) fault.erase(0, at); // it begins with "line 1, "
    return fault;
}

void each_json_line(const MappedFile& file, const std::function<void(size_t, std::string_view, sj::Value)>& f) {
    each_numbered_line(file.text(), [&](std::string_view s, size_t line) {
        if (s.find_first_not_of(" \t\r") == std::string::npos) return;
        sj::Doc doc;
        if (const std::string fault = parse_line(doc, s); !fault.empty())
            DIE("%s: line %zu, %s", file.path.c_str(), line, fault.c_str());
        f(line, s, doc.root());
    });
}
