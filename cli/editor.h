// cli/editor.h: the user's lines, edited where there is libedit.
#pragma once
#include <csignal>
#include <string>
#include <termios.h>

struct editline; // of histedit.h
struct history;

namespace cli {

// The user's messages, one after another. A message is a line; a line that ends in \ goes on in the next; on a
// terminal, lines that arrive together at a prompt were pasted and are one message. What is typed while there is no
// prompt is not echoed, as it would stand in the midst of an answer: it waits, and each line is a message of its own.
// Ctrl-C at a prompt drops what was typed; the next one leaves, if there is nothing to drop.
struct Input {
    static inline volatile sig_atomic_t hangup = 0; // the signal that ends the chat, if one came

    explicit Input(bool prompts);
    Input(const Input&) = delete;
    Input& operator=(const Input&) = delete;
    ~Input();

    // False: the input is at its end, or the user leaves.
    bool next(std::string& message);
    // Whether the user says yes. Only what is typed after the question counts.
    bool confirm(const std::string& question);
    // Forgets what waits.
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

    // The mark and a space; what a terminal obeys and does not show is between two of `quote`.
    const char* prompt(const char* quote);
    // More bytes. Looks up twice a second, for a signal may come just before it waits.
    bool fill();
    bool pasted();
    void use(size_t n);
    // What was typed before the prompt.
    void collect();
    // No echo until the next prompt. (What is typed of a line then is not seen until Enter.)
    void silence();
    // One line without its newline, with those that arrive together with it.
    bool plain_line(std::string& line);

    // Of the editor; without one these do as the terminal's own line mode does.
    editline* editor = nullptr; // libedit's, if lines are edited
    struct history* past = nullptr;
    bool can_edit() const { return editor; }
    void line_mode(bool on); // the terminal edits and echoes
    void start_editor();
    void end_editor();
    void remember(std::string message);
    void redraw();
    // One line, edited. Meanwhile the terminal marks a paste with ESC [ 200 ~ and ESC [ 201 ~. `typed`: there was
    // something in a line that was interrupted.
    bool edit_line(std::string& line, bool& typed);
};

} // namespace cli
