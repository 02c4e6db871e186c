// responses.h: OpenAI's Responses (/v1/responses): translation to a chat and back.
#pragma once
#include "server/api/fields.h"
#include "server/api/items.h"
#include <string>

namespace server {

std::string chat_of_response(const Fields& f);

struct ResponseAnswer : ItemAnswer {
    std::string repeated; // members of the request, as JSON
    size_t number = 0;    // of events

    ResponseAnswer(const Service& service, const Ask& ask, const Fields& f);

  protected:
    std::string whole_json() override;
    void write_response(sj::Writer& w) const;
    const char* kind(size_t i) const {
        return items[i].kind == Item::THOUGHT ? "rs" : items[i].kind == Item::TEXT ? "msg" : "fc";
    }
    void write_part(sj::Writer& w, size_t i, const std::string& text) const;
    void write_item(sj::Writer& w, size_t i, const char* status, bool whole) const;

    // An event of the whole response, of an item, or of an item's content.
    void response_event(const char* name) {
        event(name, [&](sj::Writer& w) { write_response(w.field("sequence_number", number++).key("response")); });
    }
    void item_event(const char* name, size_t i, const char* status, bool whole);
    template <class F> void inner_event(const std::string& name, size_t i, F fill) {
        event(name.c_str(), [&](sj::Writer& w) {
            w.field("sequence_number", number++).field("item_id", item_id(kind(i), i)).field("output_index", i);
            if (items[i].kind != Item::CALL) w.field("content_index", 0);
            fill(w);
            if (items[i].kind == Item::TEXT && name.find("output_text") != name.npos) w.key("logprobs").array().end();
        });
    }
    std::string inner(size_t i) const;
    void begin(const Piece&) override;
    void open_item(size_t i) override;
    void tell(size_t i, const std::string& more) override {
        inner_event(inner(i) + "delta", i, [&](sj::Writer& w) { w.field("delta", more); });
    }
    void close_item(size_t i) override;
    void end() override {
        response_event(strcmp(choices[0].finish, "length") ? "response.completed" : "response.incomplete");
    }
};

} // namespace server
