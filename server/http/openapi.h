// openapi.h: what the server at its routes takes and tells, as an OpenAPI document (GET /openapi.json).
#pragma once
#include <string>

namespace server {

std::string openapi_document();

} // namespace server
