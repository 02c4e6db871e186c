// convert.h: POST /convert, a PDF or a document of an office program as text, by the converters of --docs.
#pragma once
#include "base/stop_flag.h"
#include <string>
#include <string_view>

namespace server {

constexpr const char* CONVERT = "/convert";

// {"name", "text"}. stop: ends it when it becomes non-zero. limit: seconds that a converter may take.
std::string converted_document(const std::string& name, std::string_view bytes, const StopFlag* stop, double limit);

} // namespace server
