// cli/screen.h: shows a model's text safely on a terminal; its thoughts dim.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

namespace cli {

// Text for a terminal, with control characters shown and not executed: an ESC could move the cursor, name the window or
// type for the user. C0 and DEL are shown as pictures (U+2400 ..); C1 and invalid UTF-8 as U+FFFD. Newline and tab
// stay. Marks that change the direction of writing are written as \u202e, since they can show a text in a wrong order.
std::string printable(std::string_view s);

// Whether a terminal shows the character: it is printable, has a width and is not blank. A space is not.
bool visible(uint32_t c);

// One line for the user that is no part of the answer.
void say(const std::string& line);

bool plain_terminal();
// The width of the terminal at standard output; `unknown` if it has none.
int terminal_columns(int unknown);
bool colours(); // https://no-color.org

// Breaks lines of text between words, at the terminal's edge. Code between ``` keeps its lines.
struct Wrap {
    explicit Wrap(size_t columns) : columns(columns) {}

    std::string add(std::string_view text); // the text to write now: a word waits for its end
    std::string end() { return put_word(); }

  private:
    const size_t columns;
    size_t column = 0, blanks = 0, word_width = 0; // written; waiting: blanks, and a word behind them
    std::string word, line_start; // line_start: the first three characters of the line, to find ```
    bool code = false;

    std::string put_word();
};

// Shows an answer as it is generated. On a terminal control characters are harmless, lines break between words, and a
// thought is dim instead of between <think> and </think>; otherwise the text is written unchanged.
struct Screen {
    const bool terminal, dims;
    bool thinking = false;
    std::string held; // may be the beginning of a marker
    Wrap wrap;

    Screen(bool terminal, bool thinks); // thinks: the markers are a thought's, not text
    ~Screen();

    void show(std::string_view s);
    void end();
    void show_whole(std::string_view s) { show(s), end(); }

  private:
    void put(size_t n);
};

} // namespace cli
