// book/markdown.h: where the blocks of a Markdown text begin, by CommonMark: through cmark if the build has it
// (libcmark-dev), otherwise by rules for the lines that occur in most books.
#pragma once
#include <cstddef>
#include <string_view>
#include <vector>

// A heading, a fence or another block; it ends where the next one begins. Headings in lists, quotes and HTML are text.
// An unclosed fence is no fence: one stray mark must not turn the rest of a book into code.
struct MarkdownBlock {
    enum Kind { TEXT, FENCE, HEADING } kind;
    size_t line;       // the first is 0
    int level = 0;     // of a heading
    size_t titles = 1; // lines of its title
};

// Whether this build has cmark.
bool markdown_is_commonmark();

// lines: the text's lines, with their ends.
std::vector<MarkdownBlock> markdown_blocks(const std::vector<std::string_view>& lines);

// ---- Lines

// The run of ` or ~ that a line begins with, if it can open or close a fence. bare: nothing follows it.
struct FenceMark {
    char mark = 0;
    size_t count = 0;
    bool bare = false;
    explicit FenceMark(std::string_view line);
};

inline bool is_blank_line(std::string_view line) { return line.find_first_not_of(" \t\r\n") == line.npos; }

// 1..6 for "# Title" and so on, otherwise 0.
int heading_level(std::string_view line);
