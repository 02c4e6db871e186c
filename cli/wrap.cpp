#include "cli/wrap.h"
#include "model/utf8.h"
#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <locale.h>
#include <wchar.h>
#include <wctype.h>

namespace cli {

// The system's tables, whatever the user's locale. Null: it has none.
static locale_t tables() {
    static const locale_t utf8 = newlocale(LC_CTYPE_MASK, "C.UTF-8", (locale_t)0);
    return utf8;
}

// wcwidth. -1: the system does not know the character.
static int system_width(uint32_t c) {
    if (!tables()) return c < 0x7F && c >= ' ' ? 1 : -1;
    const locale_t before = uselocale(tables());
    const int width = wcwidth((wchar_t)c);
    uselocale(before);
    return width;
}

bool visible(uint32_t c) {
    // Blank, though the system's tables list them as letters or signs with a width; and private use.
    for (const uint32_t blank : {0xA0, 0xAD, 0x115F, 0x2007, 0x202F, 0x2800, 0x3164, 0xFFA0})
        if (c == blank) return false;
    if (c < 0x7F) return c > ' ';
    if ((c >= 0xE000 && c < 0xF900) || c >= 0xF0000) return false;
    return system_width(c) > 0 && !(tables() && iswspace_l((wint_t)c, tables()));
}

int columns_of(uint32_t c) {
    const int width = system_width(c);
    return width >= 0 ? width : c >= 0x1F000 && c < 0x20000 ? 2 : 1;
}

// Columns of c behind a character of `before` columns.
static int columns_behind(uint32_t c, int before) {
    return c == 0xFE0F && before == 1 ? 1 : columns_of(c); // U+FE0F: the character before it as an emoji, which is wide
}

size_t columns_of(std::string_view line) {
    size_t sum = 0;
    int before = 0;
    for (const char *at = line.data(), *end = at + line.size(); at < end;) {
        if (*at == '\033') {
            while (at < end && *at != 'm') at++;
            at += at < end;
            continue;
        }
        const int width = columns_behind(utf8_read(at), before);
        sum += (size_t)width, before = width;
    }
    return sum;
}

// Punctuation of Chinese that does not begin a line, and that does not end one.
static bool closes(uint32_t c) {
    for (const uint32_t one : {0x3001, 0x3002, 0xFF0C, 0xFF0E, 0xFF1A, 0xFF1B, 0xFF01, 0xFF1F, 0xFF09, 0x3009, 0x300B,
                               0x300D, 0x300F, 0x3011, 0xFF05, 0x2019, 0x201D, 0x2026})
        if (c == one) return true;
    return false;
}
static bool opens(uint32_t c) {
    for (const uint32_t one : {0xFF08, 0x3008, 0x300A, 0x300C, 0x300E, 0x3010, 0x2018, 0x201C})
        if (c == one) return true;
    return false;
}

// Signs that belong to the one before: joined by U+200D, a skin tone, a variation, the frame of a key.
static bool joins(uint32_t c, uint32_t before) {
    return before == 0x200D || c == 0x200D || c == 0xFE0F || c == 0x20E3 || (c >= 0x1F3FB && c <= 0x1F3FF);
}

std::string Wrap::put_word() {
    std::string out;
    if (column + blanks + word_width > columns && column > margin_width && word_width && !code && !goes_on) {
        out = "\n" + margin + (margin.empty() ? "" : active_style); // in place of the blanks
        column = margin_width, blanks = 0;
    } else if (word_width) {
        out.assign(blanks, ' '), column += blanks, blanks = 0;
    }
    out += word;
    column += word_width, goes_on = in_long;
    if (column > columns) column = (column - 1) % columns + 1; // (the terminal broke a long word)
    word.clear(), word_width = 0, active_style = next_style;
    return out;
}

std::string Wrap::end() {
    std::string out = put_word();
    if (column + blanks <= columns) out += std::string(blanks, ' '), column += blanks;
    return blanks = 0, out;
}

void Wrap::add_character(uint32_t c, std::string_view bytes, std::string& out) {
    const int width = columns_behind(c, last_width);
    const bool stays = joins(c, last) || closes(c) || opens(last);
    const bool begins = (width == 2 || last_width == 2) && !stays;
    if (begins && word_width) out += put_word();
    if (begins) in_long = goes_on = false;
    word += bytes, word_width += (size_t)width;
    in_long |= word_width > columns;
    if (code || in_long) out += put_word();
    last = c, last_width = width;
}

std::string Wrap::add(std::string_view text) {
    std::string out;
    for (const char *at = text.data(), *end = at + text.size(); at < end;) {
        const char* begin = at;
        const uint32_t c = utf8_read(at);
        const std::string_view one(begin, (size_t)(at - begin));
        if (fences && c != '\n' && line_start.size() < 3) line_start += one;
        if (c != ' ' && c != '\n' && c != '\t') {
            add_character(c, one, out);
            continue;
        }
        if (!word.empty()) out += put_word();
        last = c, last_width = 0, in_long = goes_on = false;
        if (c == ' ') {
            blanks++;
        } else if (c == '\n') {
            out += std::string(blanks, ' ') + "\n";
            code ^= fences && line_start == "```";
            column = blanks = 0, line_start.clear();
            margin.clear(), margin_width = 0;
        } else {
            out += std::string(blanks, ' ') + "\t";
            column = std::min(columns, (column + blanks) / 8 * 8 + 8), blanks = 0;
        }
    }
    return out;
}

} // namespace cli
