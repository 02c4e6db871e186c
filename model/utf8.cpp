// model/utf8.cpp: broken UTF-8 becomes valid.
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
