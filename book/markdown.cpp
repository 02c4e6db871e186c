#include "book/markdown.h"
#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#ifdef HAVE_CMARK
#include <cmark.h>
#include <memory>
#endif

// ---- Lines

FenceMark::FenceMark(std::string_view line) {
    const size_t first = line.find_first_not_of(" \t");
    if (first == line.npos || (line[first] != '`' && line[first] != '~')) return;
    const size_t end = std::min(line.find_first_not_of(line[first], first), line.size());
    if (end - first < 3 || (line[first] == '`' && line.find('`', end) != line.npos)) return;
    mark = line[first], count = end - first;
    bare = line.find_first_not_of(" \t\r\n", end) == line.npos;
}

int heading_level(std::string_view line) {
    size_t first = std::min(line.find_first_not_of(' '), line.size()), n = first;
    while (n < line.size() && line[n] == '#') n++;
    const bool heading = first < 4 && n > first && n - first <= 6 && (n == line.size() || strchr(" \t\r\n", line[n]));
    return heading ? (int)(n - first) : 0;
}

// The level (1 or 2) of a line of = or - under a title; otherwise 0.
static int underline_level(std::string_view line, size_t least) {
    const size_t first = std::min(line.find_first_not_of(" \t"), line.size());
    line = line.substr(first, line.find_last_not_of(" \t\r\n") + 1 - first);
    if (first > 3 || line.size() < least || (line[0] != '=' && line[0] != '-')) return 0;
    return line.find_first_not_of(line[0]) != line.npos ? 0 : line[0] == '=' ? 1 : 2;
}

// The lines that could open a fence that a later line closes.
static std::vector<bool> fence_openers(const std::vector<std::string_view>& lines) {
    // closer[i]: the longest runs of ` and of ~ that could close a fence from line i on.
    const size_t n = lines.size();
    std::vector<std::array<size_t, 2>> closer(n + 1);
    std::vector<bool> opens(n);
    for (size_t i = n; i-- > 0;) {
        const FenceMark f(lines[i]);
        opens[i] = f.mark && closer[i + 1][f.mark == '~'] >= f.count;
        closer[i] = closer[i + 1];
        if (f.bare) closer[i][f.mark == '~'] = std::max(closer[i][f.mark == '~'], f.count);
    }
    return opens;
}

#ifdef HAVE_CMARK

bool markdown_is_commonmark() { return true; }

// The text as passed to cmark: our line ends, and no mark that opens no fence. Same length as the original.
static std::string prepared(const std::vector<std::string_view>& lines, const std::vector<bool>& opens) {
    std::string all;
    size_t close = 0; // in a fence: the length of its mark; 0: not in a fence
    char mark = 0;
    for (size_t i = 0; i < lines.size(); i++) {
        const FenceMark f(lines[i]);
        const size_t begin = all.size();
        all += lines[i];
        for (size_t k = begin; k + 1 < all.size(); k++)
            if (all[k] == '\r' && all[k + 1] != '\n') all[k] = ' ';
        if (close) {
            if (f.bare && f.mark == mark && f.count >= close) close = 0;
        } else if (f.mark && opens[i]) {
            close = f.count, mark = f.mark;
        } else if (f.mark) {
            std::fill_n(all.begin() + (ptrdiff_t)(begin + lines[i].find(f.mark)), f.count, 'x');
        }
    }
    return all;
}

std::vector<MarkdownBlock> markdown_blocks(const std::vector<std::string_view>& lines) {
    const std::string text = prepared(lines, fence_openers(lines));
    const std::unique_ptr<cmark_node, void (*)(cmark_node*)> document(
        cmark_parse_document(text.data(), text.size(), CMARK_OPT_DEFAULT), cmark_node_free);
    const std::unique_ptr<cmark_iter, void (*)(cmark_iter*)> walk(cmark_iter_new(document.get()), cmark_iter_free);
    std::vector<MarkdownBlock> blocks;
    size_t inside = 0; // depth of lists and quotes
    for (cmark_event_type event; (event = cmark_iter_next(walk.get())) != CMARK_EVENT_DONE;) {
        cmark_node* node = cmark_iter_get_node(walk.get());
        const cmark_node_type type = cmark_node_get_type(node);
        if (type == CMARK_NODE_LIST || type == CMARK_NODE_BLOCK_QUOTE) inside += event == CMARK_EVENT_ENTER ? 1 : -1;
        const bool block = type == CMARK_NODE_HEADING || type == CMARK_NODE_CODE_BLOCK ||
                           type == CMARK_NODE_PARAGRAPH || type == CMARK_NODE_HTML_BLOCK ||
                           type == CMARK_NODE_THEMATIC_BREAK;
        const size_t line = (size_t)std::max(1, cmark_node_get_start_line(node)) - 1;
        if (!block || event != CMARK_EVENT_ENTER || line >= lines.size()) continue;
        if (!blocks.empty() && line <= blocks.back().line) continue;
        MarkdownBlock b = {MarkdownBlock::TEXT, line};
        if (type == CMARK_NODE_CODE_BLOCK) {
            const size_t column = (size_t)std::max(1, cmark_node_get_start_column(node)) - 1;
            if (FenceMark(lines[line].substr(std::min(column, lines[line].size()))).mark) b.kind = MarkdownBlock::FENCE;
        } else if (type == CMARK_NODE_HEADING && !inside) {
            b.kind = MarkdownBlock::HEADING, b.level = cmark_node_get_heading_level(node);
            const bool setext = !heading_level(lines[line]); // (cmark may report its end at the blank line after it)
            while (setext && line + b.titles < lines.size() && !underline_level(lines[line + b.titles], 1)) b.titles++;
        }
        blocks.push_back(b);
    }
    return blocks;
}

#else

bool markdown_is_commonmark() { return false; }

std::vector<MarkdownBlock> markdown_blocks(const std::vector<std::string_view>& lines) {
    const std::vector<bool> opens = fence_openers(lines);
    const size_t n = lines.size();
    std::vector<MarkdownBlock> blocks;
    for (size_t i = 0, next; i < n; i = next) {
        MarkdownBlock b = {MarkdownBlock::TEXT, i};
        next = i + 1;
        if (opens[i]) {
            b.kind = MarkdownBlock::FENCE;
            const FenceMark open(lines[i]);
            for (;; next++)
                if (const FenceMark f(lines[next]); f.bare && f.mark == open.mark && f.count >= open.count) break;
            next++;
        } else if (int level = heading_level(lines[i])) {
            b.kind = MarkdownBlock::HEADING, b.level = level;
        } else if (int level = next < n && !is_blank_line(lines[i]) ? underline_level(lines[next], 3) : 0) {
            b.kind = MarkdownBlock::HEADING, b.level = level;
            next++;
        } else {
            while (next < n && !is_blank_line(lines[next]) && !opens[next] && !heading_level(lines[next])) next++;
        }
        while (next < n && is_blank_line(lines[next])) next++;
        blocks.push_back(b);
    }
    return blocks;
}

#endif
