// cli/spans.h: the inside of a line of Markdown: code, emphasis, links, formulas.
#pragma once
#include "cli/wrap.h"
#include <cstddef>
#include <string>
#include <string_view>

namespace cli {

// The attributes of text, as bits.
enum Style : unsigned { PLAIN = 0, BOLD = 1, ITALIC = 2, STRUCK = 4, UNDERLINED = 8, CODE = 16, DIM = 32 };

// The escape sequence that sets these attributes and no others.
std::string sequence_of(unsigned style);

// The part of a line that begins at a character which may be a mark.
struct Span {
    enum Kind { OPEN, TEXT, STYLED, LINK, BREAK } kind; // OPEN: more of the line is needed to know
    size_t end;                 // behind it
    std::string_view content{}; // TEXT: as it is; STYLED, LINK: Markdown again, unless it is code
    unsigned style = PLAIN;     // of the content
    std::string_view address{}; // of a link
};

constexpr std::string_view MARKS = "\\`*_~[!$<"; // characters that may begin a span

// line[at] is one of MARKS. whole: the line has ended. An unclosed mark is text; so is one that is not closed within
// the next 240 bytes.
Span span_at(std::string_view line, size_t at, bool whole);

// Appends the line from `from` on to `out`, with attributes, as `wrap` breaks it. Returns the place up to which it is
// known; with `whole` that is the line's end.
size_t draw_spans(std::string_view line, size_t from, unsigned style, bool whole, Wrap& wrap, std::string& out);

} // namespace cli
