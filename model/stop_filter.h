// model/stop_filter.h: stop strings in a stream of text, of a Session or of one answer of the server (speech.h).
#pragma once
#include <string>
#include <string_view>
#include <utility>
#include <vector>

// Filters generated text: stops before a stop string, and holds back text that may begin one. Of several stop strings
// the one that ends first counts (of these the longest), so the result does not depend on how the text is cut.
struct StopFilter {
    std::vector<std::string> stops; // none empty
    std::string held;
    bool stopped = false;
    std::string found{};            // the one that stopped it

    // Adds new text, returns the text that certainly precedes any stop string.
    std::string feed(std::string_view text);
    std::string flush() { return std::exchange(held, {}); }
};
