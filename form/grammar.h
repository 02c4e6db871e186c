// grammar.h: answers that keep a form. A grammar over bytes, from a regular expression, a list of choices or GBNF
// (schema.h makes one of a JSON schema), and which tokens may come next.
//
//   Grammar g;
//   g.rules[0].start = g.emit(RegexReader(g, "[0-9]{3}-[a-z]+").whole(), Grammar::FINAL, RAW);
//   g.finish();
//   auto automaton = std::make_shared<Automaton>(std::move(g), vocabulary);
//   Matcher m(automaton);
//   m.mask();                         // a bit for each token that may come next
//   m.advance(id);                    // false: the answer has left the grammar
//   m.may_end(), m.must_end();
//   m.forced(most, &over);            // the text that must come next
//
// How it works
// - A Grammar is a set of rules, each a nondeterministic automaton over bytes, whose positions may call other rules.
// - A state of the Automaton is a set of threads: where one is in a rule, and a node that says to where it returns. A
//   node is a set of threads too: all calls of one rule from one state share a node, so that states stay small however
//   ambiguous a grammar is (as in Earley's parser). States and nodes are kept once, by content, and made when they are
//   first needed, and so are the transitions between states.
// - A mask comes from a walk over the trie of all tokens. The walk does not know the nodes: it is done once for each
//   set of positions, and notes where a token would return from the rule that it began in. Only what follows there is
//   walked for each state anew. So all strings of a JSON text share one walk.
// - In x{0,1000} the copies of x that are further from the end than any token is long have the same mask.
//
// Limits. Whoever writes a grammar may be hostile: the number of positions is limited, a state has MAX_THREADS at most,
// a mask is made within MAX_WORK, and an automaton that grows beyond its share of memory forgets what can be made anew.
// What the limits on threads and work leave out is not allowed; since every position leads to an end, and the tokens of
// one byte come first, something always is.
#pragma once
#include "model/chat_template.h"
#include <array>
#include <atomic>
#include <bitset>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>

// ------------------------------------------------------------------------------------------------------- characters
using Codes = std::vector<std::pair<uint32_t, uint32_t>>; // code points: ranges, first and last
constexpr uint32_t LAST_CODE = 0x10FFFF;

// In order, without overlaps.
inline Codes tidy(Codes c) {
    std::sort(c.begin(), c.end());
    Codes out;
    for (auto [first, last] : c) {
        if (!out.empty() && first <= out.back().second + 1) out.back().second = std::max(out.back().second, last);
        else out.push_back({first, last});
    }
    return out;
}
inline Codes complement(const Codes& c) {
    Codes out;
    uint32_t next = 0;
    for (auto [first, last] : tidy(c)) {
        if (first > next) out.push_back({next, first - 1});
        next = last + 1;
    }
    if (next <= LAST_CODE) out.push_back({next, LAST_CODE});
    return out;
}
inline Codes without(const Codes& a, const Codes& b) {
    Codes all = complement(a);
    all.insert(all.end(), b.begin(), b.end());
    return complement(all);
}

// A pattern over characters and rules: what regular expressions and GBNF are read into.
struct Pattern {
    enum Kind { CHARACTER, SEQUENCE, CHOICE, REPEAT, CALL, BEGIN, END } kind = SEQUENCE;
    std::vector<Pattern> parts{};
    Codes codes{};
    int least = 0, most = 0; // of REPEAT; most -1: any number
    int rule = 0;

    static Pattern character(Codes c) { return {CHARACTER, {}, std::move(c)}; }
    static Pattern repeat(Pattern p, int least, int most) { return {REPEAT, {std::move(p)}, {}, least, most}; }
};

// How characters are written: as they are, or as in a JSON string.
enum Coding { RAW, IN_STRING };

// ---------------------------------------------------------------------------------------------------------- grammar
// A token of the vocabulary that is not plain text ("<tool_call>") is ADDED and its name; no text holds this byte.
constexpr char ADDED_TOKEN = '\xFF';

using ByteSet = std::bitset<256>;

struct Grammar {
    // BYTES: a byte of set y, then x. SPLIT: x or y. CALL: rule y, then x. FINAL: the rule ends. NEVER: no way on.
    enum Op : uint8_t { BYTES, SPLIT, CALL, END, NEVER };
    struct Position {
        Op op;
        uint32_t x, y;
    };
    struct Rule {
        std::string name; // for messages
        int start = -1;
        bool nullable = false; // the empty text is one of its texts
        int rank = 0;          // callers before those whom they call
    };
    static constexpr size_t MAX_POSITIONS = 1 << 18;
    static constexpr size_t MAX_TEXT = 1 << 20; // bytes that a pattern is read from: it takes 100 times that
    static constexpr int FINAL = 0;         // the position where every rule ends
    static constexpr int MAX_REPEAT = 100000;

    std::vector<Position> at{{END, 0, 0}};
    std::vector<ByteSet> sets;
    std::vector<Rule> rules{{"root"}};      // the first is the whole
    std::array<uint8_t, 256> byte_class{};  // bytes that no set tells apart are one
    int classes = 1;

    // Copies of the same positions, one after the other, the last of the text first; `start` is where the first begins.
    // Each leads only to the one before it in the list, and (if it may be left out) to where the first leads.
    struct Copies { uint32_t base, size, count, start; };
    std::vector<Copies> copies;

    // ---- Building, from the end: what a text begins with is made last. Each takes where to go on, and returns the
    // position where it begins.
    int add(Op op, int x, int y) {
        if (at.size() >= MAX_POSITIONS) DIE("the grammar is too large: more than %zu positions", MAX_POSITIONS);
        at.push_back({op, (uint32_t)x, (uint32_t)y});
        return (int)at.size() - 1;
    }
    int bytes(const ByteSet& set, int next) {
        const auto [known, fresh] = set_number.try_emplace(set, (int)sets.size());
        if (fresh) sets.push_back(set);
        return add(BYTES, next, known->second);
    }
    int bytes(uint32_t first, uint32_t last, int next) {
        ByteSet set;
        for (uint32_t b = first; b <= last; b++) set.set(b);
        return bytes(set, next);
    }
    int split(int a, int b) { return add(SPLIT, a, b); }
    int call(int rule, int next) { return add(CALL, next, rule); }
    int never() { return add(NEVER, 0, 0); }
    int literal(std::string_view text, int next) {
        for (size_t i = text.size(); i-- > 0;) next = bytes((uint8_t)text[i], (uint8_t)text[i], next);
        return next;
    }
    int any_of(const std::vector<int>& starts) {
        if (starts.empty()) return never();
        int p = starts.back();
        for (size_t i = starts.size() - 1; i-- > 0;) p = split(starts[i], p);
        return p;
    }
    int new_rule(const std::string& name) {
        rules.push_back({name});
        return (int)rules.size() - 1;
    }

    // One of the words, as a trie.
    int words(std::vector<std::string> list, int next) {
        std::sort(list.begin(), list.end());
        list.erase(std::unique(list.begin(), list.end()), list.end());
        std::string path;
        std::vector<std::vector<int>> open(1); // the ways on from each byte of `path`, as far as they are made
        auto close = [&](size_t length) {
            for (; path.size() > length; path.pop_back()) {
                const int p = any_of(open.back());
                open.pop_back();
                open.back().push_back(bytes((uint8_t)path.back(), (uint8_t)path.back(), p));
            }
        };
        for (auto& word : list) {
            size_t same = 0;
            while (same < std::min(word.size(), path.size()) && word[same] == path[same]) same++;
            close(same);
            for (size_t i = same; i < word.size(); i++) path.push_back(word[i]), open.emplace_back();
            open.back().push_back(next);
        }
        close(0);
        return any_of(open[0]);
    }

    // `body` makes one copy before a position. most -1: any number.
    template <class F> int repeat(F body, int least, int most, int next) {
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

    int emit(const Pattern& p, int next, Coding coding) {
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

    // A character of the set, as UTF-8.
    int character(const Codes& codes, int next, Coding coding) {
        static const Codes SURROGATES = {{0xD800, 0xDFFF}}, ESCAPED = {{0, 0x1F}, {'"', '"'}, {'\\', '\\'}};
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
        int tails[4] = {next, 0, 0, 0}; // any n bytes that go on with a character
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

    // ---- When all rules are there. Throws Error if it matches nothing, or cannot be followed from left to right.
    void finish() {
        for (Rule& rule : rules)
            if (rule.start < 0) DIE("the rule %s is not defined", in_quotes(rule.name).c_str());
        const std::vector<bool> empty = least_fixpoint(false), leads_on = least_fixpoint(true);
        for (Rule& rule : rules) rule.nullable = empty[(size_t)rule.start];
        if (!leads_on[(size_t)rules[0].start]) DIE("nothing matches it");
        for (size_t p = 0; p < at.size(); p++) // so that every thread that is left can come to an end
            if (!leads_on[p]) at[p] = {NEVER, 0, 0};
        rank_rules();
        find_classes();
    }

    // Positions that have the same tokens of up to `longest` bytes before them, but for where they return to: the
    // first of them, for each.
    std::vector<uint32_t> alike(size_t longest) const {
        std::vector<uint32_t> like(at.size());
        for (size_t p = 0; p < at.size(); p++) like[p] = (uint32_t)p;
        for (auto& c : copies) { // (inner ones were noted before outer ones)
            if (c.count <= longest + 1 || passes_empty(c)) continue;
            const size_t from = c.base + longest * c.size;
            for (size_t p = from + c.size; p < c.base + (size_t)c.count * c.size; p++)
                like[p] = like[from + (p - c.base) % c.size];
        }
        return like;
    }

  private:
    struct Hash { size_t operator()(const ByteSet& s) const { return std::hash<ByteSet>()(s); } };
    std::unordered_map<ByteSet, int, Hash> set_number;

    static bool contains(const Codes& codes, uint32_t c) {
        return std::any_of(codes.begin(), codes.end(), [&](auto& r) { return r.first <= c && c <= r.second; });
    }

    template <class F> int in_copies(int count, int p, F copy) {
        Copies c = {(uint32_t)at.size(), 0, (uint32_t)count, 0};
        bool same = true;
        for (int i = 0; i < count; i++) {
            const size_t before = at.size();
            p = copy(p);
            if (i == 0) c.size = (uint32_t)(at.size() - before), c.start = (uint32_t)p;
            if (c.size == 0) return p; // of nothing
            same = same && at.size() - before == c.size;
        }
        if (count > 1 && same && c.size) copies.push_back(c);
        return p;
    }

    // Can a copy be passed without a byte? (If its first position is the choice to leave it out, that is not meant.)
    bool passes_empty(const Copies& c) const {
        uint32_t start = c.start;
        const Position& first = at[start];
        if (first.op == SPLIT && first.y < c.base) start = first.x;
        std::vector<uint32_t> todo = {start};
        std::set<uint32_t> seen;
        while (!todo.empty()) {
            const uint32_t p = todo.back();
            todo.pop_back();
            if (p < c.base || p >= c.base + c.size) return true;
            if (!seen.insert(p).second) continue;
            if (at[p].op == SPLIT || (at[p].op == CALL && rules[at[p].y].nullable)) todo.push_back(at[p].x);
            if (at[p].op == SPLIT) todo.push_back(at[p].y);
        }
        return false;
    }

    // The characters low .. high, whose UTF-8 has n bytes after the first (base + their upper bits). tails[k]: k bytes
    // of any value, made when they are first needed.
    void utf8(std::vector<int>& starts, uint32_t low, uint32_t high, int n, uint32_t base, int* tails) {
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

    // The positions from which an end can be reached; without a byte, or (any) with any bytes.
    std::vector<bool> least_fixpoint(bool any) const {
        std::vector<std::vector<uint32_t>> users(at.size()), callers(rules.size());
        std::vector<bool> holds(at.size());
        std::vector<uint32_t> todo = {(uint32_t)FINAL};
        for (uint32_t p = 0; p < at.size(); p++) {
            if (at[p].op == END || at[p].op == NEVER) continue;
            users[at[p].x].push_back(p);
            if (at[p].op == SPLIT) users[at[p].y].push_back(p);
            if (at[p].op == CALL) callers[at[p].y].push_back(p);
        }
        std::vector<std::vector<uint32_t>> begins(at.size()); // rules
        for (uint32_t r = 0; r < rules.size(); r++) begins[(size_t)rules[r].start].push_back(r);
        auto now = [&](uint32_t p) {
            switch (at[p].op) {
            case END: return true;
            case BYTES: return any && holds[at[p].x];
            case SPLIT: return holds[at[p].x] || holds[at[p].y];
            case CALL: return holds[at[p].x] && holds[(size_t)rules[at[p].y].start];
            default: return false;
            }
        };
        while (!todo.empty()) {
            const uint32_t p = todo.back();
            todo.pop_back();
            if (holds[p] || !now(p)) continue;
            holds[p] = true;
            todo.insert(todo.end(), users[p].begin(), users[p].end());
            for (uint32_t r : begins[p]) todo.insert(todo.end(), callers[r].begin(), callers[r].end());
        }
        return holds;
    }

    // Which rules a rule may call before its first byte.
    std::set<int> called_first(const Rule& rule) const {
        std::set<int> called;
        std::set<uint32_t> seen;
        std::vector<uint32_t> todo = {(uint32_t)rule.start};
        while (!todo.empty()) {
            const uint32_t p = todo.back();
            todo.pop_back();
            if (!seen.insert(p).second) continue;
            if (at[p].op == SPLIT) todo.push_back(at[p].x), todo.push_back(at[p].y);
            if (at[p].op != CALL) continue;
            called.insert((int)at[p].y);
            if (rules[at[p].y].nullable) todo.push_back(at[p].x);
        }
        return called;
    }

    void rank_rules() {
        std::vector<std::set<int>> calls;
        std::vector<int> callers(rules.size()), ready;
        for (auto& rule : rules) calls.push_back(called_first(rule));
        for (auto& list : calls)
            for (int r : list) callers[(size_t)r]++;
        for (size_t r = 0; r < rules.size(); r++)
            if (callers[r] == 0) ready.push_back((int)r);
        int rank = 0;
        while (!ready.empty()) {
            const int r = ready.back();
            ready.pop_back();
            rules[(size_t)r].rank = rank++;
            for (int next : calls[(size_t)r])
                if (--callers[(size_t)next] == 0) ready.push_back(next);
        }
        for (size_t r = 0; r < rules.size(); r++)
            if (callers[r]) DIE("the rule %s can begin with itself", in_quotes(rules[r].name).c_str());
    }

    void find_classes() {
        for (auto& set : sets) {
            std::array<int, 512> part; // of the bytes of a class outside and inside the set
            part.fill(-1);
            classes = 0;
            for (size_t b = 0; b < 256; b++) {
                int& now = part[2u * byte_class[b] + set[b]];
                if (now < 0) now = classes++;
                byte_class[b] = (uint8_t)now;
            }
        }
    }
};

// What readers of patterns share: a place in a text of characters.
struct PatternReader {
  protected:
    Grammar& grammar;
    std::string_view text;
    size_t at = 0;
    int depth = 0;
    static constexpr int MAX_DEPTH = 200;

    PatternReader(Grammar& g, std::string_view source, const char* kind) : grammar(g), text(source) {
        if (text.size() > Grammar::MAX_TEXT) DIE("%s: longer than %zu bytes", kind, Grammar::MAX_TEXT);
        for (size_t i = 0; i < text.size();) {
            const int n = utf8_length(text.data() + i, text.size() - i);
            if (n <= 0) DIE("%s: invalid UTF-8", kind);
            i += (size_t)n;
        }
    }
    ~PatternReader() = default; // (no one deletes it by this name)
    virtual std::string place() const = 0; // for messages
    [[noreturn]] void fail(const char* what) const { DIE("%s: %s", place().c_str(), what); }

    char peek(size_t ahead = 0) const { return at + ahead < text.size() ? text[at + ahead] : '\0'; }
    bool more() const { return at < text.size(); }
    bool accept(char c) { return more() && peek() == c ? (at++, true) : false; }
    uint32_t code() {
        const char* p = text.data() + at;
        const uint32_t c = utf8_read(p);
        at = (size_t)(p - text.data());
        return c;
    }
    int number() {
        int n = 0;
        if (!isdigit((unsigned char)peek())) fail("expected a number");
        for (; isdigit((unsigned char)peek()); at++) {
            n = n * 10 + (peek() - '0');
            if (n > Grammar::MAX_REPEAT) fail("the number is too large");
        }
        return n;
    }
    uint32_t hex(size_t n) {
        uint32_t value = 0;
        for (size_t i = 0; i < n; i++, at++) {
            const int digit = more() ? sj::hex_digit(peek()) : -1;
            if (digit < 0) fail("expected hex digits");
            value = value << 4 | (uint32_t)digit;
        }
        if (value > LAST_CODE || (value >= 0xD800 && value < 0xE000)) fail("not a character");
        return value;
    }
};

// ------------------------------------------------------------------------------------------------ regular expressions
// Reads the part that JavaScript, Python and RE2 agree on: characters, classes, groups, | * + ? {m,n}, and ^ and $ at
// the two ends. What looks around, back or is greedy in its own way is refused by name.
struct RegexReader : PatternReader {
    RegexReader(Grammar& g, std::string_view pattern) : PatternReader(g, pattern, "regex") {}

    // The text that matches is all of it.
    Pattern whole() { return read(false); }
    // ... or holds it somewhere, as JSON Schema's "pattern" means it.
    Pattern within() { return read(true); }

    static Codes digits() { return {{'0', '9'}}; }
    static Codes word() { return {{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}}; }
    static Codes space() {
        return {{9, 13}, {' ', ' '}, {0xA0, 0xA0}, {0x1680, 0x1680}, {0x2000, 0x200A}, {0x2028, 0x2029},
                {0x202F, 0x202F}, {0x205F, 0x205F}, {0x3000, 0x3000}, {0xFEFF, 0xFEFF}};
    }

  private:
    std::string place() const override { return format("regex, byte %zu", at); }

    Pattern read(bool anywhere) {
        Pattern all = choice();
        if (more()) fail("a ) without its (");
        if (all.kind != Pattern::CHOICE) all = {Pattern::CHOICE, {all}};
        for (Pattern& branch : all.parts) {
            auto& parts = branch.parts;
            const bool begins = !parts.empty() && parts.front().kind == Pattern::BEGIN;
            if (begins) parts.erase(parts.begin());
            const bool ends = !parts.empty() && parts.back().kind == Pattern::END;
            if (ends) parts.pop_back();
            const Pattern anything = Pattern::repeat(Pattern::character(complement({})), 0, -1);
            if (anywhere && !begins) parts.insert(parts.begin(), anything);
            if (anywhere && !ends) parts.push_back(anything);
        }
        return all;
    }

    Pattern choice() {
        if (++depth > MAX_DEPTH) fail("nested too deep");
        Pattern all{Pattern::CHOICE};
        do all.parts.push_back(sequence());
        while (accept('|'));
        depth--;
        return all.parts.size() == 1 ? std::move(all.parts[0]) : std::move(all);
    }
    Pattern sequence() {
        Pattern all;
        while (more() && peek() != '|' && peek() != ')') {
            Pattern one = atom();
            const bool anchor = one.kind == Pattern::BEGIN || one.kind == Pattern::END;
            int least, most;
            if (quantity(&least, &most)) {
                if (anchor) fail("nothing to repeat");
                one = Pattern::repeat(std::move(one), least, most);
                if (quantity(&least, &most)) fail("a repetition of a repetition");
            }
            all.parts.push_back(std::move(one));
        }
        return all;
    }

    bool quantity(int* least, int* most) {
        if (accept('*')) *least = 0, *most = -1;
        else if (accept('+')) *least = 1, *most = -1;
        else if (accept('?')) *least = 0, *most = 1;
        else if (peek() == '{' && isdigit((unsigned char)peek(1))) {
            at++;
            *least = *most = number();
            if (accept(',')) *most = peek() == '}' ? -1 : number();
            if (!accept('}')) fail("expected }");
            if (*most >= 0 && *most < *least) fail("a repetition whose bounds are the wrong way round");
        } else return false;
        if (peek() == '+') fail("possessive repetitions are not supported");
        accept('?'); // lazy: the same texts
        return true;
    }

    Pattern atom() {
        switch (peek()) {
        case '(': return group();
        case '[': return Pattern::character(char_class());
        case '.': at++; return Pattern::character(complement({{10, 10}, {13, 13}, {0x2028, 0x2029}}));
        case '^': at++; return {Pattern::BEGIN};
        case '$': at++; return {Pattern::END};
        case '*': case '+': case '?': fail("nothing to repeat");
        case '{': fail("a { that repeats nothing; write \\{");
        case '\\': return Pattern::character(escape(false));
        default:
            const uint32_t c = code();
            return Pattern::character({{c, c}});
        }
    }
    Pattern group() {
        at++;
        if (accept('?')) {
            if (accept('P') ? peek() == '<' : peek() == '<' && peek(1) != '=' && peek(1) != '!') {
                while (more() && peek() != '>') at++;
                if (!accept('>')) fail("expected >");
            } else if (!accept(':')) {
                fail("only (?:...) and named groups are supported: no looking around, no flags");
            }
        }
        Pattern inside = choice();
        if (!accept(')')) fail("a ( without its )");
        return inside;
    }

    Codes escape(bool in_class) {
        at++;
        if (!more()) fail("a \\ at the end");
        const uint32_t c = code();
        auto one = [](uint32_t c) { return Codes{{c, c}}; };
        switch (c) {
        case 'd': return digits();
        case 'D': return complement(digits());
        case 'w': return word();
        case 'W': return complement(word());
        case 's': return space();
        case 'S': return complement(space());
        case 'n': return one('\n');
        case 'r': return one('\r');
        case 't': return one('\t');
        case 'f': return one('\f');
        case 'v': return one('\v');
        case '0': if (isdigit((unsigned char)peek())) fail("octal escapes are not supported"); return one(0);
        case 'x': return one(hex(2));
        case 'u':
            if (accept('{')) {
                const size_t end = text.find('}', at);
                if (end == text.npos || end - at > 6 || end == at) fail("expected \\u{...}");
                const uint32_t value = hex(end - at);
                at++;
                return one(value);
            }
            return one(hex(4));
        case 'b': if (in_class) return one('\b'); fail("\\b is not supported");
        }
        if (c < 0x80 && isalnum((int)c)) at--, fail("this escape is not supported");
        return one(c);
    }
    Codes char_class() {
        at++;
        const bool negated = accept('^');
        Codes all;
        while (peek() != ']') {
            if (!more()) fail("a [ without its ]");
            if (peek() == '[' && peek(1) == ':') fail("[:classes:] are not supported");
            Codes low = class_atom();
            if (peek() == '-' && peek(1) != ']' && at + 1 < text.size()) {
                at++;
                const Codes high = class_atom();
                const bool single = low.size() == 1 && high.size() == 1 && low[0].first == low[0].second &&
                                    high[0].first == high[0].second;
                if (!single || low[0].first > high[0].first) fail("a range that is none");
                low[0].second = high[0].first;
            }
            all.insert(all.end(), low.begin(), low.end());
        }
        at++;
        return negated ? complement(all) : tidy(all);
    }
    Codes class_atom() {
        if (peek() == '\\') return escape(true);
        const uint32_t c = code();
        return {{c, c}};
    }
};

// --------------------------------------------------------------------------------------------------------------- GBNF
// llama.cpp's notation, which vLLM's structured_outputs.grammar takes too:
//     root ::= "yes" | "no" reason?      # a comment
//     reason ::= ", because " [^.]+ "."
// Strings and classes know \n \r \t \\ \" \[ \] \- \^ \xHH \uHHHH \UHHHHHHHH; . is any character; ( ) | * + ? {m,n}.
struct GbnfReader : PatternReader {
    std::map<std::string, int> rules{{"root", 0}};

    GbnfReader(Grammar& g, std::string_view source) : PatternReader(g, source, "grammar") {}

    void read() {
        for (skip(true); more(); skip(true)) {
            const std::string word = name();
            if (word.empty()) fail("expected a rule");
            skip(true);
            if (text.substr(at, 3) != "::=") fail("expected ::=");
            at += 3;
            const int rule = number_of(word);
            if (grammar.rules[(size_t)rule].start >= 0) fail("a second rule of this name");
            const Pattern p = choice(false);
            grammar.rules[(size_t)rule].start = grammar.emit(p, Grammar::FINAL, RAW);
            if (more() && peek() != '\n') fail("expected the end of the rule");
        }
        if (grammar.rules[0].start < 0) DIE("grammar: no rule named root");
    }

  private:
    std::string place() const override {
        const auto line = std::count(text.begin(), text.begin() + (ptrdiff_t)std::min(at, text.size()), '\n') + 1;
        return format("grammar, line %zd", line);
    }
    void skip(bool lines) { // blanks and comments
        for (; more(); at++) {
            if (peek() == '#') at = std::min(text.find('\n', at), text.size());
            if (!more() || !(peek() == ' ' || peek() == '\t' || (lines && (peek() == '\n' || peek() == '\r')))) return;
        }
    }
    std::string name() {
        const size_t begin = at;
        while (isalnum((unsigned char)peek()) || peek() == '-' || peek() == '_') at++;
        return std::string(text.substr(begin, at - begin));
    }
    int number_of(const std::string& word) {
        const auto known = rules.find(word);
        return known != rules.end() ? known->second : rules[word] = grammar.new_rule(word);
    }

    // inside: within ( ), where a line may end anywhere. Elsewhere it may before and after |.
    Pattern choice(bool inside) {
        if (++depth > MAX_DEPTH) fail("nested too deep");
        Pattern all{Pattern::CHOICE};
        for (;;) {
            skip(true);
            all.parts.push_back(sequence(inside));
            const size_t end = at;
            skip(true);
            if (accept('|')) continue;
            if (!inside) at = end;
            break;
        }
        depth--;
        return all.parts.size() == 1 ? std::move(all.parts[0]) : std::move(all);
    }
    Pattern sequence(bool inside) {
        Pattern all;
        for (;; ) {
            skip(inside);
            if (!more() || strchr("|)\n", peek())) return all;
            if (peek() == '\r') { at++; continue; }
            Pattern one = atom();
            int least, most;
            if (quantity(&least, &most)) {
                one = Pattern::repeat(std::move(one), least, most);
                if (quantity(&least, &most)) fail("a repetition of a repetition");
            }
            all.parts.push_back(std::move(one));
        }
    }
    bool quantity(int* least, int* most) {
        *least = peek() == '+', *most = peek() == '?' ? 1 : -1;
        if (accept('*') || accept('+') || accept('?')) return true;
        if (!accept('{')) return false;
        bounds(least, most);
        return true;
    }
    void bounds(int* least, int* most) {
        auto bound = [&] {
            skip(false);
            const int n = number();
            skip(false);
            return n;
        };
        *least = *most = bound();
        if (accept(',')) {
            skip(false);
            *most = peek() == '}' ? -1 : bound();
        }
        if (!accept('}')) fail("expected }");
        if (*most >= 0 && *most < *least) fail("a repetition whose bounds are the wrong way round");
    }

    Pattern atom() {
        if (accept('"')) {
            Pattern word;
            while (!accept('"')) {
                const uint32_t c = code("a string without its end");
                word.parts.push_back(Pattern::character({{c, c}}));
            }
            return word;
        }
        if (accept('[')) return Pattern::character(char_class());
        if (accept('.')) return Pattern::character(complement({}));
        if (accept('(')) {
            Pattern group = choice(true);
            if (!accept(')')) fail("a ( without its )");
            return group;
        }
        const std::string word = name();
        if (word.empty()) fail("expected a string, a class, a name or (");
        Pattern call{Pattern::CALL};
        call.rule = number_of(word);
        return call;
    }
    uint32_t code(const char* missing) {
        if (!more() || peek() == '\n') fail(missing);
        const bool escaped = accept('\\');
        if (!more()) fail(missing);
        const uint32_t c = PatternReader::code();
        if (!escaped) return c;
        switch (c) {
        case 'n': return '\n';
        case 'r': return '\r';
        case 't': return '\t';
        case 'x': return hex(2);
        case 'u': return hex(4);
        case 'U': return hex(8);
        case '\\': case '"': case '[': case ']': case '-': case '^': case '\'': case '/': return c;
        default: fail("an unknown escape");
        }
    }
    Codes char_class() {
        const bool negated = accept('^');
        Codes all;
        while (!accept(']')) {
            const uint32_t low = code("a [ without its ]");
            uint32_t high = low;
            if (peek() == '-' && peek(1) != ']') at++, high = code("a [ without its ]");
            if (low > high) fail("a range that is none");
            all.push_back({low, high});
        }
        return negated ? complement(all) : tidy(all);
    }
};

// --------------------------------------------------------------------------------------------------------- vocabulary
// Tokens by their bytes, as a trie in depth-first order.
struct TokenTrie {
    struct Node {
        uint32_t end;   // of what is below it
        uint32_t token; // that ends here; one that there is not: none
        uint16_t depth; // bytes
        uint8_t byte;   // the last of them
    };
    std::vector<Node> nodes;
    size_t longest = 0;

    TokenTrie(std::vector<std::pair<std::string, int>> tokens, int none) {
        std::sort(tokens.begin(), tokens.end());
        std::vector<uint32_t> path = {0};
        std::string_view before;
        nodes.push_back({0, (uint32_t)none, 0, 0});
        for (auto& [bytes, id] : tokens) {
            size_t same = 0;
            while (same < std::min(bytes.size(), before.size()) && bytes[same] == before[same]) same++;
            for (; path.size() > same + 1; path.pop_back()) nodes[path.back()].end = (uint32_t)nodes.size();
            for (size_t i = same; i < bytes.size(); i++) {
                path.push_back((uint32_t)nodes.size());
                nodes.push_back({0, (uint32_t)none, (uint16_t)(i + 1), (uint8_t)bytes[i]});
            }
            nodes[path.back()].token = (uint32_t)id;
            before = bytes;
            longest = std::max(longest, bytes.size());
        }
        for (uint32_t n : path) nodes[n].end = (uint32_t)nodes.size();
    }
};

// Most tokens are words: short, of whole characters, of which none has a meaning in JSON. Where a grammar takes any
// text, these need no walk.
struct Vocabulary {
    static constexpr size_t SHORT = 16, LONG = 1024; // bytes of a token; longer ones are never allowed
    enum Kind { WORDS, OTHERS, LONG_ONES, KINDS };

    const Tokenizer& tokenizer;
    std::vector<TokenTrie> tries{}; // by kind
    std::array<std::vector<uint32_t>, SHORT + 1> words_of{}; // of at most n characters: a bit a token

    explicit Vocabulary(const Tokenizer& t) : tokenizer(t) {
        std::array<std::vector<std::pair<std::string, int>>, KINDS> tokens;
        for (auto& bits : words_of) bits.resize(words());
        for (int id = 0; id < tokenizer.size(); id++) {
            std::string own = bytes(id);
            const bool plain = own.find(ADDED_TOKEN, own[0] == ADDED_TOKEN && own.size() > 1) == std::string::npos;
            if (!plain || own.size() > LONG) continue;
            const size_t characters = own.size() <= SHORT ? characters_of(own) : 0;
            for (size_t n = characters; characters && n <= SHORT; n++) words_of[n][(size_t)id / 32] |= 1u << id % 32;
            tokens[own.size() > SHORT ? LONG_ONES : characters ? WORDS : OTHERS].push_back({std::move(own), id});
        }
        for (auto& some : tokens) tries.emplace_back(std::move(some), (int)words() * 32);
    }
    size_t words() const { return ((size_t)tokenizer.size() + 31) / 32; }

    // What a grammar sees of a token.
    std::string bytes(int id) const {
        const std::string_view own = tokenizer.bytes(id);
        return tokenizer.id(own) == id ? ADDED_TOKEN + std::string(own) : std::string(own);
    }
    static bool in_words(uint8_t byte) { return byte >= ' ' && byte != '"' && byte != '\\' && byte != 0x7F; }

  private:
    static size_t characters_of(std::string_view s) { // 0: it is no word
        size_t n = 0;
        for (size_t i = 0; i < s.size(); n++) {
            const int k = utf8_length(s.data() + i, s.size() - i);
            if (k <= 0 || !in_words((uint8_t)s[i])) return 0;
            i += (size_t)k;
        }
        return n;
    }
};

// ---------------------------------------------------------------------------------------------------------- automaton
// Sorted lists of numbers, each kept once and known by its own number.
struct Lists {
    std::vector<uint64_t> items{};
    std::vector<size_t> begins{0};
    std::unordered_multimap<uint64_t, int> by_hash{};

    size_t size() const { return begins.size() - 1; }
    const uint64_t* begin(int i) const { return items.data() + begins[(size_t)i]; }
    const uint64_t* end(int i) const { return items.data() + begins[(size_t)i + 1]; }
    int intern(const std::vector<uint64_t>& list) {
        uint64_t hash = list.size();
        for (uint64_t x : list) hash = (hash ^ x) * 0x9E3779B97F4A7C15, hash ^= hash >> 32;
        for (auto [it, last] = by_hash.equal_range(hash); it != last; ++it)
            if (std::equal(list.begin(), list.end(), begin(it->second), end(it->second))) return it->second;
        items.insert(items.end(), list.begin(), list.end());
        begins.push_back(items.size());
        by_hash.emplace(hash, (int)size() - 1);
        return (int)size() - 1;
    }
    size_t bytes() const { return items.size() * sizeof(uint64_t) + size() * 64; }
};

// A set of numbers that is emptied often.
struct Seen {
    struct Slot { uint64_t x; uint32_t round; };
    std::vector<Slot> slots = std::vector<Slot>(64, Slot{0, 0});
    size_t used = 0;
    uint32_t round = 1;

    void clear() { round++, used = 0; }
    bool insert(uint64_t x) { // false: it was there
        if (2 * used >= slots.size()) grow();
        size_t i = (x * 0x9E3779B97F4A7C15 >> 32) & (slots.size() - 1);
        for (; slots[i].round == round; i = (i + 1) & (slots.size() - 1))
            if (slots[i].x == x) return false;
        slots[i] = {x, round}, used++;
        return true;
    }

  private:
    void grow() {
        std::vector<Slot> old(2 * slots.size(), Slot{0, 0});
        old.swap(slots);
        used = 0;
        for (const Slot& s : old)
            if (s.round == round) insert(s.x);
    }
};

struct Matcher;

// The states of a grammar, made as they are needed. Shared by all answers that keep the same form: whoever uses it
// holds `mutex`; a Matcher does.
struct Automaton {
    static constexpr size_t MAX_THREADS = 4096;    // of a state
    static constexpr size_t MAX_CALLERS = 1 << 16; // that nodes take over from others, when a state is made
    static constexpr size_t MAX_WORK = 100'000;    // of a mask: threads of the states that it looks at or makes,
    static constexpr size_t MAX_STEPS = 2'000'000; // ... and nodes of the tries
    static constexpr size_t ALL_MEMORY = 512 << 20, LEAST_MEMORY = 1 << 20, MOST_MEMORY = 16 << 20;
    static constexpr size_t MAX_MASKS = 128;       // kept; beside them what they are made of, by its bytes
    using Mask = std::vector<uint32_t>;            // a bit for each token, and a word for TokenTrie's `none`

    const Grammar grammar;
    const std::shared_ptr<const Vocabulary> vocabulary;
    std::mutex mutex;
    std::set<Matcher*> matchers;
    static inline std::atomic<size_t> alive{0}, grammar_bytes{0}; // of all automata

    Automaton(Grammar&& g, std::shared_ptr<const Vocabulary> v)
        : grammar(std::move(g)), vocabulary(std::move(v)),
          like{grammar.alike(Vocabulary::SHORT), grammar.alike(vocabulary->tries[Vocabulary::LONG_ONES].longest)} {
        alive++, grammar_bytes += own_bytes();
        forget();
    }
    Automaton(const Automaton&) = delete;
    ~Automaton() { alive--, grammar_bytes -= own_bytes(); }

    int start() {
        std::vector<uint64_t> todo = {thread((uint32_t)grammar.rules[0].start, BOTTOM)};
        // The first rule ends before its first byte if it is nullable; nobody called it who could pass it by.
        return settle(todo, true);
    }
    // Where a byte leads from a state. 0: nowhere.
    int next(int state, uint8_t byte) {
        const size_t e = (size_t)state * (size_t)grammar.classes + grammar.byte_class[byte];
        return edges[e].to >= 0 ? edges[e].to : make(state, byte);
    }
    bool ends(int state) const { // the text may end here
        const uint64_t *first = states.begin(state), *last = states.end(state);
        return std::binary_search(first, last, thread(MARK, BOTTOM));
    }
    // The byte that must come next. -1: several may, or the text may end.
    int only_byte(int state) const {
        ByteSet all;
        for (const uint64_t* t = states.begin(state); t != states.end(state); t++) {
            if (position_of(*t) == MARK) return -1;
            all |= grammar.sets[grammar.at[position_of(*t)].y];
            if (all.count() > 1) return -1;
        }
        for (int byte = 0; byte < 256; byte++)
            if (all[(size_t)byte]) return byte;
        return -1;
    }
    bool goes_on(int state) const { return states.end(state) - states.begin(state) > ends(state); }

    // The tokens that may come next. States with the same ones mostly share a mask.
    std::shared_ptr<const Mask> mask(int state) {
        auto known = mask_of.find(state);
        if (known == mask_of.end()) {
            if (masks.size() >= MAX_MASKS) masks.clear(), mask_of.clear();
            for (size_t k = 0; k < Vocabulary::KINDS; k++)
                if (local_bytes[k] > limit() / 8) locals[k].clear(), local_bytes[k] = 0;
            known = mask_of.emplace(state, make_mask(state)).first;
        }
        return known->second;
    }

    size_t bytes() const {
        return states.bytes() + nodes.bytes() + edges.size() * sizeof(Edge) + mask_of.size() * 48 +
               masks.size() * vocabulary->words() * 4 + local_bytes[0] + local_bytes[1] + local_bytes[2];
    }
    size_t limit() const { return std::clamp(ALL_MEMORY / alive, LEAST_MEMORY, MOST_MEMORY); }
    void collect();
    size_t state_count() const { return states.size(); }
    size_t parts_made = 0; // of masks, by a walk over a trie each

  private:
    // A thread: a position, and the node with the threads that it returns to. The nodes below FIRST have none: at
    // BOTTOM the text ends; the UNKNOWN ones stand for any node, in states that masks are made from. Whoever returns
    // there becomes a thread at MARK.
    static constexpr int BOTTOM = 0, UNKNOWN = 1, FIRST = 32;
    static constexpr uint32_t MARK = UINT32_MAX, LAST_CALL = 1u << 31; // (LAST_CALL and a rule: see drain)
    static constexpr uint64_t thread(uint32_t position, int node) { return (uint64_t)position << 32 | (uint32_t)node; }
    static uint32_t position_of(uint64_t t) { return (uint32_t)(t >> 32); }
    static int node_of(uint64_t t) { return (int)(uint32_t)t; }

    struct Edge {
        int to = -1;       // not made yet
        uint32_t walk = 0; // the last that has passed it
        uint32_t work = 0; // that making it took, in threads of a state
    };
    // What is common to all states with threads at the same positions: tokens that stay within the rules they began
    // in, and where in the trie one returns from which node.
    struct Local {
        const std::vector<uint32_t>* words = nullptr;      // these tokens, of the vocabulary's; or null,
        std::vector<std::pair<uint32_t, uint32_t>> bits{}; // ... and words of a mask, where they have bits
        std::vector<std::pair<uint32_t, int>> returns{};
    };

    const std::array<std::vector<uint32_t>, 2> like; // positions with the same masks of short tokens, and of all
    Lists states, nodes; // nodes are counted from FIRST
    std::vector<Edge> edges; // (states, classes)
    std::vector<uint8_t> returning; // (states) it has threads at MARK
    std::array<std::unordered_map<int, std::shared_ptr<Local>>, Vocabulary::KINDS> locals; // by form,
    std::array<size_t, Vocabulary::KINDS> local_bytes{};
    std::map<std::vector<int>, std::shared_ptr<Mask>> masks; // by what they depend on
    std::unordered_map<int, std::shared_ptr<Mask>> mask_of;  // by state
    uint32_t walks = 0;
    size_t work = 0, steps = 0;

    // Scratch of settle().
    std::vector<uint64_t> found;
    Seen seen;
    size_t room = 0, spent = 0; // for callers; positions and callers that were looked at
    std::map<int, std::vector<uint64_t>> calls; // by the rule's rank: who calls
    std::vector<int> by_rank;

    size_t own_bytes() const {
        return grammar.at.size() * (sizeof(Grammar::Position) + 8) + grammar.sets.size() * 96 + (1 << 16);
    }

    void forget() {
        states = nodes = Lists();
        edges.clear(), returning.clear(), locals = {}, local_bytes = {}, masks.clear(), mask_of.clear();
        intern_state({}); // 0
        by_rank.resize(grammar.rules.size());
        for (size_t r = 0; r < grammar.rules.size(); r++) by_rank[(size_t)grammar.rules[r].rank] = (int)r;
    }
    int intern_state(const std::vector<uint64_t>& threads) {
        const int s = states.intern(threads);
        if (returning.size() < states.size()) {
            edges.resize(states.size() * (size_t)grammar.classes);
            returning.push_back(!threads.empty() && position_of(threads.back()) == MARK);
        }
        return s;
    }

    int make(int state, uint8_t byte) {
        std::vector<uint64_t> todo;
        for (const uint64_t* t = states.begin(state); t != states.end(state); t++) {
            if (position_of(*t) == MARK) continue;
            const Grammar::Position& p = grammar.at[position_of(*t)];
            if (grammar.sets[p.y][byte]) todo.push_back(thread(p.x, node_of(*t)));
        }
        const int to = settle(todo, true);
        Edge& edge = edges[(size_t)state * (size_t)grammar.classes + grammar.byte_class[byte]];
        edge.work = (uint32_t)(spent / 16); // (most take no more than their threads)
        return edge.to = to;
    }

    // The state of these threads once all that takes no byte is done. First what has got a byte: it may return from
    // its rule. Then the rules that are called, callers before those whom they call: so all who call a rule are known
    // when its node is made. A rule that ends before its first byte has been passed by already.
    int settle(std::vector<uint64_t>& todo, bool may_return) {
        seen.clear(), found.clear(), calls.clear(), room = MAX_CALLERS, spent = 0;
        drain(todo, may_return);
        while (!calls.empty()) {
            const int rule = by_rank[(size_t)calls.begin()->first];
            std::vector<uint64_t> callers = std::move(calls.begin()->second);
            calls.erase(calls.begin());
            std::sort(callers.begin(), callers.end());
            callers.erase(std::unique(callers.begin(), callers.end()), callers.end());
            spent += callers.size();
            const int node = FIRST + nodes.intern(callers);
            todo = {thread((uint32_t)grammar.rules[(size_t)rule].start, node)};
            drain(todo, false);
        }
        spent += seen.used;
        std::sort(found.begin(), found.end());
        return intern_state(found);
    }
    void drain(std::vector<uint64_t>& todo, bool may_return) {
        while (!todo.empty() && found.size() < MAX_THREADS) {
            const uint64_t t = todo.back();
            todo.pop_back();
            if (!seen.insert(t)) continue;
            const Grammar::Position& p = grammar.at[position_of(t)];
            const int node = node_of(t);
            switch (p.op) {
            case Grammar::NEVER: break;
            case Grammar::BYTES: found.push_back(t); break;
            case Grammar::SPLIT:
                todo.push_back(thread(p.x, node)), todo.push_back(thread(p.y, node));
                break;
            case Grammar::CALL: {
                const Grammar::Rule& rule = grammar.rules[p.y];
                std::vector<uint64_t>& callers = calls[rule.rank];
                if (p.x != Grammar::FINAL || node < FIRST) callers.push_back(thread(p.x, node));
                else if (seen.insert(thread(LAST_CALL | p.y, node))) { // it returns to where its rule would
                    const uint64_t *first = nodes.begin(node - FIRST), *last = nodes.end(node - FIRST);
                    const size_t some = std::min((size_t)(last - first), std::max<size_t>(room, 1));
                    callers.insert(callers.end(), first, first + some);
                    room -= std::min(room, some);
                }
                if (rule.nullable) todo.push_back(thread(p.x, node));
                break;
            }
            case Grammar::END:
                if (!may_return) break;
                if (node < FIRST) found.push_back(thread(MARK, node));
                else todo.insert(todo.end(), nodes.begin(node - FIRST), nodes.end(node - FIRST));
            }
        }
    }

    // ---- Masks
    std::shared_ptr<Mask> make_mask(int state) {
        std::array<int, Vocabulary::KINDS> forms;
        std::array<std::vector<int>, Vocabulary::KINDS> known; // the node that each UNKNOWN stands for
        std::vector<int> key;
        for (size_t k = 0; k < Vocabulary::KINDS; k++) {
            forms[k] = form_of(state, like[k == Vocabulary::LONG_ONES], known[k]);
            key.push_back(forms[k]);
            key.insert(key.end(), known[k].begin(), known[k].end());
            key.push_back(-1);
        }
        std::shared_ptr<Mask>& mask = masks[key];
        if (mask) return mask;
        mask = std::make_shared<Mask>(vocabulary->words() + 1);
        for (size_t k = 0; k < Vocabulary::KINDS; k++) {
            std::shared_ptr<Local>& local = locals[k][forms[k]];
            if (!local) {
                local = std::make_shared<Local>(), parts_made++;
                make_local(*local, (Vocabulary::Kind)k, forms[k]);
                local_bytes[k] += 8 * (local->bits.size() + local->returns.size()) + 128;
            }
            for (size_t w = 0; local->words && w < vocabulary->words(); w++) (*mask)[w] |= (*local->words)[w];
            for (auto [w, bits] : local->bits) (*mask)[w] |= bits;
            walks++, work = steps = 0;
            std::vector<int> after; // where one is who has returned from the node
            for (int node : known[k]) after.push_back(returned(node));
            for (auto [n, i] : local->returns)
                walk(vocabulary->tries[k], n, after[(size_t)i], *mask, [](uint32_t, int) {});
        }
        return mask;
    }

    // The state with UNKNOWN nodes, in the order of their first use. If there are too many: the state itself.
    int form_of(int state, const std::vector<uint32_t>& like, std::vector<int>& known) {
        std::vector<uint64_t> threads;
        for (const uint64_t* t = states.begin(state); t != states.end(state); t++)
            if (position_of(*t) != MARK) threads.push_back(thread(like[position_of(*t)], node_of(*t)));
        std::sort(threads.begin(), threads.end());
        for (uint64_t& t : threads) {
            size_t i = 0;
            while (i < known.size() && known[i] != node_of(t)) i++;
            if (i == known.size()) known.push_back(node_of(t));
            if (known.size() > FIRST - UNKNOWN) return known.clear(), state;
            t = thread(position_of(t), UNKNOWN + (int)i);
        }
        std::sort(threads.begin(), threads.end());
        threads.erase(std::unique(threads.begin(), threads.end()), threads.end());
        return intern_state(threads);
    }
    int returned(int node) {
        if (node < FIRST) return 0;
        std::vector<uint64_t> todo(nodes.begin(node - FIRST), nodes.end(node - FIRST));
        return settle(todo, true);
    }

    // First the tokens of one byte, which there are for every byte, so that something is allowed in any case.
    void make_local(Local& local, Vocabulary::Kind kind, int form) {
        const TokenTrie& trie = vocabulary->tries[kind];
        if (kind == Vocabulary::WORDS)
            if (const int n = free_characters(form); n >= 0) {
                local.words = &vocabulary->words_of[(size_t)n];
                return;
            }
        Mask bits(vocabulary->words() + 1);
        for (uint32_t n = 1; n < trie.nodes.size(); n = trie.nodes[n].end)
            if (trie.nodes[n].token < none() && next(form, trie.nodes[n].byte)) allow(bits, trie.nodes[n].token);
        walks++, work = steps = 0;
        walk(trie, 0, form, bits, [&](uint32_t n, int state) {
            for (const uint64_t* t = states.end(state); t > states.begin(state) && position_of(t[-1]) == MARK; t--)
                if (node_of(t[-1]) != BOTTOM) local.returns.push_back({n, node_of(t[-1]) - UNKNOWN});
        });
        auto settled = [&](std::pair<uint32_t, int> r) { // all tokens below are allowed already
            for (uint32_t n = r.first + 1; n < trie.nodes[r.first].end; n++)
                if (const uint32_t t = trie.nodes[n].token; t < none() && !(bits[t / 32] >> t % 32 & 1))
                    return false;
            return true;
        };
        local.returns.erase(std::remove_if(local.returns.begin(), local.returns.end(), settled), local.returns.end());
        for (uint32_t w = 0; w < bits.size(); w++)
            if (bits[w]) local.bits.push_back({w, bits[w]});
        local.bits.shrink_to_fit();
    }
    uint32_t none() const { return (uint32_t)vocabulary->words() * 32; } // its bit is in a word of its own
    static void allow(Mask& bits, uint32_t token) { bits[token / 32] |= 1u << token % 32; }

    // If words of n characters may follow whatever they are, and no longer ones: n. (SHORT: any number.) Else -1.
    int free_characters(int state) {
        for (int n = 0; n <= (int)Vocabulary::SHORT; n++) {
            if (n == (int)Vocabulary::SHORT) return n;
            if (states.end(state) - states.begin(state) > 16) return -1; // it would take long
            bool some = false;
            const int to = after_any_character(state, &some);
            if (to == state) return (int)Vocabulary::SHORT;
            if (!some) return n > 0 ? n : -1;
            if (to == 0 || returning[(size_t)to]) return -1;
            state = to;
        }
        return -1;
    }
    // Where all characters of words lead from a state. 0: not to the same; `some`: of them lead anywhere.
    int after_any_character(int state, bool* some) {
        struct Lead { int first, last, low, high, more; }; // bounds of the second byte; how many bytes follow it
        static const Lead LEADS[] = {{0xC2, 0xDF, 0x80, 0xBF, 0}, {0xE0, 0xE0, 0xA0, 0xBF, 1},
                                     {0xE1, 0xEC, 0x80, 0xBF, 1}, {0xED, 0xED, 0x80, 0x9F, 1},
                                     {0xEE, 0xEF, 0x80, 0xBF, 1}, {0xF0, 0xF0, 0x90, 0xBF, 2},
                                     {0xF1, 0xF3, 0x80, 0xBF, 2}, {0xF4, 0xF4, 0x80, 0x8F, 2}};
        int to = -1; // not known yet
        auto meets = [&](int where) {
            if (to < 0) to = where;
            return where && to == where;
        };
        std::set<std::array<int, 4>> seen;
        std::function<bool(int, int, int, int)> follow = [&](int from, int low, int high, int more) {
            if (!seen.insert({from, low, high, more}).second) return true;
            for (int byte = low; byte <= high; byte++) {
                const int where = next(from, (uint8_t)byte);
                if (where == 0 || !(more ? follow(where, 0x80, 0xBF, more - 1) : meets(where))) return false;
            }
            return true;
        };
        bool same = true;
        for (int byte = ' '; byte < 0x7F; byte++)
            if (Vocabulary::in_words((uint8_t)byte)) {
                const int where = next(state, (uint8_t)byte);
                *some = *some || where;
                same = meets(where) && same;
            }
        for (const Lead& l : LEADS)
            for (int lead = l.first; lead <= l.last; lead++) {
                const int where = next(state, (uint8_t)lead);
                *some = *some || where;
                same = same && where && follow(where, l.low, l.high, l.more);
            }
        return same ? to : 0;
    }

    // Allows the tokens below node n that lead somewhere from the state. How far it gets does not depend on what was
    // made before: it counts what it passes for the first time, made or not.
    template <class F> void walk(const TokenTrie& trie, uint32_t n, int state, Mask& bits, F on_return) {
        const size_t C = (size_t)grammar.classes;
        const TokenTrie::Node* const nodes = trie.nodes.data();
        const uint32_t end = nodes[n].end, depth = nodes[n].depth + 1u;
        if (state == 0) return;
        std::array<int, Vocabulary::LONG + 1> at;
        at[0] = state;
        Edge* edge = edges.data();
        for (uint32_t i = n + 1; i < end;) {
            const TokenTrie::Node node = nodes[i];
            const int from = at[node.depth - depth];
            const size_t e = (size_t)from * C + grammar.byte_class[node.byte];
            int to = edge[e].to;
            if (edge[e].walk != walks) {
                work += 1 + (size_t)(states.end(from) - states.begin(from));
                if (work > MAX_WORK) return;
                edge[e].walk = walks;
                to = next(from, node.byte);
                edge = edges.data();
                work += edge[e].work;
            }
            if (to == 0) { i = node.end; continue; }
            allow(bits, node.token);
            if (returning[(size_t)to]) on_return(i, to);
            at[node.depth - depth + 1] = to;
            i++;
            if (++steps > MAX_STEPS) return;
        }
    }
};

// One answer's place in an Automaton.
struct Matcher {
    explicit Matcher(std::shared_ptr<Automaton> a) : automaton(std::move(a)) {
        std::lock_guard lock(automaton->mutex);
        automaton->matchers.insert(this);
        state = automaton->start();
    }
    Matcher(const Matcher&) = delete;
    ~Matcher() {
        std::lock_guard lock(automaton->mutex);
        automaton->matchers.erase(this);
    }

    void begin() {
        std::lock_guard lock(automaton->mutex);
        state = automaton->start();
    }
    // False: the text has left the grammar; nothing may follow any more.
    bool advance(std::string_view bytes) {
        std::lock_guard lock(automaton->mutex);
        for (size_t i = 0; i < bytes.size() && state; i++) {
            state = automaton->next(state, (uint8_t)bytes[i]);
            if (automaton->bytes() > automaton->limit()) automaton->collect();
        }
        return state != 0;
    }
    bool advance(int id) { return advance(automaton->vocabulary->bytes(id)); }

    // The text that must come next, up to `most` bytes of it, and whether all is over then.
    std::string forced(size_t most, bool* over) const {
        {
            std::lock_guard lock(automaton->mutex);
            if (automaton->only_byte(state) < 0) return "";
        }
        Matcher ahead(automaton);
        std::lock_guard lock(automaton->mutex);
        ahead.state = state;
        std::string text;
        while (text.size() < most) {
            const int byte = automaton->only_byte(ahead.state);
            if (byte < 0 || byte == (uint8_t)ADDED_TOKEN) break;
            ahead.state = automaton->next(ahead.state, (uint8_t)byte);
            if (ahead.state == 0) break; // (its limits)
            text += (char)byte;
            if (automaton->bytes() > automaton->limit()) automaton->collect();
        }
        *over = ahead.state && !automaton->goes_on(ahead.state);
        return text;
    }

    std::shared_ptr<const Automaton::Mask> mask() {
        std::lock_guard lock(automaton->mutex);
        auto bits = automaton->mask(state);
        if (automaton->bytes() > automaton->limit()) automaton->collect(); // (a walk may make many states)
        return bits;
    }
    void mask(uint32_t* out) { // (words)
        std::copy_n(mask()->begin(), automaton->vocabulary->words(), out);
    }
    bool may_end() const {
        std::lock_guard lock(automaton->mutex);
        return automaton->ends(state);
    }
    bool must_end() const {
        std::lock_guard lock(automaton->mutex);
        return !automaton->goes_on(state);
    }

    std::shared_ptr<Automaton> automaton;
    int state; // (collect() changes it)
};

// Forgets all states and nodes but those of the answers that are under way. An answer whose own take too much room (it
// is nested hundreds of thousands deep) comes to nothing: its state becomes 0.
inline void Automaton::collect() {
    std::map<int, std::vector<uint64_t>> kept; // states and their threads
    std::vector<bool> wanted(nodes.size());
    auto want = [&](uint64_t t) {
        if (node_of(t) >= FIRST) wanted[(size_t)(node_of(t) - FIRST)] = true;
    };
    for (Matcher* m : matchers) kept[m->state].assign(states.begin(m->state), states.end(m->state));
    for (auto& [state, threads] : kept)
        for (uint64_t t : threads) want(t);
    for (size_t i = wanted.size(); i-- > 0;) // a node knows only older ones
        if (wanted[i])
            for (const uint64_t* t = nodes.begin((int)i); t != nodes.end((int)i); t++) want(*t);
    const Lists old = std::move(nodes);
    forget();
    std::vector<int> moved(wanted.size());
    auto renamed = [&](const uint64_t* first, const uint64_t* last) {
        std::vector<uint64_t> list(first, last);
        for (uint64_t& t : list)
            if (node_of(t) >= FIRST) t = thread(position_of(t), FIRST + moved[(size_t)(node_of(t) - FIRST)]);
        std::sort(list.begin(), list.end());
        return list;
    };
    for (size_t i = 0; i < wanted.size(); i++)
        if (wanted[i]) moved[i] = nodes.intern(renamed(old.begin((int)i), old.end((int)i)));
    std::map<int, int> now;
    for (auto& [state, threads] : kept)
        now[state] = bytes() > limit() / 2 ? 0 : intern_state(renamed(threads.data(), threads.data() + threads.size()));
    for (Matcher* m : matchers) m->state = now[m->state];
}
