// cli/wrap.h: the width of characters on a terminal, and lines that break between words at its edge.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

namespace cli {

// Whether a terminal shows the character: it is printable, has a width and is not blank. A space is not.
bool visible(uint32_t c);

// Columns that a character takes, by the system's tables (C.UTF-8). Emoji that are newer than these take two.
int columns_of(uint32_t c);

// Columns of a line in which escape sequences may stand.
size_t columns_of(std::string_view line);

// Breaks lines of text between words, at the terminal's edge. Chinese breaks between any two characters, but not before
// punctuation that closes; what is drawn as one sign (U+200D, a skin tone) stays together. Code between ``` keeps its
// lines. A character that some terminals draw wider than others counts as wide: a line may end early, never late.
struct Wrap {
    explicit Wrap(size_t columns, bool fences = true) : columns(columns), fences(fences) {} // fences: ``` are code's
    const size_t columns;

    std::string add(std::string_view text); // the text to write now: a word waits for its end
    std::string end();

    // An escape sequence at this place of the text; it has no width, and must set all attributes.
    void style(std::string_view sequence) { word += sequence, next_style = sequence; }
    // Sets the prefix of continuation lines, from here to the end of the line; it resets its own style.
    void hang(std::string begin, size_t width) { margin = std::move(begin), margin_width = width; }
    bool at_start() const { return column == 0 && blanks == 0 && word_width == 0; }
    // Whether lines are left as they are, such as those of code.
    void keep_lines(bool keep) { code = keep; }

  private:
    const bool fences;
    size_t column = 0, blanks = 0, word_width = 0; // written; waiting: blanks, and a word behind them
    std::string word, line_start; // line_start: the first three characters of the line, to find ```
    std::string margin, active_style, next_style; // active: of what is written; next: of what follows the word
    size_t margin_width = 0;
    uint32_t last = 0; // the character before
    int last_width = 0;
    bool code = false;
    bool in_long = false, goes_on = false; // in a word of more than a line, which the terminal breaks; part is written

    std::string put_word();
    void add_character(uint32_t c, std::string_view bytes, std::string& out);
};

} // namespace cli
