// page.cpp: the page of server/page/, which the Makefile embeds as a string, with its values filled in.
#include "base/html.h"
#include "server/http/page.h"
#include "sj.h"
#include <string_view>

namespace server {

static const char CHAT_PAGE[] =
#include "build/chat_page.inc"
    ;

static const unsigned char TEMML[] = {
#include "build/temml.inc"
};
const std::string_view temml_script((const char*)TEMML, sizeof TEMML);

ChatPage::ChatPage(const ServerOptions& o) {
    const std::string nonce = page_nonce();
    sj::Writer starters;
    starters.array();
    for (auto& question : o.starters) starters.value(question);
    html = fill_page(CHAT_PAGE, {{"nonce", nonce}, {"title", escape_html(o.title)}, {"think", o.think ? "1" : "0"},
                                 {"docs", o.docs ? "1" : "0"}, {"starters", escape_html(starters.end().text)}});
    policy = "default-src 'none'; script-src 'nonce-" + nonce + "'; style-src 'nonce-" + nonce + "'; "
             "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
             "require-trusted-types-for 'script'; trusted-types math";
}

} // namespace server
