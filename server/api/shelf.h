// shelf.h: documents that came with a request, indexed.
#pragma once
#include "search/documents.h"
#include "server/api/fields.h"
#include "sj.h"
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace server {

// Whether a request has the field `documents`. An empty list counts as absent.
bool has_documents(const Fields& f);
// Its value: [{"title", "text"}].
std::vector<Documents::Text> documents_from_json(sj::Value list);

// The latest documents: the next question of a conversation comes with the same ones.
struct Shelf {
    static constexpr size_t KEPT = 16, KEPT_BYTES = 64 << 20;

    std::shared_ptr<const Documents> get(const std::vector<Documents::Text>& texts);

  private:
    std::mutex mutex;
    std::vector<std::pair<std::string, std::shared_ptr<const Documents>>> kept; // by all bytes, the latest first
};

} // namespace server
