// cli/editor.cpp: the user's lines, from a terminal or a pipe. libedit.cpp edits them.
#include "cli/editor.h"
#include "base/options.h"
#include "base/text.h"
#include "cli/screen.h"
#include <algorithm>
#include <cerrno>
#include <poll.h>
#include <unistd.h>

namespace cli {

static constexpr int TOGETHER_MS = 20;

static bool arrives(int ms) {
    pollfd in = {0, POLLIN, 0};
    return poll(&in, 1, ms) > 0;
}

Input::Input(bool prompts) : prompts(prompts) {
    is_terminal = tcgetattr(0, &before) == 0;
    usual = before;
    usual.c_iflag |= IUTF8;
    if (is_terminal) tcsetattr(0, TCSANOW, &usual);
    start_editor();
}

Input::~Input() {
    end_editor();
    if (is_terminal) tcsetattr(0, TCSANOW, &before);
}

bool Input::next(std::string& message) {
    collect();
    for (bool told = false;; told = true) {
        std::string all;
        bool more = true, typed = false;
        for (mark = ">"; more; mark = "…") {
            std::string line;
            if (!(can_edit() ? edit_line(line, typed) : plain_line(line))) break;
            more = !line.empty() && line.back() == '\\';
            if (more) line.back() = '\n';
            all += line;
        }
        if (!interrupted) {
            message = all;
            if (invalid_utf8(message) == message.npos) remember(message);
            silence();
            return !(more && all.empty());
        }
        const bool empty = all.empty() && !typed; // (of a line that the terminal edits, the content is unknown)
        if (!prompts || hangup || (told && empty)) return false;
        interrupted = 0;
        drop();
        say("\nCtrl-C again leaves");
    }
}

bool Input::confirm(const std::string& question) {
    while (arrives(0) && fill()) {}
    drop();
    line_mode(true);
    write_stdout(printable(question) + " [y/N] ");
    size_t end;
    while ((end = bytes.find('\n')) == std::string::npos && fill()) {}
    const std::string said = bytes.substr(0, end);
    drop();
    line_mode(false);
    return end != std::string::npos && (said == "y" || said == "Y" || said == "yes");
}

const char* Input::prompt(const char* quote) {
    coloured = mark + std::string(" ");
    if (colours()) coloured = format("%s\033[1;32m%s%s%s\033[0m%s ", quote, quote, mark, quote, quote);
    return coloured.c_str();
}

bool Input::fill() {
    while (!interrupted) {
        if (!arrives(500)) {
            redraw();
            continue;
        }
        char some[4096];
        ssize_t n = read(0, some, sizeof some);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && !is_terminal) DIE("standard input: %s", strerror(errno)); // (a terminal may be gone)
        if (n > 0) bytes.append(some, (size_t)n);
        return n > 0;
    }
    return false;
}

bool Input::pasted() { return is_terminal && (!bytes.empty() || arrives(TOGETHER_MS)); }

void Input::use(size_t n) {
    bytes.erase(0, n);
    waiting -= std::min(waiting, n);
}

void Input::collect() {
    if (!prompts) return;
    while (arrives(0) && fill()) {}
    waiting = bytes.size();
    if (!can_edit()) tcsetattr(0, TCSANOW, &usual);
}

void Input::silence() {
    if (!prompts || can_edit()) return; // (with an editor the terminal has no echo of its own)
    termios now = usual;
    now.c_lflag &= ~(tcflag_t)ECHO;
    tcsetattr(0, TCSANOW, &now);
}

bool Input::plain_line(std::string& line) {
    if (prompts) write_stdout(prompt(""));
    for (;;) {
        const size_t end = bytes.find('\n');
        const bool waited = end < waiting;
        line.append(bytes, 0, end);
        use(end == std::string::npos ? bytes.size() : end + 1);
        if (end == std::string::npos) {
            if (!fill()) return !line.empty();
        } else if (!waited && pasted()) {
            line += '\n';
        } else {
            if (!line.empty() && line.back() == '\r') line.pop_back();
            if (waited) write_stdout(printable(line) + "\n"); // not yet shown
            return true;
        }
    }
}

} // namespace cli
