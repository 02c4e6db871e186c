// form_data.cpp: parts between boundaries.
#include "server/api/form_data.h"
#include "server/api/refusal.h"
#include <algorithm>
#include <strings.h>

namespace server {

// The value of name="..." in a header.
static std::string header_parameter(std::string_view line, const std::string& name) {
    size_t at = 0, before;
    do {
        at = line.find(name + "=", at + 1);
        if (at == line.npos) return "";
        before = line.find_last_not_of(" \t", at - 1);
    } while (before == line.npos || line[before] != ';');
    std::string_view value = line.substr(at + name.size() + 1);
    if (value.substr(0, 1) != "\"") return std::string(value.substr(0, value.find_first_of("; \t")));
    value.remove_prefix(1);
    return std::string(value.substr(0, value.find('"')));
}

std::vector<FormPart> read_form(const std::string& type, std::string_view body) {
    constexpr size_t MAX_PARTS = 16, MAX_BOUNDARY = 70;
    auto refuse = [](const char* why) { throw Refusal(400, format("the form is malformed: %s", why)); };
    std::string boundary = header_parameter(type, "boundary");
    if (boundary.empty() || boundary.size() > MAX_BOUNDARY) refuse("no boundary");
    boundary = "\r\n--" + boundary;
    std::vector<FormPart> parts;
    size_t at = boundary.size() - 2; // position behind a boundary; nothing precedes the first
    if (body.substr(0, at) != std::string_view(boundary).substr(2)) refuse("it does not begin with its boundary");
    while (body.substr(at, 2) == "\r\n") {
        at += 2;
        const size_t head = body.find("\r\n\r\n", at), end = head == body.npos ? head : body.find(boundary, head + 2);
        if (end == body.npos) refuse("a part without its end");
        if (parts.size() == MAX_PARTS) refuse("too many parts");
        FormPart part;
        for (size_t line = at, next; line < head; line = next + 2) {
            next = std::min(body.find("\r\n", line), head);
            const std::string_view text = body.substr(line, next - line), wanted = "content-disposition:";
            if (text.size() < wanted.size() || strncasecmp(text.data(), wanted.data(), wanted.size())) continue;
            part.name = header_parameter(text, "name"), part.filename = header_parameter(text, "filename");
        }
        part.bytes = body.substr(std::min(head + 4, end), end - std::min(head + 4, end));
        parts.push_back(part);
        at = end + boundary.size();
    }
    if (body.substr(at, 2) != "--") refuse("it does not end with its boundary");
    return parts;
}

} // namespace server
