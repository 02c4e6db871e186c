// random_bits.h: numbers that nobody can foresee.
#pragma once
#include <cstdint>

namespace server {

// Of any thread.
uint64_t random_bits();

} // namespace server
