// cli/table.cpp: cells, the widths of columns, lines; see table.h.
#include "cli/table.h"
#include "base/error.h"
#include "cli/spans.h"
#include "cli/wrap.h"
#include "model/utf8.h"
#include <algorithm>
#include <climits>

namespace cli {

namespace {

using Lines = std::vector<std::string>;
constexpr size_t GAP = 3, NARROWEST = 4; // columns between two cells, and of a cell

std::string_view without_blanks(std::string_view s) {
    const size_t begin = std::min(s.find_first_not_of(" \t"), s.size());
    return s.substr(begin, s.find_last_not_of(" \t") + 1 - begin);
}

// A | in code or behind a backslash separates no cells.
std::vector<std::string_view> cells_of(std::string_view row) {
    row = without_blanks(row);
    if (row.substr(0, 1) == "|") row.remove_prefix(1);
    std::vector<std::string_view> cells;
    size_t begin = 0;
    bool code = false;
    for (size_t i = 0; i < row.size(); i++) {
        if (row[i] == '\\') i++;
        else if (row[i] == '`') code = !code && row.find('`', i + 1) != row.npos;
        else if (row[i] == '|' && !code) cells.push_back(without_blanks(row.substr(begin, i - begin))), begin = i + 1;
    }
    const std::string_view last = without_blanks(row.substr(std::min(begin, row.size())));
    if (!last.empty()) cells.push_back(last);
    return cells;
}

// The lines of a cell in a column of this width. Each begins and ends without attributes.
Lines lines_of(std::string_view cell, unsigned style, size_t width) {
    Wrap wrap(width, false);
    std::string all = sequence_of(style);
    draw_spans(cell, 0, style, true, wrap, all);
    all += wrap.end();
    Lines lines(1);
    std::string active;
    size_t used = 0;
    auto next_line = [&] {
        if (!active.empty()) lines.back() += sequence_of(PLAIN);
        lines.push_back(active), used = 0;
    };
    for (const char *at = all.data(), *end = at + all.size(); at < end;) {
        const char* begin = at;
        if (*at == '\033') {
            at = std::find(at, end, 'm') + 1;
            active.assign(begin, at), lines.back() += active;
            if (active == sequence_of(PLAIN)) active.clear();
            continue;
        }
        const uint32_t c = utf8_read(at);
        const size_t columns = (size_t)columns_of(c);
        if (c == '\n' || used + columns > width) next_line(); // (the wrap leaves long words to the terminal)
        if (c != '\n') lines.back().append(begin, at), used += columns;
    }
    if (!active.empty()) lines.back() += sequence_of(PLAIN);
    return lines;
}

struct Table {
    std::vector<std::vector<std::string_view>> rows; // without the rule
    std::vector<char> sides;                         // of a column: l, c or r
    std::vector<size_t> widths;

    explicit Table(const Lines& source);
    bool fit(size_t columns);
    void draw_row(const std::vector<std::string_view>& cells, unsigned style, std::string& out) const;
    std::string rule() const;
};

Table::Table(const Lines& source) {
    for (size_t i = 0; i < source.size(); i++)
        if (i != 1) rows.push_back(cells_of(source[i]));
    for (std::string_view mark : cells_of(source[1])) {
        const bool left = mark.front() == ':', right = mark.back() == ':';
        sides.push_back(left && right ? 'c' : right ? 'r' : 'l');
    }
    for (auto& row : rows) sides.resize(std::max(sides.size(), row.size()), 'l');
    for (auto& row : rows) row.resize(sides.size());
    widths.assign(sides.size(), 1);
    for (auto& row : rows)
        for (size_t k = 0; k < row.size(); k++)
            for (auto& line : lines_of(row[k], PLAIN, INT_MAX)) widths[k] = std::max(widths[k], columns_of(line));
}

// Narrows the widest columns until all fit.
bool Table::fit(size_t columns) {
    const size_t gaps = GAP * (widths.size() - 1);
    for (;;) {
        size_t sum = gaps;
        for (size_t w : widths) sum += w;
        if (sum <= columns) return true;
        size_t& widest = *std::max_element(widths.begin(), widths.end());
        if (widest <= NARROWEST) return false;
        widest--;
    }
}

void Table::draw_row(const std::vector<std::string_view>& cells, unsigned style, std::string& out) const {
    std::vector<Lines> all;
    size_t height = 1;
    for (size_t k = 0; k < cells.size(); k++) {
        all.push_back(lines_of(cells[k], style, widths[k]));
        height = std::max(height, all.back().size());
    }
    for (size_t line = 0; line < height; line++) {
        size_t column = 0;
        for (size_t k = 0; k < all.size(); k++) {
            if (k) out += " │ ", column += GAP;
            const std::string text = line < all[k].size() ? all[k][line] : "";
            const size_t rest = widths[k] - std::min(widths[k], columns_of(text));
            const size_t left = sides[k] == 'r' ? rest : sides[k] == 'c' ? rest / 2 : 0;
            out += std::string(left, ' ') + text;
            column += widths[k];
            if (k + 1 == all.size()) break;
            out += std::string(rest - left, ' ');
            // Terminals differ in the width of some characters: the next cell begins where it should.
            const bool ascii = std::all_of(text.begin(), text.end(), [](char c) { return (uint8_t)c < 0x80; });
            if (!ascii) out += format("\033[%zuG", column + 1);
        }
        out += "\n";
    }
}

std::string Table::rule() const {
    std::string out;
    for (size_t k = 0; k < widths.size(); k++) {
        if (k) out += "─┼─";
        for (size_t i = 0; i < widths[k]; i++) out += "─";
    }
    return out + "\n";
}

} // namespace

bool is_table_rule(std::string_view line) {
    const auto cells = cells_of(line);
    const auto good = [](std::string_view cell) {
        if (!cell.empty() && cell.front() == ':') cell.remove_prefix(1);
        if (!cell.empty() && cell.back() == ':') cell.remove_suffix(1);
        return !cell.empty() && cell.find_first_not_of('-') == cell.npos;
    };
    return !cells.empty() && std::all_of(cells.begin(), cells.end(), good);
}

std::string draw_table(const std::vector<std::string>& rows, size_t columns) {
    Table table(rows);
    if (!table.fit(columns)) return "";
    std::string out;
    table.draw_row(table.rows[0], BOLD, out);
    out += table.rule();
    for (size_t i = 1; i < table.rows.size(); i++) table.draw_row(table.rows[i], PLAIN, out);
    return out;
}

} // namespace cli
