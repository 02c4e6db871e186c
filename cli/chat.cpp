// cli/chat.cpp: questions and answers on one session; the commands of a chat.
#include "cli/chat.h"
#include "base/file.h"
#include "base/options.h"
#include "book/text.h"
#include "cli/saved_chat.h"
#include "cli/screen.h"
#include "cli/state.h"
#include "search/grounding.h"
#include <algorithm>
#include <cctype>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

namespace cli {

static const char* CHAT_HELP =
    "/exit  /bye  /quit   leave (also Ctrl-D, Ctrl-C twice); the conversation is kept\n"
    "/clear               begin a new conversation\n"
    "/system TEXT         another system prompt; without TEXT none\n"
    "/think  /no_think    let the model think first, or not\n"
    "/regen               another answer to the last question\n"
    "/save FILE           the conversation as JSON\n"
    "/load FILE           takes one up again; without FILE a list of those kept\n"
    "/stats               tokens of the conversation, speed, seed\n"
    "A line that ends in \\ goes on in the next; pasted lines are one message.\n"
    "Ctrl-C stops an answer.";

int Chat::run() {
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
        if (!options.starters.empty()) say("Questions that this model knows:");
        for (auto& question : options.starters) say("  " + question);
    }
    user = std::make_unique<Input>(terminal);
    std::string line;
    while (!leave && !Input::hangup && user->next(line)) {
        try {
            must_be_utf8("the message", line);
            if (!book::trimmed(line).empty() && !command(line)) {
                std::vector<Message> asked = messages;
                asked.push_back({"user", line});
                answer(std::move(asked));
            }
        } catch (const Error& e) {
            if (ferror(stdout)) throw;
            say(e.what());
        }
        if (!terminal && interrupted) break;
        if (interrupted) user->drop(); // input typed before Ctrl-C
        interrupted = 0;
    }
    if (terminal && !leave) write_stdout("\n");
    if (terminal) tell_where();
    if (Input::hangup) return 128 + Input::hangup;
    return !terminal && interrupted ? 130 : 0;
}

bool Chat::command(const std::string& line) {
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
        const bool wanted = name == "/think";
        if (tokenizer.chat.thinking(wanted) != wanted) DIE("this model %s thinks", wanted ? "never" : "always");
        options.think = wanted, changed = true;
        say(options.think ? "thinking" : "not thinking");
    } else if (name == "/save") save(argument);
    else if (name == "/load") load(argument);
    else if (name == "/stats")
        say(format("conversation %s, context %d; %s; seed %llu",
                   counted(messages.empty() ? 0 : render(messages, false).size(), "token").c_str(),
                   session.capacity(), last.c_str(), (unsigned long long)how.sampling.seed));
    else if (messages.empty()) DIE("no question to answer again");
    else answer({messages.begin(), messages.end() - 1});
    return true;
}

void Chat::keep() {
    if (!terminal || !changed || messages.empty()) return;
    try {
        if (kept.empty()) kept = SavedChat::new_name();
        write_private(kept, SavedChat{options.system, options.think, messages}.text());
    } catch (const Error& e) {
        kept.clear();
        say(std::string("the conversation is not kept: ") + e.what());
    }
}

void Chat::tell_where() {
    keep();
    const std::string& file = changed ? kept : saved;
    if (!messages.empty() && !file.empty()) say("the conversation is in " + file);
}

void Chat::clear() {
    tell_where();
    messages.clear(), kept.clear(), saved.clear(), changed = false;
    say("a new conversation begins");
}

void Chat::save(const std::string& word) {
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

void Chat::load(const std::string& word) {
    if (word.empty()) return say(SavedChat::list());
    const std::string path = SavedChat::find(word);
    SavedChat chat = SavedChat::read(path);
    if (changed) tell_where();
    messages = std::move(chat.messages);
    options.system = chat.system;
    if (chat.think >= 0) options.think = tokenizer.chat.thinking(chat.think);
    const std::string folder = path.substr(0, path.rfind('/') + 1);
    kept = folder == state_folder() + "/" ? path : ""; // a kept chat is saved to the same file again
    saved = path, changed = false;
    say(path + ": " + counted(messages.size(), "message") + (messages.size() > 2 ? "; the last:" : ""));
    for (size_t i = messages.size() - std::min<size_t>(2, messages.size()); i < messages.size(); i++) {
        if (messages[i].role == "user" || !terminal) {
            say((messages[i].role == "user" ? "> " : "") + messages[i].content);
            continue;
        }
        Screen(terminal, false, options.markdown).show_whole(messages[i].content);
        write_stdout("\n");
    }
}

void Chat::answer(std::vector<Message> asked) {
    constexpr int MOST_CALLS = 8;
    std::vector<Message> called; // the calls and their results
    std::vector<Source> sources;
    Generation g;
    for (int n = 0;; n++) {
        g = how;
        if (!speak_on(asked, called, sources, g))
            return say("stopped before the answer: the question is removed");
        const std::vector<std::string> calls = commands.empty() || interrupted ? std::vector<std::string>{}
                                                                               : calls_of(tokenizer, g.ids);
        if (calls.empty()) break;
        if (n == MOST_CALLS) DIE("%d calls and no answer: the question is removed", n);
        std::vector<Message> results;
        Message said{"assistant", ""};
        for (auto& call : calls) {
            auto confirm = [&](const std::string& words) { return user->confirm("run " + words + "?"); };
            results.push_back({"tool", do_call(commands, call, said, confirm, [] { return interrupted != 0; })});
            say(results.back().content);
            if (interrupted) return say("stopped before the answer: the question is removed");
        }
        called.push_back(said);
        called.insert(called.end(), results.begin(), results.end());
    }
    const bool looked_up = options.library && !(options.quotes && !commands.empty());
    if (looked_up && !(options.quotes && !sources.empty())) say_sources(sources); // (a quote has its source)

    // A thought that was stopped is still a thought.
    const bool thinks = tokenizer.chat.thinks && g.text.compare(0, 7, "<think>") == 0;
    if (thinks && g.text.find("</think>") == std::string::npos) g.text += "</think>";
    const Message said{"assistant", g.text};
    std::pair<std::string_view, std::string_view> parts = {"", said.content};
    if (tokenizer.chat.thinks) parts = split_thought(said);
    asked.push_back({"assistant", std::string(parts.second)});
    if (!parts.first.empty()) asked.back().reasoning = std::string(parts.first);
    messages = std::move(asked);
    changed = true;
    keep();
}

bool Chat::speak_on(std::vector<Message>& asked, const std::vector<Message>& called, std::vector<Source>& sources,
                    Generation& g) {
    const std::vector<int> prompt = fit(asked, called, sources);
    if (quote_passage(options, &tokenizer, sources, (size_t)session.capacity(), g)) {
        Screen(terminal, tokenizer.chat.thinks, options.markdown).show_whole(g.text);
        write_stdout("\n");
        last = format("a quote of %s", counted(g.ids.size(), "token").c_str());
        return true;
    }
    g.sampling = sampling_of(options); // thinking has its own defaults
    g.sampling.seed = how.sampling.seed + answers; // draws depend on the position only: /regen must not repeat them
    const double start = seconds();
    pace.begin();
    const size_t reused = feed_prompt(session, prompt);
    pace.end();
    const double prompted = seconds();
    if (!interrupted) {
        if (answers++ == 0) cache.save(session);
        g.in_thought = opens_thought(tokenizer, prompt);
        Screen screen(terminal, tokenizer.chat.thinks, options.markdown);
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
                  counted(g.ids.size(), "token").c_str(), rate, told(session.lookup()).c_str(), g.finish);
    return true;
}

std::vector<int> Chat::render(const std::vector<Message>& conversation, bool ask) const {
    std::vector<Message> all;
    if (!options.system.empty()) all.push_back({"system", options.system});
    all.insert(all.end(), conversation.begin(), conversation.end());
    std::vector<std::string> tools;
    for (auto& c : commands) tools.push_back(c.tool);
    return render_chat(tokenizer, all, {options.think == 1, ask}, tools);
}

std::vector<int> Chat::fit(std::vector<Message>& asked, const std::vector<Message>& called,
                           std::vector<Source>& sources) const {
    sources.clear(); // (those of the round before a tool's result)
    const size_t context = (size_t)session.capacity(), before = asked.size();
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
    if (options.quotes && commands.empty()) sources = find_passages(*options.library, asked);
    if (options.quotes || !options.library || prompt.size() > context - room) return prompt;
    std::vector<Message> shown = asked;
    auto size = [&](const std::vector<Message>& m) { return rendered(m).size(); };
    auto measure = [&](std::string_view text) { return tokenizer.encode(text, false).size(); };
    sources = ::add_passages(*options.library, shown, context - room, size, measure);
    return rendered(shown);
}

} // namespace cli
