// random_bits.h: unpredictable numbers.
#pragma once
#include <cstdint>

namespace server {

// Thread-safe.
uint64_t random_bits();

} // namespace server
