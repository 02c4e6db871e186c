// paths.h: paths that only the server over HTTP has.
#pragma once
#include <cstddef>

namespace server {

constexpr size_t SMALL_BODY = 16 << 10; // is tokenized where it was read: within a millisecond
constexpr const char *LOAD_ADAPTER = "/v1/load_lora_adapter", *UNLOAD_ADAPTER = "/v1/unload_lora_adapter";

} // namespace server
