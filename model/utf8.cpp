#include "model/utf8.h"

size_t utf8_repair(std::string& out, std::string_view s, bool last) {
    size_t i = 0, done = 0;
    while (i < s.size()) {
        int k = utf8_length(s.data() + i, s.size() - i);
        if (k > 0) {
            i += (size_t)k;
            continue;
        }
        if (k == 0 && !last) break;
        out.append(s, done, i - done);
        out += "\xEF\xBF\xBD";
        done = i += k ? (size_t)-k : s.size() - i;
    }
    out.append(s, done, i - done);
    return i;
}

std::string Utf8Stream::feed(std::string_view bytes) {
    std::string out;
    held += bytes;
    held.erase(0, utf8_repair(out, held, false));
    return out;
}

std::string Utf8Stream::flush() {
    std::string out;
    utf8_repair(out, held, true);
    held.clear();
    return out;
}

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
