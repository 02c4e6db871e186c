// chat.h: qwen3 without -i, a conversation in a terminal or over pipes. Included once, by cli.h.
//     Screen         a model's text, made harmless for a terminal; its thoughts dim
//     state_folder   what is kept from one chat to the next
//     Input          the user's lines, edited where there is libedit
//     SavedChat      a conversation as a file
//     Chat           questions and answers on one session; its commands
#pragma once
#include "cli/commands.h"
#include <dirent.h>
#include <langinfo.h>
#include <locale.h>
#include <poll.h>
#include <sstream>
#include <sys/ioctl.h>
#include <termios.h>

// --------------------------------------------------------------------------------- What a model says, on screen

// Text for a terminal, where control characters are shown and not obeyed: an ESC could move the cursor, name the
// window or type for the user. C0 and DEL have pictures (U+2400 ..); C1 and bytes that are no UTF-8 are U+FFFD.
// Newline and tab stay.
static std::string printable(std::string_view s) {
    std::string out;
    while (!s.empty()) {
        const int length = utf8_length(s.data(), s.size());
        const uint8_t c = (uint8_t)s[0];
        if (length <= 0 || (c == 0xC2 && (uint8_t)s[1] < 0xA0)) out += "\uFFFD";
        else if (c == 0x7F) out += "\u2421";
        else if (c < 0x20 && c != '\n' && c != '\t') utf8_append(out, 0x2400u + c);
        else out += s.substr(0, (size_t)length);
        s.remove_prefix(length ? (size_t)std::abs(length) : s.size());
    }
    return out;
}

// One line for the user that is no part of the answer.
static void say(const std::string& line) { fprintf(stderr, "%s\n", printable(line).c_str()); }
static void say_sources(const std::vector<Source>& sources) {
    for (size_t i = 0; i < sources.size(); i++) say(format("[%zu] %s", i + 1, name_of(sources[i]).c_str()));
}

static bool plain_terminal() {
    const char* kind = getenv("TERM");
    return !kind || !*kind || !strcmp(kind, "dumb");
}
static bool colours() { // https://no-color.org
    const char* none = getenv("NO_COLOR");
    return !plain_terminal() && !(none && *none);
}

// Shows an answer as it comes. On a terminal control characters are harmless, and a thought is dim instead of
// between <think> and </think>; anything else gets the text as it is.
struct Screen {
    const bool terminal, dims;
    bool thinking = false;
    std::string held; // may be the beginning of a marker

    explicit Screen(bool terminal)
        : terminal(terminal), dims(terminal && colours()) {}
    ~Screen() { if (thinking) fputs("\033[0m", stdout), fflush(stdout); }

    void show(std::string_view s) {
        if (!terminal) return write_stdout(s);
        held += s;
        for (;;) {
            const std::string_view marker = thinking ? "</think>" : "<think>";
            const size_t at = dims ? held.find(marker) : std::string::npos;
            if (at == std::string::npos) {
                size_t hold = dims ? std::min(marker.size() - 1, held.size()) : 0;
                while (hold && held.compare(held.size() - hold, hold, marker, 0, hold) != 0) hold--;
                return put(held.size() - hold);
            }
            put(at);
            held.erase(0, marker.size());
            thinking = !thinking;
            write_stdout(thinking ? "\033[2m" : "\033[0m");
        }
    }
    void end() { put(held.size()); }

  private:
    void put(size_t n) {
        write_stdout(printable(held.substr(0, n)));
        held.erase(0, n);
    }
};

// ----------------------------------------------------------------------------------- What is kept between chats

// The user's lines and the conversations that nobody saved, for this user's eyes only. "": there is no home for it.
static std::string state_folder() {
    const char *state = getenv("XDG_STATE_HOME"), *home = getenv("HOME");
    if (state && *state == '/') return std::string(state) + "/qwen3";
    if (home && *home == '/') return std::string(home) + "/.local/state/qwen3";
    return "";
}
static std::string make_state_folder() {
    const std::string folder = state_folder();
    if (folder.empty()) DIE("neither XDG_STATE_HOME nor HOME names a folder");
    make_folder(folder.substr(0, folder.rfind('/')));
    mkdir(folder.c_str(), 0700);
    make_folder(folder); // says why if it is not there now
    return folder;
}
static void write_private(const std::string& path, std::string_view text) {
    OutputFile out(path);
    fchmod(fileno(out.file), 0600);
    out.write(text);
    out.commit();
}

// ~ as a shell has it.
static std::string expanded(const std::string& path) {
    const char* home = getenv("HOME");
    const bool begins = path == "~" || path.compare(0, 2, "~/") == 0;
    return begins && home ? home + path.substr(1) : path;
}

// --------------------------------------------------------------------------------------------- The user's lines

// On a terminal lines are edited with libedit (arrows, history) where the Makefile found it. It is small, kept
// with the BSDs for thirty years, in every distribution, knows the width of Chinese characters, and its licence
// lets this program keep its own, which GNU readline's would not. Its native interface takes a function that
// reads characters, so that pasted lines and Ctrl-C can be told apart here.
// Without it, on a dumb terminal or without UTF-8, the terminal's own line mode does: it has backspace, and with
// IUTF8 set that takes a whole character. Its lines end at 4,095 bytes.
#ifdef HAVE_LIBEDIT
#define Tokenizer EditTokenizer // histedit.h has another one
#include <histedit.h>
#undef Tokenizer
#endif

// The user's messages, one after another. A message is a line; a line that ends in \ goes on in the next; on a
// terminal, lines that arrive together at a prompt were pasted and are one message. What is typed while there is no
// prompt is not echoed, as it would stand in the midst of an answer: it waits, and each line is a message of its own.
// Ctrl-C at a prompt drops what was typed; the next one leaves, if there is nothing to drop.
struct Input {
    static constexpr int TOGETHER_MS = 20;
    static inline volatile sig_atomic_t hangup = 0; // the signal that ends the chat, if one came

    explicit Input(bool prompts) : prompts(prompts) {
        is_terminal = tcgetattr(0, &before) == 0;
        usual = before;
        usual.c_iflag |= IUTF8;
        if (is_terminal) tcsetattr(0, TCSANOW, &usual);
        start_editor();
    }
    Input(const Input&) = delete;
    Input& operator=(const Input&) = delete;
    ~Input() {
        end_editor();
        if (is_terminal) tcsetattr(0, TCSANOW, &before);
    }

    // False: the input is at its end, or the user leaves.
    bool next(std::string& message) {
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
                message.clear();
                utf8_repair(message, all, true);
                remember(message);
                silence();
                return !(more && all.empty());
            }
            const bool empty = all.empty() && !typed; // (of a line that the terminal edits, nothing is known)
            if (!prompts || hangup || (told && empty)) return false;
            interrupted = 0;
            drop();
            say("\nCtrl-C again leaves");
        }
    }

    // Whether the user says yes. Only what is typed after the question counts.
    bool confirm(const std::string& question) {
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

    // Forgets what waits.
    void drop() { bytes.clear(), waiting = 0; }

  private:
    const bool prompts;
    bool is_terminal = false;
    termios before{}, usual{};
    std::string bytes;  // read and not yet used
    size_t waiting = 0; // of them, how many were typed before the prompt
    const char* mark = "";
    std::string coloured; // the prompt

    // The mark and a space; what a terminal obeys and does not show is between two of `quote`.
    const char* prompt(const char* quote) {
        coloured = mark + std::string(" ");
        if (colours()) coloured = format("%s\033[1;32m%s%s%s\033[0m%s ", quote, quote, mark, quote, quote);
        return coloured.c_str();
    }

    static bool arrives(int ms) {
        pollfd in = {0, POLLIN, 0};
        return poll(&in, 1, ms) > 0;
    }
    // More bytes. Looks up twice a second, for a signal may come just before it waits.
    bool fill() {
        while (!interrupted) {
            if (!arrives(500)) {
                redraw();
                continue;
            }
            char some[4096];
            ssize_t n = read(0, some, sizeof some);
            if (n < 0 && errno == EINTR) continue;
            if (n > 0) bytes.append(some, (size_t)n);
            return n > 0;
        }
        return false;
    }
    bool pasted() { return is_terminal && (!bytes.empty() || arrives(TOGETHER_MS)); }
    void use(size_t n) {
        bytes.erase(0, n);
        waiting -= std::min(waiting, n);
    }

    // What was typed before the prompt.
    void collect() {
        if (!prompts) return;
        while (arrives(0) && fill()) {}
        waiting = bytes.size();
        if (!can_edit()) tcsetattr(0, TCSANOW, &usual);
    }
    // No echo until the next prompt. (What is typed of a line then is not seen until Enter.)
    void silence() {
        if (!prompts || can_edit()) return; // (with an editor the terminal has no echo of its own)
        termios now = usual;
        now.c_lflag &= ~(tcflag_t)ECHO;
        tcsetattr(0, TCSANOW, &now);
    }

    // One line without its newline, with those that arrive together with it.
    bool plain_line(std::string& line) {
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
                if (waited) write_stdout(printable(line) + "\n"); // nobody saw it yet
                return true;
            }
        }
    }

#ifdef HAVE_LIBEDIT
    static constexpr wchar_t MARK = L'↵'; // a pasted newline in a line that is edited
    static constexpr const char* MARK_TEXT = "↵";
    static constexpr int KEPT_LINES = 1000; // of the history
    static inline volatile sig_atomic_t resized = 0, resumed = 0;
    EditLine* editor = nullptr;
    History* past = nullptr;

    bool can_edit() const { return editor; }
    void line_mode(bool on) { // the terminal edits and echoes
        if (editor) el_set(editor, EL_PREP_TERM, !on);
        else if (on) tcsetattr(0, TCSANOW, &usual);
        else silence();
    }

    void start_editor() {
        if (!prompts || plain_terminal()) return;
        // The user's language if it comes in UTF-8. Characters only: numbers must keep their point (sj.h).
        setlocale(LC_CTYPE, "");
        auto utf8 = [] { return !strcmp(nl_langinfo(CODESET), "UTF-8"); };
        if (!utf8()) setlocale(LC_CTYPE, "C.UTF-8");
        if (!utf8() || !(editor = el_init("qwen3", stdin, stdout, stderr))) return;
        el_set(editor, EL_CLIENTDATA, this);
        el_set(editor, EL_PROMPT_ESC, +[](EditLine* e) { return const_cast<char*>(of(e).prompt("\1")); }, '\1');
        el_set(editor, EL_GETCFN, get_character);
        el_set(editor, EL_EDITOR, "emacs");
        el_set(editor, EL_BIND, "\t", "ed-insert", nullptr);
        el_wset(editor, EL_ADDFN, L"paste", L"Insert a bracketed paste", paste); // el_set would leak copies
        el_set(editor, EL_BIND, "\033[200~", "paste", nullptr);
        HistEvent event;
        past = history_init();
        history(past, &event, H_SETSIZE, KEPT_LINES);
        history(past, &event, H_SETUNIQUE, 1);
        el_set(editor, EL_HIST, history, past);
        read_history();
        // A window of another size, or back from Ctrl-Z: that ends the wait in fill().
        struct sigaction wake = {};
        wake.sa_flags = SA_RESTART;
        wake.sa_handler = [](int) { resized = 1; };
        sigaction(SIGWINCH, &wake, nullptr);
        wake.sa_handler = [](int) { resumed = 1; };
        sigaction(SIGCONT, &wake, nullptr);
    }
    void end_editor() {
        if (past) history_end(past);
        if (editor) el_end(editor);
    }

    // The history outlives the program: the file `history` of the state folder has a message a line. It is only added
    // to, so that chats side by side lose nothing; one that grew long is cut when it is read. Without such a folder
    // there is no history of other sessions, and no word about it.
    void read_history() try {
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
    void remember(std::string message) try {
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
        winsize window = {};
        const int columns = ioctl(1, TIOCGWINSZ, &window) == 0 && window.ws_col > 1 ? window.ws_col : 80;
        int row = 0, column = 2; // after the prompt
        for (; line < place; line++) {
            const int shown = *line == '\t' ? 8 - column % 8 : wcwidth(*line), width = shown < 0 ? 2 : shown; // 2: ^X
            if (column + width > columns) row++, column = 0;
            column += width;
        }
        return row + column / columns;
    }
    // libedit draws a line anew from where the cursor is. After a resize that is the line's first row, found as
    // terminals find it that wrap long lines anew (most do; xterm does not, and there the old rows stay to be seen).
    void redraw() {
        if (!editor || !(resized || resumed)) return;
        const LineInfoW* at = el_wline(editor);
        const int up = resumed ? 0 : row_of(at->buffer, at->cursor);
        write_stdout((up ? format("\033[%dA", up) : "") + "\r\033[J");
        adjust();
        el_set(editor, EL_REFRESH);
    }
    void adjust() {
        if (resumed) el_set(editor, EL_PREP_TERM, 0); // the shell had its own settings
        resized = resumed = 0;
        el_set(editor, EL_PREP_TERM, 1);
        el_resize(editor);
    }

    // One line, edited. Meanwhile the terminal marks a paste with ESC [ 200 ~ and ESC [ 201 ~. `typed`: there was
    // something in a line that was interrupted.
    bool edit_line(std::string& line, bool& typed) {
        int n = 0;
        adjust(); // before the prompt is seen, so that a key at once finds the editor
        write_stdout("\033[?2004h");
        const char* text = el_gets(editor, &n);
        el_set(editor, EL_PREP_TERM, 1); // it has no echo, which is wanted until the next prompt too
        write_stdout("\033[?2004l");
        if (interrupted) { // the cursor goes to the end of what is dropped
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

    static Input& of(EditLine* e) {
        void* self = nullptr;
        el_get(e, EL_CLIENTDATA, &self);
        return *(Input*)self;
    }
    static void replace(std::string& s, std::string_view from, std::string_view to) {
        for (size_t at = 0; (at = s.find(from, at)) != std::string::npos; at += to.size())
            s.replace(at, from.size(), to);
    }
    // libedit asks for a character.
    static int get_character(EditLine* e, wchar_t* out) {
        Input& in = of(e);
        int length = 0;
        while (in.bytes.empty() || (length = utf8_length(in.bytes.data(), in.bytes.size())) == 0)
            if (!in.fill()) return 0;
        const char* at = in.bytes.data();
        uint32_t c = length > 0 ? utf8_read(at) : 0xFFFD;
        const bool waited = in.waiting > 0;
        in.use((size_t)std::abs(length));
        if (c == '\r') c = '\n'; // libedit has the terminal turn one into the other, when it has it
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
#else
    bool can_edit() const { return false; }
    void line_mode(bool on) {
        if (on) tcsetattr(0, TCSANOW, &usual);
        else silence();
    }
    void start_editor() {}
    void end_editor() {}
    void remember(const std::string&) {}
    void redraw() {}
    bool edit_line(std::string&, bool&) { return false; }
#endif
};

// -------------------------------------------------------------------------------------------------------- Chat

// A conversation as a file: {"system": "...", "think": false, "messages": [{"role": "user", "content": "..."}, ...]},
// OpenAI's messages.
struct SavedChat {
    std::string system;
    int think = -1; // 0, 1; -1: it does not say
    std::vector<Message> messages; // question, answer, question, answer, ...

    // Any JSON with such messages; a first message of the system is the system prompt.
    static SavedChat read(const std::string& path) {
        const MappedFile file(path);
        const char* name = path.c_str();
        sj::Doc doc;
        const std::string fault = sj::parse(doc, file.text());
        if (!fault.empty()) DIE("%s: %s", name, fault.c_str());
        sj::Value v = doc.root(), system = v["system"], think = v["think"];
        if (system && !system.is(sj::String)) DIE("%s: system is not a string", name);
        if (think && !think.is_bool()) DIE("%s: think is neither true nor false", name);
        SavedChat chat;
        try {
            chat.messages = messages_from_json(v["messages"]);
        } catch (const Error& e) {
            DIE("%s: %s", name, e.what());
        }
        std::vector<Message>& all = chat.messages;
        chat.system = system.str();
        if (!all.empty() && all[0].role == "system") {
            chat.system = all[0].content;
            all.erase(all.begin());
        }
        for (size_t i = 0; i < all.size(); i++)
            if (all[i].role != (i % 2 ? "assistant" : "user") || !all[i].tool_calls.empty())
                DIE("%s: a chat is questions of the user and answers of the assistant in turn", name);
        if (all.size() % 2) DIE("%s: the last question has no answer", name);
        if (think) chat.think = think.boolean();
        return chat;
    }

    std::string text() const {
        std::string out = "{\"system\": ";
        sj::quote(out, system);
        out += format(", \"think\": %s, \"messages\": [", think == 1 ? "true" : "false");
        for (auto& m : messages) {
            out += &m == messages.data() ? "\n" : ",\n";
            out += format("  {\"role\": \"%s\", \"content\": ", m.role.c_str());
            sj::quote(out, m.content);
            if (m.reasoning) sj::quote(out += ", \"reasoning_content\": ", *m.reasoning);
            out += "}";
        }
        return out + "\n]}\n";
    }

    // ---- Those that the state folder keeps: chat-YYYYMMDD-HHMMSS.json.

    // Their names without .json, the newest first.
    static std::vector<std::string> kept() {
        std::vector<std::string> names;
        const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir(state_folder().c_str()), closedir);
        while (const dirent* entry = folder ? readdir(folder.get()) : nullptr) {
            const std::string name = entry->d_name;
            if (name.compare(0, 5, "chat-") == 0 && name.size() > 10 && name.substr(name.size() - 5) == ".json")
                names.push_back(name.substr(0, name.size() - 5));
        }
        std::sort(names.rbegin(), names.rend());
        return names;
    }
    static std::string new_name() {
        const time_t now = time(nullptr);
        tm local = {};
        char stamp[32];
        strftime(stamp, sizeof stamp, "chat-%Y%m%d-%H%M%S", localtime_r(&now, &local));
        const std::string start = make_state_folder() + "/" + stamp;
        std::string path = start + ".json";
        for (int i = 2; access(path.c_str(), F_OK) == 0; i++) path = format("%s-%d.json", start.c_str(), i);
        return path;
    }
    // The file that the user means: one that is there, or one that is kept, by its name or its number in the list.
    static std::string find(const std::string& word) {
        const std::string path = expanded(word);
        if (access(path.c_str(), F_OK) == 0 || path.find('/') != std::string::npos) return path;
        const std::vector<std::string> names = kept();
        for (size_t i = 0; i < names.size(); i++)
            if (word == std::to_string(i + 1) || word == names[i] || word == names[i] + ".json")
                return state_folder() + "/" + names[i] + ".json";
        return path;
    }
    static std::string list() {
        constexpr size_t MOST = 20, COLUMNS = 50;
        const std::vector<std::string> names = kept();
        if (names.empty()) return "no conversation is kept; /load FILE takes up one that was saved";
        std::string all;
        for (size_t i = 0; i < std::min(names.size(), MOST); i++) {
            all += format("%3zu  %s  ", i + 1, names[i].c_str());
            try {
                const SavedChat chat = read(state_folder() + "/" + names[i] + ".json");
                std::string first = chat.messages.empty() ? "" : chat.messages[0].content;
                std::replace(first.begin(), first.end(), '\n', ' ');
                size_t end = 0;
                for (size_t n = 0; n < COLUMNS && end < first.size(); n++)
                    end += (size_t)std::max(1, utf8_length(&first[end], first.size() - end));
                all += format("%s: %s%s", counted(chat.messages.size() / 2, "question").c_str(),
                              first.substr(0, end).c_str(), end < first.size() ? "…" : "");
            } catch (const Error& e) {
                all += "damaged";
            }
            all += "\n";
        }
        if (names.size() > MOST) all += format("and %zu older ones\n", names.size() - MOST);
        return all + "in " + state_folder() + "; /load NUMBER takes one up again";
    }
};

static const char* CHAT_HELP =
    "/exit  /bye  /quit   leave (also Ctrl-D, or Ctrl-C twice); the conversation is kept\n"
    "/clear               begin a new conversation\n"
    "/system TEXT         another system prompt; without TEXT none\n"
    "/think  /no_think    let the model think first, or not\n"
    "/regen               another answer to the last question\n"
    "/save FILE           the conversation as JSON\n"
    "/load FILE           takes one up again; without FILE a list of those that were kept\n"
    "/stats               tokens of the conversation, speed, seed\n"
    "A line that ends in \\ goes on in the next; pasted lines are one message; Ctrl-C stops an answer.";

// Questions and answers on one session. Each question renders the whole conversation anew, as the template wants
// it (a thought is not repeated once the next question comes), and computes it from where it differs from what
// the KV cache holds.
// On a terminal there are prompts and an editor, and after each answer the conversation is written to the state folder:
// nothing that ends the program loses it. Otherwise each line of the input is a message, and stdout gets the answers and
// nothing else.
template <class T> struct Chat {
    Options options; // /system, /think and /no_think change it
    Session<T>& session;
    const Tokenizer& tokenizer;
    PromptCache<T>& cache;
    ThreadPace& pace;
    const Generation how;            // each answer begins as a copy of it
    std::vector<Message> messages{}; // question, answer, question, answer, ...
    uint64_t answers = 0;            // ever given
    std::string last = "no answer yet";
    bool leave = false;
    std::string kept{}, saved{};     // where the conversation is: in the state folder, where the user wants it
    bool changed = false;            // since it was saved or loaded
    const bool terminal = isatty(0) && isatty(1);
    std::vector<Command> commands{}; // of --tools
    std::unique_ptr<Input> user{};

    int run() {
        if (!options.tools.empty() && !terminal) DIE("--tools needs a terminal: it asks before it runs a command");
        if (!options.tools.empty()) commands = read_commands(options.tools);
        if (terminal) {
            struct sigaction stop = {}; // any number of times, and without cutting a write short
            stop.sa_flags = SA_RESTART;
            stop.sa_handler = [](int) { interrupted = 1; };
            sigaction(SIGINT, &stop, nullptr);
            stop.sa_handler = [](int signal) { interrupted = 1, Input::hangup = signal; };
            for (int signal : {SIGHUP, SIGTERM}) sigaction(signal, &stop, nullptr);
            say("/help lists the commands");
        }
        user = std::make_unique<Input>(terminal);
        std::string line;
        while (!leave && !Input::hangup && user->next(line)) {
            try {
                if (!line.empty() && !command(line)) {
                    std::vector<Message> asked = messages;
                    asked.push_back({"user", line});
                    answer(std::move(asked));
                }
            } catch (const Error& e) {
                if (ferror(stdout)) throw;
                say(e.what());
            }
            if (!terminal && interrupted) break;
            if (interrupted) user->drop(); // what was typed before Ctrl-C
            interrupted = 0;
        }
        if (terminal && !leave) write_stdout("\n");
        if (terminal) tell_where();
        if (Input::hangup) return 128 + Input::hangup;
        return !terminal && interrupted ? 130 : 0;
    }

  private:
    // Does what the line says if it is a command: one line, / and a letter, no other / in the first word, which would
    // make it a path.
    bool command(const std::string& line) {
        if (line.size() < 2 || line[0] != '/' || !isalpha((unsigned char)line[1])) return false;
        if (line.find('\n') != std::string::npos) return false;
        const size_t space = std::min(line.find(' '), line.size());
        const std::string name = line.substr(0, space);
        if (name.find('/', 1) != std::string::npos) return false;
        std::string argument = line.substr(std::min(line.find_first_not_of(' ', space), line.size()));
        argument.resize(argument.find_last_not_of(' ') + 1);
        const char* all = "/help /exit /bye /quit /clear /system /think /no_think /regen /save /load /stats";
        if ((all + std::string(" ")).find(name + " ") == std::string::npos)
            DIE("%s is none of %s; with a space before it, it is a message", name.c_str(), all);
        if (!argument.empty() && name != "/system" && name != "/save" && name != "/load")
            DIE("%s stands alone; with a space before it, the line is a message", name.c_str());
        if (name == "/exit" || name == "/bye" || name == "/quit") leave = true;
        else if (name == "/help") say(CHAT_HELP);
        else if (name == "/clear") clear();
        else if (name == "/system") {
            options.system = argument, changed = true;
            say(argument.empty() ? "no system prompt" : "the system prompt is set");
        } else if (name == "/think" || name == "/no_think") {
            options.think = name == "/think", changed = true;
            say(options.think ? "thinking" : "not thinking");
        } else if (name == "/save") save(argument);
        else if (name == "/load") load(argument);
        else if (name == "/stats")
            say(format("conversation %s, context %d; %s; seed %llu",
                       counted(messages.empty() ? 0 : render(messages, false).size(), "token").c_str(),
                       session.capacity, last.c_str(), (unsigned long long)how.sampling.seed));
        else if (messages.empty()) DIE("no question to answer again");
        else answer({messages.begin(), messages.end() - 1});
        return true;
    }

    // Writes what changed to the state folder. A chat goes on without one.
    void keep() {
        if (!terminal || !changed || messages.empty()) return;
        try {
            if (kept.empty()) kept = SavedChat::new_name();
            write_private(kept, SavedChat{options.system, options.think, messages}.text());
        } catch (const Error& e) {
            kept.clear();
            say(std::string("the conversation is not kept: ") + e.what());
        }
    }
    void tell_where() {
        keep();
        const std::string& file = changed ? kept : saved;
        if (!messages.empty() && !file.empty()) say("the conversation is in " + file);
    }

    void clear() {
        tell_where();
        messages.clear(), kept.clear(), saved.clear(), changed = false;
        say("a new conversation begins");
    }

    void save(const std::string& word) {
        if (word.empty()) DIE("/save needs a FILE");
        const std::string path = expanded(word);
        struct stat st;
        if (stat(path.c_str(), &st) == 0 && S_ISREG(st.st_mode)) {
            try {
                SavedChat::read(path);
            } catch (const Error&) {
                DIE("%s: exists and is no chat: not overwritten", path.c_str());
            }
        }
        write_text(path, SavedChat{options.system, options.think, messages}.text());
        if (!kept.empty() && !same_file(kept, path)) unlink(kept.c_str()), kept.clear();
        saved = path, changed = false;
        say(path + ": saved");
    }

    void load(const std::string& word) {
        if (word.empty()) return say(SavedChat::list());
        const std::string path = SavedChat::find(word);
        SavedChat chat = SavedChat::read(path);
        if (changed) tell_where();
        messages = std::move(chat.messages);
        options.system = chat.system;
        if (chat.think >= 0) options.think = chat.think;
        const std::string folder = path.substr(0, path.rfind('/') + 1);
        kept = folder == state_folder() + "/" ? path : ""; // such a one goes on where it is
        saved = path, changed = false;
        say(path + ": " + counted(messages.size(), "message"));
    }

    // Answers the last of `asked`; the conversation is then `asked` and the answer. Unless there is none: after an
    // Error or Ctrl-C before the first token it stays as it was. Where the model calls tools, it goes on with what came
    // of them; that is forgotten once it has answered.
    void answer(std::vector<Message> asked) {
        constexpr int MOST_CALLS = 8;
        std::vector<Message> called; // the calls and their results
        std::vector<Source> sources;
        Generation g;
        for (int n = 0;; n++) {
            g = how;
            if (!speak_on(asked, called, sources, g))
                return say("stopped before the answer: the question is taken back");
            const std::vector<std::string> calls = commands.empty() || interrupted ? std::vector<std::string>{}
                                                                                   : calls_of(tokenizer, g.ids);
            if (calls.empty()) break;
            if (n == MOST_CALLS) DIE("%d calls and no answer: the question is taken back", n);
            std::vector<Message> results;
            Message said{"assistant", ""};
            for (auto& call : calls) {
                auto confirm = [&](const std::string& words) { return user->confirm("run " + words + "?"); };
                results.push_back({"tool", do_call(commands, call, said, confirm, [] { return interrupted != 0; })});
                say(results.back().content);
                if (interrupted) return say("stopped before the answer: the question is taken back");
            }
            called.push_back(said);
            called.insert(called.end(), results.begin(), results.end());
        }
        say_sources(sources);

        // A thought that was stopped is still a thought.
        const bool thinks = g.text.compare(0, 7, "<think>") == 0;
        if (thinks && g.text.find("</think>") == std::string::npos) g.text += "</think>";
        Message said{"assistant", g.text};
        auto [thought, content] = split_thought(said);
        asked.push_back({"assistant", std::string(content)});
        if (!thought.empty()) asked.back().reasoning = std::string(thought);
        messages = std::move(asked);
        changed = true;
        keep();
    }

    // The model's next words, shown as they come. False: stopped before the first.
    bool speak_on(std::vector<Message>& asked, const std::vector<Message>& called, std::vector<Source>& sources,
                  Generation& g) {
        const std::vector<int> prompt = fit(asked, called, sources);
        g.sampling = sampling_of(options); // thinking has its own defaults
        g.sampling.seed = how.sampling.seed + answers; // draws go by position: /regen must not repeat them
        const double start = seconds();
        pace.begin();
        const size_t reused = feed_prompt(session, prompt);
        pace.end();
        const double prompted = seconds();
        if (!interrupted) {
            if (answers++ == 0) cache.save(session);
            Screen screen(terminal);
            speak(session, &tokenizer, g, pace, [&](std::string_view s) { screen.show(s); });
            screen.end();
        }
        if (g.ids.empty() && interrupted) return false;
        write_stdout("\n");
        if (session.full() && !strcmp(g.finish, "length")) say("the context is full: the answer ends here");
        const double prompt_s = prompted - start, decode_s = seconds() - prompted;
        const double prompt_rate = (double)(prompt.size() - reused) / prompt_s;
        const double rate = g.ids.size() > 1 ? (double)(g.ids.size() - 1) / decode_s : 0;
        last = format("prompt %s, reused %zu, %.1f tok/s; answer %s, %.1f tok/s%s (%s)",
                      counted(prompt.size(), "token").c_str(), reused, prompt_rate,
                      counted(g.ids.size(), "token").c_str(), rate, told(session.lookup).c_str(), g.finish);
        return true;
    }

    std::vector<int> render(const std::vector<Message>& conversation, bool ask) const {
        std::vector<Message> all;
        if (!options.system.empty()) all.push_back({"system", options.system});
        all.insert(all.end(), conversation.begin(), conversation.end());
        std::vector<std::string> tools;
        for (auto& c : commands) tools.push_back(c.tool);
        return render_chat(tokenizer, all, {options.think == 1, ask}, tools);
    }

    // The ids of the conversation. If they leave the answer less than a quarter of the context (or what -n asks
    // for), the oldest questions and answers go: enough of them to free half, since all that follows them must be
    // computed anew. With --docs another quarter is for passages; they go with the last question only, and are no part
    // of the conversation.
    std::vector<int> fit(std::vector<Message>& asked, const std::vector<Message>& called,
                         std::vector<Source>& sources) const {
        sources.clear(); // (those of the round before a tool's result)
        const size_t context = (size_t)session.capacity, before = asked.size();
        const size_t room = std::min(how.max_tokens, context / 4);
        auto rendered = [&](std::vector<Message> all) {
            all.insert(all.end(), called.begin(), called.end());
            return render(all, true);
        };
        std::vector<int> prompt = rendered(asked);
        if (prompt.size() > context - room - (options.library ? context / 4 : 0))
            while (asked.size() > 1 && prompt.size() > context / 2) {
                asked.erase(asked.begin(), asked.begin() + 2);
                prompt = rendered(asked);
            }
        if (prompt.size() > context)
            DIE("the message is too long: %zu tokens, the context is %zu (-c sets it)", prompt.size(), context);
        if (asked.size() < before)
            say(format("the context is full: the oldest messages went, %zu of %zu", before - asked.size(), before));
        if (!options.library || prompt.size() > context - room) return prompt;
        std::vector<Message> shown = asked;
        auto size = [&](const std::vector<Message>& m) { return rendered(m).size(); };
        auto measure = [&](std::string_view text) { return tokenizer.encode(text, false).size(); };
        sources = add_passages(*options.library, shown, context - room, size, measure);
        return rendered(shown);
    }
};
