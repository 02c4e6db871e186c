// cli/screen.cpp: shows a model's text safely on a terminal; its thoughts dim.
#include "cli/screen.h"
#include "base/error.h"
#include "base/options.h"
#include "model/utf8.h"
#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/ioctl.h>

namespace cli {

// Unicode's Bidi_Control.
static bool turns(uint32_t c) {
    return c == 0x61C || c == 0x200E || c == 0x200F || (c >= 0x202A && c <= 0x202E) || (c >= 0x2066 && c <= 0x2069);
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

static int columns_at(int file, int unknown) {
    winsize window = {};
    return ioctl(file, TIOCGWINSZ, &window) == 0 && window.ws_col > 1 ? window.ws_col : unknown;
}
int terminal_columns(int unknown) { return columns_at(1, unknown); }

void say(const std::string& line) {
    Wrap wrap((size_t)columns_at(2, INT_MAX), false);
    const std::string text = wrap.add(printable(line));
    fprintf(stderr, "%s\n", (text + wrap.end()).c_str());
}

bool plain_terminal() {
    const char* kind = getenv("TERM");
    return !kind || !*kind || !strcmp(kind, "dumb");
}

bool colours() {
    const char* none = getenv("NO_COLOR");
    return !plain_terminal() && !(none && *none);
}

Screen::Screen(bool terminal, bool thinks, bool draws)
    : terminal(terminal), dims(terminal && thinks && colours()), draws(terminal && draws && colours()),
      wrap((size_t)terminal_columns(INT_MAX), !this->draws), markdown(wrap) {}

Screen::~Screen() {
    if (styled) fputs("\033[0m", stdout), fflush(stdout);
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
        put_rest();
        held.erase(0, marker.size());
        styled = thinking = !thinking;
        write_stdout(thinking ? "\033[2m" : "\033[0m");
    }
}

void Screen::put(size_t n) {
    const std::string text = printable(held.substr(0, n));
    const bool drawn = draws && !thinking;
    styled |= drawn;
    write_stdout(drawn ? markdown.add(text) : wrap.add(text));
    held.erase(0, n);
}

void Screen::put_rest() { write_stdout(draws && !thinking ? markdown.end() : wrap.end()); }

void Screen::end() {
    put(held.size());
    put_rest();
    styled = thinking;
}

} // namespace cli
