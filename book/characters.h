// book/characters.h: the characters of a text: blanks, digits, letters, and where each character begins.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

inline bool is_digit(uint32_t c) { return c >= '0' && c <= '9'; }
inline bool is_latin(uint32_t c) { return (c | 32) >= 'a' && (c | 32) <= 'z' && c < 128; }
inline uint32_t lower(uint32_t c) { return c >= 'A' && c <= 'Z' ? c + 32 : c; }
inline bool is_space(uint32_t c) {
    return c <= ' ' || c == 0xA0 || c == 0x3000 || (c >= 0x2000 && c <= 0x200B) || c == 0xFEFF;
}
inline bool is_cjk(uint32_t c) { // written without blanks between words: Han, kana, Hangul
    return (c >= 0x3041 && c <= 0x30FF) || (c >= 0x3400 && c <= 0x9FFF) || (c >= 0xAC00 && c <= 0xD7A3) ||
           (c >= 0xF900 && c <= 0xFAFF) || (c >= 0x20000 && c <= 0x3FFFF) || c == 0x3005 || c == 0x3007;
}
// Letters and digits of all other scripts: anything but control characters, blanks, punctuation and symbol blocks.
inline bool is_word(uint32_t c) {
    if (c < 0xC0) return is_digit(c) || is_latin(c) || c == 0xAA || c == 0xB5 || c == 0xBA;
    return c != 0xD7 && c != 0xF7 && !(c >= 0x2000 && c <= 0x2BFF) && !(c >= 0x2E00 && c <= 0x303F) &&
           !(c >= 0xD800 && c <= 0xF8FF) && !(c >= 0xFE10 && c <= 0xFE6F) && !(c >= 0xFF00 && c <= 0xFF0F) &&
           !(c >= 0xFF1A && c <= 0xFF20) && !(c >= 0xFF3B && c <= 0xFF40) && !(c >= 0xFF5B && c <= 0xFF65) &&
           c < 0x1F000 && !is_cjk(c);
}

// The code points of valid UTF-8; their number.
std::u32string decode(std::string_view valid);
size_t count_characters(std::string_view valid);

// Where the first character at or after byte `at` begins.
size_t next_character(std::string_view s, size_t at);

// A text in one line of at most `most` characters, without control characters for a terminal.
std::string score_excerpt(std::string_view text, int most);
