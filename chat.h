// chat.h: qwen3 without -i, a conversation in a terminal or over pipes. Included once, by cli.h.
//     Screen   a model's text, made harmless for a terminal; its thoughts dim
//     Input    the user's lines, edited where there is libedit
//     Chat     questions and answers on one session; its commands
#pragma once
#include <langinfo.h>
#include <locale.h>
#include <poll.h>
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

static bool plain_terminal() {
    const char* kind = getenv("TERM");
    return !kind || !*kind || !strcmp(kind, "dumb");
}

// Shows an answer as it comes. On a terminal control characters are harmless, and a thought is dim instead of
// between <think> and </think>; anything else gets the text as it is.
struct Screen {
    const bool terminal, dims;
    bool thinking = false;
    std::string held; // may be the beginning of a marker

    explicit Screen(bool terminal)
        : terminal(terminal), dims(terminal && !plain_terminal() && !getenv("NO_COLOR")) {}
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
// terminal, lines that arrive together were pasted and are one message.
struct Input {
    static constexpr int TOGETHER_MS = 20;

    explicit Input(bool prompts) : prompts(prompts) {
        is_terminal = tcgetattr(0, &before) == 0;
        if (is_terminal) {
            termios now = before;
            now.c_iflag |= IUTF8;
            tcsetattr(0, TCSANOW, &now);
        }
        start_editor();
    }
    Input(const Input&) = delete;
    Input& operator=(const Input&) = delete;
    ~Input() {
        end_editor();
        if (is_terminal) tcsetattr(0, TCSANOW, &before);
    }

    // False: the input is at its end, or Ctrl-C.
    bool next(std::string& message) {
        std::string all;
        bool more = true;
        for (prompt = "> "; more; prompt = "… ") {
            std::string line;
            if (!(can_edit() ? edit_line(line) : plain_line(line))) break;
            more = !line.empty() && line.back() == '\\';
            if (more) line.back() = '\n';
            all += line;
        }
        if (interrupted || (more && all.empty())) return false;
        message.clear();
        utf8_repair(message, all, true);
        remember(message);
        return true;
    }

  private:
    const bool prompts;
    bool is_terminal = false;
    termios before{};
    std::string bytes; // read and not yet used
    const char* prompt = "";

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

    // One line without its newline, with those that arrive together with it.
    bool plain_line(std::string& line) {
        if (prompts) write_stdout(prompt);
        for (;;) {
            const size_t end = bytes.find('\n');
            line.append(bytes, 0, end);
            bytes.erase(0, end == std::string::npos ? end : end + 1);
            if (end == std::string::npos) {
                if (!fill()) return !line.empty();
            } else if (pasted()) {
                line += '\n';
            } else {
                if (!line.empty() && line.back() == '\r') line.pop_back();
                return true;
            }
        }
    }

#ifdef HAVE_LIBEDIT
    static constexpr wchar_t MARK = L'↵'; // a pasted newline in a line that is edited
    static constexpr const char* MARK_TEXT = "↵";
    static inline volatile sig_atomic_t woken = 0;
    EditLine* editor = nullptr;
    History* past = nullptr;

    bool can_edit() const { return editor; }

    void start_editor() {
        if (!prompts || plain_terminal()) return;
        // The user's language if it comes in UTF-8. Characters only: numbers must keep their point (sj.h).
        setlocale(LC_CTYPE, "");
        auto utf8 = [] { return !strcmp(nl_langinfo(CODESET), "UTF-8"); };
        if (!utf8()) setlocale(LC_CTYPE, "C.UTF-8");
        if (!utf8() || !(editor = el_init("qwen3", stdin, stdout, stderr))) return;
        el_set(editor, EL_CLIENTDATA, this);
        el_set(editor, EL_PROMPT, +[](EditLine* e) { return const_cast<char*>(of(e).prompt); });
        el_set(editor, EL_GETCFN, get_character);
        el_set(editor, EL_EDITOR, "emacs");
        el_set(editor, EL_BIND, "\t", "ed-insert", nullptr);
        el_wset(editor, EL_ADDFN, L"paste", L"Insert a bracketed paste", paste); // el_set would leak copies
        el_set(editor, EL_BIND, "\033[200~", "paste", nullptr);
        HistEvent event;
        past = history_init();
        history(past, &event, H_SETSIZE, 1000);
        history(past, &event, H_SETUNIQUE, 1);
        el_set(editor, EL_HIST, history, past);
        // A window of another size, or back from Ctrl-Z: only to end the wait in fill().
        struct sigaction wake = {};
        wake.sa_handler = [](int) { woken = 1; };
        wake.sa_flags = SA_RESTART;
        sigaction(SIGWINCH, &wake, nullptr);
        sigaction(SIGCONT, &wake, nullptr);
    }
    void end_editor() {
        if (past) history_end(past);
        if (editor) el_end(editor);
    }
    void remember(std::string message) {
        HistEvent event;
        replace(message, "\n", MARK_TEXT);
        if (editor && !message.empty()) history(past, &event, H_ENTER, message.c_str());
    }
    void redraw() {
        if (!editor || !woken) return;
        woken = 0;
        el_resize(editor);
        el_set(editor, EL_PREP_TERM, 0);
        el_set(editor, EL_PREP_TERM, 1);
        el_set(editor, EL_REFRESH);
    }

    // One line, edited. Meanwhile the terminal marks a paste with ESC [ 200 ~ and ESC [ 201 ~.
    bool edit_line(std::string& line) {
        int n = 0;
        el_set(editor, EL_PREP_TERM, 1); // before the prompt is seen, so that a key at once finds the editor
        write_stdout("\033[?2004h");
        const char* text = el_gets(editor, &n);
        write_stdout("\033[?2004l");
        if (!text || n <= 0 || interrupted) return false;
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
        in.bytes.erase(0, (size_t)std::abs(length));
        if (c == '\r') c = '\n'; // libedit has the terminal turn one into the other, when it has it
        *out = c == '\n' && in.pasted() ? MARK : (wchar_t)c;
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
        in.bytes.erase(0, end + close.size());
        for (const char* newline : {"\r\n", "\r", "\n"}) replace(text, newline, MARK_TEXT);
        el_insertstr(e, text.c_str());
        return CC_REFRESH;
    }
#else
    bool can_edit() const { return false; }
    void start_editor() {}
    void end_editor() {}
    void remember(const std::string&) {}
    void redraw() {}
    bool edit_line(std::string&) { return false; }
#endif
};

// -------------------------------------------------------------------------------------------------------- Chat

static const char* CHAT_HELP =
    "/exit  /clear        leave (also Ctrl-D, Ctrl-C); forget the conversation\n"
    "/system TEXT         another system prompt; without TEXT none\n"
    "/think  /no_think    let the model think first, or not\n"
    "/regen               another answer to the last question\n"
    "/save FILE           the conversation as JSON; /load FILE takes it up again\n"
    "/stats               tokens of the conversation, speed, seed\n"
    "A line that ends in \\ goes on in the next; pasted lines are one message; Ctrl-C stops an answer.";

// Questions and answers on one session. Each question renders the whole conversation anew, as the template wants
// it (a thought is not repeated once the next question comes), and computes it from where it differs from what
// the KV cache holds.
// On a terminal there are prompts and an editor. Otherwise each line of the input is a message, and stdout gets
// the answers and nothing else.
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
    const bool terminal = isatty(0) && isatty(1);

    int run() {
        if (terminal) {
            struct sigaction stop = {}; // any number of times, and without cutting a write short
            stop.sa_handler = [](int) { interrupted = 1; };
            stop.sa_flags = SA_RESTART;
            sigaction(SIGINT, &stop, nullptr);
            say("/help lists the commands");
        }
        Input input(terminal);
        std::string line;
        while (!leave && input.next(line)) {
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
            interrupted = 0;
        }
        if (terminal && !leave) write_stdout("\n");
        return !terminal && interrupted ? 130 : 0;
    }

  private:
    // Does what the line says if it is a command and nothing else.
    bool command(const std::string& line) {
        const size_t space = std::min(line.find(' '), line.size());
        const std::string name = line.substr(0, space), argument = line.substr(std::min(space + 1, line.size()));
        const bool file = name == "/save" || name == "/load";
        const bool takes_argument = file || name == "/system";
        if (line.find('\n') != std::string::npos || (space < line.size() && !takes_argument)) return false;
        if (file && argument.empty()) DIE("%s needs a FILE", name.c_str());
        if (name == "/exit") leave = true;
        else if (name == "/help") say(CHAT_HELP);
        else if (name == "/clear") messages.clear(), say("the conversation is forgotten");
        else if (name == "/system")
            options.system = argument, say(argument.empty() ? "no system prompt" : "the system prompt is set");
        else if (name == "/think") options.think = 1, say("thinking");
        else if (name == "/no_think") options.think = 0, say("not thinking");
        else if (name == "/save") save(argument), say(argument + ": saved");
        else if (name == "/load") load(argument), say(format("%s: %zu messages", argument.c_str(), messages.size()));
        else if (name == "/stats")
            say(format("conversation %zu tokens, context %d; %s; seed %llu",
                       messages.empty() ? 0 : render(messages, false).size(), session.capacity, last.c_str(),
                       (unsigned long long)how.sampling.seed));
        else if (name == "/regen") {
            if (messages.empty()) DIE("no question to answer again");
            answer({messages.begin(), messages.end() - 1});
        } else return false;
        return true;
    }

    // Answers the last of `asked`; the conversation is then `asked` and the answer. Unless there is none: after an
    // Error or Ctrl-C before the first token it stays as it was.
    void answer(std::vector<Message> asked) {
        const std::vector<int> prompt = fit(asked);
        Generation g = how;
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
        if (g.ids.empty() && interrupted) return say("stopped before the answer: the question is taken back");
        write_stdout("\n");
        if (session.full() && !strcmp(g.finish, "length")) say("the context is full: the answer ends here");
        const double prompt_s = prompted - start, decode_s = seconds() - prompted;
        const double prompt_rate = (double)(prompt.size() - reused) / prompt_s;
        const double rate = g.ids.size() > 1 ? (double)(g.ids.size() - 1) / decode_s : 0;
        last = format("prompt %zu tokens, reused %zu, %.1f tok/s; answer %zu tokens, %.1f tok/s (%s)",
                      prompt.size(), reused, prompt_rate, g.ids.size(), rate, g.finish);

        // A thought that was stopped is still a thought.
        const bool thinks = g.text.compare(0, 7, "<think>") == 0;
        if (thinks && g.text.find("</think>") == std::string::npos) g.text += "</think>";
        Message said{"assistant", g.text};
        auto [thought, content] = split_thought(said);
        asked.push_back({"assistant", std::string(content)});
        if (!thought.empty()) asked.back().reasoning = std::string(thought);
        messages = std::move(asked);
    }

    std::vector<int> render(const std::vector<Message>& conversation, bool ask) const {
        std::vector<Message> all;
        if (!options.system.empty()) all.push_back({"system", options.system});
        all.insert(all.end(), conversation.begin(), conversation.end());
        return render_chat(tokenizer, all, {options.think == 1, ask});
    }

    // The ids of the conversation. If they leave the answer less than a quarter of the context (or what -n asks
    // for), the oldest questions and answers go: enough of them to free half, since all that follows them must be
    // computed anew.
    std::vector<int> fit(std::vector<Message>& asked) const {
        const size_t context = (size_t)session.capacity, before = asked.size();
        const size_t room = std::min(how.max_tokens, context / 4);
        std::vector<int> prompt = render(asked, true);
        if (prompt.size() > context - room)
            while (asked.size() > 1 && prompt.size() > context / 2) {
                asked.erase(asked.begin(), asked.begin() + 2);
                prompt = render(asked, true);
            }
        if (prompt.size() > context)
            DIE("the message is too long: %zu tokens, the context is %zu (-c sets it)", prompt.size(), context);
        if (asked.size() < before)
            say(format("the context is full: the oldest messages went, %zu of %zu", before - asked.size(), before));
        return prompt;
    }

    // {"system": "...", "think": false, "messages": [{"role": "user", "content": "..."}, ...]}: OpenAI's messages.
    void save(const std::string& path) const {
        std::string out = "{\"system\": ";
        sj::quote(out, options.system);
        out += format(", \"think\": %s, \"messages\": [", options.think ? "true" : "false");
        for (auto& m : messages) {
            out += &m == messages.data() ? "\n" : ",\n";
            out += format("  {\"role\": \"%s\", \"content\": ", m.role.c_str());
            sj::quote(out, m.content);
            if (m.reasoning) sj::quote(out += ", \"reasoning_content\": ", *m.reasoning);
            out += "}";
        }
        OutputFile file(path);
        file.write(out + "\n]}\n");
        file.commit();
    }

    // What save() wrote, or any JSON with such messages; a first message of the system is the system prompt.
    void load(const std::string& path) {
        const MappedFile file(path);
        const char* name = path.c_str();
        sj::Doc doc;
        const std::string fault = sj::parse(doc, file.text());
        if (!fault.empty()) DIE("%s: %s", name, fault.c_str());
        sj::Value v = doc.root(), system = v["system"], think = v["think"];
        if (system && !system.is(sj::String)) DIE("%s: system is not a string", name);
        if (think && !think.is_bool()) DIE("%s: think is neither true nor false", name);
        std::vector<Message> loaded;
        try {
            loaded = messages_from_json(v["messages"]);
        } catch (const Error& e) {
            DIE("%s: %s", name, e.what());
        }
        std::string prompt = system.str();
        if (!loaded.empty() && loaded[0].role == "system") {
            prompt = loaded[0].content;
            loaded.erase(loaded.begin());
        }
        for (size_t i = 0; i < loaded.size(); i++)
            if (loaded[i].role != (i % 2 ? "assistant" : "user") || !loaded[i].tool_calls.empty())
                DIE("%s: a chat is questions of the user and answers of the assistant in turn", name);
        if (loaded.size() % 2) DIE("%s: the last question has no answer", name);
        options.system = prompt;
        if (think) options.think = think.boolean();
        messages = std::move(loaded);
    }
};
