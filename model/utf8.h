// model/utf8.h: UTF-8, whole, broken, or in parts.
#pragma once
#include "base/text.h"
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

// The code point at p, which moves past it. For text that is known to be valid.
inline uint32_t utf8_read(const char*& p) {
    auto tail = [&] { return (uint32_t)(uint8_t)*p++ & 0x3F; };
    uint32_t c = (uint8_t)*p++;
    if (c < 0x80) return c;
    if (c < 0xE0) return c = (c & 0x1F) << 6, c | tail();
    if (c < 0xF0) return c = (c & 0x0F) << 12, c |= tail() << 6, c | tail();
    return c = (c & 0x07) << 18, c |= tail() << 12, c |= tail() << 6, c | tail();
}

inline void utf8_append(std::string& out, uint32_t c) {
    if (c < 0x80) return out.push_back((char)c);
    if (c < 0x800) out.push_back((char)(0xC0 | c >> 6));
    else {
        if (c < 0x10000) out.push_back((char)(0xE0 | c >> 12));
        else {
            out.push_back((char)(0xF0 | c >> 18));
            out.push_back((char)(0x80 | (c >> 12 & 0x3F)));
        }
        out.push_back((char)(0x80 | (c >> 6 & 0x3F)));
    }
    out.push_back((char)(0x80 | (c & 0x3F)));
}

// Appends s as valid UTF-8 and returns how much of it was used: all of it if this is the last part of a text,
// else all but a character that s does not hold to its end.
size_t utf8_repair(std::string& out, std::string_view s, bool last);

// Bytes in, in any portions; valid UTF-8 out as soon as it is complete.
struct Utf8Stream {
    std::string held; // the beginning of a character: at most 3 bytes between calls

    std::string feed(std::string_view bytes);
    std::string flush();
};
