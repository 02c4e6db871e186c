// Text on a terminal: lines broken between words, Markdown drawn. A small terminal of our own executes the sequences
// that are written, so that tests see the screen; it fails at any that could change a line that is finished.
#include "cli/markdown.h"
#include "cli/wrap.h"
#include "model/utf8.h"
#include <algorithm>
#include <doctest/doctest.h>
#include <string>
#include <vector>

namespace {

// Lines of cells. A cell: a character with those that have no width, and its attributes ("1;4").
struct Screen {
    struct Cell {
        std::string text = " ", style{};
    };
    const size_t columns;
    std::vector<std::vector<Cell>> lines = std::vector<std::vector<Cell>>(1);
    size_t column = 0;
    std::string style{};
    size_t broken = 0; // lines that the terminal itself broke

    explicit Screen(size_t c) : columns(c) {}

    void put(uint32_t c, const std::string& bytes) {
        const size_t width = (size_t)cli::columns_of(c);
        if (width == 0 && column > 0) return void(lines.back()[column - 1].text += bytes);
        if (column + width > columns) lines.emplace_back(), column = 0, broken++;
        lines.back().resize(std::max(lines.back().size(), column + width));
        lines.back()[column++] = {bytes, style};
        if (width == 2) lines.back()[column++] = {"", style};
    }
    void sequence(const std::string& parameters, char what) {
        if (what == 'm') {
            REQUIRE(parameters[0] == '0'); // all attributes at once
            style = parameters == "0" ? "" : parameters.substr(2);
        } else if (what == 'K') {
            lines.back().resize(std::min(column, lines.back().size()));
        } else {
            REQUIRE(what == 'G');
            column = (size_t)std::stoi(parameters) - 1;
            REQUIRE(column <= columns);
        }
    }
    void write(std::string_view s) {
        for (const char *at = s.data(), *end = at + s.size(); at < end;) {
            const char* begin = at;
            const uint32_t c = utf8_read(at);
            if (c == '\n') lines.emplace_back(), column = 0;
            else if (c == '\r') column = 0;
            else if (c != '\033') put(c, std::string(begin, at));
            else {
                REQUIRE(*at++ == '[');
                const char* last = std::find_if(at, end, [](char x) { return isalpha((unsigned char)x); });
                REQUIRE(last < end);
                sequence(std::string(at, last), *last);
                at = last + 1;
            }
        }
    }
    // With styles, runs of styled cells stand in braces: {1:bold}.
    std::string text(bool styles = false) const {
        std::string all;
        for (auto& line : lines) {
            if (&line != &lines[0]) all += "\n";
            std::string now;
            for (auto& cell : line) {
                if (styles && cell.style != now) all += (now.empty() ? "" : "}") + (cell.style.empty() ? "" : "{" + cell.style + ":");
                if (styles) now = cell.style;
                all += cell.text;
            }
            if (!now.empty()) all += "}";
            while (!all.empty() && all.back() == ' ') all.pop_back();
        }
        return all;
    }
};

std::vector<std::string> pieces(const std::string& text, size_t size) { // of whole characters
    std::vector<std::string> all;
    for (size_t at = 0, next; at < text.size(); at = next) {
        for (next = std::min(at + size, text.size()); next < text.size() && ((uint8_t)text[next] & 0xC0) == 0x80;) next++;
        all.push_back(text.substr(at, next - at));
    }
    return all;
}

Screen drawn(const std::string& text, size_t columns, size_t piece) {
    cli::Wrap wrap(columns, false);
    cli::Markdown markdown(wrap);
    Screen screen(columns);
    for (auto& one : pieces(text, piece)) screen.write(markdown.add(one));
    screen.write(markdown.end());
    CHECK(screen.style == "");
    return screen;
}

// The same however the text comes.
std::string shown(const std::string& text, size_t columns = 60, bool styles = true) {
    const std::string whole = drawn(text, columns, 1 << 20).text(styles);
    for (size_t piece : {1, 2, 3, 7, 30}) {
        INFO("pieces of " << piece << ": " << text);
        CHECK(drawn(text, columns, piece).text(styles) == whole);
    }
    return whole;
}

} // namespace

TEST_CASE("an answer's lines break between words at the terminal's edge, however its pieces come") {
    auto wrapped = [](size_t columns, const std::string& text, size_t size) {
        cli::Wrap wrap(columns);
        std::string out;
        for (auto& one : pieces(text, size)) out += wrap.add(one);
        return out + wrap.end();
    };
    const std::pair<const char*, const char*> rows[] = {
        {"a warp has 32 threads", "a warp has\n32 threads"},
        {"0123456789 ab", "0123456789\nab"},        // the break takes the place of a blank
        {"01234567890123 ab", "01234567890123 ab"},   // a word longer than a line: the terminal breaks it
        {"see 012345678901234567890123456789 ab", "see\n012345678901234567890123456789\nab"}, // wherever it begins
        {"见 012345678901234567890123共享内存", "见\n012345678901234567890123共享内\n存"},
        {"共享内存快得多", "共享内存快\n得多"},     // two columns each
        {"用 warp 做归约", "用 warp 做\n归约"},
        {"共享内存快，得多", "共享内存\n快，得多"},  // no line begins with a comma,
        {"共享内存（快）", "共享内存\n（快）"},     // ... and none ends with an opening bracket
        {"ab cdefg 👩‍💻", "ab cdefg\n👩‍💻"},          // one sign, whatever a terminal draws: four columns at most
        {"abcdefg 👍🏽", "abcdefg\n👍🏽"},
        {"abcdefg ❤️x", "abcdefg\n❤️x"},             // two columns with U+FE0F
        {"one\ntwo three four", "one\ntwo three\nfour"},
        {"```\nint threads = 32;\n```\nand then text", "```\nint threads = 32;\n```\nand then\ntext"}};
    for (auto& row : rows)
        for (size_t size = 1; size < 9; size++) {
            INFO(row.first);
            CHECK(wrapped(10, row.first, size) == row.second);
        }
}

TEST_CASE("Markdown: emphasis, code, links; what is no mark stays as it is") {
    const std::pair<const char*, const char*> rows[] = {
        {"A **warp** is *one* `group`.", "A {1:warp} is {3:one} {36:group}."},
        {"***both***, ~~gone~~, __bold__, _it_", "{1;3:both}, {9:gone}, {1:bold}, {3:it}"},
        {"**a *b* c** and *a **b** c*", "{1:a }{1;3:b}{1: c} and {3:a }{1;3:b}{3: c}"},
        {"**a *b*** and *a **b***", "{1:a }{1;3:b} and {3:a }{1;3:b}"},
        {"**重点**：共享内存", "{1:重点}：共享内存"},
        {"2 * 3 * 4, a_b_c, __syncthreads() and *p", "2 * 3 * 4, a_b_c, __syncthreads() and *p"},
        {"an **open one", "an **open one"},
        {"`**p` and ``a`b`` and ` a `", "{36:**p} and {36:a`b} and {36:a}"},
        {"\\*no\\*, C:\\dir, \\", "*no*, C:\\dir, \\"},
        {"it costs $5 and *$6*", "it costs $5 and {3:$6}"},
        {"$a*b*c$, $$x_i _j_$$, \\(a*b*c\\), \\[d*e*f\\]", "$a*b*c$, $$x_i _j_$$, \\(a*b*c\\), \\[d*e*f\\]"},
        {"[guide](https://x.org/a_b_c), [1], f[i](j)", "{4:guide} {2:(https://x.org/a_b_c)}, [1], f{4:i} {2:(j)}"},
        {"[https://x.org](https://x.org)!", "{4:https://x.org}!"},
        {"![a *fine* picture](p.png)", "{4:a }{3;4:fine}{4: picture} {2:(p.png)}"},
        {"a<br>b, vector<int>, 1 < 2", "a\nb, vector<int>, 1 < 2"},
        {"", ""}, {"a *", "a *"}, {"**", "**"}, {"`", "`"}, {"[", "["}, {"!", "!"}, {"$", "$"}, {"<b", "<b"}};
    for (auto& row : rows) CHECK(shown(row.first) == row.second);
}

TEST_CASE("Markdown: headings, lists, quotes, code, rules") {
    const std::pair<const char*, const char*> rows[] = {
        {"# One\n\n## Two ##\ntext #\n#hashtag", "{1;4:One}\n\n{1:Two}\ntext #\n#hashtag"},
        {"- a **b**\n  * c\n+ d\n-e\n- ", "• a {1:b}\n  • c\n• d\n-e\n•"},
        {"1. a\n10) b\n3.5 is no item\n2026", "1. a\n10) b\n3.5 is no item\n2026"},
        {"> said\n> - a\n>> b", "{2:│} said\n{2:│} • a\n{2:│} {2:│} b"},
        {"```cuda\nint *a, **b;\n\n  # c\n```\nafter", "{2:cuda}\n{36:int *a, **b;}\n\n{36:  # c}\nafter"},
        {"~~~\n```\n~~~\n````\n```\n````", "{36:```}\n{36:```}\n"},
        {"```\nunclosed", "{36:unclosed}"},
        {"```a `b` c```", "{36:a `b` c}"},
        {"a\n---\n* * *", "a\n{2:────────────────────────────────────────}\n{2:────────────────────────────────────────}"},
        {"**bold** first\n--- no rule", "{1:bold} first\n--- no rule"}};
    for (auto& row : rows) CHECK(shown(row.first) == row.second);
}

TEST_CASE("Markdown: lines break under their text, and no line is longer than the terminal") {
    CHECK(shown("- a warp has 32 threads\n  1. each of **them has** a lane\n> and waits for all", 14) ==
          "• a warp has\n  32 threads\n  1. each of\n     {1:them has}\n     a lane\n{2:│} and waits\n{2:│} for all");
    CHECK(shown("**共享内存，快得多** 一些", 10) == "{1:共享内存，}\n{1:快得多} 一\n些");
    const std::string all = "# A **title** of some words\n- 用 warp 做归约 **比共享内存快得多**，`a b c` 👩‍💻 ❤️\n> quoted *words and "
                            "more* words\n\n| a | 中文 |\n|--|:-:|\n| some words | 线程束，线程 👍🏽 |\n| `x|y` | z |\nend [l](https://x.y)";
    for (size_t columns = 20; columns < 70; columns++) {
        INFO(columns);
        const Screen screen = drawn(all, columns, 3);
        CHECK(screen.broken == 0);
        for (auto& line : screen.lines) CHECK(line.size() <= columns);
    }
}

TEST_CASE("Markdown: words are written as they come; an open mark waits for 240 bytes, a table in the current line") {
    cli::Wrap wrap(40, false);
    cli::Markdown markdown(wrap);
    CHECK(markdown.add("A warp ") == "A warp");
    CHECK(markdown.add("has **32") == " has");
    CHECK(markdown.add(" threads** in") == " \033[0;1m32 threads\033[0m");
    std::string later;
    for (int i = 0; i < 40; i++) later += markdown.add(i ? " eight b" : " [eight b");
    CHECK(later.size() > 40 * 8 - 240 - 8);
    CHECK(markdown.end() == " b");

    cli::Wrap narrow(20, false);
    cli::Markdown table(narrow);
    Screen screen(20);
    for (const char* piece : {"| a", " | b |\n", "|---|", "---|\n| **one** and two and three"}) screen.write(table.add(piece));
    CHECK(screen.text() == "| **one** and two a"); // never as wide as the terminal, which would break it
    screen.write(table.add(" | x |\n"));
    CHECK(screen.lines.size() == 1);
    screen.write(table.add("\n"));
    CHECK(screen.text() == "a                │ b\n─────────────────┼──\none and two and  │ x\nthree            │\n\n");
}

TEST_CASE("Markdown: a table's columns are aligned, broken where they must be, and text if they cannot fit") {
    const std::string table = "| Name | 中文 | Time |\n|:--|:-:|--:|\n| a **b** | 线程束 | 1.5 |\n| `x|y` \\| z | 快 | 12.25 |\n";
    CHECK(shown("before\n" + table + "after", 60, false) == "before\n"
          "Name    │  中文  │  Time\n"
          "────────┼────────┼──────\n"
          "a b     │ 线程束 │   1.5\n"
          "x|y | z │   快   │ 12.25\n"
          "after");
    CHECK(shown(table).find("{1:Name}    │  {1:中文}  │  {1:Time}\n") == 0);
    CHECK(shown("| a | b |\n|---|---|\n| one two three | 四五六七 |", 14, false) == 
          "a     │ b\n──────┼───────\none   │ 四五六\ntwo   │ 七\nthree │\n");
    CHECK(shown("| a | b | c |\n|-|-|-|\n| 1 | 2 | 3 |\n", 8, false) == "| a | b\n| c |\n|-|-|-|\n| 1 | 2\n| 3 |\n");
    CHECK(shown("| no table\n| at all", 60, false) == "| no table\n| at all\n");
    CHECK(shown("|x|\n|-|\n|1|2|\n|\n", 60, false) == "x │\n──┼──\n1 │ 2\n  │\n"); // more cells than heads: none is lost
}

TEST_CASE("Markdown: any text is the same in any pieces, and no word of it is lost") {
    const std::vector<std::string> parts = {"a", "b ", "*", "**", "_", "`", "```", "~~", "[", "](x)", "!", "$", "<br>", "|", "|-|-|", "\n",
                                            "\n\n", "- ", "# ", "> ", "1. ", "\\", "中", "，", "👩‍💻", "  "};
    uint32_t random = 1;
    for (int n = 0; n < 500; n++) {
        std::string text;
        for (int i = 0; i < 40; i++) text += parts[(random = random * 1664525 + 1013904223) / 65536 % parts.size()];
        INFO(text);
        const std::string screen = shown(text, 24);
        for (const char* word : {"a", "b", "中", "，", "👩‍💻"}) {
            auto count = [&](const std::string& s) {
                size_t n = 0;
                for (size_t at = 0; (at = s.find(word, at)) != s.npos; at++) n++;
                return n;
            };
            if (*word != 'b') CHECK(count(screen) == count(text)); // (<br> is a mark)
        }
    }
}
