// paths.h: paths that exist only over HTTP.
#pragma once
#include <cstddef>

namespace server {

constexpr size_t SMALL_BODY = 16 << 10; // is tokenized by the thread that read it: within a millisecond
constexpr const char *LOAD_ADAPTER = "/v1/load_lora_adapter", *UNLOAD_ADAPTER = "/v1/unload_lora_adapter";

} // namespace server
