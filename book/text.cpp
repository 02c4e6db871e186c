#include "book/text.h"
#include "base/error.h"
#include <algorithm>

namespace book {

std::string hex(uint64_t x) { return format("%016llx", (unsigned long long)x); }

std::string one_line(std::string_view json) {
    std::string s(json);
    std::replace_if(s.begin(), s.end(), [](char c) { return c == '\n' || c == '\r'; }, ' ');
    return s;
}

Lines lines_of(std::string_view text) {
    Lines lines;
    for (size_t at = 0, end; at < text.size(); at = end + 1) {
        end = std::min(text.find('\n', at), text.size());
        lines.push_back(text.substr(at, end - at - (end > at && text[end - 1] == '\r')));
    }
    return lines;
}

std::string_view trimmed(std::string_view s) {
    s.remove_prefix(std::min(s.find_first_not_of(" \t\r\n"), s.size()));
    return s.substr(0, s.find_last_not_of(" \t\r\n") + 1);
}

} // namespace book
