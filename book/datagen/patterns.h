// book/datagen/patterns.h: lists of patterns (references to figures, terms of a subject), searched all at once.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace book {

// A list of patterns, searched all at once. In a pattern ' ' is one or more blanks, '_' any number or none, '#' a
// number (3, 3.2, 3-2, 三); ASCII letters match case-insensitively, and as whole words. A line that begins with '!' is
// an exception: no pattern is searched for inside its matches.
struct Patterns {
    std::vector<std::u32string> list;
    std::vector<bool> exception;
    std::vector<std::vector<uint32_t>> starting = std::vector<std::vector<uint32_t>>(0x10000);

    Patterns() = default;
    explicit Patterns(const std::string& path);
    bool add(std::string_view line); // false: invalid pattern
    bool empty() const { return list.empty(); }

    // The first match of any pattern; "": none.
    std::string find(std::u32string_view s) const;
};

} // namespace book
