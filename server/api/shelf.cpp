// shelf.cpp: reads, indexes and keeps documents of requests.
#include "server/api/shelf.h"
#include "server/api/limits.h"
#include "server/api/refusal.h"
#include <algorithm>

namespace server {

bool has_documents(const Fields& f) {
    const sj::Value list = f["documents"];
    return list && !(list.is(sj::Array) && list.size() == 0);
}

std::vector<Documents::Text> documents_from_json(sj::Value list) {
    if (!list.is(sj::Array) || list.size() > MAX_DOCUMENTS)
        throw Refusal(400, format("documents must be a list of at most %zu objects", MAX_DOCUMENTS), "documents");
    std::vector<Documents::Text> texts;
    size_t bytes = 0;
    for (sj::Value v : list.items()) {
        const Fields f(v, "documents");
        for (auto& [name, value] : f.all)
            if (name != "title" && name != "text")
                throw Refusal(400, "documents: an object has title and text only", "documents");
        texts.push_back({f.text("title"), f.text("text")});
        bytes += texts.back().text.size();
        if (texts.back().text.find_first_not_of(" \t\r\n") == std::string::npos)
            throw Refusal(400, "documents: a text is missing or empty", "documents");
        if (texts.back().title.empty()) texts.back().title = format("document %zu", texts.size());
        if (texts.back().title.size() > MAX_NAME)
            throw Refusal(400, format("documents: a title may have %zu bytes", MAX_NAME), "documents");
    }
    if (bytes > MAX_DOCUMENT_BYTES)
        throw Refusal(400, format("documents: the texts may have %zu bytes together", MAX_DOCUMENT_BYTES), "documents");
    return texts;
}

std::shared_ptr<const Documents> Shelf::get(const std::vector<Documents::Text>& texts) {
    std::string all;
    for (auto& one : texts)
        all += format("%zu %zu ", one.title.size(), one.text.size()) + one.title + one.text;
    {
        std::lock_guard lock(mutex);
        for (auto it = kept.begin(); it != kept.end(); ++it)
            if (it->first == all) {
                std::rotate(kept.begin(), it, it + 1); // move to the front
                return kept.front().second;
            }
    }
    std::shared_ptr<const Documents> made;
    try {
        made = std::make_shared<const Documents>(texts); // without the lock: it takes a while
    } catch (const Error& e) { // not the request's fault; the client must not see the path
        print_error("serve", e.what());
        throw Refusal(500, "the documents cannot be indexed");
    }
    std::lock_guard lock(mutex);
    kept.insert(kept.begin(), {std::move(all), made});
    size_t bytes = 0, n = 0;
    while (n < kept.size() && n < KEPT && (bytes += kept[n].first.size()) <= KEPT_BYTES) n++;
    kept.resize(n);
    return made;
}

} // namespace server
