// cli/saved_chat.cpp: a conversation as a file.
#include "cli/saved_chat.h"
#include "base/file.h"
#include "base/options.h"
#include "cli/state.h"
#include "model/utf8.h"
#include "sj.h"
#include <algorithm>
#include <ctime>
#include <dirent.h>
#include <memory>
#include <unistd.h>

namespace cli {

SavedChat SavedChat::read(const std::string& path) {
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

std::string SavedChat::text() const {
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

std::vector<std::string> SavedChat::kept() {
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

std::string SavedChat::new_name() {
    const time_t now = time(nullptr);
    tm local = {};
    char stamp[32];
    strftime(stamp, sizeof stamp, "chat-%Y%m%d-%H%M%S", localtime_r(&now, &local));
    const std::string start = make_state_folder() + "/" + stamp;
    std::string path = start + ".json";
    for (int i = 2; access(path.c_str(), F_OK) == 0; i++) path = format("%s-%d.json", start.c_str(), i);
    return path;
}

std::string SavedChat::find(const std::string& word) {
    const std::string path = expanded(word);
    if (access(path.c_str(), F_OK) == 0 || path.find('/') != std::string::npos) return path;
    const std::vector<std::string> names = kept();
    for (size_t i = 0; i < names.size(); i++)
        if (word == std::to_string(i + 1) || word == names[i] || word == names[i] + ".json")
            return state_folder() + "/" + names[i] + ".json";
    return path;
}

std::string SavedChat::list() {
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

} // namespace cli
