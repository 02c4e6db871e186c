// cli/markdown.cpp: the kinds of lines; see markdown.h.
#include "cli/markdown.h"
#include "cli/spans.h"
#include "cli/table.h"
#include "model/utf8.h"
#include <algorithm>
#include <cctype>
#include <cstring>
#include <utility>

namespace cli {

static constexpr size_t NO_EDGE = 10'000; // columns of what is no terminal
static const char* const BAR = "\033[0;2m│\033[0m ";

std::string Markdown::add(std::string_view text) {
    line += text;
    while (step(false)) {}
    preview();
    return std::exchange(out, "");
}

std::string Markdown::end() {
    while (step(true)) {}
    put_rows();
    out += wrap.end();
    line.clear(), fence.clear(), place = START;
    wrap.keep_lines(false);
    return std::exchange(out, "");
}

// Draws as much of the line as is known. False: nothing more.
bool Markdown::step(bool whole) {
    const size_t end = line.find('\n');
    const bool ended = whole || end != line.npos;
    const std::string_view now = std::string_view(line).substr(0, end);
    if (place == START) return !line.empty() && start(now, ended);
    if (place == CODE_LINE) {
        put(now);
        if (!ended) return line.clear(), false;
        wrap.style(sequence_of(PLAIN));
    } else {
        const size_t known = draw_spans(now, 1, PLAIN, ended, wrap, out);
        if (!ended) return line.erase(0, known - 1), false;
    }
    place = START;
    drop_line();
    return true;
}

// Goes on behind the line.
void Markdown::drop_line() {
    const size_t end = line.find('\n');
    if (end != line.npos) put("\n");
    line.erase(0, end == line.npos ? end : end + 1);
    margin.clear(), quoted = false;
    wrap.keep_lines(false);
}

// Finds out the kind of the line. False: it needs more of it.
bool Markdown::start(std::string_view now, bool ended) {
    if (!fence.empty()) return start_code_line(now, ended);
    const size_t first = std::min(now.find_first_not_of(' '), now.size());
    if (first == now.size() && !ended) return false;
    const bool row = now.substr(first, 1) == "|" && !quoted && wrap.at_start();
    if (row) return start_row(now, ended);
    if (!rows.empty()) return put_rows(), true;
    return start_block(now, first, ended);
}

bool Markdown::start_code_line(std::string_view now, bool ended) {
    const std::string_view text = now.substr(std::min(now.find_first_not_of(' '), now.size()));
    const size_t marks = std::min(text.find_first_not_of(fence[0]), text.size());
    const bool closes = marks >= fence.size() && text.find_first_not_of(' ', marks) == text.npos;
    if (!ended && (closes || marks == text.size())) return false;
    if (closes) {
        fence.clear();
        line.erase(0, line.find('\n') == line.npos ? line.npos : line.find('\n') + 1);
        return true;
    }
    place = CODE_LINE;
    wrap.keep_lines(true);
    wrap.style(sequence_of(CODE));
    return true;
}

bool Markdown::start_row(std::string_view now, bool ended) {
    if (!ended) return false;
    if (rows.size() == 1 && !is_table_rule(now)) return put_rows(), true;
    rows.emplace_back(now);
    line.erase(0, line.find('\n') == line.npos ? line.npos : line.find('\n') + 1);
    return true;
}

// Writes the table, or the lines that are none.
void Markdown::put_rows() {
    if (std::exchange(previewed, false)) out += "\r\033[K";
    const std::string table = rows.size() > 1 ? draw_table(rows, wrap.columns) : "";
    out += table;
    for (auto& row : rows) {
        if (!table.empty()) break;
        draw_spans(row, 0, PLAIN, true, wrap, out);
        put("\n");
    }
    rows.clear();
}

// Shows the row that is being written, cut to one line of the terminal.
void Markdown::preview() {
    const bool row = place == START && !quoted && wrap.at_start() && line.substr(0, 1) == "|";
    if (wrap.columns > NO_EDGE || (!row && rows.empty())) return;
    const std::string& shown = line.empty() ? rows.back() : line;
    size_t used = 0, bytes = 0;
    for (const char *at = shown.data(), *end = at + shown.size(); at < end; bytes = (size_t)(at - shown.data())) {
        used += (size_t)std::max(1, columns_of(utf8_read(at)));
        if (used >= wrap.columns) break;
    }
    out += "\r\033[K" + sequence_of(DIM) + shown.substr(0, bytes) + sequence_of(PLAIN);
    previewed = true;
}

void Markdown::put_line(std::string_view text, unsigned style) {
    wrap.style(sequence_of(style));
    draw_spans(text, 0, style, true, wrap, out);
    wrap.style(sequence_of(PLAIN));
    drop_line();
}

// The rest of the line is text: `first` blanks, then `mark` in place of `skip` bytes.
void Markdown::inside(size_t first, const std::string& mark, size_t skip) {
    put(std::string(first, ' ') + mark);
    margin += std::string(first + columns_of(mark), ' ');
    const size_t width = columns_of(margin);
    if (width < wrap.columns / 2) wrap.hang(margin, width);
    line.replace(0, first + skip, " ");
    place = INSIDE;
}

bool Markdown::start_block(std::string_view now, size_t first, bool ended) {
    const std::string_view text = now.substr(first);
    const char c = text.empty() ? ' ' : text[0];
    const size_t n = std::min(text.find_first_not_of(c), text.size()); // of the same mark
    if (strchr("`~#>", c) && n == text.size() && !ended) return false;
    if (c == '>') {
        put(std::string(first, ' '));
        wrap.style(sequence_of(DIM));
        put("│");
        wrap.style(sequence_of(PLAIN));
        put(" ");
        margin += std::string(first, ' ') + BAR, quoted = true;
        line.erase(0, first + 1 + (text.substr(1, 1) == " "));
        return true;
    }
    if ((c == '`' || c == '~') && n >= 3 && !quoted && text.find('`', n) == text.npos) {
        if (!ended) return false;
        fence.assign(n, c);
        const std::string language(text.substr(std::min(text.find_first_not_of(' ', n), text.size())));
        if (!language.empty()) return put_line(language, DIM), true;
        line.erase(0, line.find('\n') == line.npos ? line.npos : line.find('\n') + 1);
        return true;
    }
    if (c == '#' && n <= 6 && (n == text.size() || text[n] == ' ')) {
        if (!ended) return false;
        std::string_view title = text.substr(std::min(text.find_first_not_of(' ', n), text.size()));
        title = title.substr(0, title.find_last_not_of(' ') + 1);
        const size_t kept = title.find_last_not_of('#') + 1; // closing #s
        if (kept == 0 || title[kept - 1] == ' ') title = title.substr(0, title.find_last_not_of(' ', kept - 1) + 1);
        return put_line(std::string(title), n == 1 ? BOLD | UNDERLINED : BOLD), true;
    }
    if (strchr("-*+_", c)) return start_mark(now, first, ended);
    if (isdigit((unsigned char)c)) return start_number(now, first, ended);
    return inside(first, "", 0), true;
}

// A list's item, or a rule: "- - -".
bool Markdown::start_mark(std::string_view now, size_t first, bool ended) {
    const std::string_view text = now.substr(first);
    const char both[] = {text[0], ' ', 0};
    const bool bare = text.find_first_not_of(both) == text.npos;
    if (bare && !ended) return false;
    if (bare && text[0] != '+' && std::count(text.begin(), text.end(), text[0]) >= 3) {
        std::string rule;
        for (size_t i = 0; i < std::min<size_t>(wrap.columns, 40); i++) rule += "─";
        return put_line(rule, DIM), true;
    }
    const bool item = text[0] != '_' && (text.size() == 1 || text[1] == ' ');
    inside(first, item ? "• " : "", item ? std::min<size_t>(text.size(), 2) : 0);
    return true;
}

bool Markdown::start_number(std::string_view now, size_t first, bool ended) {
    const std::string_view text = now.substr(first);
    size_t n = 0;
    while (n < text.size() && n < 10 && isdigit((unsigned char)text[n])) n++;
    if (text.size() < n + 2 && !ended) return false;
    const bool item = n < 10 && n + 1 < text.size() && (text[n] == '.' || text[n] == ')') && text[n + 1] == ' ';
    inside(first, item ? std::string(text.substr(0, n + 2)) : "", item ? n + 2 : 0);
    return true;
}

} // namespace cli
