// form_data.h: multipart/form-data (RFC 7578).
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace server {

struct FormPart {
    std::string name, filename;
    std::string_view bytes;
};

std::vector<FormPart> read_form(const std::string& type, std::string_view body);

} // namespace server
