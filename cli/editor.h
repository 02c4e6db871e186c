// cli/editor.h: the user's lines, edited where there is libedit.
#pragma once
#include <csignal>
#include <string>
#include <termios.h>

struct editline; // of histedit.h
struct history;

namespace cli {

// The user's messages, one after another. A message is a line; a line that ends in \ continues in the next; on a
// terminal, lines that arrive together at a prompt were pasted and are one message. Input typed without a prompt is not
// echoed, since it would appear within an answer: it is queued, and each line is a message of its own. Ctrl-C at a
// prompt discards the input; a further Ctrl-C leaves if there is none to discard.
struct Input {
    static inline volatile sig_atomic_t hangup = 0; // the signal that ends the chat, if one came

    explicit Input(bool prompts);
    Input(const Input&) = delete;
    Input& operator=(const Input&) = delete;
    ~Input();

    // False: the input is at its end, or the user leaves.
    bool next(std::string& message);
    // Whether the user says yes. Only input typed after the question counts.
    bool confirm(const std::string& question);
    // Discards queued input.
    void drop() { bytes.clear(), waiting = 0; }

  private:
    friend struct Editing;
    const bool prompts;
    bool is_terminal = false;
    termios before{}, usual{};
    std::string bytes;  // read and not yet used
    size_t waiting = 0; // of them, how many were typed before the prompt
    const char* mark = "";
    std::string coloured; // the prompt

    // The mark and a space; control sequences without width are enclosed in two `quote` characters.
    const char* prompt(const char* quote);
    // Reads more bytes. Wakes twice a second, since a signal may arrive just before the wait.
    bool fill();
    bool pasted();
    void use(size_t n);
    // Input typed before the prompt.
    void collect();
    // Disables echo until the next prompt. (Part of a line typed then appears only after Enter.)
    void silence();
    // One line without its newline, with those that arrive together with it.
    bool plain_line(std::string& line);

    // For the editor; without one, the terminal's own line mode.
    editline* editor = nullptr; // libedit's, if lines are edited
    struct history* past = nullptr;
    bool can_edit() const { return editor; }
    void line_mode(bool on); // the terminal edits and echoes
    void start_editor();
    void end_editor();
    void remember(std::string message);
    void redraw();
    // One line, edited. Meanwhile the terminal encloses a paste in ESC [ 200 ~ and ESC [ 201 ~. `typed`: an interrupted
    // line was not empty.
    bool edit_line(std::string& line, bool& typed);
};

} // namespace cli
