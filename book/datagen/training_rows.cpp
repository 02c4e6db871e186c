#include "book/datagen/training_rows.h"
#include "base/error.h"
#include "model/chat_template.h"
#include <algorithm>

namespace book {

// A row of tokens: first the model's input for this answer (the template with the earlier messages, and an empty think
// block if the answer has no thought), not trained; then the answer and <|im_end|>\n, trained. Prompt and answer are
// tokenized separately, as in generation.
static Words render_row(const Tokenizer& tokenizer, const std::vector<Message>& before, const Message& answer,
                        const Strings& tools, bool thinks) {
    std::vector<Message> with = before;
    with.push_back(answer);
    const auto prompt = render(before, {thinks, true}, tools).parts;
    auto whole = render(with, {thinks, false}, tools).parts;
    std::vector<int> ids;
    auto encode = [&](const std::vector<ChatText::Part>& parts, size_t from, size_t to) {
        for (size_t k = from; k < to; k++)
            if (!parts[k].special) tokenizer.encode(ids, parts[k].text, false);
            else if (const int id = tokenizer.id(parts[k].text); id >= 0) ids.push_back(id);
            else DIE("the tokenizer has no %s", parts[k].text.c_str());
    };
    const size_t last = prompt.size() - 1; // a text; the answer continues it in the same part of `whole`
    const std::string& asked = prompt[last].text;
    bool same = whole.size() > last && whole[last].text.compare(0, asked.size(), asked) == 0;
    for (size_t k = 0; same && k < last; k++) same = prompt[k].text == whole[k].text;
    if (!same)
        DIE("messages: the assistant's turn %zu does not follow a question as the chat template wants it",
            before.size());
    encode(prompt, 0, last + 1);
    const size_t trained_from = ids.size();
    whole[last].text.erase(0, asked.size());
    encode(whole, last, whole.size());
    Words row(ids.begin(), ids.end());
    for (size_t k = trained_from; k < row.size(); k++) row[k] |= TRAIN;
    return row;
}

// Appends it, unless the text ends with it already.
static void add_end_of_text(const Tokenizer& tokenizer, std::vector<int>& ids) {
    const int id = tokenizer.id("<|endoftext|>");
    if (id < 0) DIE("the tokenizer has no <|endoftext|>");
    if (ids.empty() || ids.back() != id) ids.push_back(id);
}

static bool thinks(const Message& m) { return !split_thought(m).first.empty(); }

// Calls f for every answer to a question.
template <class F> static void each_answer(const Conversation& c, F f) {
    bool asked = false;
    for (size_t i = 0; i < c.messages.size(); i++) {
        asked |= c.messages[i].role == "user";
        if (asked && c.messages[i].role == "assistant") f(i);
    }
}

size_t count_wordless(const Conversation& c) {
    size_t n = 0;
    each_answer(c, [&](size_t i) { n += is_wordless(c.messages[i]); });
    return n;
}

bool has_mark(const Tokenizer& tokenizer, std::string_view text) {
    for (size_t at = 0; (at = text.find("<|", at)) != text.npos; at += 2) {
        const std::string_view name = text.substr(at, 40); // (special tokens' names are shorter)
        const size_t end = name.find("|>");
        if (end != name.npos && tokenizer.id(std::string(name.substr(0, end + 2))) >= 0) return true;
    }
    return false;
}

std::vector<Words> render_rows(const Tokenizer& tokenizer, const Conversation& c) {
    std::vector<Words> rows;
    each_answer(c, [&](size_t i) {
        const Message& m = c.messages[i];
        if (is_wordless(m)) return;
        rows.push_back(render_row(tokenizer, {c.messages.begin(), c.messages.begin() + (ptrdiff_t)i}, m, c.tools,
                                  thinks(m)));
    });
    return rows;
}

std::vector<Words> render_pair(const Tokenizer& tokenizer, const Preference& p) {
    std::vector<Words> rows;
    for (const Message* m : {&p.chosen, &p.rejected}) {
        if (p.kind != "text") {
            rows.push_back(render_row(tokenizer, p.prompt, *m, p.tools, thinks(p.chosen) || thinks(p.rejected)));
            continue;
        }
        std::vector<int> ids = tokenizer.encode(p.prompt[0].content, true);
        const size_t trained_from = ids.size();
        tokenizer.encode(ids, m->content, true);
        add_end_of_text(tokenizer, ids);
        rows.emplace_back(ids.begin(), ids.end());
        for (size_t k = trained_from; k < ids.size(); k++) rows.back()[k] |= TRAIN;
    }
    if (rows[0] == rows[1]) DIE("chosen and rejected are the same");
    return rows;
}

static Words::const_iterator answer_of(const Words& words) {
    return std::find_if(words.begin(), words.end(), [](uint32_t word) { return word & TRAIN; });
}

bool same_prompt(const Words& a, const Words& b) {
    return std::equal(a.begin(), answer_of(a), b.begin(), answer_of(b));
}

Words mismatched_row(const Words& row, const Words& other, size_t longest) {
    Words mixed(row.begin(), answer_of(row));
    mixed.insert(mixed.end(), answer_of(other), other.end());
    if (mixed.size() > longest) mixed.resize(longest);
    return mixed;
}

Words render_text_row(const Tokenizer& tokenizer, const std::string& text) {
    std::vector<int> ids = tokenizer.encode(text, true);
    add_end_of_text(tokenizer, ids);
    if (ids.size() < 2) DIE("text: empty");
    Words words(ids.begin(), ids.end());
    for (size_t k = 1; k < words.size(); k++) words[k] |= TRAIN;
    return words;
}

size_t count_trained(DatasetRow row) {
    return (size_t)std::count_if(row.begin(), row.end(), [](uint32_t word) { return word & TRAIN; });
}

} // namespace book
