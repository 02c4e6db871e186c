// cli/screen.h: a model's text, made harmless for a terminal; its thoughts dim.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

namespace cli {

// Text for a terminal, where control characters are shown and not obeyed: an ESC could move the cursor, name the
// window or type for the user. C0 and DEL have pictures (U+2400 ..); C1 and bytes that are no UTF-8 are U+FFFD.
// Newline and tab stay. Marks that turn the direction of writing are written as \u202e, since they can show a text in
// another order than it is.
std::string printable(std::string_view s);

// Whether a terminal shows the character: it is printable, takes room and is not blank. A space is not.
bool visible(uint32_t c);

// One line for the user that is no part of the answer.
void say(const std::string& line);

bool plain_terminal();
bool colours(); // https://no-color.org

// Shows an answer as it comes. On a terminal control characters are harmless, and a thought is dim instead of
// between <think> and </think>; anything else gets the text as it is.
struct Screen {
    const bool terminal, dims;
    bool thinking = false;
    std::string held; // may be the beginning of a marker

    Screen(bool terminal, bool thinks); // thinks: the markers are a thought's, not text
    ~Screen();

    void show(std::string_view s);
    void end() { put(held.size()); }

  private:
    void put(size_t n);
};

} // namespace cli
