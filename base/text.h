// base/text.h: the end of a text.
#pragma once
#include <string_view>

inline bool ends_in(std::string_view s, std::string_view end) {
    return s.size() >= end.size() && s.substr(s.size() - end.size()) == end;
}
