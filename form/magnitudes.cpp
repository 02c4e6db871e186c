// form/magnitudes.cpp: digit by digit, see magnitudes.h.
#include "form/magnitudes.h"
#include "base/error.h"
#include <algorithm>
#include <cstdlib>
#include <utility>
#include <vector>

Decimal Decimal::read(sj::Value v, const std::string& keyword) {
    if (!v.is(sj::Number)) DIE("%s must be a number", keyword.c_str());
    const std::string raw(v.raw());
    const size_t e = std::min(raw.find_first_of("eE"), raw.size()), sign = raw[0] == '-';
    const long exponent = e < raw.size() ? strtol(raw.c_str() + e + 1, nullptr, 10) : 0;
    if (std::labs(exponent) > 40 || e > 60) DIE("%s is too large or too exact", keyword.c_str());
    std::string digits = raw.substr(sign, e - sign);
    const size_t dot = std::min(digits.find('.'), digits.size());
    if (dot < digits.size()) digits.erase(dot, 1);
    long point = (long)dot + exponent;
    if (point < 0) digits.insert(0, (size_t)-point, '0'), point = 0;
    if (point > (long)digits.size()) digits.append((size_t)point - digits.size(), '0');
    Decimal d{sign == 1, digits.substr(0, (size_t)point), digits.substr((size_t)point)};
    d.whole.erase(0, std::min(d.whole.find_first_not_of('0'), d.whole.size()));
    d.fraction.resize(d.fraction.find_last_not_of('0') + 1);
    if (d.whole.empty()) d.whole = "0";
    if (d.zero()) d.negative = false;
    return d;
}

int Magnitudes::start() {
    std::vector<int> starts;
    const size_t longest = bounded ? high.whole.size() : std::max(DIGITS, low.whole.size());
    for (size_t n = low.whole.size(); n <= longest; n++) {
        places = integer || n >= DIGITS ? 0 : DIGITS - n;
        made.clear();
        starts.push_back(whole(n, 0, n == low.whole.size(), bounded && n == high.whole.size()));
    }
    return grammar.any_of(starts);
}

// One more digit. at_low, at_high: all earlier digits equal the bound's.
int Magnitudes::digit(char from, char to, bool at_low, bool at_high, const std::function<int(bool, bool)>& rest) {
    std::map<std::pair<bool, bool>, ByteSet> ways;
    for (char d = from; d <= to; d++) ways[{at_low && d == from, at_high && d == to}].set((uint8_t)d);
    std::vector<int> starts;
    for (auto& [flags, set] : ways) starts.push_back(grammar.bytes(set, rest(flags.first, flags.second)));
    return grammar.any_of(starts);
}

int Magnitudes::whole(size_t n, size_t i, bool at_low, bool at_high) {
    if (i == n) return fraction(0, at_low, at_high);
    const auto [known, fresh] = made.try_emplace({0, i, at_low, at_high}, 0);
    if (!fresh) return known->second;
    const char from = at_low ? low.whole[i] : i == 0 && n > 1 ? '1' : '0', to = at_high ? high.whole[i] : '9';
    const int p = digit(from, to, at_low, at_high, [&](bool l, bool h) { return whole(n, i + 1, l, h); });
    return made[{0, i, at_low, at_high}] = p;
}

int Magnitudes::fraction(size_t i, bool at_low, bool at_high) { // i digits of it are written
    const auto [known, fresh] = made.try_emplace({1, i, at_low, at_high}, 0);
    if (!fresh) return known->second;
    std::vector<int> starts;
    const bool below = at_low && low.fraction.size() > i, is_low = at_low && !below;
    const bool is_high = at_high && high.fraction.size() <= i;
    if (!below && (!is_low || low_in) && (!is_high || high_in)) starts.push_back(next);
    if (i < places) {
        const char from = at_low && i < low.fraction.size() ? low.fraction[i] : '0';
        const char to = !at_high ? '9' : i < high.fraction.size() ? high.fraction[i] : '0';
        const int p = digit(from, to, at_low, at_high, [&](bool l, bool h) { return fraction(i + 1, l, h); });
        starts.push_back(i == 0 ? grammar.literal(".", p) : p);
    }
    return made[{1, i, at_low, at_high}] = grammar.any_of(starts);
}
