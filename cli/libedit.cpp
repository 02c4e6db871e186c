// cli/libedit.cpp: lines edited with libedit; without it, the terminal's own line mode.
#include "cli/editor.h"
#ifdef HAVE_LIBEDIT
#include "base/file.h"
#include "base/options.h"
#include "cli/screen.h"
#include "cli/state.h"
#include "model/utf8.h"
#include <algorithm>
#include <cerrno>
#include <clocale>
#include <csignal>
#include <cstring>
#include <fcntl.h>
#include <histedit.h>
#include <langinfo.h>
#include <sstream>
#include <string_view>
#include <unistd.h>
#include <vector>
#include <wchar.h>

namespace cli {

// On a terminal lines are edited with libedit (arrows, history) if the Makefile found it. It is small, maintained with
// the BSDs for thirty years, in every distribution, knows the width of Chinese characters, and its licence does not
// change this program's, as GNU readline's would. Its native interface takes a function that reads characters, so
// pasted lines and Ctrl-C can be distinguished here. Without it, on a dumb terminal or without UTF-8, the terminal's
// own line mode is used: it has backspace, which with IUTF8 deletes a whole character. Its lines end at 4,095 bytes.

static constexpr wchar_t MARK = L'↵'; // a pasted newline in a line that is edited
static constexpr const char* MARK_TEXT = "↵";
static constexpr int KEPT_LINES = 1000; // of the history
static volatile sig_atomic_t resized = 0, resumed = 0;

static void replace(std::string& s, std::string_view from, std::string_view to) {
    for (size_t at = 0; (at = s.find(from, at)) != std::string::npos; at += to.size())
        s.replace(at, from.size(), to);
}

// Callbacks of libedit.
struct Editing {
    static Input& of(EditLine* e) {
        void* self = nullptr;
        el_get(e, EL_CLIENTDATA, &self);
        return *(Input*)self;
    }
    // libedit requests a character.
    static int get_character(EditLine* e, wchar_t* out) {
        Input& in = of(e);
        int length = 0;
        while (in.bytes.empty() || (length = utf8_length(in.bytes.data(), in.bytes.size())) == 0)
            if (!in.fill()) return 0;
        const char* at = in.bytes.data();
        uint32_t c = length > 0 ? utf8_read(at) : 0xFFFD;
        const bool waited = in.waiting > 0;
        in.use((size_t)std::abs(length));
        if (c == '\r') c = '\n'; // libedit makes the terminal convert one to the other while it is active
        *out = c == '\n' && !waited && in.pasted() ? MARK : (wchar_t)c;
        return 1;
    }
    static unsigned char paste(EditLine* e, int) {
        Input& in = of(e);
        const std::string_view close = "\033[201~";
        size_t end;
        while ((end = in.bytes.find(close)) == std::string::npos)
            if (!in.fill()) return CC_EOF;
        std::string text;
        utf8_repair(text, std::string_view(in.bytes).substr(0, end), true);
        in.use(end + close.size());
        for (const char* newline : {"\r\n", "\r", "\n"}) replace(text, newline, MARK_TEXT);
        el_insertstr(e, text.c_str());
        return CC_REFRESH;
    }
};

void Input::line_mode(bool on) {
    if (editor) el_set(editor, EL_PREP_TERM, !on);
    else if (on) tcsetattr(0, TCSANOW, &usual);
    else silence();
}

// The history outlives the program: the file `history` of the state folder has a message a line. It is append-only, so
// concurrent chats lose nothing; a long file is cut when it is read. Without such a folder there is no history of other
// sessions, and no message about it.
static void read_history(History* past) try {
    const std::string path = state_folder() + "/history";
    if (access(path.c_str(), F_OK) != 0) return;
    std::vector<std::string> lines;
    std::istringstream in{std::string(MappedFile(path).text())};
    for (std::string line; std::getline(in, line);) lines.emplace_back(), utf8_repair(lines.back(), line, true);
    std::string last;
    for (size_t i = lines.size() - std::min(lines.size(), (size_t)KEPT_LINES); i < lines.size(); i++) {
        HistEvent event;
        history(past, &event, H_ENTER, lines[i].c_str());
        last += lines[i] + "\n";
    }
    if (lines.size() > 2 * KEPT_LINES) write_private(path, last);
} catch (const Error&) {
}

void Input::start_editor() {
    if (!prompts || plain_terminal()) return;
    // The user's language if it is UTF-8. Characters only: numbers must keep the decimal point (sj.h).
    setlocale(LC_CTYPE, "");
    auto utf8 = [] { return !strcmp(nl_langinfo(CODESET), "UTF-8"); };
    if (!utf8()) setlocale(LC_CTYPE, "C.UTF-8");
    if (!utf8() || !(editor = el_init("qwen3", stdin, stdout, stderr))) return;
    el_set(editor, EL_CLIENTDATA, this);
    el_set(editor, EL_PROMPT_ESC, +[](EditLine* e) { return const_cast<char*>(Editing::of(e).prompt("\1")); }, '\1');
    el_set(editor, EL_GETCFN, Editing::get_character);
    el_set(editor, EL_EDITOR, "emacs");
    el_set(editor, EL_BIND, "\t", "ed-insert", nullptr);
    el_wset(editor, EL_ADDFN, L"paste", L"Insert a bracketed paste", Editing::paste); // el_set would leak copies
    el_set(editor, EL_BIND, "\033[200~", "paste", nullptr);
    HistEvent event;
    past = history_init();
    history(past, &event, H_SETSIZE, KEPT_LINES);
    history(past, &event, H_SETUNIQUE, 1);
    el_set(editor, EL_HIST, history, past);
    read_history(past);
    // A resized window, or return from Ctrl-Z: both end the wait in fill().
    struct sigaction wake = {};
    wake.sa_flags = SA_RESTART;
    wake.sa_handler = [](int) { resized = 1; };
    sigaction(SIGWINCH, &wake, nullptr);
    wake.sa_handler = [](int) { resumed = 1; };
    sigaction(SIGCONT, &wake, nullptr);
}

void Input::end_editor() {
    if (past) history_end(past);
    if (editor) el_end(editor);
}

void Input::remember(std::string message) try {
    HistEvent event;
    replace(message, "\n", MARK_TEXT);
    if (!editor || message.empty()) return;
    history(past, &event, H_ENTER, message.c_str());
    const std::string path = make_state_folder() + "/history", line = message + "\n";
    const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (file < 0) return;
    [[maybe_unused]] const ssize_t n = write(file, line.data(), line.size()); // (on a full disk: less of it)
    close(file);
} catch (const Error&) {
}

// How many rows below the prompt a place in the line is shown.
static int row_of(const wchar_t* line, const wchar_t* place) {
    const int columns = terminal_columns(80);
    int row = 0, column = 2; // after the prompt
    for (; line < place; line++) {
        const int shown = *line == '\t' ? 8 - column % 8 : wcwidth(*line), width = shown < 0 ? 2 : shown; // 2: ^X
        if (column + width > columns) row++, column = 0;
        column += width;
    }
    return row + column / columns;
}

static void adjust(EditLine* editor) {
    if (resumed) el_set(editor, EL_PREP_TERM, 0); // the shell had its own settings
    resized = resumed = 0;
    el_set(editor, EL_PREP_TERM, 1);
    el_resize(editor);
}

// libedit redraws a line from the cursor on. After a resize that is the line's first row, located as in terminals that
// rewrap long lines (most do; xterm does not, and there the old rows remain visible).
void Input::redraw() {
    if (!editor || !(resized || resumed)) return;
    const LineInfoW* at = el_wline(editor);
    const int up = resumed ? 0 : row_of(at->buffer, at->cursor);
    write_stdout((up ? format("\033[%dA", up) : "") + "\r\033[J");
    adjust(editor);
    el_set(editor, EL_REFRESH);
}

bool Input::edit_line(std::string& line, bool& typed) {
    int n = 0;
    adjust(editor); // before the prompt is visible, so that an immediate key reaches the editor
    write_stdout("\033[?2004h");
    const char* text = el_gets(editor, &n);
    el_set(editor, EL_PREP_TERM, 1); // without echo, as required until the next prompt too
    write_stdout("\033[?2004l");
    if (interrupted) { // the cursor goes to the end of the discarded text
        const LineInfoW* at = el_wline(editor);
        typed = at->lastchar > at->buffer;
        const int down = row_of(at->buffer, at->lastchar) - row_of(at->buffer, at->cursor);
        if (down) write_stdout(format("\033[%dB", down));
        return false;
    }
    if (!text || n <= 0) return false;
    line.assign(text, (size_t)n);
    if (line.back() == '\n') line.pop_back();
    replace(line, MARK_TEXT, "\n");
    return true;
}

} // namespace cli
#else

namespace cli {

void Input::line_mode(bool on) {
    if (on) tcsetattr(0, TCSANOW, &usual);
    else silence();
}
void Input::start_editor() {}
void Input::end_editor() {}
void Input::remember(std::string) {}
void Input::redraw() {}
bool Input::edit_line(std::string&, bool&) { return false; }

} // namespace cli
#endif
