// cli/screen.cpp: shows a model's text safely on a terminal; its thoughts dim.
#include "cli/screen.h"
#include "base/error.h"
#include "base/options.h"
#include "model/utf8.h"
#include <algorithm>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <locale.h>
#include <sys/ioctl.h>
#include <wchar.h>
#include <wctype.h>

namespace cli {

// Unicode's Bidi_Control.
static bool turns(uint32_t c) {
    return c == 0x61C || c == 0x200E || c == 0x200F || (c >= 0x202A && c <= 0x202E) || (c >= 0x2066 && c <= 0x2069);
}

// Columns of a character on a terminal. -1: it is not printable.
static int width_of(uint32_t c) {
    static const locale_t utf8 = newlocale(LC_CTYPE_MASK, "C.UTF-8", (locale_t)0);
    if (!utf8) return c < 0x7F && c >= ' ' ? 1 : -1; // (a system without its tables)
    const locale_t before = uselocale(utf8);
    const int width = iswspace((wint_t)c) && c != ' ' ? 0 : wcwidth((wchar_t)c);
    uselocale(before);
    return width;
}

bool visible(uint32_t c) {
    // Blank, though the system's tables list them as letters or signs with a width; and private use.
    for (const uint32_t blank : {0xA0, 0xAD, 0x115F, 0x2007, 0x202F, 0x2800, 0x3164, 0xFFA0})
        if (c == blank) return false;
    if (c < 0x7F) return c > ' ';
    if ((c >= 0xE000 && c < 0xF900) || c >= 0xF0000) return false;
    return width_of(c) > 0;
}

std::string printable(std::string_view s) {
    std::string out;
    while (!s.empty()) {
        const int length = utf8_length(s.data(), s.size());
        const uint8_t c = (uint8_t)s[0];
        const char* at = s.data();
        const uint32_t whole = length > 0 ? utf8_read(at) : 0;
        if (turns(whole)) out += format("\\u%04x", whole);
        else if (length <= 0 || (c == 0xC2 && (uint8_t)s[1] < 0xA0)) out += "\uFFFD";
        else if (c == 0x7F) out += "\u2421";
        else if (c < 0x20 && c != '\n' && c != '\t') utf8_append(out, 0x2400u + c);
        else out += s.substr(0, (size_t)length);
        s.remove_prefix(length ? (size_t)std::abs(length) : s.size());
    }
    return out;
}

void say(const std::string& line) { fprintf(stderr, "%s\n", printable(line).c_str()); }

bool plain_terminal() {
    const char* kind = getenv("TERM");
    return !kind || !*kind || !strcmp(kind, "dumb");
}

bool colours() {
    const char* none = getenv("NO_COLOR");
    return !plain_terminal() && !(none && *none);
}

std::string Wrap::put_word() {
    std::string out;
    if (column + blanks + word_width > columns && column > 0 && !code) out = "\n", column = 0; // in place of the blanks
    else out.assign(blanks, ' '), column += blanks;
    out += word;
    column += word_width;
    if (column > columns) column = (column - 1) % columns + 1; // (the terminal broke a long word)
    word.clear(), word_width = blanks = 0;
    return out;
}

std::string Wrap::add(std::string_view text) {
    std::string out;
    for (const char *at = text.data(), *end = at + text.size(); at < end;) {
        const char* begin = at;
        const uint32_t c = utf8_read(at);
        const std::string_view one(begin, (size_t)(at - begin));
        const int width = std::max(0, width_of(c));
        if (c != '\n' && line_start.size() < 3) line_start += one;
        if (c == ' ' || c == '\n' || c == '\t' || width == 2) // (Chinese breaks between any two characters)
            if (!word.empty()) out += put_word();
        if (c == ' ') {
            blanks++;
        } else if (c == '\n') {
            out += std::string(blanks, ' ') + "\n";
            code ^= line_start == "```";
            column = blanks = 0, line_start.clear();
        } else if (c == '\t') {
            out += std::string(blanks, ' ') + "\t";
            column = std::min(columns, (column + blanks) / 8 * 8 + 8), blanks = 0;
        } else {
            word += one, word_width += (size_t)width;
            if (width == 2 || code || word_width > columns) out += put_word();
        }
    }
    return out;
}

int terminal_columns(int unknown) {
    winsize window = {};
    return ioctl(1, TIOCGWINSZ, &window) == 0 && window.ws_col > 1 ? window.ws_col : unknown;
}

Screen::Screen(bool terminal, bool thinks)
    : terminal(terminal), dims(terminal && thinks && colours()), wrap((size_t)terminal_columns(INT_MAX)) {}

Screen::~Screen() {
    if (thinking) fputs("\033[0m", stdout), fflush(stdout);
}

void Screen::show(std::string_view s) {
    if (!terminal) return write_stdout(s);
    held += s;
    for (;;) {
        const std::string_view marker = thinking ? "</think>" : "<think>";
        const size_t at = dims ? held.find(marker) : std::string::npos;
        if (at == std::string::npos) {
            size_t hold = dims ? std::min(marker.size() - 1, held.size()) : 0;
            while (hold && held.compare(held.size() - hold, hold, marker, 0, hold) != 0) hold--;
            return put(held.size() - hold);
        }
        put(at);
        write_stdout(wrap.end());
        held.erase(0, marker.size());
        thinking = !thinking;
        write_stdout(thinking ? "\033[2m" : "\033[0m");
    }
}

void Screen::put(size_t n) {
    write_stdout(wrap.add(printable(held.substr(0, n))));
    held.erase(0, n);
}

void Screen::end() {
    put(held.size());
    write_stdout(wrap.end());
}

} // namespace cli
