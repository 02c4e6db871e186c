// form/regex.cpp: the reader of regular expressions, see regex.h.
#include "form/regex.h"
#include "form/pattern_reader.h"
#include <cctype>

namespace {

// Reads the part that JavaScript, Python and RE2 agree on: characters, classes, groups, | * + ? {m,n}, and ^ and $ at
// the two ends. What looks around, back or is greedy in its own way is refused by name.
struct RegexReader : PatternReader {
    RegexReader(Grammar& g, std::string_view pattern) : PatternReader(g, pattern, "regex") {}

    Pattern whole() { return read(false); }
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
        do spend_part(), all.parts.push_back(sequence());
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
        spend_part();
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
            grammar.spend(1, 64);
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
} // namespace

Pattern regex_whole(Grammar& g, std::string_view regex) { return RegexReader(g, regex).whole(); }
Pattern regex_within(Grammar& g, std::string_view regex) { return RegexReader(g, regex).within(); }
Grammar grammar_of_regex(std::string_view regex) {
    return grammar_of([&](Grammar& g, int end) { return g.emit(regex_whole(g, regex), end, RAW); });
}
