// form/pattern_reader.cpp: characters and numbers of a pattern's text, see pattern_reader.h.
#include "form/pattern_reader.h"
#include "model/utf8.h"
#include "sj.h"
#include <cctype>

PatternReader::PatternReader(Grammar& g, std::string_view source, const char* kind) : grammar(g), text(source) {
    if (text.size() > Grammar::MAX_TEXT) DIE("%s: longer than %zu bytes", kind, Grammar::MAX_TEXT);
    for (size_t i = 0; i < text.size();) {
        const int n = utf8_length(text.data() + i, text.size() - i);
        if (n <= 0) DIE("%s: invalid UTF-8", kind);
        i += (size_t)n;
    }
}

uint32_t PatternReader::code() {
    const char* p = text.data() + at;
    const uint32_t c = utf8_read(p);
    at = (size_t)(p - text.data());
    return c;
}

int PatternReader::number() {
    int n = 0;
    if (!isdigit((unsigned char)peek())) fail("expected a number");
    for (; isdigit((unsigned char)peek()); at++) {
        n = n * 10 + (peek() - '0');
        if (n > Grammar::MAX_REPEAT) fail("the number is too large");
    }
    return n;
}

uint32_t PatternReader::hex(size_t n) {
    uint32_t value = 0;
    for (size_t i = 0; i < n; i++, at++) {
        const int digit = more() ? sj::hex_digit(peek()) : -1;
        if (digit < 0) fail("expected hex digits");
        value = value << 4 | (uint32_t)digit;
    }
    if (value > LAST_CODE || (value >= 0xD800 && value < 0xE000)) fail("not a character");
    return value;
}
