// book/text.h: small tools for texts: lines, blanks around them, JSON on one line.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace book {

using Strings = std::vector<std::string>;
using Lines = std::vector<std::string_view>;

std::string hex(uint64_t x);

// A JSON text without its line ends, which may occur only between values.
std::string one_line(std::string_view json);

Lines lines_of(std::string_view text); // without their ends
std::string_view trimmed(std::string_view s);

} // namespace book
