// form/regex.cpp: the reader of regular expressions, see regex.h.
#include "form/regex.h"
#include "form/pattern_reader.h"
#include <cctype>

namespace {

// A class of characters: those in it in JavaScript, Python and RE2, and those in it in only some of them. A negated
// class contains in all three the characters that the class contains in none.
struct Class {
    Codes sure, possible;

    static Class of(Codes c) { return {c, c}; }
    Class negated() const { return {complement(possible), complement(sure)}; }
};

// Unicode 15: the first of each ten decimal digits, which are \d in Python.
constexpr uint32_t DIGITS[] = {
    0x660, 0x6F0, 0x7C0, 0x966, 0x9E6, 0xA66, 0xAE6, 0xB66, 0xBE6, 0xC66, 0xCE6, 0xD66, 0xDE6, 0xE50, 0xED0, 0xF20,
    0x1040, 0x1090, 0x17E0, 0x1810, 0x1946, 0x19D0, 0x1A80, 0x1A90, 0x1B50, 0x1BB0, 0x1C40, 0x1C50, 0xA620, 0xA8D0,
    0xA900, 0xA9D0, 0xA9F0, 0xAA50, 0xABF0, 0xFF10, 0x104A0, 0x10D30, 0x11066, 0x110F0, 0x11136, 0x111D0, 0x112F0, 0x11450,
    0x114D0, 0x11650, 0x116C0, 0x11730, 0x118E0, 0x11950, 0x11C50, 0x11D50, 0x11DA0, 0x11F50, 0x16A60, 0x16AC0,
    0x16B50, 0x1D7CE, 0x1D7D8, 0x1D7E2, 0x1D7EC, 0x1D7F6, 0x1E140, 0x1E2F0, 0x1E4F0, 0x1E950, 0x1FBF0};

// Reads the common subset of JavaScript, Python and RE2: characters, classes, groups, | * + ? {m,n}, and ^ and $ at
// the two ends. Lookaround, backreferences and possessive quantifiers are refused by name.
struct RegexReader : PatternReader {
    RegexReader(Grammar& g, std::string_view pattern) : PatternReader(g, pattern, "regex") {}

    Pattern whole() { return read(false); }
    Pattern within() { return read(true); }

    static Class digits() {
        Class c = Class::of({{'0', '9'}});
        for (uint32_t first : DIGITS) c.possible.push_back({first, first + 9});
        return c;
    }
    // \d \w \s and, by a capital letter, what each leaves out. Made once: a pattern may name one 500,000 times.
    static const Class& named(char letter) {
        static const Class DIGIT = digits(), WORD = word(), SPACE = space(), NOT_DIGIT = DIGIT.negated(),
                           NOT_WORD = WORD.negated(), NOT_SPACE = SPACE.negated();
        switch (letter) {
        case 'd': return DIGIT;
        case 'D': return NOT_DIGIT;
        case 'w': return WORD;
        case 'W': return NOT_WORD;
        case 's': return SPACE;
        default: return NOT_SPACE;
        }
    }
    // Beyond ASCII, Python's \w covers letters, marks and numbers of all scripts: anything but these blocks of signs.
    static Class word() {
        static const Codes SIGNS = {{0, '/'}, {':', '@'}, {'[', '^'}, {'`', '`'}, {'{', 0xA9}, {0x2010, 0x2029},
            {0x2030, 0x203E}, {0x2041, 0x2053}, {0x2190, 0x2426}, {0x2500, 0x2775}, {0x2794, 0x2B73}, {0x3001, 0x3003},
            {0x3008, 0x3020}, {0xFF01, 0xFF0F}, {0xFF1A, 0xFF20}, {0xFF3B, 0xFF3E}, {0xFF5B, 0xFF65},
            {0x1F300, 0x1F6D7}, {0x1F900, 0x1FA53}};
        return {{{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}}, complement(SIGNS)};
    }
    static Class space() {
        return {{{9, 10}, {12, 13}, {' ', ' '}},
                {{9, 13}, {0x1C, ' '}, {0x85, 0x85}, {0xA0, 0xA0}, {0x1680, 0x1680}, {0x180E, 0x180E}, {0x2000, 0x200A},
                 {0x2028, 0x2029}, {0x202F, 0x202F}, {0x205F, 0x205F}, {0x3000, 0x3000}, {0xFEFF, 0xFEFF}}};
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
        accept('?'); // lazy: matches the same texts
        return true;
    }

    Pattern atom() {
        spend_part();
        switch (peek()) {
        case '(': return group();
        case '[': return Pattern::character(char_class().sure);
        case '.': at++; return Pattern::character(complement({{10, 10}, {13, 13}, {0x2028, 0x2029}}));
        case '^': at++; return {Pattern::BEGIN};
        case '$': at++; return {Pattern::END};
        case '*': case '+': case '?': fail("nothing to repeat");
        case '{': fail("a { that repeats nothing; write \\{");
        case '\\': return Pattern::character(escape(false).sure);
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

    Class escape(bool in_class) {
        at++;
        if (!more()) fail("a \\ at the end");
        const uint32_t c = code();
        auto one = [](uint32_t c) { return Class::of({{c, c}}); };
        switch (c) {
        case 'd': case 'D': case 'w': case 'W': case 's': case 'S': grammar.spend(8, 1024); return named((char)c);
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
    Class char_class() {
        at++;
        const bool negated = accept('^');
        Class all;
        while (peek() != ']') {
            if (!more()) fail("a [ without its ]");
            grammar.spend(1, 64);
            if (peek() == '[' && peek(1) == ':') fail("[:classes:] are not supported");
            Class low = class_atom();
            if (peek() == '-' && peek(1) != ']' && at + 1 < text.size()) {
                at++;
                const Class high = class_atom();
                const Codes &a = low.sure, &b = high.sure;
                const bool single = a.size() == 1 && b.size() == 1 && a[0].first == a[0].second &&
                                    b[0].first == b[0].second;
                if (!single || a[0].first > b[0].first) fail("a range that is none");
                low = Class::of({{a[0].first, b[0].first}});
            }
            all.sure.insert(all.sure.end(), low.sure.begin(), low.sure.end());
            all.possible.insert(all.possible.end(), low.possible.begin(), low.possible.end());
        }
        at++;
        return negated ? all.negated() : Class{tidy(all.sure), tidy(all.possible)};
    }
    Class class_atom() {
        if (peek() == '\\') return escape(true);
        const uint32_t c = code();
        return Class::of({{c, c}});
    }
};
} // namespace

Pattern regex_whole(Grammar& g, std::string_view regex) { return RegexReader(g, regex).whole(); }
Pattern regex_within(Grammar& g, std::string_view regex) { return RegexReader(g, regex).within(); }
Grammar grammar_of_regex(std::string_view regex) {
    return grammar_of([&](Grammar& g, int end) { return g.emit(regex_whole(g, regex), end, RAW); });
}
