// form/gbnf.cpp: the reader of GBNF, see gbnf.h.
#include "form/gbnf.h"
#include "form/pattern_reader.h"
#include <algorithm>
#include <cctype>
#include <cstring>
#include <map>

namespace {

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

    // inside: within ( ), where a line may end anywhere. Elsewhere a line may end only before and after |.
    Pattern choice(bool inside) {
        if (++depth > MAX_DEPTH) fail("nested too deep");
        Pattern all{Pattern::CHOICE};
        for (;;) {
            skip(true);
            spend_part();
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
        spend_part();
        if (accept('"')) {
            Pattern word;
            while (!accept('"')) {
                spend_part();
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
            grammar.spend(1, 64);
            const uint32_t low = code("a [ without its ]");
            uint32_t high = low;
            if (peek() == '-' && peek(1) != ']') at++, high = code("a [ without its ]");
            if (low > high) fail("a range that is none");
            all.push_back({low, high});
        }
        return negated ? complement(all) : tidy(all);
    }
};
} // namespace

Grammar grammar_of_gbnf(std::string_view text) {
    Grammar g;
    GbnfReader(g, text).read();
    g.finish();
    return g;
}
