#include "book/characters.h"
#include "model/utf8.h"

std::u32string decode(std::string_view valid) {
    std::u32string out;
    for (const char *p = valid.data(), *end = p + valid.size(); p < end;) out += (char32_t)utf8_read(p);
    return out;
}

size_t count_characters(std::string_view valid) {
    return (size_t)std::count_if(valid.begin(), valid.end(), [](char c) { return (c & 0xC0) != 0x80; });
}

size_t next_character(std::string_view s, size_t at) {
    while (at < s.size() && ((uint8_t)s[at] & 0xC0) == 0x80) at++;
    return at;
}

std::string score_excerpt(std::string_view text, int most) {
    std::string out;
    for (const char *p = text.data(), *end = p + text.size(); p < end;) {
        if (most-- == 0) return out + "…";
        const uint32_t c = utf8_read(p);
        if (c < 0x20 || (c >= 0x7F && c < 0xA0)) out += ' ';
        else utf8_append(out, c);
    }
    return out;
}
