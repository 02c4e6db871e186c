// messages.h: Anthropic's Messages (/v1/messages): translation to a chat and back.
#pragma once
#include "server/api/fields.h"
#include "server/api/items.h"
#include <string>

namespace server {

std::string chat_of_message(const Fields& f, bool counting);

struct MessageAnswer : ItemAnswer {
    using ItemAnswer::ItemAnswer;

  protected:
    void write_usage(sj::Writer& w, size_t cached, size_t output) const; // input_tokens excludes cached tokens
    void write_stop(sj::Writer& w) const;
    sj::Writer& write_head(sj::Writer& w) const;
    void write_block(sj::Writer& w, size_t i, const std::string& text, const std::string& input) const;
    std::string whole_json() override;
    void begin(const Piece& first) override;
    void open_item(size_t i) override;
    void tell(size_t i, const std::string& more) override;
    void close_item(size_t i) override {
        event("content_block_stop", [&](sj::Writer& w) { w.field("index", i); });
    }
    void end() override;
};

std::string message_error_json(const Refusal& r, const std::string& request_id);

} // namespace server
