// search/quote.cpp: see quote.h.
#include "search/quote.h"
#include "model/stop_filter.h"
#include <algorithm>

bool would_quote(const DocumentOptions& o, const Config& c) {
    return o.quote < 0 ? parameters(c) < LEAST_TO_USE_PASSAGES : o.quote == 1;
}

bool quotes(const DocumentOptions& o, const Config& c, const Tell& tell) {
    const bool small = parameters(c) < LEAST_TO_USE_PASSAGES, is = would_quote(o, c);
    if (!o.docs.empty() && is)
        tell("the best passage of --docs is quoted" + (small ? format(": %.1f M parameters are too few to use passages",
                                                                      (double)parameters(c) / 1e6) : ""));
    return !o.docs.empty() && is;
}

// Where the sentence or the line before the last one ends; without one, the middle, between characters.
static size_t shorter(const std::string& text) {
    size_t end = 0;
    for (const std::string mark : {"\n", "。", ". "})
        if (const size_t at = text.size() > mark.size() ? text.rfind(mark, text.size() - mark.size() - 1) : text.npos;
            at != text.npos)
            end = std::max(end, at + mark.size());
    if (end == 0)
        for (end = text.size() / 2; end > 0 && ((uint8_t)text[end] & 0xC0) == 0x80;) end--;
    return end;
}

Quote quote(const Source& source, const Tokenizer& tokenizer, size_t room, const std::vector<std::string>& stops,
            size_t most) {
    std::string text = source.text;
    auto whole = [&] {
        size_t fences = 0;
        for (size_t at = 0; (at = text.find("```", at)) != text.npos; at += 3) fences++;
        return text + (text.size() < source.text.size() ? " …" : "") + (fences % 2 ? "\n```" : "") + "\n\n— " +
               name_of(source);
    };
    auto fits = [&] { return tokenizer.encode(whole(), false).size() <= room; };
    while (!text.empty() && !fits()) {
        text.resize(shorter(text));
        text.resize(text.find_last_not_of(" \n") + 1);
    }
    StopFilter filter{stops, "", false};
    Quote q;
    q.text = filter.feed(whole());
    if (!filter.stopped) q.text += filter.flush();
    q.stop = filter.found;
    q.ids = tokenizer.encode(q.text, false);
    q.finish = "stop";
    if (q.ids.size() < most) return q;
    q.ids.resize(most);
    q.text = tokenizer.decode(q.ids, false), q.finish = "length";
    return q;
}
