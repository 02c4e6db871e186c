// page.cpp: the page of server/page/, which the Makefile embeds as a string, with its values filled in.
#include "base/error.h"
#include "server/engine/random_bits.h"
#include "server/http/page.h"
#include "sj.h"
#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>

namespace server {

static const char CHAT_PAGE[] =
#include "build/chat_page.inc"
    ;

static std::string escape_html(const std::string& text) {
    std::string out;
    for (char c : text)
        if (strchr("&<>\"'", c)) out += format("&#%d;", c); // NUL, too
        else out += c;
    return out;
}

static const unsigned char TEMML[] = {
#include "build/temml.inc"
};
const std::string_view temml_script((const char*)TEMML, sizeof TEMML);

ChatPage::ChatPage(const ServerOptions& o) {
    std::string nonce;
    for (int half = 0; half < 2; half++) nonce += format("%016llx", (unsigned long long)random_bits());
    sj::Writer starters;
    starters.array();
    for (auto& question : o.starters) starters.value(question);
    const std::pair<std::string_view, std::string> values[] = {
        {"{{nonce}}", nonce}, {"{{title}}", escape_html(o.title)}, {"{{think}}", o.think ? "1" : "0"},
        {"{{docs}}", o.docs ? "1" : "0"}, {"{{starters}}", escape_html(starters.end().text)}};
    const std::string_view page = CHAT_PAGE;
    for (size_t at = 0, next; at < page.size(); at = next) {
        next = std::min(page.find("{{", at + 1), page.size());
        std::string_view part = page.substr(at, next - at);
        for (auto& [name, value] : values)
            if (part.substr(0, name.size()) == name) html += value, part.remove_prefix(name.size());
        html += part;
    }
    policy = "default-src 'none'; script-src 'nonce-" + nonce + "'; style-src 'nonce-" + nonce + "'; "
             "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
             "require-trusted-types-for 'script'; trusted-types math";
}

} // namespace server
