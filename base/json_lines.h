// base/json_lines.h: the lines of a JSONL file, each parsed by itself.
#pragma once
#include "base/file.h"
#include "sj.h"

// Calls f(number, text, value) for each line of a JSONL file that is not blank.
template <class F> void each_json_line(const MappedFile& file, F f) {
    const std::string_view text = file.text();
    for (size_t at = 0, line = 1; at < text.size(); line++) {
        const std::string_view s = text.substr(at, text.find('\n', at) - at);
        at += s.size() + 1;
        if (s.find_first_not_of(" \t\r") == std::string::npos) continue;
        sj::Doc doc;
        const std::string fault = sj::parse(doc, s);
        if (!fault.empty()) // it begins with "line 1, ", since each line is a text by itself
            DIE("%s: line %zu, %s", file.path.c_str(), line, fault.c_str() + fault.find("byte"));
        f(line, s, doc.root());
    }
}
