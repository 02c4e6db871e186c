// cli/screen.cpp: shows a model's text safely on a terminal; its thoughts dim.
#include "cli/screen.h"
#include "base/error.h"
#include "base/options.h"
#include "model/utf8.h"
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <locale.h>
#include <wchar.h>
#include <wctype.h>

namespace cli {

// Unicode's Bidi_Control.
static bool turns(uint32_t c) {
    return c == 0x61C || c == 0x200E || c == 0x200F || (c >= 0x202A && c <= 0x202E) || (c >= 0x2066 && c <= 0x2069);
}

bool visible(uint32_t c) {
    // Blank, though the system's tables list them as letters or signs with a width; and private use.
    for (const uint32_t blank : {0xA0, 0xAD, 0x115F, 0x2007, 0x202F, 0x2800, 0x3164, 0xFFA0})
        if (c == blank) return false;
    if (c < 0x7F) return c > ' ';
    if ((c >= 0xE000 && c < 0xF900) || c >= 0xF0000) return false;
    static const locale_t utf8 = newlocale(LC_CTYPE_MASK, "C.UTF-8", (locale_t)0);
    if (!utf8) return false; // (a system without its tables)
    const locale_t before = uselocale(utf8);
    const bool seen = wcwidth((wchar_t)c) > 0 && !iswspace((wint_t)c);
    uselocale(before);
    return seen;
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

Screen::Screen(bool terminal, bool thinks) : terminal(terminal), dims(terminal && thinks && colours()) {}

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
        held.erase(0, marker.size());
        thinking = !thinking;
        write_stdout(thinking ? "\033[2m" : "\033[0m");
    }
}

void Screen::put(size_t n) {
    write_stdout(printable(held.substr(0, n)));
    held.erase(0, n);
}

} // namespace cli
