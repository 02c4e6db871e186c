// model/stop_filter.cpp: finds stop strings, and holds back text that may begin one.
#include "model/stop_filter.h"
#include <cstddef>

std::string StopFilter::feed(std::string_view text) {
    if (stopped) return "";
    held += text;
    size_t cut = std::string::npos, end = std::string::npos;
    for (auto& s : stops) {
        const size_t at = held.find(s);
        if (at == std::string::npos || std::make_pair(at + s.size(), at) >= std::make_pair(end, cut)) continue;
        cut = at, end = at + s.size(), found = s;
    }
    if (cut != std::string::npos) {
        stopped = true;
        held.resize(cut);
        return flush();
    }
    size_t hold = 0; // the longest tail that begins a stop string
    for (auto& s : stops)
        for (size_t n = std::min(s.size() - 1, held.size()); n > hold; n--)
            if (held.compare(held.size() - n, n, s, 0, n) == 0) hold = n;
    std::string out = held.substr(0, held.size() - hold);
    held.erase(0, out.size());
    return out;
}
