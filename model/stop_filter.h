// model/stop_filter.h: stop strings in a stream of text.
#pragma once
#include <string>
#include <string_view>
#include <utility>
#include <vector>

// Text on its way out: stops before a stop string, and holds back what may be the beginning of one. Of several it
// is the one that ends first (of these the longest), so that it does not matter in which pieces the text comes.
struct StopFilter {
    std::vector<std::string> stops; // none empty
    std::string held;
    bool stopped = false;
    std::string found{};            // the one that stopped it

    // Takes new text, returns what is certain to be before any stop string.
    std::string feed(std::string_view text);
    std::string flush() { return std::exchange(held, {}); }
};
