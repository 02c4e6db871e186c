// base/sha256.h: SHA-256 (FIPS 180-4), where two texts with the same hash must not be constructible.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

using Digest = std::array<uint8_t, 32>;

Digest sha256(const void* bytes, size_t n);
inline Digest sha256(std::string_view s) { return sha256(s.data(), s.size()); }
std::string hex(const Digest& d);
