// page.h: the page to chat on, as it is sent.
#pragma once
#include "server/http/options.h"
#include <string>

namespace server {

// The page as it is sent, and the policy that goes with it: nothing but what is in the page, and this server, by a
// number that only this answer has. Text can never become HTML in it (trusted types).
struct ChatPage {
    std::string html, policy;
    explicit ChatPage(const ServerOptions& o);
};

} // namespace server
