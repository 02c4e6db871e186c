// search/grounding.cpp: joins instruction, passages and question; see grounding.h.
#include "search/grounding.h"
#include "base/error.h"
#include "book/chunks.h"
#include <algorithm>
#include <cstdint>

bool is_chinese(std::string_view text) {
    size_t han = 0, latin = 0;
    bool inside = false; // inside a word
    for (char32_t c : decode(text)) {
        han += is_cjk(c);
        latin += is_latin(c) && !inside;
        inside = is_latin(c);
    }
    return han > 0 && han >= latin;
}

std::string grounded(const std::string& question, std::vector<Source>& sources, size_t room, const Measure& measure) {
    static const char ENGLISH[] = "Answer the question from the passages below, and name those that you use by their "
                                  "number, like [1]. If the answer is not in them, say that it is not in the "
                                  "documents.\n\n";
    static const char CHINESE[] = "请根据下面的段落回答问题，并用编号（例如 [1]）注明依据。"
                                  "如果段落里没有答案，就回答“文档中没有提到”。\n\n";
    const bool chinese = is_chinese(question);
    std::string text = chinese ? CHINESE : ENGLISH;
    const std::string last = (chinese ? "问题：" : "Question: ") + question;
    if (sources.empty()) text += chinese ? "（没有找到相关段落。）\n\n" : "(No passage was found.)\n\n";
    const size_t used = measure(text + last);
    if (used > room) return sources.clear(), question;
    size_t left = room - used, n = 0;
    for (bool whole = true; n < sources.size() && whole; n++) {
        Source& s = sources[n];
        const std::string head = format("[%zu] %s\n", n + 1, name_of(s).c_str());
        size_t size = measure(head + s.text + "\n\n");
        while (size > left && s.text.size() > 100) { // cut between characters, about where it should fit
            whole = false;
            size_t end = std::min(s.text.size() * left / size, s.text.size() - 20);
            while (end > 0 && ((uint8_t)s.text[end] & 0xC0) == 0x80) end--;
            s.text.resize(end);
            size = measure(head + s.text + "\n\n");
        }
        if (size > left) break;
        text += head + s.text + "\n\n", left -= size;
    }
    const bool none_fits = n == 0 && !sources.empty();
    sources.resize(n, Source{});
    return none_fits ? question : text + last;
}

void write_sources(sj::Writer& w, const std::vector<Source>& sources) {
    w.key("sources").array();
    for (const Source& s : sources) {
        w.object().field("file", s.file).field("line", s.line).field("heading", s.heading);
        w.field("score", s.score).field("text", s.text).end();
    }
    w.end();
}

static bool is_question(const Message& m) { return m.role == "user"; }

std::vector<Source> find_passages(const Documents& documents, const std::vector<Message>& messages) {
    const auto last = std::find_if(messages.rbegin(), messages.rend(), is_question);
    if (last == messages.rend()) return {};
    const auto before = std::find_if(last + 1, messages.rend(), is_question);
    return documents.find(last->content, before == messages.rend() ? "" : before->content);
}

std::vector<Source> add_passages(const Documents& documents, std::vector<Message>& messages, size_t most,
                                 const Rendered& rendered, const Measure& measure) {
    const auto last = std::find_if(messages.rbegin(), messages.rend(), is_question);
    if (last == messages.rend()) return {};
    const std::string question = last->content;
    std::vector<Source> sources = find_passages(documents, messages);
    last->content.clear();
    const size_t others = rendered(messages);
    size_t room = most - std::min(most, others);
    for (;;) {
        last->content = grounded(question, sources, room, measure);
        const size_t all = rendered(messages); // seldom more than the sum of its parts
        if (all <= most) return sources;
        if (room == 0) return last->content = question, std::vector<Source>();
        room -= std::min(room, all - most);
    }
}
