// cli/screen.h: shows a model's text safely on a terminal; its thoughts dim.
#pragma once
#include "cli/markdown.h"
#include "cli/wrap.h"
#include <string>
#include <string_view>

namespace cli {

// Text for a terminal, with control characters shown and not executed: an ESC could move the cursor, name the window or
// type for the user. C0 and DEL are shown as pictures (U+2400 ..); C1 and invalid UTF-8 as U+FFFD. Newline and tab
// stay. Marks that change the direction of writing are written as \u202e, since they can show a text in a wrong order.
std::string printable(std::string_view s);

// A line for the user that is no part of the answer. On a terminal it breaks between words.
void say(const std::string& line);

bool plain_terminal();
// The width of the terminal at standard output; `unknown` if it has none.
int terminal_columns(int unknown);
bool colours(); // https://no-color.org

// Shows an answer as it is generated. On a terminal control characters are harmless, lines break between words, a
// thought is dim instead of between <think> and </think>, and Markdown is drawn. Elsewhere the text is written
// unchanged.
struct Screen {
    // thinks: the markers are a thought's, not text. draws: the answer is Markdown to draw.
    Screen(bool terminal, bool thinks, bool draws);
    ~Screen();

    void show(std::string_view s);
    void end();
    void show_whole(std::string_view s) { show(s), end(); }

  private:
    const bool terminal, dims, draws;
    bool thinking = false, styled = false; // styled: attributes may be set
    std::string held; // may be the beginning of a marker
    Wrap wrap;
    Markdown markdown;

    void put(size_t n);
    void put_rest();
};

} // namespace cli
