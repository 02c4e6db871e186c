// base/html.cpp: escapes text, fills in templates.
#include "base/html.h"
#include "base/error.h"
#include <algorithm>
#include <cstring>
#include <random>

std::string escape_html(std::string_view text) {
    std::string out;
    for (char c : text)
        if (strchr("&<>\"'", c)) out += format("&#%d;", c); // NUL, too
        else out += c;
    return out;
}

std::string fill_page(std::string_view page, const std::vector<std::pair<std::string_view, std::string>>& values) {
    std::string html;
    for (size_t at = 0, next; at < page.size(); at = next) {
        next = std::min(page.find("{{", at + 1), page.size());
        std::string_view part = page.substr(at, next - at);
        for (auto& [name, value] : values) {
            const std::string place = "{{" + std::string(name) + "}}";
            if (part.substr(0, place.size()) == place) html += value, part.remove_prefix(place.size());
        }
        html += part;
    }
    return html;
}

std::string page_nonce() {
    std::random_device device;
    std::string nonce;
    for (int part = 0; part < 4; part++) nonce += format("%08x", device());
    return nonce;
}
