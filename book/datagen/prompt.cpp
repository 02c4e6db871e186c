#include "book/datagen/prompt.h"
#include "base/file.h"
#include "book/characters.h"
#include "book/datagen/requests.h"
#include "book/report.h"
#include "book/rows.h"
#include "model/chat_template.h"
#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <map>

namespace book {

std::string top_chapter(sj::Value row) {
    const std::string chapter = row["chapter"].str();
    return chapter.substr(0, chapter.find(" > "));
}

// Fills in a template: replaces each {{name}}, and {{name|otherwise}} by `otherwise` if there is no such value.
// Inserted text is not searched again.
static std::string fill_in(std::string_view text, const std::map<std::string, std::string>& values,
                           const std::string& path) {
    std::string out;
    for (size_t at = 0;;) {
        const size_t open = text.find("{{", at), close = text.find("}}", open);
        out += text.substr(at, open - at);
        if (open == text.npos) return out;
        const std::string name(text.substr(open + 2, close - open - 2));
        const size_t bar = name.find('|');
        const auto found = values.find(name.substr(0, bar));
        if (found != values.end()) out += found->second;
        else if (bar != name.npos) out += name.substr(bar + 1);
        else DIE("%s: {{%s}} is not known", path.c_str(), name.substr(0, 40).c_str());
        at = close + 2;
    }
}

namespace {

// data/datagen/prompts/, one folder per language: the system prompt (system.md), a request for each difficulty, and
// examples of the form.
struct Templates {
    const std::string folder, examples, subject;
    std::map<std::string, std::string> files; // files read so far

    explicit Templates(const Arguments& a)
        : folder(a.data("prompts") + "/"), examples(a.text("--examples", a.data("prompts"))),
          subject(a.text("--subject")) {}

    // Writes the messages that request `count` questions about a chunk.
    void ask(sj::Writer& body, const std::string& lang, const std::string& difficulty, size_t count, sj::Value chunk) {
        std::map<std::string, std::string> values = {
            {"count", std::to_string(count)}, {"s", count == 1 ? "" : "s"},
            {"chapter", chunk["chapter"].str()}, {"text", chunk["text"].str()}};
        if (examples != "none") values["examples"] = trimmed(file(examples + "/" + lang + "/" + difficulty + ".json"));
        if (!subject.empty()) values["subject"] = subject;
        auto message = [&](const std::string& name) {
            const std::string path = folder + lang + "/" + name;
            std::string text = file(path);
            const size_t at = text.find("{{examples}}");
            if (at != text.npos && examples == "none") { // removes its paragraph
                const size_t before = text.rfind("\n\n", at), begin = before == text.npos ? 0 : before + 2;
                text.erase(begin, std::min(text.find("\n\n", at), text.size()) - begin);
                text.erase(begin, text.find_first_not_of('\n', begin) - begin);
            }
            return fill_in(text, values, path);
        };
        body.key("messages").array();
        body.object().field("role", "system").field("content", message("system.md")).end();
        body.object().field("role", "user").field("content", message(difficulty + ".md")).end().end();
    }

  private:
    const std::string& file(const std::string& path) {
        std::string& text = files[path];
        if (text.empty()) text = MappedFile(path).text();
        return text;
    }
};

// Requests the reply's form as a JSON schema, in the subset of OpenAI's strict mode: its root has to be an object.
void ask_for_form(sj::Writer& body) {
    auto object = [&](std::initializer_list<const char*> names) {
        body.object().field("type", "object").field("additionalProperties", false).key("required").array();
        for (auto* name : names) body.value(name);
        body.end().key("properties").object();
    };
    body.key("response_format").object().field("type", "json_schema").key("json_schema").object();
    body.field("name", ANSWER_FORM).field("strict", true).key("schema");
    object({"questions"});
    body.key("questions").object().field("type", "array").key("items");
    object({"question", "answer"});
    for (auto* name : {"question", "answer"}) body.key(name).object().field("type", "string").end();
    for (int open = 7; open--;) body.end(); // properties, items, questions, properties, schema, json_schema, format
}

// A row of the file of chunks.
sj::Value chunk_of(const Reader& in) {
    for (auto name : {"id", "text", "lang"})
        if (!in.need()[name].is(sj::String)) DIE("%s: no %s; is it a file of chunks?", in.where().c_str(), name);
    const std::string lang = in.row()["lang"].str(); // names a folder
    if (lang.empty() || lang.find_first_not_of("abcdefghijklmnopqrstuvwxyz_-") != lang.npos)
        DIE("%s: lang %s is no language", in.where().c_str(), in_quotes(lang).c_str());
    return in.row();
}

// The shares of the difficulties in a chapter's questions, and the tokens of a question with its answer.
struct Difficulties {
    double share[3], sum = 0;
    size_t tokens[3];
    explicit Difficulties(const Limits& limits) {
        for (int d = 0; d < 3; d++) {
            sum += share[d] = limits[format("prompt.%s", DIFFICULTIES[d]).c_str()];
            tokens[d] = limits.count(format("prompt.%s.tokens", DIFFICULTIES[d]).c_str());
        }
        if (sum <= 0) DIE("%s: prompt.easy, medium and hard are all 0", limits.path.c_str());
    }
    // The difficulty of the next question, where `given` of each are among the first `asked`.
    int next(const size_t (&given)[3], size_t asked) const {
        int behind = 0;
        auto gap = [&](int d) { return share[d] / sum * (double)(asked + 1) - (double)given[d]; };
        for (int d : {1, 2})
            if (gap(d) > gap(behind) + 1e-9) behind = d;
        return behind;
    }
};

struct Chapter {
    size_t wanted = 0, past = 0, asked = 0, given[3] = {}; // questions; in `given` by difficulty
    // Counts the questions of the next chunk, of which `more` are wanted; the chapter has `quota` at most.
    void ask(const Difficulties& difficulties, size_t more, size_t quota, size_t (&count)[3]) {
        past += more;
        const size_t limit = std::min(quota, wanted), target = past * limit / wanted;
        for (; asked < target; asked++) {
            const int next = difficulties.next(given, asked);
            given[next]++, count[next]++;
        }
    }
};

void say_totals(const std::map<std::string, Chapter>& chapters, size_t requests) {
    size_t questions[3] = {};
    for (auto& [name, c] : chapters)
        for (int d = 0; d < 3; d++) questions[d] += c.given[d];
    say(format("%zu requests for %zu easy, %zu medium, %zu hard questions in %zu chapter%s", requests, questions[0],
               questions[1], questions[2], chapters.size(), chapters.size() == 1 ? "" : "s"));
}

// The line of a request with this body. Its id holds the chunk's, which collect needs, and a hash of the body, so that
// another request has another id. (The form is not hashed: it does not change the questions.)
std::string request_line(sj::Writer& body, sj::Value chunk, const std::string& difficulty) {
    sj::Writer w;
    const std::string hash = hex(fnv1a(body.text + "}")).substr(0, 8);
    w.object().field("custom_id", chunk["id"].str() + "." + difficulty + "." + hash);
    ask_for_form(body);
    w.field("method", "POST").field("url", "/v1/chat/completions").key("body").text += body.end().text;
    return w.text + "}";
}

} // namespace

int run_prompt(const Arguments& a) {
    const Limits limits(a);
    const size_t least = limits.count("prompt.least_characters"), most = limits.count("prompt.most_questions");
    const size_t quota = a.number("--chapter-quota", SIZE_MAX, 1, SIZE_MAX - 1);
    const std::string model = a.text("--model"), language = a.text("--lang");
    const size_t max_tokens = a.number("--max-tokens", SIZE_MAX, 0, 1 << 24); // SIZE_MAX: by the questions; 0: no limit
    const Difficulties difficulties(limits);
    size_t most_tokens = 0; // of a request

    std::map<std::string, Chapter> chapters;
    auto chapter_of = [](sj::Value v) { return v["source"].str() + "\n" + top_chapter(v); };
    auto wanted = [&](sj::Value v) {
        const double n = (double)count_characters(v["text"].str()) / limits["prompt.characters_per_question"];
        return std::min(most, std::max<size_t>(1, (size_t)std::lround(n)));
    };
    auto is_short = [&](sj::Value v) { return count_characters(v["text"].str()) < least; };
    {
        Reader in(a.files[0]);
        if (!in.seekable()) DIE("%s: is read twice, so it has to be a file", in.path.c_str());
        while (in.next())
            if (!is_short(chunk_of(in))) chapters[chapter_of(in.row())].wanted += wanted(in.row());
    }
    Reader in(a.files[0]);
    Report report(a.dropped(), {"short", "quota"});
    Output out(a.output());
    Templates templates(a);
    size_t requests = 0;
    while (in.next()) {
        const sj::Value v = chunk_of(in);
        if (is_short(v)) {
            report.drop("short", "too little text to ask about", in);
            continue;
        }
        size_t count[3] = {};
        chapters[chapter_of(v)].ask(difficulties, wanted(v), quota, count);
        if (!count[0] && !count[1] && !count[2]) report.drop("quota", "its chapter has its questions", in);
        else report.kept++;
        for (int d = 0; d < 3; d++) {
            if (!count[d]) continue;
            const std::string difficulty = DIFFICULTIES[d];
            sj::Writer body;
            body.object();
            if (!model.empty()) body.field("model", model);
            templates.ask(body, language.empty() ? v["lang"].str() : language, difficulty, count[d], v);
            body.field("temperature", limits["request.temperature"]);
            const size_t room = max_tokens == SIZE_MAX ? count[d] * difficulties.tokens[d] : max_tokens;
            if (room) body.field("max_tokens", room);
            most_tokens = std::max(most_tokens, room);
            out.line(request_line(body, v, difficulty));
            requests++;
        }
    }
    out.commit();
    report.finish("chunks");
    say_totals(chapters, requests);
    if (max_tokens == SIZE_MAX)
        say(format("max_tokens: %zu, %zu, %zu for an easy, medium, hard question; %zu in a request at most. "
                   "A model that thinks first needs more (--max-tokens)",
                   difficulties.tokens[0], difficulties.tokens[1], difficulties.tokens[2], most_tokens));
    return 0;
}

} // namespace book
