// page.h: the chat page, as it is sent.
#pragma once
#include "server/http/options.h"
#include <string>
#include <string_view>

namespace server {

// The page as it is sent, with its security policy: it may load nothing but its own content and this server, by a nonce
// that only this response has. Text can never become HTML in it (trusted types); the one policy gives the address of
// Temml.
struct ChatPage {
    std::string html, policy;
    explicit ChatPage(const ServerOptions& o);
};

extern const std::string_view temml_script; // draws the page's formulas (server/page/LICENSE-temml)

} // namespace server
