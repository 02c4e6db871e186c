// form/grammar.cpp: builds a grammar from its end. grammar_finish.cpp has the rest.
#include "form/grammar.h"
#include "base/error.h"
#include "sj.h"
#include <algorithm>

void Grammar::spend(size_t more_steps, size_t more_bytes) {
    steps += more_steps, bytes_taken += more_bytes;
    if (bytes_taken > MAX_BYTES) DIE("the form is too large: it takes more than %zu MB to make", MAX_BYTES >> 20);
    if (steps > MAX_STEPS) DIE("the form is too large: it takes more than %zu steps to make", MAX_STEPS);
    if (form_stop && *form_stop) DIE("the client has gone");
}

int Grammar::add(Op op, int x, int y) {
    spend(1, 0);
    if (at.size() >= MAX_POSITIONS) DIE("the grammar is too large: more than %zu positions", MAX_POSITIONS);
    at.push_back({op, (uint32_t)x, (uint32_t)y});
    return (int)at.size() - 1;
}

int Grammar::bytes(const ByteSet& set, int next) {
    const auto [known, fresh] = set_number.try_emplace(set, (int)sets.size());
    if (fresh) spend(1, 128), sets.push_back(set);
    return add(BYTES, next, known->second);
}

int Grammar::bytes(uint32_t first, uint32_t last, int next) {
    ByteSet set;
    for (uint32_t b = first; b <= last; b++) set.set(b);
    return bytes(set, next);
}

int Grammar::literal(std::string_view text, int next) {
    for (size_t i = text.size(); i-- > 0;) next = bytes((uint8_t)text[i], (uint8_t)text[i], next);
    return next;
}

int Grammar::any_of(const std::vector<int>& starts) {
    if (starts.empty()) return never();
    int p = starts.back();
    for (size_t i = starts.size() - 1; i-- > 0;) p = split(starts[i], p);
    return p;
}

int Grammar::new_rule(const std::string& name) {
    spend(2, 256 + name.size());
    rules.push_back({name});
    return (int)rules.size() - 1;
}

int Grammar::words(std::vector<std::string> list, int next) {
    spend(4 * list.size());
    std::sort(list.begin(), list.end());
    list.erase(std::unique(list.begin(), list.end()), list.end());
    std::string path;
    std::vector<std::vector<int>> open(1); // the branches open at each byte of `path`, as far as they are made
    auto close = [&](size_t length) {
        for (; path.size() > length; path.pop_back()) {
            const int p = any_of(open.back());
            open.pop_back();
            open.back().push_back(bytes((uint8_t)path.back(), (uint8_t)path.back(), p));
        }
    };
    for (auto& word : list) {
        if (word.size() > MAX_POSITIONS) DIE("the grammar is too large: more than %zu positions", MAX_POSITIONS);
        size_t same = 0;
        while (same < std::min(word.size(), path.size()) && word[same] == path[same]) same++;
        close(same);
        for (size_t i = same; i < word.size(); i++) path.push_back(word[i]), open.emplace_back();
        open.back().push_back(next);
    }
    close(0);
    return any_of(open[0]);
}

int Grammar::repeat(const Body& body, int least, int most, int next) {
    if (most > MAX_REPEAT || least > MAX_REPEAT) DIE("a repetition of more than %d", MAX_REPEAT);
    int p = next;
    if (most < 0) {
        p = add(SPLIT, 0, next);
        const int inside = body(p);
        at[(size_t)p].x = (uint32_t)inside;
    } else {
        p = in_copies(most - least, p, [&](int before) { return split(body(before), next); });
    }
    return in_copies(least, p, body);
}

int Grammar::emit(const Pattern& p, int next, Coding coding) {
    switch (p.kind) {
    case Pattern::CHARACTER: return character(p.codes, next, coding);
    case Pattern::CALL: return call(p.rule, next);
    case Pattern::SEQUENCE:
        for (size_t i = p.parts.size(); i-- > 0;) next = emit(p.parts[i], next, coding);
        return next;
    case Pattern::CHOICE: {
        std::vector<int> starts;
        for (auto& part : p.parts) starts.push_back(emit(part, next, coding));
        return any_of(starts);
    }
    case Pattern::REPEAT:
        return repeat([&](int before) { return emit(p.parts[0], before, coding); }, p.least, p.most, next);
    default: DIE("^ and $ are supported at the beginning and the end only");
    }
}

static bool contains(const Codes& codes, uint32_t c) {
    return std::any_of(codes.begin(), codes.end(), [&](auto& r) { return r.first <= c && c <= r.second; });
}

int Grammar::character(const Codes& codes, int next, Coding coding) {
    static const Codes SURROGATES = {{0xD800, 0xDFFF}}, ESCAPED = {{0, 0x1F}, {'"', '"'}, {'\\', '\\'}};
    spend(1 + codes.size());
    Codes plain = without(codes, SURROGATES);
    std::vector<int> starts;
    if (coding == IN_STRING) {
        std::vector<std::string> escapes;
        for (uint32_t c = 0; c <= '\\'; c++)
            if (contains(ESCAPED, c) && contains(plain, c)) {
                std::string quoted;
                sj::quote(quoted, std::string(1, (char)c));
                escapes.push_back(quoted.substr(1, quoted.size() - 2));
            }
        if (!escapes.empty()) starts.push_back(words(escapes, next));
        plain = without(plain, ESCAPED);
    }
    ByteSet ascii;
    int tails[4] = {next, 0, 0, 0}; // k bytes of any value that continue a character
    for (auto [first, last] : plain) {
        for (uint32_t c = first; c <= std::min(last, 0x7Fu); c++) ascii.set(c);
        const uint32_t bounds[] = {0x80, 0x800, 0x10000, LAST_CODE + 1}, leads[] = {0xC0, 0xE0, 0xF0};
        for (int n = 1; n <= 3; n++) {
            const uint32_t low = std::max(first, bounds[n - 1]), high = std::min(last, bounds[n] - 1);
            if (low <= high) utf8(starts, low, high, n, leads[n - 1], tails);
        }
    }
    if (ascii.any()) starts.push_back(bytes(ascii, next));
    return any_of(starts);
}

int Grammar::in_copies(int count, int p, const Body& copy) {
    Copies c = {(uint32_t)at.size(), 0, (uint32_t)count, 0};
    bool same = true;
    for (int i = 0; i < count; i++) {
        const size_t before = at.size();
        p = copy(p);
        if (i == 0) c.size = (uint32_t)(at.size() - before), c.start = (uint32_t)p;
        if (c.size == 0) return p; // empty
        same = same && at.size() - before == c.size;
    }
    if (count > 1 && same && c.size) copies.push_back(c);
    return p;
}

// The characters low .. high, whose UTF-8 has n bytes after the first (base + their upper bits). tails[k]: k bytes
// of any value, created when first needed.
void Grammar::utf8(std::vector<int>& starts, uint32_t low, uint32_t high, int n, uint32_t base, int* tails) {
    if (n == 0) {
        starts.push_back(bytes(base + low, base + high, tails[0]));
        return;
    }
    const uint32_t bits = 6 * (uint32_t)n, rest = (1u << bits) - 1;
    uint32_t a = low >> bits, b = high >> bits;
    auto part = [&](uint32_t lead, uint32_t from, uint32_t to) {
        std::vector<int> inner;
        utf8(inner, from, to, n - 1, 0x80, tails);
        starts.push_back(bytes(base + lead, base + lead, any_of(inner)));
    };
    if (a == b && !((low & rest) == 0 && (high & rest) == rest)) return part(a, low & rest, high & rest);
    if (low & rest) part(a, low & rest, rest), a++;
    if ((high & rest) != rest) part(b, 0, high & rest), b--;
    if (a > b) return;
    for (int k = 1; k <= n; k++)
        if (!tails[k]) tails[k] = bytes(0x80, 0xBF, tails[k - 1]);
    starts.push_back(bytes(base + a, base + b, tails[n]));
}

Grammar grammar_of(const std::function<int(Grammar&, int)>& root) {
    Grammar g;
    const int start = root(g, Grammar::FINAL);
    g.rules[0].start = start;
    g.finish();
    return g;
}
Grammar grammar_of_choice(const std::vector<std::string>& words) {
    return grammar_of([&](Grammar& g, int end) { return g.words(words, end); });
}
