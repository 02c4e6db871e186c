// cli/markdown.h: draws Markdown on a terminal while it is generated.
//
// Headings are bold, code is coloured and without its fences, lists have bullets, links show their addresses, tables
// have aligned columns. Text is written once and never changed: what may be a mark waits for its end, for at most 240
// bytes. A table waits for its last row, which may be the widest; meanwhile the terminal's current line shows the row
// that is being written, cut to the width.
#pragma once
#include "cli/wrap.h"
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace cli {

struct Markdown {
    explicit Markdown(Wrap& w) : wrap(w) {}

    // The text to write now, for text without control characters.
    std::string add(std::string_view text);
    std::string end(); // the rest; the next text begins a document

  private:
    enum Place { START, INSIDE, CODE_LINE } place = START; // of `line`; START: its kind is not known

    Wrap& wrap;
    std::string line, out;         // line: the text that waits. INSIDE: behind the byte before it
    std::string fence, margin;     // of the code that is open; of the lines that this one breaks into
    std::vector<std::string> rows; // of a table
    bool quoted = false, previewed = false;

    bool step(bool whole);
    bool start(std::string_view now, bool ended);
    bool start_code_line(std::string_view now, bool ended);
    bool start_row(std::string_view now, bool ended);
    bool start_block(std::string_view now, size_t first, bool ended);
    bool start_mark(std::string_view now, size_t first, bool ended);
    bool start_number(std::string_view now, size_t first, bool ended);
    void inside(size_t first, const std::string& mark, size_t skip);
    void drop_line();
    void put_rows();
    void preview();
    void put(std::string_view text) { out += wrap.add(text); }
    void put_line(std::string_view text, unsigned style); // styled, without marks
};

} // namespace cli
