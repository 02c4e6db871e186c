// openapi.h: the server's API as an OpenAPI document (GET /openapi.json).
#pragma once
#include <string>

namespace server {

std::string openapi_document();

} // namespace server
