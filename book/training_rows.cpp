#include "book/training_rows.h"
#include "base/error.h"
#include "model/chat_template.h"
#include <algorithm>

namespace book {

// A row of tokens: what the model is fed when it has to give this answer (the template with what was said before, and
// an empty think block if nothing is thought), not trained; then the answer and <|im_end|>\n, trained. Prompt and
// answer are tokenized apart, as in the answer's making.
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
    const size_t last = prompt.size() - 1; // a text, in whole's part of the same number goes on with the answer
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

static int need_end_of_text(const Tokenizer& tokenizer) {
    const int id = tokenizer.id("<|endoftext|>");
    if (id < 0) DIE("the tokenizer has no <|endoftext|>");
    return id;
}

static bool thinks(const Message& m) { return !split_thought(m).first.empty(); }

std::vector<Words> render_rows(const Tokenizer& tokenizer, const Conversation& c) {
    std::vector<Words> rows;
    bool asked = false;
    for (size_t i = 0; i < c.messages.size(); i++) {
        const Message& m = c.messages[i];
        asked |= m.role == "user";
        if (m.role != "assistant" || !asked) continue;
        rows.push_back(render_row(tokenizer, {c.messages.begin(), c.messages.begin() + (ptrdiff_t)i}, m, c.tools,
                                  thinks(m)));
    }
    return rows;
}

std::vector<Words> render_pair(const Tokenizer& tokenizer, const Preference& p) {
    std::vector<Words> rows;
    for (const Message* m : {&p.chosen, &p.rejected}) {
        if (p.kind != "text") {
            rows.push_back(render_row(tokenizer, p.prompt, *m, p.tools, thinks(p.chosen) || thinks(p.rejected)));
            continue;
        }
        std::vector<int> ids = tokenizer.encode(p.prompt[0].content, false);
        const size_t trained_from = ids.size();
        tokenizer.encode(ids, m->content, false);
        ids.push_back(need_end_of_text(tokenizer));
        rows.emplace_back(ids.begin(), ids.end());
        for (size_t k = trained_from; k < ids.size(); k++) rows.back()[k] |= TRAIN;
    }
    if (rows[0] == rows[1]) DIE("chosen and rejected are the same");
    return rows;
}

Words render_text_row(const Tokenizer& tokenizer, const std::string& text) {
    std::vector<int> ids = tokenizer.encode(text, false);
    ids.push_back(need_end_of_text(tokenizer));
    if (ids.size() < 2) DIE("text: empty");
    Words words(ids.begin(), ids.end());
    for (size_t k = 1; k < words.size(); k++) words[k] |= TRAIN;
    return words;
}

size_t count_trained(DatasetRow row) {
    return (size_t)std::count_if(row.begin(), row.end(), [](uint32_t word) { return word & TRAIN; });
}

} // namespace book
