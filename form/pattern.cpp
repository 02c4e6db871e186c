// form/pattern.cpp: sets of characters, see pattern.h.
#include "form/pattern.h"
#include <algorithm>

Codes tidy(Codes c) {
    std::sort(c.begin(), c.end());
    Codes out;
    for (auto [first, last] : c) {
        if (!out.empty() && first <= out.back().second + 1) out.back().second = std::max(out.back().second, last);
        else out.push_back({first, last});
    }
    return out;
}

Codes complement(const Codes& c) {
    Codes out;
    uint32_t next = 0;
    for (auto [first, last] : tidy(c)) {
        if (first > next) out.push_back({next, first - 1});
        next = last + 1;
    }
    if (next <= LAST_CODE) out.push_back({next, LAST_CODE});
    return out;
}

Codes without(const Codes& a, const Codes& b) {
    Codes all = complement(a);
    all.insert(all.end(), b.begin(), b.end());
    return complement(all);
}
