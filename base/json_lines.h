// base/json_lines.h: the lines of a text; those of a JSONL file, each parsed by itself.
#pragma once
#include "base/file.h"
#include "sj.h"
#include <functional>

// Calls f(line, number) with each line of a text, without its newline. The first has the number 1.
template <class F> void each_numbered_line(std::string_view text, F f) {
    for (size_t at = 0, number = 1; at < text.size(); number++) {
        const std::string_view line = text.substr(at, text.find('\n', at) - at);
        at += line.size() + 1;
        f(line, number);
    }
}

// Bytes of the byte order mark that a file begins with: 3 or 0. UTF-16 and UTF-32 are refused by their names.
size_t mark_of(const std::string& path, std::string_view beginning);

// Parses a line of a file as a text by itself: "" or "byte 57: ...".
std::string parse_line(sj::Doc& doc, std::string_view line);

// Calls f(number, text, value) for each line of a JSONL file that is not blank, behind a byte order mark. The first bad
// one ends it: Error.
void each_json_line(const MappedFile& file, const std::function<void(size_t, std::string_view, sj::Value)>& f);
