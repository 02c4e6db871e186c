// base/text.h: the end of a text; valid UTF-8.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

inline bool ends_in(std::string_view s, std::string_view end) {
    return s.size() >= end.size() && s.substr(s.size() - end.size()) == end;
}

// Length of the character that s (n > 0 bytes) begins with. Not positive if there is none: -k if one U+FFFD
// stands for the k bytes of a broken one (Unicode 3.9, table 3-7), 0 if s ends before the character does.
inline int utf8_length(const char* s, size_t n) {
    uint8_t c = (uint8_t)s[0];
    if (c < 0x80) return 1;
    if (c < 0xC2 || c > 0xF4) return -1;
    int length = c < 0xE0 ? 2 : c < 0xF0 ? 3 : 4;
    // the second byte excludes overlong forms (E0, F0), surrogates (ED) and what lies past U+10FFFF (F4)
    uint8_t low = c == 0xE0 ? 0xA0 : c == 0xF0 ? 0x90 : 0x80;
    uint8_t high = c == 0xED ? 0x9F : c == 0xF4 ? 0x8F : 0xBF;
    for (int i = 1; i < length; i++) {
        if ((size_t)i == n) return 0;
        if ((uint8_t)s[i] < low || (uint8_t)s[i] > high) return -i;
        low = 0x80, high = 0xBF;
    }
    return length;
}

// The first byte that is not valid UTF-8; npos: all are.
size_t invalid_utf8(std::string_view text);
// Throws Error if there is one. name: of the text, in the message.
void must_be_utf8(const std::string& name, std::string_view text);
