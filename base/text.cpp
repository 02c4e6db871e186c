#include "base/text.h"
#include "base/error.h"

size_t invalid_utf8(std::string_view text) {
    for (size_t i = 0; i < text.size();) {
        const int n = utf8_length(&text[i], text.size() - i);
        if (n <= 0) return i;
        i += (size_t)n;
    }
    return text.npos;
}

void must_be_utf8(const std::string& name, std::string_view text) {
    if (const size_t at = invalid_utf8(text); at != text.npos) DIE("%s: invalid UTF-8 at byte %zu", name.c_str(), at);
}
