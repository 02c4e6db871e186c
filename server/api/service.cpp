// service.cpp: the cache of forms.
#include "form/grammar.h"
#include "form/matcher.h"
#include "server/api/refusal.h"
#include "server/api/service.h"
#include <algorithm>

namespace server {

std::shared_ptr<Automaton> Forms::get(const Tokenizer& tokenizer, std::string text,
                                      const std::function<Grammar()>& grammar) {
    std::shared_ptr<const Vocabulary> all;
    Kept dropped; // freed outside the lock
    {
        std::lock_guard lock(mutex);
        if (!vocabulary) vocabulary = std::make_shared<const Vocabulary>(tokenizer);
        all = vocabulary;
        for (auto it = kept.begin(); it != kept.end(); ++it)
            if (it->first == text) {
                std::rotate(kept.begin(), it, it + 1); // move to the front
                return kept.front().second;
            }
        if (Automaton::grammar_bytes > ALL_BYTES) dropped.swap(kept);
    }
    dropped.clear(); // forms that answers still use stay alive
    if (Automaton::grammar_bytes > ALL_BYTES) throw Refusal(503, "too many different forms are asked for");
    auto form = std::make_shared<Automaton>(grammar(), all);
    Matcher(form).mask(); // builds the first mask, which takes longest
    std::lock_guard lock(mutex);
    if (text.size() > LONGEST) return form;
    for (auto& [other, made] : kept) // added by a concurrent request
        if (other == text) return made;
    kept.insert(kept.begin(), {std::move(text), form});
    if (kept.size() > KEPT) kept.pop_back();
    return form;
}

} // namespace server
