// cli/spans.cpp: where a mark of Markdown is closed; see spans.h.
#include "cli/spans.h"
#include <algorithm>
#include <cctype>
#include <cstring>

namespace cli {

namespace {

constexpr size_t LONGEST = 240, NONE = std::string_view::npos;

// A line, and how far a mark may be closed.
struct SpanReader {
    const std::string_view line; // up to `at` + LONGEST
    const bool whole;            // nothing follows that could close a mark

    SpanReader(std::string_view all, size_t at, bool ended)
        : line(all.substr(0, at + LONGEST)), whole(ended || all.size() > line.size()) {}

    Span text(size_t at, size_t n) const { return {Span::TEXT, at + n, line.substr(at, n)}; }
    Span unclosed(size_t at, size_t n) const { return whole ? text(at, n) : Span{Span::OPEN, at}; }

    char operator[](size_t i) const { return i < line.size() ? line[i] : ' '; }
    size_t run(size_t at) const { return std::min(line.find_first_not_of(line[at], at), line.size()) - at; }
    bool is_word(size_t i) const { return isalnum((unsigned char)(*this)[i]) || (uint8_t)(*this)[i] >= 0x80; }

    Span escape(size_t at) const;
    Span code(size_t at) const;
    Span emphasis(size_t at) const;
    Span link(size_t at) const;
    Span formula(size_t at) const;
    Span line_break(size_t at) const;
    size_t skip(size_t at) const;
    size_t closer(size_t at, size_t n) const;
};

// A formula in \( \) or \[ \] stays as it is; before other punctuation the backslash is a mark.
Span SpanReader::escape(size_t at) const {
    if (at + 1 == line.size()) return unclosed(at, 1);
    const char c = line[at + 1];
    if (c == '(' || c == '[') {
        const size_t end = line.find(c == '(' ? "\\)" : "\\]", at + 2);
        return end == NONE ? unclosed(at, 2) : text(at, end + 2 - at);
    }
    if (!ispunct((unsigned char)c)) return text(at, 1);
    return {Span::TEXT, at + 2, line.substr(at + 1, 1)};
}

Span SpanReader::code(size_t at) const {
    const size_t n = run(at);
    for (size_t end = at + n; (end = line.find('`', end)) != NONE; end += run(end)) {
        if (run(end) != n || (end + n == line.size() && !whole)) continue; // (the run may go on)
        std::string_view inner = line.substr(at + n, end - at - n);
        const bool padded = inner.size() > 2 && inner.front() == ' ' && inner.back() == ' ';
        return {Span::STYLED, end + n, padded ? inner.substr(1, inner.size() - 2) : inner, CODE};
    }
    return unclosed(at, n);
}

// The end of what begins at `at` and holds no mark of emphasis: an escape, code, a formula, or one character.
size_t SpanReader::skip(size_t at) const {
    const char c = line[at];
    const Span s = c == '\\' ? escape(at) : c == '`' ? code(at) : c == '$' ? formula(at) : text(at, 1);
    return s.kind == Span::OPEN ? line.size() : s.end;
}

// Where n marks close the emphasis that n marks opened before `at`. Between them may be emphasis of the other length.
size_t SpanReader::closer(size_t at, size_t n) const {
    const char mark = line[at - 1];
    bool inner = false; // emphasis of 3 - n marks is open
    for (size_t i = at; i < line.size();) {
        if (line[i] != mark) {
            i = skip(i);
            continue;
        }
        const size_t found = run(i);
        const bool may_close = line[i - 1] != ' ' && i > at && !(mark == '_' && is_word(i + found));
        if (i + found == line.size() && !whole) return NONE; // (the run may go on)
        if (may_close && found == n) return i;
        if (may_close && found == 3 && n < 3) return i + (inner ? 3 - n : 0);
        if (n < 3 && found == 3 - n) inner = !inner;
        i += found;
    }
    return NONE;
}

Span SpanReader::emphasis(size_t at) const {
    const size_t n = run(at);
    if (at + n == line.size()) return unclosed(at, n);
    const bool opens = line[at + n] != ' ' && !(line[at] == '_' && at > 0 && is_word(at - 1));
    if (!opens || n > 3 || (line[at] == '~' && n != 2)) return text(at, n);
    const size_t end = closer(at + n, n);
    if (end == NONE) return unclosed(at, n);
    static const unsigned STYLES[] = {PLAIN, ITALIC, BOLD, BOLD | ITALIC};
    return {Span::STYLED, end + n, line.substr(at + n, end - at - n), line[at] == '~' ? (unsigned)STRUCK : STYLES[n]};
}

// [text](address), and ![text](address) of a picture.
Span SpanReader::link(size_t at) const {
    const size_t mark = line[at] == '!' ? 2 : 1;
    if (mark == 2 && at + 1 == line.size()) return unclosed(at, 1);
    if (mark == 2 && line[at + 1] != '[') return text(at, 1);
    size_t i = at + mark;
    for (size_t depth = 1; i < line.size(); i = skip(i))
        if (line[i] == '[') depth++;
        else if (line[i] == ']' && --depth == 0) break;
    if (i + 1 >= line.size()) return unclosed(at, mark);
    if (line[i + 1] != '(') return text(at, mark);
    const size_t end = line.find_first_of(")", i + 2);
    if (end == NONE) return unclosed(at, mark);
    std::string_view address = line.substr(i + 2, end - i - 2);
    address = address.substr(0, address.find(' ')); // (a title follows)
    if (address.empty() || i == at + mark) return text(at, mark);
    return {Span::LINK, end + 1, line.substr(at + mark, i - at - mark), UNDERLINED, address};
}

// $...$ and $$...$$ stay as they are; a price is none.
Span SpanReader::formula(size_t at) const {
    const size_t n = run(at);
    if (at + n == line.size()) return unclosed(at, n);
    if (n > 2 || (n == 1 && isspace((unsigned char)line[at + 1]))) return text(at, n);
    const size_t end = line.find(n == 2 ? "$$" : "$", at + n);
    if (end == NONE || (n == 1 && end + 1 == line.size() && !whole)) return unclosed(at, n);
    const bool price = isspace((unsigned char)line[end - 1]) || isdigit((unsigned char)(*this)[end + 1]);
    if (n == 1 && price) return text(at, 1);
    return text(at, end + n - at);
}

// <br>, <br/> and <br />
Span SpanReader::line_break(size_t at) const {
    for (const std::string_view form : {"<br>", "<br/>", "<br />"}) {
        const std::string_view here = line.substr(at, form.size());
        if (here == form) return {Span::BREAK, at + form.size()};
        if (here == form.substr(0, here.size()) && !whole) return {Span::OPEN, at};
    }
    return text(at, 1);
}

} // namespace

Span span_at(std::string_view line, size_t at, bool whole) {
    const SpanReader reader(line, at, whole);
    switch (line[at]) {
    case '\\': return reader.escape(at);
    case '`': return reader.code(at);
    case '*':
    case '_':
    case '~': return reader.emphasis(at);
    case '[':
    case '!': return reader.link(at);
    case '$': return reader.formula(at);
    default: return reader.line_break(at);
    }
}

std::string sequence_of(unsigned style) {
    static constexpr struct { Style bit; const char* code; } CODES[] = {
        {BOLD, ";1"}, {ITALIC, ";3"}, {STRUCK, ";9"}, {UNDERLINED, ";4"}, {CODE, ";36"}, {DIM, ";2"}};
    std::string all = "\033[0";
    for (auto [bit, code] : CODES)
        if (style & bit) all += code;
    return all + "m";
}

size_t draw_spans(std::string_view line, size_t from, unsigned style, bool whole, Wrap& wrap, std::string& out) {
    while (from < line.size()) {
        const size_t at = std::min(line.find_first_of(MARKS, from), line.size());
        out += wrap.add(line.substr(from, at - from));
        from = at;
        if (at == line.size()) break;
        const Span s = span_at(line, at, whole);
        if (s.kind == Span::OPEN) break;
        from = s.end;
        if (s.kind == Span::BREAK) out += wrap.add("\n");
        if (s.kind == Span::TEXT) out += wrap.add(s.content);
        if (s.kind != Span::STYLED && s.kind != Span::LINK) continue;
        wrap.style(sequence_of(style | s.style));
        if (s.style & CODE) out += wrap.add(s.content);
        else draw_spans(s.content, 0, style | s.style, true, wrap, out);
        wrap.style(sequence_of(style));
        if (s.kind == Span::LINK && s.address != s.content) {
            out += wrap.add(" ");
            wrap.style(sequence_of(style | DIM));
            out += wrap.add("(" + std::string(s.address) + ")");
            wrap.style(sequence_of(style));
        }
    }
    return from;
}

} // namespace cli
