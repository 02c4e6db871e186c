// sj.h: small JSON. One header, stb style: read a text, walk it, write it back as Python would.
//
//     sj::Doc doc;
//     std::string fault = sj::parse(doc, text);            // "" or "line 3, byte 57: ..."
//     for (auto [name, tensor] : doc.root().members())     // file order, duplicate keys included
//         for (sj::Value n : tensor["shape"].items()) ...
//
// Reading is RFC 8259 and nothing more: no comments, no trailing commas, no NaN, no byte order mark. Strings
// must be valid UTF-8, and \ud800 without its other half is refused: it names no character, and no UTF-8 text
// can hold it (Python accepts it, and fails later, when the text is written).
//
// Parsing checks everything, converts nothing and is linear: a node is 16 bytes and knows where its text
// lies; numbers and strings are decoded when they are asked for. Containers nest 256 deep at most, so that
// recursion is bounded. The worst text, "[],[],...", takes 11 bytes of nodes a byte: a hostile header of
// 100 MB costs seconds and 1.1 GB.
//
// A Value is two pointers, to be passed by value. It stays good as long as the text and the Doc's nodes do (a
// Doc may be moved). What is not there is a Missing value, which again may be asked for anything:
// v["a"][3]["b"].str() needs no checks in between. A step of an iteration is O(1); v["key"] and v[3] walk the
// members one by one, so loops use members() and items(). Of duplicate keys v["key"] sees the last, as
// Python does.
//
// Text that a language model wrote as JSON is often invalid: repair() (below) makes it valid and says how.
//
// Numbers go through strtod and snprintf, since g++ 9 and 10 have no from_chars for double. Both obey
// LC_NUMERIC: a program that calls setlocale() must leave that category at "C".
#pragma once
#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace sj {

// ----------------------------------------------------------------------------------------------------- nodes
// In the order of the text, a key before its value. A scalar is one node. A container is an opening node, the
// nodes of what it holds, and a closing node, so that a walk steps over a whole child at once.
struct Node {
    uint64_t begin; // first byte in the text    closing node: how many items or members there are
    uint64_t end;   // the byte after the last   opening node: how many nodes further its closing node is
};

enum Type : uint8_t { Missing, Null, False, True, Number, String, Array, Object };

template <class T> struct Items;        // what items() and members() return: something for a range-for
struct Member;

struct Value {
    const Node* node = nullptr;
    const char* text = nullptr;         // the whole text; the node's offsets count from here

    Type type() const {                 // a checked value's first byte tells what it is
        if (!node) return Missing;
        switch (text[node->begin]) {
        case '{': return Object;
        case '[': return Array;
        case '"': return String;
        case 't': return True;
        case 'f': return False;
        case 'n': return Null;
        default:  return Number;
        }
    }
    bool is(Type t) const { return type() == t; }
    bool is_bool() const { return is(True) || is(False); }
    bool is_container() const { return is(Array) || is(Object); }
    explicit operator bool() const { return node; }             // is it there at all?

    Items<Value> items() const;         // of an array; nothing for any other type
    Items<Member> members() const;      // of an object; nothing for any other type
    Value operator[](std::string_view key) const;
    Value operator[](size_t i) const;
    size_t size() const { return is_container() ? closing()->begin : 0; }

    std::string_view raw() const {      // its text as it stands in the source
        if (!node) return {};
        uint64_t end = is_container() ? closing()->end : node->end;
        return {text + node->begin, size_t(end - node->begin)};
    }
    std::string str(std::string_view otherwise = "") const;     // decoded UTF-8; may hold \0
    double number(double otherwise = 0) const {
        return is(Number) ? std::strtod(std::string(raw()).c_str(), nullptr) : otherwise;
    }
    bool integer(int64_t* out) const;   // true if it is -?digits (12, not 12.0) and fits
    bool boolean(bool otherwise = false) const { return is_bool() ? is(True) : otherwise; }

    const Node* closing() const { return node + node->end; }                    // containers only
    const Node* after() const { return (is_container() ? closing() : node) + 1; }
};

struct Member {
    std::string key;    // decoded
    Value value;
};

template <class T> struct Items {
    struct Iterator {
        const Node* node;
        const char* text;
        T operator*() const {
            Value v{node, text};
            if constexpr (std::is_same_v<T, Member>) return {v.str(), {node + 1, text}};
            else return v;
        }
        Iterator& operator++() {
            if (std::is_same_v<T, Member>) ++node;      // the key
            node = Value{node, text}.after();
            return *this;
        }
        bool operator!=(const Iterator& other) const { return node != other.node; }
    };
    Iterator first, last;
    Iterator begin() const { return first; }
    Iterator end() const { return last; }
};

inline Items<Value> Value::items() const {
    if (!is(Array)) return {};
    return {{node + 1, text}, {closing(), text}};
}

inline Items<Member> Value::members() const {
    if (!is(Object)) return {};
    return {{node + 1, text}, {closing(), text}};
}

inline Value Value::operator[](std::string_view key) const {
    Value found;
    for (auto [name, value] : members())
        if (name == key) found = value;
    return found;
}

inline Value Value::operator[](size_t i) const {
    if (i < size())
        for (Value item : items())
            if (i-- == 0) return item;
    return {};
}

inline bool Value::integer(int64_t* out) const {
    std::string digits(raw());
    if (!is(Number) || digits.find_first_of(".eE") != std::string::npos) return false;
    errno = 0;
    long long n = std::strtoll(digits.c_str(), nullptr, 10);
    if (errno == ERANGE) return false;
    *out = n;
    return true;
}

inline void append_utf8(std::string& out, uint32_t c) {
    if (c < 0x80) {
        out += char(c);
        return;
    }
    int n = c < 0x800 ? 1 : c < 0x10000 ? 2 : 3;        // bytes of six bits after the first
    out += char(0xF0u << (3 - n) | c >> 6 * n);         // 110xxxxx, 1110xxxx, 11110xxx
    while (n--) out += char(0x80 | (c >> 6 * n & 63));  // 10xxxxxx
}

inline int hex_digit(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
}

inline std::string Value::str(std::string_view otherwise) const {
    if (!is(String)) return std::string(otherwise);
    std::string_view s = raw().substr(1, raw().size() - 2);
    std::string out;
    auto hex4 = [&](size_t at) {                        // parse() made sure that they are there
        uint32_t c = 0;
        for (char digit : s.substr(at, 4)) c = c << 4 | uint32_t(hex_digit(digit));
        return c;
    };
    for (size_t i = 0; i < s.size();) {
        size_t backslash = std::min(s.find('\\', i), s.size());
        out.append(s, i, backslash - i);
        if (backslash == s.size()) break;
        char escape = s[backslash + 1];
        i = backslash + 2;
        switch (escape) {
        case 'b': out += '\b'; break;
        case 'f': out += '\f'; break;
        case 'n': out += '\n'; break;
        case 'r': out += '\r'; break;
        case 't': out += '\t'; break;
        case 'u': {
            uint32_t c = hex4(i);
            i += 4;
            if (c >= 0xD800 && c < 0xE000) {            // a surrogate pair: \ud83d\ude00
                c = 0x10000 + ((c - 0xD800) << 10) + (hex4(i + 2) - 0xDC00);
                i += 6;
            }
            append_utf8(out, c);
            break;
        }
        default: out += escape;                         // " \ and /
        }
    }
    return out;
}

// --------------------------------------------------------------------------------------------------- parsing
struct Doc {
    std::vector<Node> nodes;
    const char* text = nullptr;         // not owned: it must outlive the Doc and every Value
    Value root() const { return nodes.empty() ? Value{} : Value{nodes.data(), text}; }
};

constexpr int MAX_DEPTH = 256;

// Bytes of the UTF-8 character that s starts with; 0 if there is none (Unicode, table 3-7: no overlong forms,
// no surrogates, nothing above U+10FFFF).
inline size_t utf8_length(std::string_view s) {
    auto byte = [&](size_t i) { return i < s.size() ? uint8_t(s[i]) : 0; };
    uint8_t c = byte(0), low = 0x80, high = 0xBF;       // the bounds of the second byte
    size_t n = c < 0x80 ? 1 : c < 0xC2 ? 0 : c < 0xE0 ? 2 : c < 0xF0 ? 3 : c < 0xF5 ? 4 : 0;
    if (c == 0xE0) low = 0xA0;
    if (c == 0xED) high = 0x9F;
    if (c == 0xF0) low = 0x90;
    if (c == 0xF4) high = 0x8F;
    for (size_t i = 1; i < n; i++, low = 0x80, high = 0xBF)
        if (byte(i) < low || byte(i) > high) return 0;
    return s.empty() ? 0 : n;
}

// Recursive descent. Every function leaves `at` behind what it read, or sets `fault` and returns false with
// `at` on the byte that is wrong.
struct Parser {
    std::string_view text;
    std::vector<Node>& nodes;
    size_t at = 0;
    int depth = 0;
    const char* fault = nullptr;

    bool fail(const char* what) { fault = what; return false; }
    char peek() const { return at < text.size() ? text[at] : '\0'; }    // a \0 in the text is an error anyway
    bool accept(char c) { return peek() == c ? (at++, true) : false; }
    void skip_space() { while (peek() == ' ' || peek() == '\n' || peek() == '\r' || peek() == '\t') at++; }

    bool value() {
        size_t begin = at;
        bool good = false;
        switch (peek()) {
        case '{': return container('}');
        case '[': return container(']');
        case '"': good = string(); break;
        case 't': good = word("true"); break;
        case 'f': good = word("false"); break;
        case 'n': good = word("null"); break;
        default:  good = number();
        }
        if (good) nodes.push_back({begin, at});
        return good;
    }

    bool container(char close) {
        if (++depth > MAX_DEPTH) return fail("nested deeper than 256");
        size_t opening = nodes.size();
        uint64_t count = 0;
        nodes.push_back({at++, 0});
        skip_space();
        if (!accept(close)) {
            do {
                skip_space();
                if (close == '}') {
                    if (peek() != '"') return fail("expected a key in quotes");
                    if (!value()) return false;
                    skip_space();
                    if (!accept(':')) return fail("expected ':' after a key");
                    skip_space();
                }
                if (!value()) return false;
                count++;
                skip_space();
            } while (accept(','));
            if (!accept(close)) return fail(close == '}' ? "expected ',' or '}'" : "expected ',' or ']'");
        }
        nodes[opening].end = nodes.size() - opening;
        nodes.push_back({count, at});
        depth--;
        return true;
    }

    bool word(std::string_view expected) {
        if (text.substr(at, expected.size()) != expected) return fail("expected a value");
        at += expected.size();
        return true;
    }

    bool digits() {
        if (peek() < '0' || peek() > '9') return fail("expected a digit");
        while (peek() >= '0' && peek() <= '9') at++;
        return true;
    }

    bool number() {
        if (peek() != '-' && (peek() < '0' || peek() > '9')) return fail("expected a value");
        accept('-');
        if (accept('0')) {
            if (peek() >= '0' && peek() <= '9') return fail("a number may not begin with 0");
        } else if (!digits()) {
            return false;
        }
        if (accept('.') && !digits()) return false;
        if (accept('e') || accept('E')) {
            if (!accept('+')) accept('-');
            return digits();
        }
        return true;
    }

    bool string() {
        at++;
        for (;;) {
            if (at == text.size()) return fail("a string without its end");
            uint8_t c = uint8_t(text[at]);
            if (c == '"') return at++, true;
            if (c == '\\') {
                if (!escape()) return false;
            } else if (c < 0x20) {
                return fail("a control character in a string");
            } else if (c < 0x80) {
                at++;
            } else if (size_t n = utf8_length(text.substr(at))) {
                at += n;
            } else {
                return fail("invalid UTF-8");
            }
        }
    }

    bool escape() {
        size_t begin = at++;
        if (!accept('u')) {
            if (peek() == '\0' || !std::strchr("\"\\/bfnrt", peek())) return fail("an unknown escape");
            at++;
            return true;
        }
        uint32_t c, low;
        if (!hex4(&c)) return false;
        if (c >= 0xD800 && c < 0xE000) {
            bool pair = c < 0xDC00 && accept('\\') && accept('u');
            if (pair && !hex4(&low)) return false;
            if (!pair || low < 0xDC00 || low >= 0xE000) {
                at = begin;
                return fail("half a surrogate pair");
            }
        }
        return true;
    }

    bool hex4(uint32_t* out) {
        *out = 0;
        for (int i = 0; i < 4; i++, at++) {
            if (hex_digit(peek()) < 0) return fail("expected four hex digits");
            *out = *out << 4 | uint32_t(hex_digit(peek()));
        }
        return true;
    }
};

// Parses one JSON text. Returns "", or what is wrong and where; doc.root() is then Missing.
inline std::string parse(Doc& doc, std::string_view text) {
    doc.nodes.clear();
    doc.text = text.data();
    Parser p{text, doc.nodes};
    p.skip_space();
    if (p.value()) {
        p.skip_space();
        if (p.at == text.size()) return "";
        p.fail("text after the end");
    }
    doc.nodes.clear();
    size_t line = 1 + size_t(std::count(text.begin(), text.begin() + p.at, '\n'));
    return "line " + std::to_string(line) + ", byte " + std::to_string(p.at) + ": " +
           (p.at == text.size() ? "the text ends too early" : p.fault);
}

// -------------------------------------------------------------------------------------------------- repairing
// JSON as language models write it, made JSON. What comes out is an array of the lists and objects that stand in the
// text, whatever is around them. What is valid is copied as it is; of the rest these are repaired: an end that is
// missing (a value that was begun goes, what holds it is closed), commas and closing brackets too many or too few,
// quotes that are missing, single or curly, or stand in a string without \, line breaks in strings, unknown escapes,
// Python's words, comments, invalid UTF-8. A list or object that is still none is passed over, and what it holds is
// looked at by itself.
struct Repaired {
    std::string text;                   // a JSON array
    std::vector<const char*> repairs;   // each kind once, in words
    bool cut = false;                   // the text ended inside a value
};

struct Mender {
    enum Result { FAILED, DROPPED, CUT, WHOLE }; // DROPPED: the text ended before anything that can be kept
    std::string_view text;
    size_t at;
    Repaired& done;                     // of which `text` is not used
    std::string out = "";
    int depth = 0;

    bool ended() const { return at >= text.size(); }
    char peek(size_t ahead = 0) const { return at + ahead < text.size() ? text[at + ahead] : '\0'; }
    Result note(const char* what, Result result = WHOLE) {
        auto& all = done.repairs;
        if (std::find(all.begin(), all.end(), what) == all.end()) all.push_back(what);
        return result;
    }
    static bool is_space(char c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; }
    static bool is_name(char c) {
        return (c >= '0' && c <= '9') || ((c | 32) >= 'a' && (c | 32) <= 'z') || c == '_' || c == '-' || c == '$';
    }

    void skip() { // blanks and comments
        for (;; note("a comment")) {
            while (is_space(peek())) at++;
            if (peek() != '/' || (peek(1) != '/' && peek(1) != '*')) return;
            const std::string_view close = peek(1) == '/' ? "\n" : "*/";
            at = std::min(text.find(close, at + 2), text.size() - close.size()) + close.size();
        }
    }

    // Bytes of the quote at a place: " and ' 1, a curly one 3, none 0.
    size_t quote_at(size_t i) const {
        if (i >= text.size()) return 0;
        if (text[i] == '"' || text[i] == '\'') return 1;
        const std::string_view s = text.substr(i, 3);
        return s == "\xE2\x80\x9C" || s == "\xE2\x80\x9D" ? 3 : 0;
    }
    // Does a key stand at a place, with its colon, or (may_end) as much of it as there is of the text?
    bool key_at(size_t i, bool may_end) const {
        const size_t quote = quote_at(i), limit = std::min(text.size(), i + 200);
        if (quote)
            for (i += quote; i < limit && !quote_at(i) && text[i] != '\n';) i++;
        else
            while (i < limit && is_name(text[i])) i++;
        i += quote_at(i);
        while (i < limit && is_space(text[i])) i++;
        return i == text.size() ? may_end : i < limit && text[i] == ':';
    }
    // Does a string end at the quote before a place? By what follows.
    bool ends_before(size_t i, bool in_object) const {
        const size_t from = i;
        auto blanks = [&] { while (i < text.size() && is_space(text[i])) i++; };
        auto starts = [&] { return quote_at(i) || std::strchr("{[0123456789-tfnTFN", text[i]); };
        auto next = [&] { return in_object ? key_at(i, true) : starts(); };
        auto closes = [&] { return i == text.size() || text[i] == '}' || text[i] == ']'; };
        blanks();
        if (closes()) return true;
        if (text[i] == ',') return i++, blanks(), closes() || next();
        const bool line = text.substr(from, i - from).find('\n') != text.npos;
        return line ? next() : in_object && quote_at(i) && key_at(i, false);
    }

    Result value(bool in_object) {
        if (ended()) return DROPPED;
        if (peek() == '{' || peek() == '[') return container();
        if (quote_at(at)) return string(in_object, false);
        return is_name(peek()) ? word() : FAILED;
    }

    // A number, true, false, null; or Python's and JavaScript's words for these.
    Result word() {
        const size_t begin = at;
        while (is_name(peek()) || peek() == '.' || peek() == '+') at++;
        if (ended()) return DROPPED;    // more may have followed
        const std::string_view s = text.substr(begin, at - begin);
        std::vector<Node> nodes;
        Parser number{s, nodes};
        if (s == "true" || s == "false" || s == "null" || (number.number() && number.at == s.size()))
            return out += s, WHOLE;
        if (s == "True" || s == "False") return out += s == "True" ? "true" : "false", note("a word of Python");
        if (s != "None" && s != "NaN" && s != "Infinity" && s != "-Infinity" && s != "undefined") return FAILED;
        return out += "null", note("a word that is not JSON's");
    }

    Result name() { // of a member
        if (quote_at(at)) return string(true, true);
        const size_t begin = at;
        while (is_name(peek())) at++;
        if (at == begin) return FAILED;
        out += '"', out += text.substr(begin, at - begin), out += '"';
        return note("quotes");
    }

    Result string(bool in_object, bool key) {
        const size_t quote = quote_at(at);
        const char mark = quote == 1 ? text[at] : '\0';     // \0: curly quotes
        if (mark != '"') note("quotes");
        at += quote;
        out += '"';
        while (!ended()) {
            const size_t n = quote_at(at);
            const bool closing = n && (mark ? text[at] == mark : text[at] != '\'');
            if (closing && (key || ends_before(at + n, in_object))) return at += n, out += '"', WHOLE;
            if (closing && n == 1 && mark != '\'') {
                out += "\\\"", at++;
                note("quotes");
            } else if (!character()) {
                break;
            }
        }
        return at = text.size(), DROPPED;
    }

    bool character() {                  // false: the text ends in it
        const char c = peek();
        if (c == '\\') return escape();
        if (c == '"') return out += "\\\"", at++, true;     // between other quotes
        if (uint8_t(c) < 0x20) {
            char hex[8];
            snprintf(hex, sizeof hex, "\\u%04x", unsigned(uint8_t(c)));
            out += c == '\n' ? "\\n" : c == '\t' ? "\\t" : c == '\r' ? "\\r" : hex;
            note("a line break or another control character in a string");
            return at++, true;
        }
        const size_t n = utf8_length(text.substr(at));
        if (n) out += text.substr(at, n);
        else out += "\xEF\xBF\xBD", note("invalid UTF-8");
        return at += std::max<size_t>(n, 1), true;
    }

    bool escape() {
        std::vector<Node> nodes;
        Parser p{text, nodes, at};
        if (p.escape()) return out += text.substr(at, p.at - at), at = p.at, true;
        if (at + 1 >= text.size()) return false;
        note("an escape");
        bool four = peek(1) == 'u';
        for (size_t i = 2; four && i < 6; i++) four = hex_digit(peek(i)) >= 0;
        if (four) return out += "\\ufffd", at += 6, true;   // half a surrogate pair
        if (peek(1) == '\'' || peek(1) == '\n') return at++, true;
        return out += "\\\\", at++, true;                   // a backslash, as in \alpha
    }

    Result member() {
        if (const Result r = name(); r != WHOLE) return r;
        skip();
        if (ended()) return DROPPED;
        if (peek() != ':') return FAILED;
        at++, out += ": ";
        skip();
        return value(true);
    }

    Result container() {
        const bool object = peek() == '{';
        const char close = object ? '}' : ']', other = object ? ']' : '}';
        if (++depth > MAX_DEPTH) return FAILED;
        out += text[at++];
        Result result = WHOLE;
        for (bool first = true; result == WHOLE; first = false) {
            size_t commas = 0;
            for (skip(); peek() == ','; skip()) at++, commas++;
            const bool closed = peek() == close;
            if (ended() || closed || (peek() == other && depth > 1)) {
                result = !ended() ? WHOLE : first ? DROPPED : CUT;
                if (commas && !ended()) note("a comma");
                if (!ended() && !closed) note("a bracket");
                at += closed;
                break;
            }
            if (commas != !first) note("a comma");
            const size_t before = out.size();
            if (!first) out += ", ";
            result = object ? member() : value(false);
            if (result == FAILED) return FAILED;
            if (result != DROPPED) continue;
            out.resize(before);
            if (!first) result = CUT;
        }
        depth--;
        out += close;
        return result;
    }
};

inline Repaired repair(std::string_view text) {
    Repaired done;
    std::vector<Node> nodes;
    std::string& all = done.text = "[";
    bool around = false;
    size_t from = 0;                    // behind the last value
    auto look = [&](size_t to) { around |= text.substr(from, to - from).find_first_not_of(" \n\r\t") < to - from; };
    for (size_t at = 0; (at = text.find_first_of("[{", at)) != text.npos;) {
        nodes.clear();
        Parser strict{text, nodes, at};
        Repaired tried = {"", done.repairs};
        Mender mender{text, at, tried};
        const bool valid = strict.value();
        const Mender::Result result = valid ? Mender::WHOLE : mender.container();
        if (result == Mender::FAILED) {
            at++;
            continue;
        }
        look(at);
        from = valid ? strict.at : mender.at;
        done.cut |= result != Mender::WHOLE;
        if (result != Mender::DROPPED) {
            all += all.size() > 1 ? ", " : "";
            all += valid ? text.substr(at, strict.at - at) : std::string_view(mender.out);
            done.repairs = tried.repairs;
        }
        at = from;
    }
    look(text.size());
    if (around) done.repairs.push_back("text around it");
    if (done.cut) done.repairs.push_back("its end");
    all += ']';
    return done;
}

// --------------------------------------------------------------------------------------------------- writing
// Byte for byte as Python's json.dumps(x, ensure_ascii=False).

// Appends a string in quotes. utf8 must be valid UTF-8: what is not is copied as it is.
inline void quote(std::string& out, std::string_view utf8) {
    out += '"';
    for (char c : utf8) {
        switch (c) {
        case '"':  out += "\\\""; break;
        case '\\': out += "\\\\"; break;
        case '\b': out += "\\b"; break;
        case '\f': out += "\\f"; break;
        case '\n': out += "\\n"; break;
        case '\r': out += "\\r"; break;
        case '\t': out += "\\t"; break;
        default:
            if (uint8_t(c) < 0x20) {
                char hex[8];
                snprintf(hex, sizeof hex, "\\u%04x", unsigned(c));
                out += hex;
            } else {
                out += c;
            }
        }
    }
    out += '"';
}

// Python's repr of a float: the fewest digits that read back as x, an exponent below 1e-4 and from 1e16 on.
inline std::string repr(double x) {
    if (std::isnan(x)) return "NaN";
    if (std::isinf(x)) return x < 0 ? "-Infinity" : "Infinity";
    char s[32];
    for (int digits = 1; digits <= 17; digits++) {      // 17 are always enough
        snprintf(s, sizeof s, "%.*e", digits - 1, x);   // -d.ddde-dd
        if (std::strtod(s, nullptr) == x) break;
        // Below a power of two doubles lie half as far apart as above it: the nearest decimal may miss it
        // from below where the next one reads back. (After a 9 that has fewer digits and was tried before.)
        char& last = std::strchr(s, 'e')[-1];
        if (last++ < '9' && std::strtod(s, nullptr) == x) break;
    }
    std::string all(s);
    size_t e = all.find('e');
    int exponent = std::atoi(s + e + 1);
    if (exponent < -4 || exponent >= 16) return all;
    std::string sign = std::signbit(x) ? "-" : "", digits;
    for (char c : all.substr(0, e))
        if (c >= '0' && c <= '9') digits += c;
    if (exponent < 0) return sign + "0." + std::string(size_t(-exponent - 1), '0') + digits;
    size_t whole = size_t(exponent) + 1;                // digits before the point
    if (digits.size() <= whole) digits.resize(whole + 1, '0');
    return sign + digits.insert(whole, ".");
}

inline void dump(std::string& out, Value v) {
    bool first = true;
    auto separate = [&] { out += first ? "" : ", "; first = false; };
    switch (v.type()) {
    case Array:
        out += '[';
        for (Value item : v.items()) separate(), dump(out, item);
        out += ']';
        break;
    case Object: {      // of duplicate keys: the place of the first, the value of the last
        std::map<std::string, Value> last;
        for (auto [key, value] : v.members()) last[key] = value;
        out += '{';
        for (auto [key, unused] : v.members()) {
            auto entry = last.extract(key);
            if (!entry) continue;
            separate(), quote(out, key), out += ": ", dump(out, entry.mapped());
        }
        out += '}';
        break;
    }
    case String:
        quote(out, v.str());
        break;
    case Number:        // integers keep their digits, however many; floats go through double
        if (v.raw() == "-0") out += '0';
        else if (v.raw().find_first_of(".eE") == std::string_view::npos) out += v.raw();
        else out += repr(v.number());
        break;
    default:
        out += v.raw();
    }
}

// json.dumps(json.loads(text), ensure_ascii=False). As there, 1e999 comes out as Infinity, which is not JSON.
inline std::string dump(Value v) {
    std::string out;
    dump(out, v);
    return out;
}

// Writes JSON without counting commas:
//     sj::Writer w;
//     w.object().field("name", name).field("loss", 0.5).key("ids").array();
//     for (int id : ids) w.value(id);
//     w.end().end();       // w.text: {"name": "...", "loss": 0.5, "ids": [1, 2]}
struct Writer {
    std::string text;
    std::string open;           // the closing brackets still to come
    bool comma = false;

    Writer& object() { separate(); text += '{', open += '}', comma = false; return *this; }
    Writer& array() { separate(); text += '[', open += ']', comma = false; return *this; }
    Writer& end() { text += open.back(), open.pop_back(), comma = true; return *this; }
    Writer& key(std::string_view s) { separate(); quote(text, s), text += ": ", comma = false; return *this; }
    template <class T> Writer& field(std::string_view name, const T& x) { return key(name).value(x); }

    // a string, bool, integer, Value, nullptr or float (not finite: null, since JSON has no word for it)
    template <class T> Writer& value(const T& x) {
        separate();
        if constexpr (std::is_same_v<T, Value>) dump(text, x);
        else if constexpr (std::is_same_v<T, bool>) text += x ? "true" : "false";
        else if constexpr (std::is_same_v<T, std::nullptr_t>) text += "null";
        else if constexpr (std::is_integral_v<T>) text += std::to_string(x);
        else if constexpr (std::is_floating_point_v<T>) text += std::isfinite(x) ? repr(x) : "null";
        else quote(text, x);
        return *this;
    }
    void separate() { text += comma ? ", " : "", comma = true; }
};

} // namespace sj
