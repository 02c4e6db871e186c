// datagen.cpp: from a textbook to a clean dataset. Plain C++; libcurl only for `generate`.
//
//   book.md > chunk > chunks > prompt > requests > generate > responses > collect > qa > filter > clean
//   clean > split > train, test > pack > train.bin, test.bin            (stats and unpack look into any of them)
//
// Every step reads and writes JSONL, a row at a time, and is a pure function of its files: run it again and the same
// bytes come out. Output goes to stdout, or with -o to a file that appears when it is complete; a step that is
// stopped leaves nothing behind, except `generate`, whose answers cost money: they go into a journal at once.
// What is not passed on is counted by rule on stderr and stands, with rule and reason, in INPUT.dropped.
//
// Limits, patterns, terms and prompts are data: see data/datagen: limits.txt, the other lists, prompts/. A limit in
// this file protects the program, not the dataset: rows up to 64 MB, replies up to 32 MB, 2^32 rows a file.
//
// Contents: 1 rows in, rows out   2 characters and words   3 chunk   4 prompt   5 generate   6 collect
//           7 conversations   8 ROUGE-L and MinHash   9 filter   10 split   11 pack, unpack, stats   12 main
#include "base/options.h"
#include "model/chat_template.h"
#include "book/chunks.h"
#include "model/dataset.h"
#include "book/score.h"
#include <array>
#include <chrono>
#include <csignal>
#include <memory>
#include <set>
#include <sys/file.h>
#include <sys/wait.h>
#include <unordered_map>
#include <unordered_set>
#ifdef HAVE_CURL
#include <curl/curl.h>
#endif

// ============================================================================================ 1 rows in, rows out

using Strings = std::vector<std::string>;

struct Interrupted {}; // thrown where it is safe to stop; main returns 130
static void stop_if_interrupted() { if (interrupted) throw Interrupted(); }

static std::string hex(uint64_t x) { return format("%016llx", (unsigned long long)x); }

// A JSON text without its line ends, which may stand between its values only.
static std::string one_line(std::string_view json) {
    std::string s(json);
    std::replace_if(s.begin(), s.end(), [](char c) { return c == '\n' || c == '\r'; }, ' ');
    return s;
}

static void say(const std::string& line) { fprintf(stderr, "%s\n", line.c_str()); }

// A line on stderr that is written over once a second; on anything but a terminal a new one every ten.
struct Progress {
    const bool terminal = isatty(2);
    const double start = seconds();
    double told = start;

    ~Progress() { if (terminal && told > start) fputc('\n', stderr); }
    void show(const char* what, size_t rows, double share) {
        stop_if_interrupted();
        const double now = seconds(), past = now - start;
        if (now - told < (terminal ? 1 : 10)) return;
        told = now;
        fprintf(stderr, "%s%s: %zu rows, %.0f rows/s, %.0f%%, %.0f s left   %s", terminal ? "\r" : "", what, rows,
                (double)rows / past, 100 * share, share > 0 ? past / share - past : 0, terminal ? "" : "\n");
    }
};

// Where the bytes go: a file that appears by commit(), or stdout.
struct Output {
    std::unique_ptr<OutputFile> named;
    explicit Output(const std::string& path) { if (path != "-") named = std::make_unique<OutputFile>(path); }
    void line(std::string_view text) {
        FILE* file = named ? named->file : stdout;
        if (fwrite(text.data(), 1, text.size(), file) != text.size() || fputc('\n', file) == EOF)
            DIE("%s: %s", named ? named->path.c_str() : "standard output", strerror(errno));
    }
    void commit() {
        if (named) named->commit();
        else if (fflush(stdout) != 0) DIE("standard output: %s", strerror(errno));
    }
};

// The rows of a file, one after another: JSONL, or one JSON array, which its first character tells. Blank lines and
// a byte order mark are passed over. A row that is no JSON is not the end: its `fault` says what is wrong.
struct Reader {
    static constexpr size_t LONGEST = 64 << 20;
    std::string path;
    size_t number = 0;      // of the row: its line, or its place in the array
    uint64_t offset = 0;    // of its text in the file
    std::string_view text;  // valid until next()
    std::string fault;
    sj::Doc doc;

    explicit Reader(const std::string& p) : path(p == "-" ? "standard input" : p) {
        file = p == "-" ? stdin : fopen(p.c_str(), "rb");
        struct stat st;
        if (!file || fstat(fileno(file), &st) != 0) DIE("%s: %s", path.c_str(), strerror(errno));
        if (S_ISDIR(st.st_mode)) DIE("%s: is a directory", path.c_str());
        regular = S_ISREG(st.st_mode);
        size = regular ? (uint64_t)st.st_size : 0;
        if (has(2) && !memcmp(&buffer[at], "\xEF\xBB\xBF", 3)) at += 3;
        size_t first = 0;
        while (has(first) && is_blank(buffer[at + first])) first++;
        array = has(first) && buffer[at + first] == '[';
        if (array) at += first + 1;
    }
    Reader(const Reader&) = delete;
    ~Reader() { if (file && file != stdin) fclose(file); }

    // The next row's text, not parsed. False at the end.
    bool next_text() {
        while (array ? find_item() : find_line()) {
            if (!fault.empty() || !std::all_of(text.begin(), text.end(), is_blank)) return true;
        }
        return false;
    }
    bool next() {
        doc.nodes.clear();
        if (!next_text()) return false;
        if (fault.empty()) fault = sj::parse(doc, text);
        if (size_t at = fault.find("byte "); at != fault.npos) fault.erase(0, at); // each row is a text by itself
        return true;
    }
    sj::Value row() const { return doc.root(); }
    std::string where() const { return format("%s: %s %zu", path.c_str(), array ? "item" : "line", number); }
    // The row, where a bad one ends the program.
    sj::Value need() const {
        if (!fault.empty()) DIE("%s: %s", where().c_str(), fault.c_str());
        if (!row().is(sj::Object)) DIE("%s: not an object", where().c_str());
        return row();
    }
    double share() const { return size ? (double)(base + at) / (double)size : 0; }
    bool seekable() const { return regular && file != stdin; }
    // A row that was there before, by its offset and length.
    struct Place { uint64_t offset; size_t length; };
    struct Old {
        std::string text;
        sj::Doc doc;
        sj::Value row() const { return doc.root(); }
    };
    Place place() const { return {offset, text.size()}; }
    std::unique_ptr<Old> again(Place at) const {
        auto old = std::make_unique<Old>();
        old->text.resize(at.length);
        if (pread(fileno(file), old->text.data(), at.length, (off_t)at.offset) != (ssize_t)at.length)
            DIE("%s: changed while it was read", path.c_str());
        sj::parse(old->doc, old->text);
        return old;
    }

  private:
    FILE* file = nullptr;
    uint64_t size = 0, base = 0; // of the file (0: not known); file offset of buffer[0]
    std::string buffer;
    size_t at = 0;
    bool regular = false, array = false, closed = false; // closed: its ] was read

    static bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\n'; }
    // Is there a byte at buffer[at + n]? Reads on if need be.
    bool has(size_t n) {
        while (buffer.size() - at <= n) {
            if (at > buffer.size() / 2) buffer.erase(0, at), base += at, at = 0;
            const size_t old = buffer.size(), step = 1 << 20;
            buffer.resize(old + step);
            buffer.resize(old + fread(&buffer[old], 1, step, file));
            if (ferror(file)) DIE("%s: %s", path.c_str(), strerror(errno));
            if (buffer.size() == old) return false;
        }
        return true;
    }
    bool found(size_t begin, size_t length) {
        number++;
        offset = base + begin;
        text = std::string_view(buffer).substr(begin, length);
        return true;
    }
    // What is too long is thrown away as it comes.
    void forget(size_t& n) { fault = format("longer than %zu MB", LONGEST >> 20), at += n, n = 0; }

    bool find_line() {
        fault.clear();
        size_t n = 0;
        while (has(n)) {
            const char* newline = (const char*)memchr(&buffer[at + n], '\n', buffer.size() - at - n);
            n = newline ? (size_t)(newline - &buffer[at]) : buffer.size() - at;
            if (n > LONGEST) forget(n);
            if (newline) break;
        }
        if (!has(0)) return fault.empty() ? false : found(at, 0);
        const size_t newline = has(n); // first: it may move the buffer
        at += n + newline;
        return found(at - n - newline, n);
    }
    bool find_item() {
        fault.clear();
        while (closed && has(0))
            if (!is_blank(buffer[at++])) DIE("%s: text after the array", path.c_str());
        if (closed) return false;
        size_t n = 0;
        int depth = 0;
        bool string = false;
        for (; has(n); n++) {
            const char c = buffer[at + n];
            if (string) {
                if (c == '\\') n += has(n + 1);
                else string = c != '"';
            } else if (c == '"') string = true;
            else if (c == '[' || c == '{') depth++;
            else if (depth == 0 && (c == ',' || c == ']')) break;
            else if (c == ']' || c == '}') depth--;
            if (n > LONGEST) forget(n);
        }
        if (!has(n)) DIE("%s: the array has no end", path.c_str());
        closed = buffer[at + n] == ']';
        at += n + 1;
        return found(at - n - 1, n);
    }
};

// Rows that are not passed on: counted by rule in the order the rules were named, kept with their rule in a file.
struct Report {
    struct Rule {
        std::string name;
        size_t dropped = 0;
        double seconds = 0;     // spent on it
        std::string first = {}; // why it dropped its first row
    };
    std::vector<Rule> rules;
    size_t kept = 0;
    Output side;
    const std::string path;

    Report(const std::string& side_path, const Strings& names) : side(side_path), path(side_path) {
        for (auto& name : names) rules.push_back({name});
    }
    void drop(const std::string& rule, const std::string& why, const Reader& in) {
        for (auto& r : rules)
            if (r.name == rule && r.dropped++ == 0) r.first = why;
        sj::Writer w;
        w.object().field("rule", rule).field("why", why).field("line", in.number);
        if (in.row()) w.key("row").value(in.row());
        else {
            std::string text;
            utf8_repair(text, in.text.substr(0, 4096), true);
            w.field("text", text);
        }
        side.line(w.end().text);
    }
    size_t dropped() const {
        size_t sum = 0;
        for (auto& r : rules) sum += r.dropped;
        return sum;
    }
    // advice: what to do about a rule that drops more than half, with its name where %s is; null: that is no matter.
    void finish(const char* unit, const char* advice = nullptr) {
        side.commit();
        say(format("%zu %s kept, %zu dropped%s", kept, unit, dropped(), dropped() ? (" into " + path).c_str() : ""));
        for (auto& r : rules)
            if (r.seconds >= 0.05) say(format("  %-12s %8zu   %.1f s", r.name.c_str(), r.dropped, r.seconds));
            else if (r.dropped) say(format("  %-12s %8zu", r.name.c_str(), r.dropped));
        for (auto& r : rules)
            if (advice && 2 * r.dropped > kept + dropped()) {
                std::string what = advice;
                if (const size_t at = what.find("%s"); at != what.npos) what.replace(at, 2, r.name);
                say(format("*** The rule %s dropped %zu of %zu %s, more than half; the first: %s. %s ***",
                           r.name.c_str(), r.dropped, kept + dropped(), unit, score_excerpt(r.first, 120).c_str(),
                           what.c_str()));
            }
    }
};

// What the command line gave: files, and options by name.
struct Arguments {
    Strings files;
    std::map<std::string, std::string> given;

    bool has(const std::string& name) const { return given.count(name); }
    std::string text(const std::string& name, const std::string& otherwise = "") const {
        return has(name) ? given.at(name) : otherwise;
    }
    std::string need(const std::string& name) const {
        if (!has(name)) DIE("%s is needed", name.c_str());
        return given.at(name);
    }
    size_t number(const std::string& name, size_t otherwise, size_t low, size_t high) const {
        if (!has(name)) return otherwise;
        const std::string& s = given.at(name);
        errno = 0;
        const unsigned long long n = strtoull(s.c_str(), nullptr, 10);
        if (s.empty() || s.find_first_not_of("0123456789") != s.npos || errno || n < low || n > high)
            DIE("%s %s: expected a whole number from %zu to %zu", name.c_str(), s.c_str(), low, high);
        return (size_t)n;
    }
    std::string output() const { return text("-o", "-"); }
    std::string dropped() const {
        if (files[0] == "-" && !has("--dropped")) DIE("--dropped is needed, since standard input has no name");
        return text("--dropped", files[0] + ".dropped");
    }
    // A file of data/datagen/: of the working folder, else beside the program; or where --data says.
    std::string data(const std::string& name) const {
        if (has("--data")) return given.at("--data") + "/" + name;
        return beside("data/datagen/" + name);
    }
    std::string tokenizer() const { return text("-z", beside("tokenizer.bin")); }
    static std::string beside(const std::string& name) {
        char self[4096];
        const ssize_t n = readlink("/proc/self/exe", self, sizeof self);
        if (n <= 0 || access(name.c_str(), F_OK) == 0) return name;
        std::string there(self, (size_t)n);
        there = there.substr(0, there.rfind('/') + 1) + name;
        return access(there.c_str(), F_OK) == 0 ? there : name;
    }
};

// Calls f with the lines of a list in data/datagen/, without comments (from ';' on) and blanks around.
template <class F> static void for_each_line(const std::string& path, F f) {
    struct stat st;
    if (stat(path.c_str(), &st) == 0 && st.st_size == 0 && (S_ISREG(st.st_mode) || S_ISCHR(st.st_mode))) return;
    const MappedFile file(path);
    const std::string_view all = file.text();
    for (size_t at = 0, number = 1; at < all.size(); number++) {
        std::string_view line = all.substr(at, all.find('\n', at) - at);
        at += line.size() + 1;
        line = line.substr(0, line.find(';'));
        const size_t first = std::min(line.find_first_not_of(" \t\r"), line.size());
        line = line.substr(first, line.find_last_not_of(" \t\r") + 1 - first);
        for (size_t i = 0; i < line.size(); i++)
            if (int k = utf8_length(&line[i], line.size() - i); k > 0) i += (size_t)k - 1;
            else DIE("%s: line %zu: invalid UTF-8", path.c_str(), number);
        if (!line.empty()) f(line, number);
    }
}

// data/datagen/limits.txt: a name and a number a line.
struct Limits {
    std::string path;
    std::map<std::string, double> value;
    explicit Limits(const Arguments& a) : path(a.data("limits.txt")) {
        for_each_line(path, [&](std::string_view line, size_t number) {
            const std::string all(line), name = all.substr(0, all.find(' '));
            char* end;
            const double x = strtod(all.c_str() + name.size(), &end);
            if (*end || name.size() == all.size() || !std::isfinite(x) || x < 0)
                DIE("%s: line %zu: expected a name and a number of 0 or more", path.c_str(), number);
            value[name] = x;
        });
    }
    double operator[](const char* name) const {
        const auto found = value.find(name);
        if (found == value.end()) DIE("%s: %s is missing", path.c_str(), name);
        return found->second;
    }
    size_t count(const char* name) const { return (size_t)std::min((*this)[name], 1e12); }
};

// ======================================================================================== 2 characters and words

static uint64_t mix(uint64_t h, uint64_t x) { // a step of hashing; every bit of x reaches the upper half
    h = (h ^ x) * 0x9E3779B97F4A7C15;
    return h ^ h >> 32;
}

// The words of a text as ROUGE-L and the word rules count them: a CJK character is a word, and so is a run of other
// letters and digits, in lower case (ASCII's). f gets where it begins and ends.
template <class F> static void for_each_word(std::u32string_view s, F f) {
    for (size_t i = 0, j; i < s.size(); i = j) {
        j = i + 1;
        if (!is_cjk(s[i]) && !is_word(s[i])) continue;
        while (!is_cjk(s[i]) && j < s.size() && is_word(s[j])) j++;
        f(i, j);
    }
}
static uint64_t word_hash(std::u32string_view word) {
    uint64_t h = word.size();
    for (char32_t c : word) h = mix(h, lower(c));
    return h;
}
static std::vector<uint32_t> word_hashes(std::u32string_view s) {
    std::vector<uint32_t> out;
    for_each_word(s, [&](size_t i, size_t j) { out.push_back((uint32_t)(word_hash(s.substr(i, j - i)) >> 16)); });
    return out;
}

// Which part of the words is Chinese, Japanese or Korean; -1 if there is no word. Code does not count.
static double cjk_share(std::u32string_view s) {
    size_t all = 0, cjk = 0;
    bool code = false;
    for (size_t i = 0; i < s.size();) { // between runs of backticks, code and prose take turns
        size_t end = std::min(s.find(U'`', i), s.size());
        if (!code) for_each_word(s.substr(i, end - i), [&](size_t at, size_t) { all++, cjk += is_cjk(s[i + at]); });
        if (end < s.size()) code = !code;
        for (i = end; i < s.size() && s[i] == '`';) i++;
    }
    return all ? (double)cjk / (double)all : -1;
}

// A list of patterns, searched all at once. In a pattern ' ' is one or more blanks, '_' any number or none, '#' a
// number (3, 3.2, 3-2, 三); ASCII letters match in either case, and as whole words. A line that begins with '!' is
// an exception: where it stands, no pattern is looked for.
struct Patterns {
    std::vector<std::u32string> list;
    std::vector<bool> exception;
    std::vector<std::vector<uint32_t>> starting = std::vector<std::vector<uint32_t>>(0x10000);

    Patterns() = default;
    explicit Patterns(const std::string& path) {
        for_each_line(path, [&](std::string_view line, size_t number) {
            if (!add(line)) DIE("%s: line %zu: a pattern begins with a letter", path.c_str(), number);
        });
    }
    bool add(std::string_view line) { // false: it is no pattern
        const bool except = line[0] == '!';
        std::u32string p = decode(line.substr(except));
        for (char32_t& c : p) c = lower(c);
        if (p.empty() || p[0] == ' ' || p[0] == '_' || p[0] == '#' || p[0] > 0xFFFF) return false;
        auto& same = starting[p[0]];
        same.insert(except ? same.begin() : same.end(), (uint32_t)list.size()); // exceptions are tried first
        list.push_back(p), exception.push_back(except);
        return true;
    }
    bool empty() const { return list.empty(); }

    // The first place where one matches; "" if none does.
    std::string find(std::u32string_view s) const {
        for (size_t i = 0, skip; i < s.size(); i += skip) {
            skip = 1;
            const char32_t c = lower(s[i]);
            if (c > 0xFFFF || starting[c].empty()) continue;
            for (uint32_t p : starting[c]) {
                const size_t n = match(list[p], s, i);
                if (!n) continue;
                if (!exception[p]) {
                    std::string out;
                    for (char32_t found : s.substr(i, n)) utf8_append(out, found);
                    return out;
                }
                skip = n;
                break;
            }
        }
        return "";
    }

  private:
    static bool is_ascii_word(uint32_t c) { return is_latin(c) || is_digit(c); }
    static size_t match(std::u32string_view p, std::u32string_view s, size_t begin) {
        if (begin > 0 && is_ascii_word(p[0]) && is_ascii_word(s[begin - 1])) return 0;
        size_t at = begin;
        auto here = [&](size_t i) -> uint32_t { return i < s.size() ? s[i] : 0; };
        for (char32_t c : p) {
            const size_t before = at;
            if (c == ' ' || c == '_') {
                while (at < s.size() && is_space(s[at])) at++;
                if (c == ' ' && at == before) return 0;
            } else if (c == '#') {
                const std::u32string_view digits = U"0123456789零一二三四五六七八九十百";
                auto is_number = [&](uint32_t x) { return x && digits.find((char32_t)x) != digits.npos; };
                auto joins = [&](uint32_t x) {
                    return at > before && (x == '.' || x == '-') && is_digit(here(at + 1));
                };
                while (is_number(here(at)) || joins(here(at))) at++;
                if (at == before) return 0;
            } else if (lower(here(at)) != c) return 0;
            else at++;
        }
        return is_ascii_word(p.back()) && is_ascii_word(here(at)) ? 0 : at - begin;
    }
};

// ============================================================================================================ 3 chunk

// ---- Books in other formats, and text that was a PDF

// What a program found in PATH writes to its standard output. False if it is not installed; if it fails, what it said
// is shown. No shell sees the words.
static bool output_of(const std::string& path, const Strings& command, std::string& out) {
    using File = std::unique_ptr<FILE, int (*)(FILE*)>;
    const File text(tmpfile(), fclose), said(tmpfile(), fclose);
    int started[2]; // the child's end closes when the program runs, or brings errno
    if (!text || !said || pipe2(started, O_CLOEXEC) != 0) DIE("a temporary file: %s", strerror(errno));
    std::vector<char*> argv;
    for (auto& word : command) argv.push_back((char*)word.c_str());
    argv.push_back(nullptr);
    const pid_t child = fork();
    if (child < 0) DIE("%s: %s", argv[0], strerror(errno));
    if (child == 0) {
        signal(SIGPIPE, SIG_DFL);
        dup2(open("/dev/null", O_RDONLY), 0), dup2(fileno(text.get()), 1), dup2(fileno(said.get()), 2);
        execvp(argv[0], argv.data());
        const int fault = errno;
        _exit(write(started[1], &fault, sizeof fault) == sizeof fault ? 127 : 126);
    }
    close(started[1]);
    int fault = 0, status = 0;
    while (read(started[0], &fault, sizeof fault) < 0 && errno == EINTR) {}
    close(started[0]);
    while (waitpid(child, &status, 0) < 0 && errno == EINTR)
        if (interrupted) kill(child, SIGTERM);
    stop_if_interrupted();
    if (fault == ENOENT) return false;
    if (fault) DIE("%s: %s", argv[0], strerror(fault));
    auto all_of = [&](FILE* file) {
        struct stat st;
        if (fstat(fileno(file), &st) != 0) DIE("%s: %s", argv[0], strerror(errno));
        std::string s((size_t)st.st_size, '\0');
        if (pread(fileno(file), s.data(), s.size(), 0) != (ssize_t)s.size()) DIE("%s: %s", argv[0], strerror(errno));
        return s;
    };
    if (status != 0) {
        std::string why = all_of(said.get());
        for (char& c : why)
            if (((uint8_t)c < 0x20 && c != '\n') || c == 0x7F) c = ' ';
        fputs(why.c_str(), stderr);
        if (!why.empty() && why.back() != '\n') fputc('\n', stderr);
        if (WIFEXITED(status)) DIE("%s: %s failed: exit status %d", path.c_str(), argv[0], WEXITSTATUS(status));
        DIE("%s: %s was ended by signal %d", path.c_str(), argv[0], WTERMSIG(status));
    }
    out = all_of(text.get());
    return true;
}


// The number that a line consists of, as pages are numbered: "12", "- 12 -", "Page 12 of 300", "第 12 页"; in front
// matter "xii". -1: it is no such line.
static long page_number(std::string_view line) {
    if (line.size() > 80) return -1;
    std::string s(line);
    static const Strings frame = {" ", "\t", "-", "–", "—", "|", "*", "_", "[", "]", "(", ")", "<", ">", "!", "#"};
    for (bool more = true; more;) { // what stands around it
        more = false;
        for (auto& f : frame) {
            if (s.compare(0, f.size(), f) == 0) s.erase(0, f.size()), more = true;
            if (s.size() >= f.size() && s.compare(s.size() - f.size(), f.size(), f) == 0)
                s.erase(s.size() - f.size()), more = true;
        }
    }
    for (std::string word : {"page ", "Page ", "PAGE ", "p. ", "第 ", "第"})
        if (s.compare(0, word.size(), word) == 0) s.erase(0, s.find_first_not_of(' ', word.size()));
    const size_t digits = std::min(s.find_first_not_of("0123456789"), s.size());
    if (digits > 0 && digits <= 5) {
        const std::string rest = s.substr(digits);
        long all;
        int end = 0;
        const bool of_all = (sscanf(rest.c_str(), " of %5ld%n", &all, &end) == 1 ||
                             sscanf(rest.c_str(), " / %5ld%n", &all, &end) == 1) && (size_t)end == rest.size();
        return rest.empty() || of_all || rest == "页" || rest == " 页" ? strtol(s.c_str(), nullptr, 10) : -1;
    }
    long sum = 0, last = 0;
    for (char c : s) {
        static const std::map<char, long> ROMAN = {{'i', 1}, {'v', 5}, {'x', 10}, {'l', 50}, {'c', 100}};
        const auto letter = ROMAN.find(c);
        if (letter == ROMAN.end() || s.size() > 8) return -1;
        sum += letter->second - (last < letter->second ? 2 * last : 0), last = letter->second;
    }
    return sum > 0 ? sum : -1;
}

// Text that was a PDF, without what was only on the pages: see clean_pages and join_hyphens.
struct CleanText {
    std::string text;
    size_t breaks = 0, numbers = 0, heads = 0, hyphens = 0; // what is gone
};
using Lines = std::vector<std::string_view>;

static Lines lines_of(std::string_view text) { // without their ends
    Lines lines;
    for (size_t at = 0, end; at < text.size(); at = end + 1) {
        end = std::min(text.find('\n', at), text.size());
        lines.push_back(text.substr(at, end - at - (end > at && text[end - 1] == '\r')));
    }
    return lines;
}
static std::string_view trimmed(std::string_view s) {
    s.remove_prefix(std::min(s.find_first_not_of(" \t\r\n"), s.size()));
    return s.substr(0, s.find_last_not_of(" \t\r\n") + 1);
}

// Where a text without form feeds shows that it had pages (as Markdown of a PDF does): numbers on lines by themselves
// that count on, five and more, a page's length from each other. The lines of the longest such count.
static std::vector<size_t> page_marks(const Lines& lines) {
    std::vector<size_t> marks;
    size_t run = 0, best = 0, most = 0; // where the count at hand begins in marks, where the longest, and its length
    bool fence = false;
    long last = 0;
    for (size_t i = 0; i < lines.size(); i++) {
        fence ^= FenceMark(lines[i]).mark != 0;
        auto blank = [&](size_t line) { return line >= lines.size() || is_blank_line(lines[line]); };
        if (fence || blank(i) || !blank(i - 1) || !blank(i + 1)) continue;
        const long number = page_number(lines[i]);
        if (number < 0) continue;
        if (number <= last || number > last + 2) run = marks.size(); // (a page without number is passed over)
        marks.push_back(i), last = number;
        if (marks.size() - run > most) best = run, most = marks.size() - run;
    }
    if (most < 5) return {};
    marks = {marks.begin() + (ptrdiff_t)best, marks.begin() + (ptrdiff_t)(best + most)};
    const size_t between = (size_t)(lines[marks.back()].data() - lines[marks[0]].data()) / (most - 1);
    return between >= 200 && between <= 10000 ? marks : std::vector<size_t>();
}

// Every page's lines. Form feeds part them; where there is none, numbers do.
static std::vector<Lines> pages_of(std::string_view book) {
    std::vector<Lines> pages;
    if (book.find('\f') != book.npos) {
        for (size_t at = 0, end; at <= book.size(); at = end + 1) {
            end = std::min(book.find('\f', at), book.size());
            pages.push_back(lines_of(book.substr(at, end - at)));
        }
        return pages;
    }
    const Lines lines = lines_of(book);
    size_t from = 0;
    for (size_t mark : page_marks(lines)) {
        pages.emplace_back(lines.begin() + (ptrdiff_t)from, lines.begin() + (ptrdiff_t)mark + 1);
        from = mark + 1;
    }
    pages.emplace_back(lines.begin() + (ptrdiff_t)from, lines.end());
    return pages;
}

// Empties the lines that only say where we are: among the first and last three of a page, numbers that go with the
// pages (on two near each other), alone or with the same text beside them, and text that stands there on three pages
// near each other. (A heading "Chapter 3" is neither: its number does not go with the pages.)
static void drop_heads(std::vector<Lines>& pages, CleanText& found) {
    constexpr size_t LONGEST = 90; // bytes: what is longer is a paragraph
    struct Place { size_t page, line; };
    std::map<std::string, std::vector<Place>> places; // by what such lines have in common
    auto note = [&](char edge, std::string_view text, long number, Place at) {
        places[format("%c%ld ", edge, number) + std::string(text)].push_back(at);
    };
    for (size_t p = 0; p < pages.size(); p++) {
        std::vector<size_t> filled;
        for (size_t i = 0; i < pages[p].size(); i++)
            if (!is_blank_line(pages[p][i])) filled.push_back(i);
        for (size_t k = 0; k < filled.size(); k++) {
            const bool top = k < 3, bottom = k + 3 >= filled.size();
            if (!top && !bottom) continue;
            std::string line; // blanks as one
            for (char c : trimmed(pages[p][filled[k]]))
                if ((uint8_t)c > ' ') line += c;
                else if (line.empty() || line.back() != ' ') line += ' ';
            if (line.size() > LONGEST) continue;
            const size_t front = line.find_first_not_of("0123456789"), back = line.find_last_not_of("0123456789") + 1;
            for (char edge : {top ? 't' : 'b', top && bottom ? 'b' : ' '}) {
                if (edge == ' ') continue;
                const Place at = {p, filled[k]};
                if (const long n = page_number(line); n >= 0) note(edge, "", n - (long)p, at);
                else note(edge, line, LONG_MAX, at);
                if (front == line.npos || heading_level(line)) continue;
                auto tell = [&](const std::string& number, const std::string& rest) {
                    const bool fits = !number.empty() && number.size() < 6 && rest != trimmed(rest);
                    if (fits) note(edge, trimmed(rest), strtol(number.c_str(), nullptr, 10) - (long)p, at);
                };
                tell(line.substr(0, front), line.substr(front));
                tell(line.substr(back), line.substr(0, back));
            }
        }
    }
    std::set<std::pair<size_t, size_t>> gone;
    for (auto& [key, list] : places) {
        const std::string_view text = std::string_view(key).substr(key.find(' ') + 1);
        const auto is_letter = [](char c) { return is_latin((uint8_t)c) || (uint8_t)c >= 0x80; };
        const bool rule = text.size() >= 3 && text.find_first_not_of("-_*=") == text.npos;
        const auto letters = std::count_if(text.begin(), text.end(), is_letter);
        if (!text.empty() && !rule && letters < 3) continue; // a brace of code
        const bool numbered = key.compare(1, text.data() - key.data() - 2, std::to_string(LONG_MAX)) != 0;
        const size_t least = numbered ? 2 : 3;
        for (size_t i = 0, j; i < list.size(); i = j) {
            size_t on = 1; // so many pages, each at most two after the one before
            for (j = i + 1; j < list.size() && list[j].page <= list[j - 1].page + 2; j++)
                on += list[j].page != list[j - 1].page;
            if (on < least) continue;
            for (size_t k = i; k < j; k++) {
                if (!gone.insert({list[k].page, list[k].line}).second) continue;
                (text.empty() ? found.numbers : found.heads)++;
                pages[list[k].page][list[k].line] = "";
            }
        }
    }
}

// The pages as one text. Where a page ends within a sentence, the next one goes on with it.
static std::string join_pages(const std::vector<Lines>& pages) {
    std::string all;
    for (auto& page : pages) {
        std::string text;
        for (auto line : page) text.append(line) += '\n';
        const size_t first = text.find_first_not_of(" \t\n");
        if (first == text.npos) continue;
        text.erase(0, text.rfind('\n', first) + 1); // (npos + 1 is 0)
        text.erase(text.find_last_not_of(" \t\n") + 1);
        const char last = all.empty() ? '.' : all.back(), next = text[text.find_first_not_of(" \t")];
        const bool goes_on = (next >= 'a' && next <= 'z') || ((last & 0x80) && (next & 0x80));
        all += all.empty() ? "" : goes_on && !strchr(".!?:;", last) ? "\n" : "\n\n";
        all += text;
    }
    return all + "\n";
}

// Words that were cut at a line's end are whole again, on the first of the two lines. The hyphen stays if the book
// writes the word with it elsewhere, and never without.
struct HyphenJoiner {
    std::unordered_set<uint64_t> words, pairs; // of the text: its words, and those of two parts with a hyphen

    explicit HyphenJoiner(std::u32string_view text) {
        size_t from = 0, to = 0; // of the word before
        for_each_word(text, [&](size_t i, size_t j) {
            words.insert(word_hash(text.substr(i, j - i)));
            if (i == to + 1 && text[to] == '-') pairs.insert(pair(text.substr(from, to - from), text.substr(i, j - i)));
            from = i, to = j;
        });
    }
    static uint64_t pair(std::u32string_view a, std::u32string_view b) { return mix(word_hash(a), word_hash(b)); }
    static bool is_letter(uint32_t c) { return is_word(c) && !is_digit(c); }

    // If a line ends within a word and the next one begins with the rest of it, this rest goes to the first.
    bool join(std::string& line, std::string& next) const {
        constexpr size_t LONGEST = 80; // bytes of half a word
        const std::string_view more = trimmed(next);
        const size_t tail = next_character(line, line.size() - std::min(line.size(), LONGEST));
        std::u32string left = decode(std::string_view(line).substr(tail));
        const std::u32string right = decode(more.substr(0, next_character(more, std::min(more.size(), LONGEST))));
        const char32_t hyphen = left.empty() ? 0 : left.back();
        if (hyphen != '-' && hyphen != 0x2010 && hyphen != 0xAD) return false;
        left.pop_back();
        size_t from = left.size(), to = 0;
        while (from > 0 && is_letter(left[from - 1])) from--;
        while (to < right.size() && is_letter(right[to])) to++;
        if (from == left.size() || to == 0 || (right[0] < 0x80 && right[0] < 'a')) return false;
        left.erase(0, from);
        const std::u32string rest = right.substr(0, to);
        if (std::any_of(left.begin() + 1, left.end(), [](uint32_t c) { return c >= 'A' && c <= 'Z'; })) return false;
        const bool with = pairs.count(pair(left, rest)) && !words.count(word_hash(left + rest));
        const size_t bytes = hyphen == '-' ? 1 : hyphen == 0xAD ? 2 : 3;
        if (hyphen == 0xAD || (left.size() > 1 && !with)) line.erase(line.size() - bytes);
        const size_t end = std::min(more.find_first_of(" \t"), more.size());
        line += more.substr(0, end);
        const std::string after(trimmed(more.substr(end)));
        next = after.empty() ? "" : next.substr(0, (size_t)(more.data() - next.data())) + after;
        return true;
    }
};

static bool was_pdf(std::string_view book) {
    return book.find('\f') != book.npos || !page_marks(lines_of(book)).empty();
}

// Page breaks, page numbers, running heads and feet, hyphens at line ends and ligatures go.
static CleanText clean_pages(std::string_view book) {
    CleanText clean;
    std::vector<Lines> pages = pages_of(book);
    clean.breaks = pages.size() - 1;
    drop_heads(pages, clean);
    const std::string all = join_pages(pages);
    const HyphenJoiner joiner(decode(all));
    Strings lines;
    bool fence = false;
    for (auto view : lines_of(all)) {
        fence ^= FenceMark(view).mark != 0;
        std::string line(view);
        while (!fence && !lines.empty() && joiner.join(lines.back(), line)) clean.hyphens++;
        if (!line.empty() || view.empty()) lines.push_back(line);
    }
    static const char* const LIGATURES[] = {"ff", "fi", "fl", "ffi", "ffl", "st", "st"}; // U+FB00 .. U+FB06
    for (auto& line : lines) {
        for (size_t at = 0; (at = line.find("\xEF\xAC", at)) != line.npos; at++)
            if (const int which = (uint8_t)line[at + 2] - 0x80; which <= 6) line.replace(at, 3, LIGATURES[which]);
        clean.text += line + "\n";
    }
    return clean;
}

// A book as text: the file's own, or what pdftotext or pandoc make of it. `clean`: auto, yes or no.
static std::string read_book(const std::string& path, const std::string& clean) {
    const MappedFile file(path);
    const size_t dot = path.find('.', path.rfind('/') + 1) == path.npos ? path.size() : path.rfind('.');
    const std::string stem = path.substr(0, dot), word = path[0] == '-' ? "./" + path : path;
    std::string ending = path.substr(dot), text;
    for (char& c : ending) c = (char)lower((uint8_t)c);
    const bool pdf = ending == ".pdf" || file.text().substr(0, 5) == "%PDF-";
    const bool other = std::set<std::string>{".html", ".htm", ".xhtml", ".docx", ".epub"}.count(ending);
    if (pdf) {
        if (!output_of(path, {"pdftotext", "-layout", "-enc", "UTF-8", word, "-"}, text))
            DIE("%s: a PDF, and there is no pdftotext (install poppler-utils); elsewhere: pdftotext -layout %s %s.txt",
                path.c_str(), path.c_str(), stem.c_str());
    } else if (other) {
        if (!output_of(path, {"pandoc", "-t", "gfm", "--wrap=none", word}, text))
            DIE("%s: no Markdown, and there is no pandoc (install pandoc); elsewhere: pandoc -t gfm %s -o %s.md",
                path.c_str(), path.c_str(), stem.c_str());
    } else text = file.text();
    if (text.compare(0, 3, "\xEF\xBB\xBF") == 0) text.erase(0, 3);
    for (size_t i = 0; i < text.size();) {
        const int k = utf8_length(&text[i], text.size() - i);
        if (k <= 0) DIE("%s: no UTF-8 at byte %zu; convert it first: iconv -f GB18030 -t UTF-8", path.c_str(), i);
        i += (size_t)k;
    }
    if ((pdf || other) && text.find_first_not_of(" \t\r\n\f") == text.npos)
        DIE("%s: no text in it%s", path.c_str(), pdf ? "; pictures of pages need OCR first" : "");
    if (clean == "no" || (clean == "auto" && !pdf && !was_pdf(text))) return text;
    const CleanText c = clean_pages(text);
    say(format("%s: cleaned as text of a PDF: %zu page breaks, %zu page numbers, %zu running heads and feet, "
               "%zu hyphens at line ends (--clean no leaves all)",
               path.c_str(), c.breaks, c.numbers, c.heads, c.hyphens));
    return c.text;
}

static int run_chunk(const Arguments& a) {
    const Limits limits(a);
    ChunkSizes sizes = {a.number("--characters", limits.count("chunk.characters"), 50, 1 << 24), 0,
                        a.number("--overlap", limits.count("chunk.overlap"), 0, 1 << 20), limits.count("chunk.title")};
    std::unique_ptr<Tokenizer> tokenizer;
    if (a.has("--tokens")) {
        if (a.has("--characters")) DIE("--tokens and --characters: one of them");
        tokenizer = std::make_unique<Tokenizer>(a.tokenizer());
        sizes.most = a.number("--tokens", 0, 50, 1 << 24);
        sizes.measure = [&](std::string_view text) { return tokenizer->encode(text, false).size(); };
    }
    sizes.least = (size_t)((double)sizes.most * limits["chunk.least_share"]);
    Output out(a.output());
    std::unordered_map<uint64_t, size_t> seen; // a text that a book repeats gets -2, -3 after its id
    size_t count = 0, long_fences = 0;
    const std::string clean = a.text("--clean", "auto");
    if (clean != "auto" && clean != "yes" && clean != "no") DIE("--clean %s: expected auto, yes or no", clean.c_str());
    for (auto& path : a.files) {
        const std::string text_of_book = read_book(path, clean);
        const std::string_view book = text_of_book;
        const std::string source = path.substr(path.rfind('/') + 1);
        for (const Chunk& c : cut_chunks(book, sizes)) {
            stop_if_interrupted();
            const std::string_view text = book.substr(c.begin, c.end - c.begin);
            const uint64_t hash = fnv1a(text, fnv1a(c.chapter + "\n"));
            const size_t again = ++seen[hash];
            sj::Writer w;
            w.object().field("id", "c" + hex(hash) + (again > 1 ? format("-%zu", again) : "")).field("source", source);
            w.field("chapter", c.chapter).field("lang", cjk_share(decode(text)) >= limits["lang.zh"] ? "zh" : "en");
            w.field("characters", count_characters(text)).field("begin", c.begin).field("body", c.body);
            out.line(w.field("end", c.end).field("text", text).end().text);
            count++;
            long_fences += sizes.measure(book.substr(c.body, c.end - c.body)) > sizes.most;
        }
    }
    out.commit();
    auto s = [](size_t n) { return n == 1 ? "" : "s"; };
    say(format("%zu chunk%s from %zu file%s", count, s(count), a.files.size(), s(a.files.size())));
    if (long_fences) say(format("%zu are longer than asked, since a code fence is never cut", long_fences));
    return 0;
}

// =========================================================================================================== 4 prompt

static const char* const DIFFICULTIES[] = {"easy", "medium", "hard"};

// A chapter's name without those of its sections.
static std::string top_chapter(sj::Value row) {
    const std::string chapter = row["chapter"].str();
    return chapter.substr(0, chapter.find(" > "));
}

// A template with its {{name}}s replaced, {{name|otherwise}} by `otherwise` where there is no such value. What is put
// in is not searched again.
static std::string fill_in(std::string_view text, const std::map<std::string, std::string>& values,
                           const std::string& path) {
    std::string out;
    for (size_t at = 0;;) {
        const size_t open = text.find("{{", at), close = text.find("}}", open);
        out += text.substr(at, open - at);
        if (open == text.npos) return out;
        const std::string name(text.substr(open + 2, close - open - 2));
        const size_t bar = name.find('|');
        const auto found = values.find(name.substr(0, bar));
        if (found != values.end()) out += found->second;
        else if (bar != name.npos) out += name.substr(bar + 1);
        else DIE("%s: {{%s}} is not known", path.c_str(), name.substr(0, 40).c_str());
        at = close + 2;
    }
}

// data/datagen/prompts/, a folder for each language: what the model is told (system.md), what is asked of it for each
// difficulty, and examples of the form.
struct Templates {
    const std::string folder, examples, subject;
    std::map<std::string, std::string> files; // those that were read

    explicit Templates(const Arguments& a)
        : folder(a.data("prompts") + "/"), examples(a.text("--examples", a.data("prompts"))),
          subject(a.text("--subject")) {}

    // Writes the messages that ask for so many questions about a chunk.
    void ask(sj::Writer& body, const std::string& lang, const std::string& difficulty, size_t count, sj::Value chunk) {
        std::map<std::string, std::string> values = {
            {"count", std::to_string(count)}, {"chapter", chunk["chapter"].str()}, {"text", chunk["text"].str()}};
        if (examples != "none") values["examples"] = trimmed(file(examples + "/" + lang + "/" + difficulty + ".json"));
        if (!subject.empty()) values["subject"] = subject;
        auto message = [&](const std::string& name) {
            const std::string path = folder + lang + "/" + name;
            std::string text = file(path);
            const size_t at = text.find("{{examples}}");
            if (at != text.npos && examples == "none") { // then its paragraph goes
                const size_t before = text.rfind("\n\n", at), begin = before == text.npos ? 0 : before + 2;
                text.erase(begin, std::min(text.find("\n\n", at), text.size()) - begin);
                text.erase(begin, text.find_first_not_of('\n', begin) - begin);
            }
            return fill_in(text, values, path);
        };
        body.key("messages").array();
        body.object().field("role", "system").field("content", message("system.md")).end();
        body.object().field("role", "user").field("content", message(difficulty + ".md")).end().end();
    }

  private:
    const std::string& file(const std::string& path) {
        std::string& text = files[path];
        if (text.empty()) text = MappedFile(path).text();
        return text;
    }
};

// Questions by the length of a chunk, the same shares of difficulties in every chapter, to within one question: each
// question takes the difficulty that is furthest behind. A chapter's quota thins its chunks evenly.
static int run_prompt(const Arguments& a) {
    const Limits limits(a);
    const size_t least = limits.count("prompt.least_characters"), most = limits.count("prompt.most_questions");
    const size_t quota = a.number("--chapter-quota", SIZE_MAX, 1, SIZE_MAX - 1);
    const std::string model = a.text("--model"), language = a.text("--lang");
    const size_t max_tokens = a.number("--max-tokens", SIZE_MAX, 0, 1 << 24); // SIZE_MAX: by the questions; 0: none
    double share[3], sum = 0;
    size_t tokens[3], most_tokens = 0; // that a question and its answer take
    for (int d = 0; d < 3; d++) {
        sum += share[d] = limits[format("prompt.%s", DIFFICULTIES[d]).c_str()];
        tokens[d] = limits.count(format("prompt.%s.tokens", DIFFICULTIES[d]).c_str());
    }
    if (sum <= 0) DIE("%s: prompt.easy, medium and hard are all 0", limits.path.c_str());

    struct Chapter { size_t wanted = 0, past = 0, asked = 0, given[3] = {}; };
    std::map<std::string, Chapter> chapters;
    auto chapter_of = [](sj::Value v) { return v["source"].str() + "\n" + top_chapter(v); };
    auto wanted = [&](sj::Value v) {
        const double n = (double)count_characters(v["text"].str()) / limits["prompt.characters_per_question"];
        return std::min(most, std::max<size_t>(1, (size_t)std::lround(n)));
    };
    auto chunk = [&](const Reader& in) {
        for (auto name : {"id", "text", "lang"})
            if (!in.need()[name].is(sj::String)) DIE("%s: no %s; is it a file of chunks?", in.where().c_str(), name);
        const std::string lang = in.row()["lang"].str(); // names a folder
        if (lang.empty() || lang.find_first_not_of("abcdefghijklmnopqrstuvwxyz_-") != lang.npos)
            DIE("%s: lang %s is no language", in.where().c_str(), in_quotes(lang).c_str());
        return in.row();
    };
    auto is_short = [&](sj::Value v) { return count_characters(v["text"].str()) < least; };
    {
        Reader in(a.files[0]);
        if (!in.seekable()) DIE("%s: is read twice, so it has to be a file", in.path.c_str());
        while (in.next())
            if (!is_short(chunk(in))) chapters[chapter_of(in.row())].wanted += wanted(in.row());
    }
    Reader in(a.files[0]);
    Report report(a.dropped(), {"short", "quota"});
    Output out(a.output());
    Templates templates(a);
    size_t requests = 0;
    while (in.next()) {
        const sj::Value v = chunk(in);
        if (is_short(v)) {
            report.drop("short", "too little text to ask about", in);
            continue;
        }
        Chapter& c = chapters[chapter_of(v)];
        c.past += wanted(v);
        const size_t limit = std::min(quota, c.wanted), target = c.past * limit / c.wanted;
        size_t count[3] = {};
        for (; c.asked < target; c.asked++) {
            int behind = 0;
            auto gap = [&](int d) { return share[d] / sum * (double)(c.asked + 1) - (double)c.given[d]; };
            for (int d : {1, 2})
                if (gap(d) > gap(behind) + 1e-9) behind = d;
            c.given[behind]++, count[behind]++;
        }
        if (!count[0] && !count[1] && !count[2]) report.drop("quota", "its chapter has its questions", in);
        else report.kept++;
        for (int d = 0; d < 3; d++) {
            if (!count[d]) continue;
            const std::string difficulty = DIFFICULTIES[d], lang = language.empty() ? v["lang"].str() : language;
            sj::Writer body;
            body.object();
            if (!model.empty()) body.field("model", model);
            templates.ask(body, lang, difficulty, count[d], v);
            body.field("temperature", limits["request.temperature"]);
            const size_t room = max_tokens == SIZE_MAX ? count[d] * tokens[d] : max_tokens;
            if (room) body.field("max_tokens", room);
            body.end();
            most_tokens = std::max(most_tokens, room);
            // The id says what collect has to know, and a hash of the request, so that another one has another id.
            sj::Writer w;
            w.object().field("custom_id", v["id"].str() + "." + difficulty + "." + hex(fnv1a(body.text)).substr(0, 8));
            w.field("method", "POST").field("url", "/v1/chat/completions").key("body").text += body.text;
            out.line(w.text + "}");
            requests++;
        }
    }
    out.commit();
    report.finish("chunks");
    size_t questions[3] = {};
    for (auto& [name, c] : chapters)
        for (int d = 0; d < 3; d++) questions[d] += c.given[d];
    say(format("%zu requests for %zu easy, %zu medium, %zu hard questions in %zu chapter%s", requests, questions[0],
               questions[1], questions[2], chapters.size(), chapters.size() == 1 ? "" : "s"));
    if (max_tokens == SIZE_MAX)
        say(format("max_tokens: %zu, %zu, %zu for an easy, medium, hard question; %zu in a request at most. "
                   "A model that thinks first needs more (--max-tokens)",
                   tokens[0], tokens[1], tokens[2], most_tokens));
    return 0;
}

// ========================================================================================================= 5 generate

// What is asked, as OpenAI's Batch format has it. id names the whole request, not only what its author called it.
struct Request {
    std::string custom_id, url, body, id;
    std::string model; // that the row names
    Reader::Place place;
    size_t number;
    explicit Request(const Reader& in) : place(in.place()), number(in.number) {
        const sj::Value v = in.need();
        custom_id = v["custom_id"].str(), url = v["url"].str(), body = v["body"].raw();
        model = v["body"]["model"].str();
        if (custom_id.empty()) DIE("%s: no custom_id", in.where().c_str());
        if (v["method"].str() != "POST" || url[0] != '/' || !v["body"].is(sj::Object))
            DIE("%s: expected a method POST, a url that begins with / and a body", in.where().c_str());
        id = "batch_req_" + hex(fnv1a(url + "\n" + body));
    }
    // A row without a model asks whatever model there is: its id stays.
    void set_model(const std::string& name) {
        sj::Doc doc;
        sj::parse(doc, body);
        sj::Writer w;
        w.object().field("model", name);
        for (auto [key, value] : doc.root().members())
            if (key != "model") w.key(key).value(value);
        const std::string text = w.end().text;
        body = text;
    }
};

// The answers so far, in OpenAI's Batch output format, each appended and synced as it comes. A line that a kill cut
// short is cut off. Only what was answered is in here: what failed is asked again by the next run.
struct Journal {
    struct Place { uint64_t offset; size_t length; std::string id; };
    std::string path;
    std::unordered_map<std::string, Place> answers; // by custom_id

    explicit Journal(const std::string& p) : path(p) {
        fd = open(p.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
        struct stat st;
        if (fd < 0 || fstat(fd, &st) != 0) DIE("%s: %s", p.c_str(), strerror(errno));
        if (!S_ISREG(st.st_mode)) DIE("%s: not a regular file", p.c_str());
        if (flock(fd, LOCK_EX | LOCK_NB) != 0) DIE("%s: another run is writing it", p.c_str());
        for (end = (uint64_t)st.st_size; end > 0; end--) {
            char c;
            if (pread(fd, &c, 1, (off_t)end - 1) == 1 && c == '\n') break;
        }
        if (ftruncate(fd, (off_t)end) != 0) DIE("%s: %s", p.c_str(), strerror(errno));
        Reader in(p);
        while (in.next()) {
            const sj::Value v = in.need();
            if (!v["custom_id"].is(sj::String) || !v["response"]["body"])
                DIE("%s: not an answer; remove the file to start anew", in.where().c_str());
            answers[v["custom_id"].str()] = {in.offset, in.text.size(), v["id"].str()};
        }
    }
    Journal(const Journal&) = delete;
    ~Journal() { if (fd >= 0) close(fd); }

    bool has(const Request& r) const {
        const auto found = answers.find(r.custom_id);
        if (found == answers.end()) return false;
        if (found->second.id != r.id)
            DIE("%s: %s was asked something else; remove the file to start anew", path.c_str(), r.custom_id.c_str());
        return true;
    }
    void add(const Request& r, long status, const std::string& reply) {
        sj::Writer w;
        w.object().field("id", r.id).field("custom_id", r.custom_id).key("response").object();
        w.field("status_code", status).field("request_id", r.id).key("body").text += one_line(reply);
        std::string line = w.text + "}, \"error\": null}\n";
        answers[r.custom_id] = {end, line.size() - 1, r.id};
        end += line.size();
        for (std::string_view left = line; !left.empty();) {
            const ssize_t n = write(fd, left.data(), left.size());
            if (n < 0 && errno != EINTR) DIE("%s: %s", path.c_str(), strerror(errno));
            left.remove_prefix((size_t)std::max<ssize_t>(n, 0));
        }
        if (fdatasync(fd) != 0) DIE("%s: %s", path.c_str(), strerror(errno));
    }
    std::string line(const Request& r) const {
        const Place& at = answers.at(r.custom_id);
        std::string s(at.length, '\0');
        if (pread(fd, s.data(), s.size(), (off_t)at.offset) != (ssize_t)s.size())
            DIE("%s: changed meanwhile", path.c_str());
        return s;
    }

  private:
    int fd = -1;
    uint64_t end = 0;
};

// Where a request goes: its url after the endpoint's, which may end in a version (/v1, /v4) that takes /v1's place,
// or be the whole address of the chat already.
[[maybe_unused]] static std::string address(std::string endpoint, const std::string& url) {
    while (!endpoint.empty() && endpoint.back() == '/') endpoint.pop_back();
    const std::string path = url.compare(0, 4, "/v1/") ? url : url.substr(3), chat = "/chat/completions";
    const size_t base = endpoint.size() - std::min(endpoint.size(), chat.size());
    if (path != chat && endpoint.substr(base) == chat) endpoint.erase(base);
    if (endpoint.size() >= path.size() && !endpoint.compare(endpoint.size() - path.size(), path.size(), path))
        return endpoint;
    const std::string last = endpoint.substr(endpoint.rfind('/') + 1);
    const bool version = last.size() > 1 && last[0] == 'v' && last.find_first_not_of("0123456789", 1) == last.npos;
    return endpoint + (version ? path : url);
}

#ifdef HAVE_CURL
// One of the connections: idle, asking, or waiting before it asks again.
struct Slot {
    CURL* easy = curl_easy_init();
    std::unique_ptr<Request> request; // none: idle
    std::string reply;
    size_t attempts = 0;
    double wake = 0; // when to ask; infinite while asking
    ~Slot() { curl_easy_cleanup(easy); }
};

struct Sender {
    const Limits limits;
    Journal& journal;
    const std::string url, key;
    const size_t retries, parallel, timeout, give_up;
    curl_slist* headers = nullptr;
    CURLM* multi = curl_multi_init();
    std::vector<std::unique_ptr<Slot>> slots;
    std::map<std::string, std::pair<size_t, std::string>> faults; // why requests were asked again or given up: how
                                                                  // often, and what the endpoint said at last
    struct Refused { Reader::Place place; size_t number; long status; std::string why; };
    std::vector<Refused> refused;
    size_t answered = 0, failed = 0, failures_in_row = 0;
    std::string fatal;                    // why it makes no sense to ask on

    Sender(const Arguments& a, Journal& journal)
        : limits(a), journal(journal), url(a.need("--url")), key(read_key(a)),
          retries(a.number("--retries", limits.count("generate.retries"), 0, 100)),
          parallel(a.number("--parallel", limits.count("generate.parallel"), 1, 1000)),
          timeout(a.number("--timeout", limits.count("generate.timeout"), 1, 86400)),
          give_up(limits.count("generate.give_up")) {
        if (!key.empty()) headers = curl_slist_append(headers, ("Authorization: Bearer " + key).c_str());
        headers = curl_slist_append(headers, "Content-Type: application/json");
        headers = curl_slist_append(headers, "Expect:"); // no round trip before the body
        while (slots.size() < parallel) slots.push_back(std::make_unique<Slot>());
    }
    static std::string read_key(const Arguments& a) {
        if (!a.has("--key-env")) return "";
        const std::string name = a.text("--key-env");
        const char* found = getenv(name.c_str());
        if (!found || !*found) DIE("--key-env %s: no such environment variable", name.c_str());
        if (strpbrk(found, "\r\n")) DIE("--key-env %s: holds a line break", name.c_str());
        return found;
    }
    ~Sender() {
        for (auto& s : slots) curl_multi_remove_handle(multi, s->easy);
        slots.clear();
        curl_multi_cleanup(multi);
        curl_slist_free_all(headers);
    }

    static size_t receive(char* bytes, size_t, size_t n, void* slot) {
        std::string& reply = ((Slot*)slot)->reply;
        if (reply.size() + n > Reader::LONGEST / 2) return 0; // curl ends the transfer
        reply.append(bytes, n);
        return n;
    }
    void ask(Slot& s) {
        s.reply.clear();
        s.attempts++;
        curl_easy_reset(s.easy);
        auto set = [&](CURLoption option, auto value) {
            if (curl_easy_setopt(s.easy, option, value) != CURLE_OK) DIE("libcurl refuses option %d", (int)option);
        };
        set(CURLOPT_URL, address(url, s.request ? s.request->url : "/v1/models").c_str());
#if LIBCURL_VERSION_NUM >= 0x075500 // no redirects are followed: the key goes nowhere else
        set(CURLOPT_PROTOCOLS_STR, "http,https");
#else
        set(CURLOPT_PROTOCOLS, (long)(CURLPROTO_HTTP | CURLPROTO_HTTPS));
#endif
        set(CURLOPT_HTTPHEADER, headers);
        if (s.request) {
            set(CURLOPT_POSTFIELDS, s.request->body.c_str());
            set(CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)s.request->body.size());
        }
        set(CURLOPT_WRITEFUNCTION, receive);
        set(CURLOPT_WRITEDATA, (void*)&s);
        set(CURLOPT_PRIVATE, (void*)&s);
        set(CURLOPT_NOSIGNAL, 1L);
        set(CURLOPT_CONNECTTIMEOUT, 20L);
        set(CURLOPT_TIMEOUT, (long)timeout);
    }

    // How a transfer ended.
    struct Outcome {
        long status = 0;
        std::string fault;  // "": well
        std::string said;   // the endpoint's own words
        bool again = false; // asking again may help
        double wait = 0;    // ... after so many seconds
    };
    Outcome look_at(Slot& s, CURLcode code) const {
        Outcome o;
        curl_off_t retry_after = 0;
        curl_easy_getinfo(s.easy, CURLINFO_RESPONSE_CODE, &o.status);
        curl_easy_getinfo(s.easy, CURLINFO_RETRY_AFTER, &retry_after);
        for (size_t at = 0; !key.empty() && (at = s.reply.find(key, at)) != s.reply.npos; at += 3)
            s.reply.replace(at, key.size(), "***"); // an endpoint may echo it
        sj::Doc doc;
        const bool json = sj::parse(doc, s.reply).empty(), well = o.status / 100 == 2, chat = (bool)s.request;
        const sj::Value list = doc.root()[chat ? "choices" : "data"];
        if (code == CURLE_OK && well && json && list.is(sj::Array) && (list.size() || !chat)) return o;
        o.fault = code != CURLE_OK ? curl_easy_strerror(code)
                : !well            ? format("HTTP status %ld", o.status)
                : chat             ? "a reply that is no chat completion" : "a reply that is no list of models";
        if (code == CURLE_OK) o.said = words_of(json ? doc.root() : sj::Value(), s.reply);
        o.again = code != CURLE_OK || well || o.status == 408 || o.status == 429 || o.status >= 500;
        const double doubled = limits["generate.backoff"] * std::pow(2, (double)s.attempts - 1);
        const std::string who = chat ? s.request->id : "";
        const double jitter = 0.75 + 0.5 * (double)(mix(s.attempts, fnv1a(who)) >> 40) / (1 << 24);
        const double backoff = std::min(doubled, limits["generate.longest_backoff"]) * jitter;
        o.wait = std::min(std::max(backoff, (double)retry_after), limits["generate.longest_retry_after"]);
        return o;
    }

    // What an endpoint says of a fault: OpenAI's {"error": {"message"}}, or others' {"error": text}, {"message"},
    // {"detail"}; else the beginning of the reply. One line.
    static std::string words_of(sj::Value reply, const std::string& text) {
        const sj::Value error = reply["error"];
        for (sj::Value v : {error["message"], error, reply["message"], reply["detail"]}) {
            if (v.is(sj::String) && !v.str().empty()) return score_excerpt(v.str(), 500);
        }
        const sj::Value other = error ? error : reply["detail"];
        std::string valid;
        utf8_repair(valid, std::string_view(other ? other.raw() : text).substr(0, 2000), true);
        return score_excerpt(trimmed(valid), 200);
    }
    static std::string sentence(const Outcome& o) { return o.fault + (o.said.empty() ? "" : ": " + o.said); }

    // A transfer ended: the answer goes into the journal, or the slot waits and asks again, or gives up.
    void finish(Slot& s, CURLcode code) {
        const Outcome o = look_at(s, code);
        curl_multi_remove_handle(multi, s.easy);
        if (o.fault.empty()) {
            journal.add(*s.request, o.status, s.reply);
            s.request.reset();
            answered++, failures_in_row = 0;
            return;
        }
        faults[o.fault].first++, faults[o.fault].second = o.said;
        if (o.status == 400 || o.status == 401 || o.status == 403 || o.status == 404) {
            fatal = "the endpoint answers " + sentence(o);
            if (s.reply.find("context_length_exceeded") != s.reply.npos)
                fatal += " (datagen chunk --characters N makes shorter prompts, prompt --max-tokens N shorter answers)";
        }
        if (!o.again || s.attempts > retries) {
            refused.push_back({s.request->place, s.request->number, o.status, sentence(o)});
            s.request.reset();
            failed++;
            if (++failures_in_row >= give_up && fatal.empty())
                fatal = format("%zu requests in a row failed, the last with: %s", failures_in_row, sentence(o).c_str());
            return;
        }
        s.wake = seconds() + o.wait;
    }

    // The only model that the endpoint has, where nobody named one.
    std::string find_model() {
        const std::string where = address(url, "/v1/models");
        Slot s;
        for (;;) {
            stop_if_interrupted();
            ask(s);
            const CURLcode code = curl_easy_perform(s.easy);
            const Outcome o = look_at(s, code);
            if (o.fault.empty()) break;
            if (!o.again || s.attempts > retries)
                DIE("%s: %s; --model NAME names the model", where.c_str(), sentence(o).c_str());
            for (const double end = seconds() + o.wait; seconds() < end && !interrupted;) usleep(20'000);
        }
        sj::Doc doc;
        sj::parse(doc, s.reply);
        Strings names;
        for (sj::Value m : doc.root()["data"].items()) names.push_back(m["id"].str());
        if (names.size() == 1 && !names[0].empty()) return names[0];
        std::string all;
        for (size_t i = 0; i < names.size() && i < 20; i++) all += (i ? ", " : "") + score_excerpt(names[i], 80);
        if (names.size() > 20) all += format(" and %zu more", names.size() - 20);
        DIE("--model NAME is needed: the endpoint has %s", all.empty() ? "no model" : all.c_str());
    }

    // Asks what `next` gives until it gives nothing more. After Ctrl-C answers on their way are still taken.
    template <class F> void run(F next, size_t total) {
        const double start = seconds();
        const bool terminal = isatty(2);
        double told = start;
        bool more = true;
        for (;;) {
            const bool stopping = interrupted || !fatal.empty();
            const double now = seconds();
            double wake = now + 0.5;
            bool busy = false;
            for (auto& s : slots) {
                if (!s->request && more && !stopping) {
                    s->request = next();
                    s->attempts = 0, s->wake = now;
                    more = (bool)s->request;
                }
                if (!s->request || (stopping && s->wake < INFINITY)) continue;
                if (s->wake <= now) {
                    ask(*s);
                    s->wake = INFINITY;
                    curl_multi_add_handle(multi, s->easy);
                }
                wake = std::min(wake, s->wake);
                busy = true;
            }
            if (!busy) break;
            int running;
            curl_multi_perform(multi, &running);
            for (int left; CURLMsg* m = curl_multi_info_read(multi, &left);) {
                Slot* s;
                const CURLcode code = m->data.result; // finish() ends the message's life
                curl_easy_getinfo(m->easy_handle, CURLINFO_PRIVATE, &s);
                finish(*s, code);
                wake = now;
            }
            if (wake > now) curl_multi_poll(multi, nullptr, 0, std::max(1, (int)(1000 * (wake - now))), nullptr);
            if (now - told >= (terminal ? 1 : 10)) {
                const double rate = (double)answered / (now - start), left = (double)(total - answered - failed);
                fprintf(stderr, "%sanswered %zu of %zu, failed %zu, %.2f/s, %.0f s left   %s", terminal ? "\r" : "",
                        answered, total, failed, rate, rate > 0 ? left / rate : 0, terminal ? "" : "\n");
                told = now;
            }
        }
        if (terminal && told > start) fputc('\n', stderr);
    }
};

// What was refused or failed for good, as other steps keep what they drop.
static void write_refused(const Arguments& a, const Reader& in, const std::vector<Sender::Refused>& refused) {
    Output out(a.dropped());
    for (auto& r : refused) {
        sj::Writer w;
        w.object().field("rule", r.status / 100 > 2 ? format("status %ld", r.status) : std::string("failed"));
        out.line(w.field("why", r.why).field("line", r.number).key("row").value(in.again(r.place)->row()).end().text);
    }
    out.commit();
    if (!refused.empty())
        say(format("%zu requests were refused or failed for good: %s says why", refused.size(),
                   a.dropped().c_str()));
}

static int run_generate(const Arguments& a) {
    if (a.files[0] == "-") DIE("the requests are read more than once, so they have to be in a file");
    const std::string url = a.need("--url");
    if (url.compare(0, 7, "http://") && url.compare(0, 8, "https://"))
        DIE("--url %s: expected http:// or https://", url.c_str());
    Journal journal(a.text("--journal", a.files[0] + ".journal"));
    size_t total = 0, there = 0;
    {
        std::unordered_set<std::string> ids;
        for (Reader in(a.files[0]); in.next(); total++) {
            const Request r(in);
            if (!ids.insert(r.custom_id).second)
                DIE("%s: custom_id %s is there twice", in.where().c_str(), r.custom_id.c_str());
            if (a.has("--model") && !r.model.empty() && r.model != a.text("--model"))
                DIE("%s: asks the model %s, --model says %s", in.where().c_str(), in_quotes(r.model).c_str(),
                    a.text("--model").c_str());
            there += journal.has(r);
        }
    }
    curl_global_init(CURL_GLOBAL_DEFAULT);
    Sender sender(a, journal);
    if (there) say(format("%s: %zu of %zu requests are answered", journal.path.c_str(), there, total));
    std::string model = a.text("--model");
    Reader pending(a.files[0]);
    sender.run([&]() -> std::unique_ptr<Request> {
        while (!interrupted && pending.next()) {
            auto r = std::make_unique<Request>(pending);
            if (journal.has(*r)) continue;
            if (r->model.empty()) {
                if (model.empty()) say("asking the only model there: " + in_quotes(model = sender.find_model()));
                r->set_model(model);
            }
            return r;
        }
        return nullptr;
    }, total - there);
    for (auto& [fault, what] : sender.faults)
        say(format("  %6zu times: %s%s%s", what.first, fault.c_str(), what.second.empty() ? "" : ": ",
                   what.second.c_str()));
    write_refused(a, pending, sender.refused);
    const size_t missing = total - there - sender.answered;
    if (missing)
        say(format("%zu of %zu answers are missing; those that came are in %s, and the same command goes on", missing,
                   total, journal.path.c_str()));
    if (interrupted) throw Interrupted();
    if (!sender.fatal.empty()) DIE("%s", sender.fatal.c_str());

    Output out(a.output());
    for (Reader in(a.files[0]); in.next();)
        if (const Request r(in); journal.has(r)) out.line(journal.line(r));
    out.commit();
    if (!missing) say(format("%zu answers, %zu of them new", total, sender.answered));
    return missing ? 1 : 0;
}
#else
static int run_generate(const Arguments&) {
    DIE("generate: built without libcurl; install libcurl4-openssl-dev and run make datagen again");
}
#endif

// ========================================================================================================== 6 collect

// What the model said without a think block before it and a code fence around it.
static std::string_view bare_reply(std::string_view s) {
    auto trim = [&] {
        s.remove_prefix(std::min(s.find_first_not_of(" \t\r\n"), s.size()));
        s = s.substr(0, s.find_last_not_of(" \t\r\n") + 1);
    };
    trim();
    if (const size_t end = s.find("</think>"); end != s.npos && s.substr(0, 7) == "<think>") {
        s.remove_prefix(end + 8);
        trim();
    }
    if (s.size() > 6 && s.substr(0, 3) == "```" && s.substr(s.size() - 3) == "```" && s.find('\n') != s.npos) {
        s.remove_suffix(3);
        s.remove_prefix(s.find('\n')); // with the fence's language
        trim();
    }
    return s;
}

// The replies are JSON, [{"question": ..., "answer": ...}, ...], or they are kept aside.
static int run_collect(const Arguments& a) {
    struct ChunkFields { std::string source, chapter, lang; };
    std::unordered_map<std::string, ChunkFields> chunks;
    for (Reader in(a.need("--chunks")); in.next();) {
        const sj::Value v = in.need();
        chunks[v["id"].str()] = {v["source"].str(), v["chapter"].str(), v["lang"].str()};
    }
    Reader in(a.files[0]);
    Report report(a.dropped(), {"line", "custom_id", "repeated", "status", "reply", "json", "item"});
    Output out(a.output());
    Progress progress;
    std::unordered_set<std::string> seen;
    while (in.next()) {
        progress.show("collect", report.kept, in.share());
        if (!in.fault.empty() || !in.row().is(sj::Object)) {
            report.drop("line", in.fault.empty() ? "not an object" : in.fault, in);
            continue;
        }
        const sj::Value response = in.row()["response"], choice = response["body"]["choices"][0];
        const std::string id = in.row()["custom_id"].str();
        const size_t hash = id.rfind('.'), dot = hash ? id.rfind('.', hash - 1) : id.npos;
        const std::string chunk = id.substr(0, dot < hash ? dot : 0); // "chunk.difficulty.hash"
        const std::string difficulty = dot < hash ? id.substr(dot + 1, hash - dot - 1) : "";
        const bool ours = std::count(std::begin(DIFFICULTIES), std::end(DIFFICULTIES), difficulty);
        int64_t status = 0;
        response["status_code"].integer(&status);
        const std::string content = choice["message"]["content"].str();
        const std::string_view reply = bare_reply(content);
        sj::Doc doc;
        std::string fault;
        if (!ours || !chunks.count(chunk)) report.drop("custom_id", "names no chunk of these, or no difficulty", in);
        else if (!seen.insert(id).second) report.drop("repeated", "this custom_id was answered before", in);
        else if (status / 100 != 2) report.drop("status", format("status %lld", (long long)status), in);
        else if (content.empty()) report.drop("reply", "no choices[0].message.content", in);
        else if (fault = sj::parse(doc, reply); !fault.empty())
            report.drop("json", choice["finish_reason"].str() == "length" ? "cut off at max_tokens" : fault, in);
        else if (!doc.root().is(sj::Array)) report.drop("json", "not a list", in);
        else {
            size_t number = 0;
            for (sj::Value item : doc.root().items()) {
                number++;
                const std::string question = item["question"].str(), answer = item["answer"].str();
                if (item.size() != 2 || question.empty() || answer.empty()) {
                    report.drop("item", format("item %zu is not {\"question\": text, \"answer\": text}", number), in);
                    continue;
                }
                const ChunkFields& c = chunks[chunk];
                sj::Writer w;
                w.object().field("id", id + format(".%zu", number)).field("instruction", question).field("input", "");
                w.field("output", answer).field("chunk", chunk).field("source", c.source).field("chapter", c.chapter);
                out.line(w.field("difficulty", difficulty).field("lang", c.lang).end().text);
                report.kept++;
            }
        }
    }
    out.commit();
    report.finish("questions", "The model has to answer with a JSON list of questions and answers.");
    return 0;
}

// ==================================================================================================== 7 conversations

// A row of any of the usual datasets. LLaMA-Factory's names; its dataset_info.json may give others.
struct Layout {
    std::string formatting; // alpaca or sharegpt; "": each row shows what it is
    std::map<std::string, std::string> name = {
        {"prompt", "instruction"}, {"query", "input"}, {"response", "output"}, {"system", "system"},
        {"history", "history"}, {"messages", "conversations"}, {"tools", "tools"}, {"role_tag", "from"},
        {"content_tag", "value"}, {"user_tag", "human"}, {"assistant_tag", "gpt"}, {"observation_tag", "observation"},
        {"function_tag", "function_call"}, {"system_tag", "system"}, {"chosen", "chosen"}, {"rejected", "rejected"}};
};
struct Conversation {
    std::vector<Message> messages; // the last is the assistant's
    Strings tools;
    std::string kind;              // alpaca, openai or sharegpt
    std::string question, answer;  // all that the user said, all that the assistant said
};

static bool is_absent(sj::Value v) { return !v || v.is(sj::Null); }

static Conversation read_alpaca(sj::Value v, const Layout& layout, bool answered) {
    Conversation c;
    c.kind = "alpaca";
    auto text = [&](const char* column, bool needed) {
        const std::string& key = layout.name.at(column);
        const sj::Value s = v[key];
        if (!s.is(sj::String) && (needed || !is_absent(s))) DIE("%s: %s", key.c_str(), s ? "not a string" : "missing");
        return s.str();
    };
    const std::string prompt = text("prompt", true), query = text("query", false), system = text("system", false);
    if (!system.empty()) c.messages.push_back({"system", system});
    const sj::Value history = v[layout.name.at("history")];
    if (!is_absent(history) && !history.is(sj::Array)) DIE("history: not a list");
    for (sj::Value turn : history.items()) {
        if (turn.size() != 2 || !turn[0].is(sj::String) || !turn[1].is(sj::String))
            DIE("history: not a list of [question, answer]");
        c.messages.push_back({"user", turn[0].str()});
        c.messages.push_back({"assistant", turn[1].str()});
    }
    c.messages.push_back({"user", query.empty() ? prompt : prompt + "\n" + query});
    if (answered) c.messages.push_back({"assistant", text("response", true)});
    return c;
}

static Message read_sharegpt_turn(sj::Value turn, const Layout& layout, const std::string& where) {
    auto name = [&](const char* key) { return layout.name.at(key); };
    const std::string role = turn[name("role_tag")].str();
    const sj::Value content = turn[name("content_tag")];
    if (!content.is(sj::String)) DIE("%s: a turn without %s", where.c_str(), name("content_tag").c_str());
    if (role == name("user_tag")) return {"user", content.str()};
    if (role == name("assistant_tag")) return {"assistant", content.str()};
    if (role == name("system_tag")) return {"system", content.str()};
    if (role == name("observation_tag")) return {"tool", content.str()};
    if (role != name("function_tag")) DIE("%s: unknown role %s", where.c_str(), in_quotes(role).c_str());
    const std::string text = content.str();
    sj::Doc call;
    if (!sj::parse(call, text).empty()) DIE("%s: a call that is no JSON", name("function_tag").c_str());
    return {"assistant", "", {}, {tool_call_from_json(call.root(), name("function_tag"))}};
}

static Conversation read_sharegpt(sj::Value v, const Layout& layout) {
    Conversation c;
    c.kind = "sharegpt";
    if (sj::Value s = v[layout.name.at("system")]; s.is(sj::String) && !s.str().empty())
        c.messages.push_back({"system", s.str()});
    const std::string& key = layout.name.at("messages");
    if (!v[key].is(sj::Array)) DIE("%s: not a list", key.c_str());
    for (sj::Value turn : v[key].items()) c.messages.push_back(read_sharegpt_turn(turn, layout, key));
    return c;
}

// The messages of a row in any of the three formats, and its tools. Not `answered`: Alpaca's last answer is not in it.
static Conversation read_messages(sj::Value v, const Layout& layout, bool answered) {
    const bool known = !layout.formatting.empty(), sharegpt = layout.formatting == "sharegpt";
    const bool openai = sharegpt && layout.name.at("role_tag") == "role" && layout.name.at("content_tag") == "content";
    Conversation c;
    if (known ? openai : (bool)v["messages"]) {
        c.messages = messages_from_json(v[known ? layout.name.at("messages") : "messages"]);
        c.kind = "openai";
    } else if (known ? sharegpt : (bool)v["conversations"]) c = read_sharegpt(v, layout);
    else c = read_alpaca(v, layout, answered);
    return c;
}

static Strings read_tools(sj::Value v, const Layout& layout) {
    const sj::Value tools = v[layout.name.at("tools")];
    if (!tools.is(sj::String)) return tools_from_json(tools);
    const std::string text = tools.str(); // LLaMA-Factory keeps them as JSON in a string
    sj::Doc doc;
    if (!text.empty() && !sj::parse(doc, text).empty()) DIE("tools: a string that is no JSON");
    return tools_from_json(doc.root());
}

static Conversation read_conversation(sj::Value v, const Layout& layout = {}) {
    if (!v.is(sj::Object)) DIE("not an object");
    Conversation c = read_messages(v, layout, true);
    c.tools = read_tools(v, layout);
    if (c.messages.empty() || c.messages.back().role != "assistant")
        DIE("messages: the last one is not the assistant's");
    for (auto& m : c.messages)
        if (m.role == "user" || m.role == "assistant") {
            std::string& all = m.role == "user" ? c.question : c.answer;
            all += (all.empty() ? "" : "\n") + m.content;
        }
    if (c.question.empty()) DIE("messages: nobody asks");
    return c;
}

// A preference: two answers to one prompt. LLaMA-Factory's rows are a conversation that lacks its last answer, with
// `chosen` and `rejected` beside it: a text, or one message. TRL's have `prompt`, `chosen` and `rejected`, all of them
// lists of messages, or all of them texts, which TRL continues without a chat template (kind "text"). Without `prompt`
// each list is a whole conversation, and the two differ in their last message.
struct Preference {
    std::vector<Message> prompt;
    Message chosen, rejected;
    Strings tools;
    std::string kind; // alpaca, openai or sharegpt as LLaMA-Factory reads them; trl or text
};

static bool is_preference(sj::Value v, const Layout& layout) {
    return !is_absent(v[layout.name.at("chosen")]) || !is_absent(v[layout.name.at("rejected")]);
}

// The messages of a list, or one that stands alone: OpenAI's or ShareGPT's.
static std::vector<Message> read_turns(sj::Value v, const Layout& layout, const std::string& where) {
    const std::string &role = layout.name.at("role_tag"), &content = layout.name.at("content_tag");
    const sj::Value first = v.is(sj::Array) ? v[0] : v;
    std::vector<Message> turns;
    if ((role != "role" || content != "content") && first[content].is(sj::String)) {
        if (!v.is(sj::Array)) return {read_sharegpt_turn(v, layout, where)};
        for (sj::Value turn : v.items()) turns.push_back(read_sharegpt_turn(turn, layout, where));
        return turns;
    }
    const std::string list = v.is(sj::Array) ? sj::dump(v) : "[" + sj::dump(v) + "]";
    sj::Doc doc;
    sj::parse(doc, list);
    return messages_from_json(doc.root());
}

static Preference read_preference(sj::Value v, const Layout& layout) {
    Preference p;
    const std::string name[2] = {layout.name.at("chosen"), layout.name.at("rejected")};
    Message* const answer[2] = {&p.chosen, &p.rejected};
    for (auto& key : name)
        if (is_absent(v[key])) DIE("%s: missing; a pair has both answers", key.c_str());
    const sj::Value prompt = v["prompt"];
    const bool lists = v[name[0]].is(sj::Array), text = prompt.is(sj::String);
    const bool others = !layout.formatting.empty() || v["instruction"] || v["messages"] || v["conversations"];
    std::vector<Message> turns[2];
    for (int i : {0, 1}) {
        const sj::Value a = v[name[i]];
        if (a.is(sj::Array) != lists) DIE("%s and %s: only one is a list", name[0].c_str(), name[1].c_str());
        if (a.is(sj::String)) turns[i] = {{"assistant", a.str()}};
        else if (a.is(sj::Object) || a.is(sj::Array)) turns[i] = read_turns(a, layout, name[i]);
        else DIE("%s: neither a text nor a message", name[i].c_str());
        if (turns[i].empty()) DIE("%s: empty", name[i].c_str());
        *answer[i] = turns[i].back(), turns[i].pop_back();
        if (answer[i]->role != "assistant") DIE("%s: not the assistant's", name[i].c_str());
        if (answer[i]->tool_calls.empty() && answer[i]->content.find_first_not_of(" \t\r\n") == std::string::npos)
            DIE("%s: empty", name[i].c_str());
    }
    if (lists && !turns[0].empty() && (text || is_absent(prompt))) { // (some repeat the question as `prompt`)
        bool same = v[name[1]].size() == v[name[0]].size();
        for (size_t k = 0; same && k < turns[0].size(); k++)
            same = sj::dump(v[name[0]][k]) == sj::dump(v[name[1]][k]);
        if (!same) DIE("%s and %s: not the same up to the last message", name[0].c_str(), name[1].c_str());
        p.prompt = turns[0], p.kind = "trl";
    } else if (!turns[0].empty() || !turns[1].empty()) {
        DIE("%s: more than one message, where one answer is compared", name[turns[0].empty()].c_str());
    } else if (others) {
        const Conversation c = read_messages(v, layout, false);
        p.prompt = c.messages, p.kind = c.kind;
    } else if (prompt.is(sj::Array)) p.prompt = read_turns(prompt, layout, "prompt"), p.kind = "trl";
    else if (text) p.prompt = {{"user", prompt.str()}}, p.kind = lists ? "trl" : "text";
    else DIE("no prompt: instruction, conversations, messages or prompt holds it");
    p.tools = read_tools(v, layout);
    if (p.prompt.empty() || (p.prompt.back().role != "user" && p.prompt.back().role != "tool"))
        DIE("the prompt does not end with a question");
    if (p.kind == "text" && p.prompt[0].content.empty()) DIE("prompt: empty");
    return p;
}

// The row that was read, where a bad one ends the program.
static Conversation need_conversation(const Reader& in, const Layout& layout = {}) {
    const sj::Value v = in.need();
    try {
        return read_conversation(v, layout);
    } catch (const Error& e) {
        DIE("%s: %s", in.where().c_str(), e.what());
    }
}

// =============================================================================================== 8 ROUGE-L and MinHash

// Finds every question whose ROUGE-L F with a new one, 2 LCS / (m + n) of m and n words, reaches a threshold t.
// A common subsequence is no longer than the overlap of the two bags of words, so the overlap must reach t (m + n) / 2
// too; that is the prefix filter of set similarity joins (Chaudhuri et al. 2006, Xiao et al. 2008): with all words in
// one fixed order, two bags that share o of their words have one in common among the first m - o + 1 of the one and
// n - o + 1 of the other. So only that many words of a question, the rarest first, are entered and looked up. The
// least o for any partner of m words is that of the shortest one, n = t m / (2 - t). What is found is narrowed by where
// the word stood and by 64-bit signatures, both of which bound the overlap from above; then the LCS itself decides.
// None is lost. (Words are known by 32 bits of hash: two of them that collide could only make one too many.)
struct RougeIndex {
    const double t;
    std::unordered_map<uint32_t, uint32_t> frequency; // of words, from learn(): any order is right, this one is fast

    explicit RougeIndex(double threshold) : t(threshold) {
        if (t <= 0 || t > 1) DIE("rouge: a threshold of %g is not in 0..1", t);
    }
    void learn(const std::vector<uint32_t>& words) { for (uint32_t w : words) frequency[w]++; }
    size_t size() const { return begin.size() - 1; }

    void add(const std::vector<uint32_t>& words) {
        const Bag bag(*this, words);
        const uint32_t row = (uint32_t)size();
        for (size_t i = 0, m = words.size(); i < bag.prefix; i++)
            postings[bag.keys[i]].push_back({bag.signature, row, (uint16_t)m, (uint16_t)(m - i - 1)});
        all.insert(all.end(), words.begin(), words.end());
        begin.push_back(all.size());
        seen.push_back(0);
    }
    // Calls f with the number, counted by add(), of every question that is this near, until f returns false.
    template <class F> void find(const std::vector<uint32_t>& words, F f) {
        const size_t m = words.size();
        const Bag bag(*this, words);
        Places places;
        round++;
        for (size_t i = 0; i < bag.prefix; i++) {
            const auto list = postings.find(bag.keys[i]);
            if (list == postings.end()) continue;
            for (const Posting& p : list->second) {
                const double wanted = t * (double)(m + p.length) - 1e-9; // twice the overlap
                const size_t after = 1 + std::min<size_t>(m - i - 1, p.after);
                if ((double)(2 * after) < wanted) continue;
                if ((double)(m + p.length - (size_t)__builtin_popcountll(bag.signature ^ p.signature)) < wanted)
                    continue;
                if (seen[p.row] == round) continue;
                seen[p.row] = round;
                if (places.empty()) places = places_of(words);
                if (2 * (double)longest_common(places, m, p.row) >= wanted && !f((size_t)p.row)) return;
            }
        }
    }

  private:
    struct Posting { uint64_t signature; uint32_t row; uint16_t length, after; };
    struct Bag { // the second "the" of a question is another word than the first
        std::vector<uint32_t> keys;
        uint64_t signature = 0;
        size_t prefix = 0;
        Bag(const RougeIndex& index, const std::vector<uint32_t>& words) {
            const size_t m = words.size();
            if (m == 0 || m > UINT16_MAX) return;
            std::vector<uint32_t> sorted = words;
            std::sort(sorted.begin(), sorted.end());
            std::vector<std::pair<uint32_t, uint32_t>> order;
            for (size_t i = 0, k = 0; i < m; i++) {
                k = i > 0 && sorted[i] == sorted[i - 1] ? k + 1 : 0;
                const auto found = index.frequency.find(sorted[i]);
                const uint32_t key = (uint32_t)(mix(k, sorted[i]) >> 8);
                order.push_back({found == index.frequency.end() ? 0 : found->second, key});
                signature |= (uint64_t)1 << (key % 64);
            }
            std::sort(order.begin(), order.end());
            for (auto& [count, key] : order) keys.push_back(key);
            const double shortest = std::ceil(index.t * (double)m / (2 - index.t) - 1e-9);
            const double overlap = std::ceil(index.t * ((double)m + shortest) / 2 - 1e-9);
            prefix = m + 1 - std::min(m, (size_t)overlap);
        }
    };
    std::unordered_map<uint32_t, std::vector<Posting>> postings;
    std::vector<uint32_t> all;        // words of all questions
    std::vector<uint64_t> begin = {0};
    std::vector<uint32_t> seen;       // the last round that looked at it
    uint32_t round = 0;

    using Places = std::unordered_map<uint32_t, std::vector<uint64_t>>; // bit i: words[i] is this word
    static Places places_of(const std::vector<uint32_t>& words) {
        Places places;
        for (size_t i = 0; i < words.size(); i++) {
            auto& bits = places[words[i]];
            bits.resize((words.size() + 63) / 64);
            bits[i / 64] |= (uint64_t)1 << (i % 64);
        }
        return places;
    }
    // Length of the longest common subsequence of m words and a row, 64 words at a time in the bits of a column
    // (Hyyrö 2004): a bit is 0 where the subsequence grows.
    size_t longest_common(const Places& places, size_t m, size_t row) const {
        const size_t n = (m + 63) / 64;
        std::vector<uint64_t> column(n, ~(uint64_t)0);
        for (uint64_t i = begin[row]; i < begin[row + 1]; i++) {
            const auto found = places.find(all[i]);
            if (found == places.end()) continue;
            uint64_t carry = 0;
            for (size_t k = 0; k < n; k++) {
                const uint64_t v = column[k], u = v & found->second[k], sum = v + u, with_carry = sum + carry;
                carry = (sum < v) | (with_carry < sum);
                column[k] = with_carry | (v & ~u);
            }
        }
        size_t length = 0;
        for (size_t i = 0; i < m; i++) length += !(column[i / 64] >> (i % 64) & 1);
        return length;
    }
};

// Rows by hashes: open addressing, 8 bytes a slot, a third of them free. Only as many as were promised may be added.
struct HashTable {
    explicit HashTable(size_t most) : slots(most + most / 2 + 16), table((uint64_t*)calloc(slots, 8), free) {
        if (!table) throw std::bad_alloc();
    }
    void add(uint64_t hash, uint32_t row) {
        size_t i = first(hash);
        while (table.get()[i]) i = i + 1 < slots ? i + 1 : 0;
        table.get()[i] = hash << 32 | (row + 1);
    }
    // Calls f with every row of this hash (and, once in 2^32, one of another) until it returns true; so does find.
    template <class F> bool find(uint64_t hash, F f) const {
        for (size_t i = first(hash); uint64_t s = table.get()[i]; i = i + 1 < slots ? i + 1 : 0)
            if (s >> 32 == (hash & UINT32_MAX) && f((uint32_t)s - 1)) return true;
        return false;
    }

  private:
    const size_t slots;
    std::unique_ptr<uint64_t, decltype(&free)> table;
    size_t first(uint64_t hash) const { return (size_t)((__uint128_t)hash * slots >> 64); }
};

// The character n-grams of a text as hashes; case and blanks do not count. A text that is shorter is one gram.
static std::vector<uint64_t> ngrams(std::u32string_view s, size_t n) {
    std::u32string letters;
    for (char32_t c : s)
        if (!is_space(c)) letters += lower(c);
    std::vector<uint64_t> grams;
    for (size_t i = 0; i == 0 || i + n <= letters.size(); i++) {
        uint64_t h = n;
        for (char32_t c : std::u32string_view(letters).substr(i, n)) h = mix(h, c);
        grams.push_back(h);
    }
    return grams;
}

static double jaccard(std::vector<uint64_t> a, std::vector<uint64_t> b) {
    for (auto* v : {&a, &b}) {
        std::sort(v->begin(), v->end());
        v->erase(std::unique(v->begin(), v->end()), v->end());
    }
    size_t common = 0;
    for (size_t i = 0, j = 0; i < a.size() && j < b.size();)
        if (a[i] == b[j]) common++, i++, j++;
        else a[i] < b[j] ? i++ : j++;
    return (double)common / (double)(a.size() + b.size() - common);
}

// MinHash with banding (Broder 1997; Leskovec et al., Mining of Massive Datasets, 3.4): rows whose sets have a Jaccard
// similarity s share the minimum of a random order with probability s, all r of a band with s^r, at least one of b
// bands with 1 - (1 - s^r)^b: half of the pairs at s = 0.72 for 14 bands of 8. One hash a band.
struct MinHash {
    static constexpr size_t BANDS = 14, ROWS = 8;
    uint32_t factor[BANDS * ROWS], summand[BANDS * ROWS]; // the i-th order of 32-bit hashes x: factor x + summand

    MinHash() {
        uint64_t h = 1;
        for (auto& f : factor) f = (uint32_t)(h = mix(h, 1)) | 1;
        for (auto& x : summand) x = (uint32_t)(h = mix(h, 2));
    }
    std::array<uint64_t, BANDS> bands(const std::vector<uint64_t>& grams) const {
        uint32_t least[BANDS * ROWS];
        std::fill(std::begin(least), std::end(least), UINT32_MAX);
        for (uint64_t gram : grams) {
            const uint32_t x = (uint32_t)(gram >> 16);
            for (size_t i = 0; i < BANDS * ROWS; i++) least[i] = std::min(least[i], factor[i] * x + summand[i]);
        }
        std::array<uint64_t, BANDS> out;
        for (size_t b = 0; b < BANDS; b++) {
            out[b] = b;
            for (size_t r = 0; r < ROWS; r++) out[b] = mix(out[b], least[b * ROWS + r]);
            out[b] *= 0x9E3779B97F4A7C15; // the table takes both its ends
        }
        return out;
    }
};

// =========================================================================================================== 9 filter

// Numbers and identifiers of a text: runs of letters, digits, '_' and '.' that hold a digit, a '_' or a capital
// after a small letter. "1,024" is 1024; threadIdx.x is also threadIdx and x.
template <class F> static void for_each_fact(std::u32string_view s, F f) {
    auto here = [&](size_t i) -> uint32_t { return i < s.size() ? s[i] : 0; };
    for (size_t i = 0; i < s.size(); i++) {
        std::string run;
        for (;; i++) {
            const uint32_t c = here(i);
            if (is_latin(c) || is_digit(c) || c == '_' || c == '.') run += (char)c;
            else if (c != ',' || run.empty() || !is_digit(here(i - 1)) || !is_digit(here(i + 1))) break;
        }
        while (!run.empty() && run.back() == '.') run.pop_back();
        run.erase(0, run.find_first_not_of('.'));
        bool is_fact = run.find_first_of("0123456789_") != run.npos;
        for (size_t k = 1; k < run.size(); k++) is_fact |= islower((uint8_t)run[k - 1]) && isupper((uint8_t)run[k]);
        if (!run.empty()) f(run, is_fact);
    }
}

// What an answer may build on: the facts and content words of its chunk. A content word is a pair of neighbouring
// CJK characters, or a word of three letters and more that is no stop word.
struct Ground {
    std::unordered_set<uint64_t> words;
    std::unordered_set<std::string> facts;
    const std::unordered_set<uint64_t>& stop_words;

    Ground(std::u32string_view text, const std::unordered_set<uint64_t>& stop_words) : stop_words(stop_words) {
        for_each_content_word(text, [&](uint64_t word) { words.insert(word); });
        for_each_fact(text, [&](const std::string& run, bool) {
            facts.insert(run);
            for_each_part(run, [&](const std::string& part) { facts.insert(part); });
        });
    }
    bool has(const std::string& fact) const {
        bool all = true;
        for_each_part(fact, [&](const std::string& part) { all &= facts.count(part) > 0; });
        return facts.count(fact) || (all && fact.find_first_not_of("0123456789.") != fact.npos);
    }
    template <class F> static void for_each_part(const std::string& run, F f) {
        for (size_t at = 0; at <= run.size();) {
            const size_t dot = std::min(run.find('.', at), run.size());
            if (dot > at) f(run.substr(at, dot - at));
            at = dot + 1;
        }
    }
    template <class F> void for_each_content_word(std::u32string_view s, F f) const {
        for_each_word(s, [&](size_t i, size_t j) {
            if (is_cjk(s[i])) {
                if (j < s.size() && is_cjk(s[j])) f(word_hash(s.substr(i, 2)));
            } else if (j - i >= 3 && !stop_words.count(word_hash(s.substr(i, j - i)))) f(word_hash(s.substr(i, j - i)));
        });
    }
};

// A book's own terms: the words of its headings; words in capitals that are frequent; and words that come in clumps,
// often where they come at all, and not everywhere. Chinese is cut by jieba.
struct BookTerms {
    struct Use { size_t count = 0, chunks = 0, last = 0; bool heading = false, capitals = false; };
    std::unordered_map<std::string, Use> uses;
    std::unordered_set<uint64_t> nothing; // words that are no terms
    size_t chunks = 0;
    std::unique_ptr<Jieba> jieba;

    BookTerms(const std::unordered_set<uint64_t>& stop_words, const std::string& common) : nothing(stop_words) {
        for_each_line(common, [&](std::string_view word, size_t) { nothing.insert(word_hash(decode(word))); });
    }
    void learn(sj::Value chunk) {
        chunks++;
        const std::string text = chunk["text"].str();
        add(chunk["chapter"].str(), true);
        for (auto line : lines_of(text))
            if (heading_level(line)) add(line, true);
        add(text, false);
    }
    Strings terms(const Limits& limits) const { // the frequent ones first
        const size_t least = limits.count("terms.least");
        std::vector<std::pair<size_t, std::string>> order;
        for (auto& [word, u] : uses) {
            const bool clumps = (double)u.count >= limits["terms.clump"] * (double)u.chunks;
            const bool spread = (double)u.chunks > std::max(1., limits["terms.spread"] * (double)chunks);
            const bool frequent = u.count >= least && (u.capitals || (clumps && !spread));
            if (u.heading || frequent) order.push_back({u.count, word});
        }
        std::sort(order.begin(), order.end(), [](auto& x, auto& y) {
            return x.first != y.first ? x.first > y.first : x.second < y.second;
        });
        Strings all;
        for (auto& [count, word] : order) all.push_back(word);
        return all;
    }

  private:
    void add(std::string_view valid, bool heading) {
        const std::u32string text = decode(valid);
        auto note = [&](std::u32string_view word, bool capitals) {
            if (nothing.count(word_hash(word))) return;
            std::string name;
            for (char32_t c : word) utf8_append(name, lower(c));
            Use& u = uses[name];
            u.heading |= heading, u.capitals |= capitals;
            if (heading) return;
            u.count++;
            if (u.last != chunks) u.last = chunks, u.chunks++;
        };
        for_each_word(text, [&](size_t i, size_t j) {
            const std::u32string_view word = std::u32string_view(text).substr(i, j - i);
            if (is_cjk(word[0])) return;
            const bool letters = !std::all_of(word.begin(), word.end(), is_digit);
            const bool capitals = word.size() >= 2 && std::all_of(word.begin(), word.end(), [](uint32_t c) {
                return (c >= 'A' && c <= 'Z') || is_digit(c);
            });
            if (letters && (word.size() >= 3 || capitals)) note(word, capitals);
        });
        if (std::none_of(text.begin(), text.end(), is_cjk)) return;
        if (!jieba) jieba = std::make_unique<Jieba>(find_jieba());
        std::vector<std::string_view> words;
        jieba->cut(words, valid);
        for (auto w : words) {
            const std::u32string word = decode(w);
            if (word.size() >= 2 && std::all_of(word.begin(), word.end(), is_cjk)) note(word, false);
        }
    }
};

// Rules in the order in which they are asked; the first that has something against a row drops it. One pass: rows
// that were kept are all that later ones are compared with, so a row that is dropped cannot drop another. In memory
// are 196 bytes a row for exact (12) and near duplicates (168) and its place (16), and for the questions' ROUGE-L some
// 11 bytes a word; texts are read again where two rows have to be compared.
struct Filter {
    struct Row {
        sj::Value value;
        Conversation talk;
        std::u32string question, answer;
    };
    using Place = Reader::Place;
    using Rule = std::string (Filter::*)(Row&); // "" or what it has against the row

    const Arguments& a;
    const Limits limits = Limits(a);
    Reader in;
    const size_t most_rows;
    const Tokenizer tokenizer = Tokenizer(a.tokenizer());
    const Patterns references = Patterns(a.data("references.txt"));
    Patterns terms; // of the subject; without any, no row has to name one
    std::set<std::string> skipped = {}; // rules that are turned off
    const std::string language = a.text("--lang");
    std::unordered_set<uint64_t> stop_words;
    std::unique_ptr<Reader> chunks;
    std::unordered_map<std::string, Place> chunk_places;
    std::string ground_id;          // the chunk that `ground` is made of; rows of one chunk come one after another
    std::unique_ptr<Ground> ground;
    HashTable exact_rows, near_rows;
    const MinHash minhash;
    RougeIndex rouge_index;
    std::vector<Place> kept;        // rows that were kept, by number
    std::array<uint64_t, MinHash::BANDS> bands; // of the row at work, from near() and rouge() to keep()
    std::vector<uint32_t> words;

    explicit Filter(const Arguments& a)
        : a(a), in(a.files[0]), most_rows(count_rows()), exact_rows(most_rows), near_rows(most_rows * MinHash::BANDS),
          rouge_index(limits["filter.rouge"]) {
        if (!language.empty() && language != "zh" && language != "en")
            DIE("--lang %s: expected zh or en", language.c_str());
        std::string left = a.text("--skip");
        while (!left.empty()) { // names with commas between them
            const std::string name = left.substr(0, left.find(','));
            left.erase(0, name.size() + 1);
            std::string names;
            bool known = false;
            for (auto& r : rules()) {
                if (r.rule == &Filter::schema) continue; // all others need it
                known |= name == r.name;
                names += (names.empty() ? "" : ", ") + std::string(r.name);
            }
            if (!known) DIE("--skip %s: the rules are %s", name.c_str(), names.c_str());
            skipped.insert(name);
        }
        for_each_line(a.data("stopwords.txt"),
                      [&](std::string_view word, size_t) { stop_words.insert(word_hash(decode(word))); });
        if (a.has("--chunks")) {
            chunks = std::make_unique<Reader>(a.text("--chunks"));
            if (!chunks->seekable()) DIE("%s: is read in any order, so it has to be a file", chunks->path.c_str());
            while (chunks->next()) chunk_places[chunks->need()["id"].str()] = chunks->place();
        }
        if (a.text("--terms") == "auto") learn_terms();
        else if (a.has("--terms")) terms = Patterns(a.text("--terms"));
    }
    struct NamedRule { const char* name; Rule rule; };
    static const std::vector<NamedRule>& rules() {
        static const std::vector<NamedRule> all = {
            {"schema", &Filter::schema}, {"length", &Filter::length}, {"utf8", &Filter::utf8}, {"nfc", &Filter::nfc},
            {"language", &Filter::lang}, {"reference", &Filter::reference}, {"grounding", &Filter::grounding},
            {"terms", &Filter::term}, {"exact", &Filter::exact}, {"near", &Filter::near}, {"rouge-l", &Filter::rouge}};
        return all;
    }
    // For --terms auto.
    void learn_terms() {
        if (!chunks) DIE("--terms auto takes them from the book: --chunks FILE names it");
        BookTerms book(stop_words, a.data("common.txt"));
        for (Reader r(a.text("--chunks")); r.next();) book.learn(r.need());
        const Strings found = book.terms(limits);
        std::string some;
        for (size_t i = 0; i < found.size(); i++) {
            if (i < 10) some += (i ? ", " : ": ") + found[i];
            terms.add(found[i]);
            if (found[i].size() < 4 || !is_latin((uint8_t)found[i].back())) continue;
            terms.add(found[i].back() == 's' ? found[i].substr(0, found[i].size() - 1) : found[i] + "s");
        }
        say(format("%zu terms of the book%s%s", found.size(), some.c_str(), found.size() > 10 ? ", ..." : ""));
    }
    // A first look at the file: how many rows there are at most, and how frequent the words of questions are.
    size_t count_rows() {
        if (!in.seekable()) DIE("%s: is read twice, so it has to be a file", in.path.c_str());
        size_t n = 0;
        for (Reader r(a.files[0]); r.next_text(); n++)
            if (n % 4096 == 0) stop_if_interrupted();
        if (n >= UINT32_MAX) DIE("%s: more than 2^32 rows", in.path.c_str());
        return n;
    }
    void learn_words() {
        Reader r(a.files[0]);
        for (size_t n = 0; n < limits.count("filter.rouge_sample") && r.next(); n++)
            try {
                rouge_index.learn(word_hashes(decode(read_conversation(r.row()).question)));
            } catch (const Error&) {} // the schema rule will tell
    }

    std::string schema(Row& row) {
        try {
            row.talk = read_conversation(row.value);
        } catch (const Error& e) {
            return e.what();
        }
        row.question = decode(row.talk.question), row.answer = decode(row.talk.answer);
        return "";
    }
    std::string length(Row& row) {
        auto check = [&](const char* what, size_t n) -> std::string {
            const size_t least = limits.count(format("filter.%s.least", what).c_str());
            const size_t most = limits.count(format("filter.%s.most", what).c_str());
            return n >= least && n <= most ? "" : format("%s of %zu characters, not %zu to %zu", what, n, least, most);
        };
        const std::string fault = check("question", row.question.size());
        return fault.empty() ? check("answer", row.answer.size()) : fault;
    }
    // JSON is valid UTF-8 or the row would have no schema; what was broken before it became JSON shows as U+FFFD.
    std::string utf8(Row& row) {
        for (auto* text : {&row.question, &row.answer})
            for (char32_t c : *text) {
                const bool control = (c < 0x20 && c != '\n' && c != '\t' && c != '\r') || (c >= 0x7F && c < 0xA0);
                const bool nobodys = c == 0xFFFD || (c >= 0xE000 && c < 0xF900);
                if (control || nobodys) return format("U+%04X", (unsigned)c);
            }
        return "";
    }
    std::string nfc(Row& row) {
        for (auto* text : {&row.talk.question, &row.talk.answer})
            if (tokenizer.nfc(*text) != *text) return "is not in Unicode's form NFC";
        return "";
    }
    // --lang, else what the row says, else that of its question.
    std::string lang(Row& row) {
        const double question = cjk_share(row.question), answer = cjk_share(row.answer);
        const double zh = limits["lang.zh"], en = limits["lang.en"];
        std::string wanted = language.empty() ? row.value["lang"].str() : language;
        if (wanted.empty()) wanted = question >= zh ? "zh" : "en";
        for (double share : {question, answer})
            if (share >= 0 && (wanted == "zh" ? share < zh : share > en))
                return format("%.0f%% of the %s's words are Chinese, in %s", 100 * share,
                              share == question ? "question" : "answer", wanted.c_str());
        return "";
    }
    std::string reference(Row& row) {
        std::string found = references.find(row.question);
        return found.empty() ? references.find(row.answer) : found;
    }
    std::string grounding(Row& row) {
        if (!chunks) return "";
        const std::string id = row.value["chunk"].str();
        if (id != ground_id || !ground) {
            const auto place = chunk_places.find(id);
            if (place == chunk_places.end()) return "its chunk " + in_quotes(id) + " is not in " + chunks->path;
            ground = std::make_unique<Ground>(decode(chunks->again(place->second)->row()["text"].str()), stop_words);
            ground_id = id;
        }
        std::u32string_view question = row.question;
        std::unordered_set<std::string> asked; // an answer may take up what the question names
        for_each_fact(question, [&](const std::string& run, bool) { asked.insert(run); });
        size_t facts = 0, found = 0, words = 0, common = 0;
        std::string missing;
        for_each_fact(row.answer, [&](const std::string& run, bool is_fact) {
            const bool number = run.find_first_not_of("0123456789") == run.npos;
            if (!is_fact || (number && strtod(run.c_str(), nullptr) <= limits["filter.free_number"])) return;
            const bool known = asked.count(run) || ground->has(run);
            facts++, found += known;
            if (!known) missing = run;
        });
        ground->for_each_content_word(row.answer, [&](uint64_t word) { words++, common += ground->words.count(word); });
        if (facts && (double)found < limits["filter.facts"] * (double)facts)
            return format("%zu of %zu numbers and identifiers are not in the chunk: %s", facts - found, facts,
                          missing.substr(0, 40).c_str());
        if (words && (double)common < limits["filter.overlap"] * (double)words)
            return format("%zu of %zu content words are in the chunk", common, words);
        return "";
    }
    std::string term(Row& row) {
        const bool named = !terms.find(row.question).empty() || !terms.find(row.answer).empty();
        return named || terms.empty() ? "" : "names nothing of the subject";
    }
    static uint64_t content_hash(const Row& row) { // the table takes both ends of it
        return mix(0, fnv1a(row.talk.answer, fnv1a(row.talk.question + "\n"))) * 0x9E3779B97F4A7C15;
    }
    std::string exact(Row& row) {
        size_t first = 0;
        const bool found = exact_rows.find(content_hash(row), [&](uint32_t other) {
            first = other;
            const Conversation o = read_conversation(in.again(kept[other])->row());
            return o.question == row.talk.question && o.answer == row.talk.answer;
        });
        return found ? name_of(first) : "";
    }
    std::vector<uint64_t> grams_of(const Conversation& c) const {
        return ngrams(decode(c.question + "\n" + c.answer), limits.count("filter.near_characters"));
    }
    std::string near(Row& row) {
        const std::vector<uint64_t> grams = grams_of(row.talk);
        bands = minhash.bands(grams);
        std::set<uint32_t> compared;
        std::string found;
        for (uint64_t band : bands)
            if (near_rows.find(band, [&](uint32_t other) {
                    if (!compared.insert(other).second) return false;
                    const double s = jaccard(grams, grams_of(read_conversation(in.again(kept[other])->row())));
                    if (s < limits["filter.near"]) return false;
                    found = format("%.2f alike: ", s) + name_of(other);
                    return true;
                })) break;
        return found;
    }
    std::string rouge(Row& row) {
        words = word_hashes(row.question);
        std::string found;
        rouge_index.find(words, [&](size_t other) { return found = name_of(other), false; });
        return found;
    }
    std::string name_of(size_t number) {
        const auto old = in.again(kept[number]);
        const sj::Value id = old->row()["id"];
        return id ? sj::dump(id) : format("the row at byte %zu", (size_t)kept[number].offset);
    }
    void keep(Row& row) {
        const uint32_t number = (uint32_t)kept.size();
        kept.push_back(in.place());
        exact_rows.add(content_hash(row), number);
        for (uint64_t band : bands) near_rows.add(band, number);
        rouge_index.add(words);
    }

    int run() {
        Strings names;
        for (auto& r : rules()) names.push_back(r.name);
        Report report(a.dropped(), names);
        Output out(a.output());
        if (!chunks) say("no --chunks: answers are not compared with their source");
        learn_words();
        Progress progress;
        const double start = seconds();
        size_t rows = 0;
        while (in.next()) {
            progress.show("filter", ++rows, in.share());
            Row row = {};
            row.value = in.row();
            std::string fault = in.fault.empty() ? "" : "not JSON: " + in.fault;
            size_t i = 0;
            for (; i < rules().size(); i++) {
                const double before = seconds();
                const Rule rule = rules()[i].rule; // apart: g++ 12's -fsanitize=bounds loses the i of (this->*a[i])()
                if (skipped.count(names[i])) continue;
                if (fault.empty()) fault = (this->*rule)(row);
                report.rules[i].seconds += seconds() - before;
                if (!fault.empty()) break;
            }
            if (!fault.empty()) {
                report.drop(fault.find("invalid UTF-8") != fault.npos ? "utf8" : names[i], fault, in);
                continue;
            }
            keep(row);
            report.kept++;
            out.line(one_line(in.text));
        }
        out.commit();
        report.finish("rows", "--skip %s turns the rule off.");
        say(format("%zu rows in %.1f s", rows, seconds() - start));
        return 0;
    }
};
static int run_filter(const Arguments& a) { return Filter(a).run(); }

// ============================================================================================================ 10 split

using Counts = std::map<std::string, double>; // rows by difficulty
struct Group {                                // the rows of a chunk
    uint64_t order = 0;
    std::string chapter;
    Counts rows;
    size_t size = 0;
    bool test = false;
};

// Whole chunks go to the test side, until it has its rows; each time the one that brings the numbers of the chapters
// and of the difficulties, in its chapter and overall (""), nearest to what is wanted. Ties go by Group::order.
// missing: how many rows are wanted; on return, how many of them did not come.
static void choose_tests(const std::vector<Group*>& groups, std::map<std::string, Counts>& missing, size_t& wanted) {
    std::map<std::string, double> missing_rows;
    for (auto& [chapter, counts] : missing)
        for (auto& [difficulty, n] : counts) missing_rows[chapter] += n;
    for (;;) {
        Group* best = nullptr;
        double best_gain = -INFINITY;
        for (Group* g : groups) {
            if (g->test || g->size > wanted) continue;
            double gain = 0; // by how much, for a row, the sum of squares of what is missing shrinks
            for (auto& [difficulty, n] : g->rows)
                for (const Counts* c : {&missing[g->chapter], &missing[""]}) gain += n * (2 * c->at(difficulty) - n);
            const double n = (double)g->size;
            gain = (gain + n * (2 * missing_rows[g->chapter] - n)) / n;
            if (gain > best_gain + 1e-9) best = g, best_gain = gain;
        }
        stop_if_interrupted();
        if (!best) return;
        best->test = true;
        wanted -= best->size, missing_rows[best->chapter] -= (double)best->size;
        for (auto& [difficulty, n] : best->rows) missing[best->chapter][difficulty] -= n, missing[""][difficulty] -= n;
    }
}

// What the test rows have in common with training rows: character n-grams, and questions that are nearly the same.
struct Leakage {
    const size_t n;
    const double limit; // more than this share of a row's n-grams in train is a leak
    const std::vector<Conversation>& tests;
    RougeIndex index;
    std::unordered_map<uint64_t, bool> in_train; // n-grams of the test rows
    Strings asked;                               // by test row: the name of a row of train with a question like its own

    Leakage(const std::vector<Conversation>& tests, const Limits& limits)
        : n(limits.count("split.ngram")), limit(limits["split.leak_share"]), tests(tests),
          index(limits["filter.rouge"]), asked(tests.size()) {
        for (auto& c : tests) index.learn(question(c));
        for (auto& c : tests) {
            index.add(question(c));
            for (uint64_t gram : grams(c)) in_train[gram] = false;
        }
    }
    static std::vector<uint32_t> question(const Conversation& c) { return word_hashes(decode(c.question)); }
    std::vector<uint64_t> grams(const Conversation& c) const { return ngrams(decode(c.question + "\n" + c.answer), n); }
    void train(const Conversation& c, const std::string& name) {
        for (uint64_t gram : grams(c))
            if (auto found = in_train.find(gram); found != in_train.end()) found->second = true;
        index.find(question(c), [&](size_t i) { return asked[i] = name, true; });
    }
    double share(size_t test) const {
        const auto all = grams(tests[test]);
        const auto common = std::count_if(all.begin(), all.end(), [&](uint64_t gram) { return in_train.at(gram); });
        return (double)common / (double)all.size();
    }
    // Says what was found; returns the test rows that leak.
    std::vector<size_t> report() const {
        size_t overlapping = 0, alike = 0;
        std::vector<size_t> leaks;
        double mean = 0;
        for (size_t i = 0; i < tests.size(); i++) {
            const double x = share(i);
            mean += x / (double)tests.size();
            overlapping += x > limit, alike += !asked[i].empty();
            if (x > limit || !asked[i].empty()) leaks.push_back(i);
        }
        say(format("leakage: of a test row's %zu-character n-grams %.2f%% stand in train, on average", n, 100 * mean));
        say(format("  %zu rows with more than %.0f%% there, %zu with a question of ROUGE-L %.2f or more to one there: "
                   "%zu rows leak", overlapping, 100 * limit, alike, index.t, leaks.size()));
        return leaks;
    }
};

// The rows of train to leave out so that no test row leaks: those with a question like a test row's, and of those that
// share n-grams with a test row the ones that share most with it, until no more than `limit` of its own are left there.
// for_each_train(f) calls f(conversation, row) with every row of train.
template <class Each> static std::set<size_t> leaking_rows(Leakage& leakage, Each for_each_train) {
    std::set<size_t> gone;
    std::vector<size_t> overlapping;
    std::unordered_map<uint64_t, std::vector<size_t>> holders; // rows of train, by n-gram of these
    for (size_t i = 0; i < leakage.tests.size(); i++)
        if (leakage.share(i) > leakage.limit) {
            overlapping.push_back(i);
            for (uint64_t gram : leakage.grams(leakage.tests[i])) holders[gram];
        }
    for_each_train([&](const Conversation& c, size_t row) {
        leakage.index.find(Leakage::question(c), [&](size_t) { return gone.insert(row), false; });
        for (uint64_t gram : leakage.grams(c))
            if (auto found = holders.find(gram); found != holders.end())
                if (found->second.empty() || found->second.back() != row) found->second.push_back(row);
    });
    for (size_t i : overlapping) {
        const std::vector<uint64_t> all = leakage.grams(leakage.tests[i]);
        for (;;) {
            size_t common = 0;
            std::map<size_t, size_t> shared; // n-grams by row of train
            for (uint64_t gram : all) {
                bool here = false;
                for (size_t row : holders.at(gram))
                    if (!gone.count(row)) here = true, shared[row]++;
                common += here;
            }
            if ((double)common <= leakage.limit * (double)all.size()) break;
            auto fewer = [](auto& x, auto& y) { return x.second < y.second; };
            gone.insert(std::max_element(shared.begin(), shared.end(), fewer)->first);
        }
    }
    return gone;
}

struct Split {
    const Arguments& a;
    const Limits limits = Limits(a);
    const size_t wanted = a.number("--test", 0, 1, SIZE_MAX / 2);
    const std::string folder = a.output() == "-" ? "." : a.output();
    std::map<std::string, Group> groups;             // by chunk
    std::map<std::string, Counts> chapters, missing; // "": all of them; rows that the test side should have and lacks
    size_t rows = 0, taken = 0;                      // in all; for the test

    explicit Split(const Arguments& a) : a(a) {}
    Group& group_of(const Reader& in) { // a row without a chunk is one by itself
        const std::string chunk = in.row()["chunk"].str();
        return groups[chunk.empty() ? format("\nrow %zu", in.number) : chunk];
    }
    // Calls f(row as it was read) with the rows of a side.
    template <class F> void each(bool test, F f) {
        Progress progress;
        size_t done = 0;
        for (Reader in(a.files[0]); in.next();) {
            progress.show("split", ++done, in.share());
            if (group_of(in).test == test) f(in);
        }
    }
    static std::string name_of(const Reader& in) {
        const sj::Value id = in.row()["id"];
        return id.is(sj::String) ? id.str() : id ? sj::dump(id) : format("line %zu", in.number);
    }

    void choose() {
        Reader in(a.files[0]);
        if (!in.seekable()) DIE("%s: is read again, so it has to be a file", in.path.c_str());
        for (Progress progress; in.next(); rows++) {
            progress.show("split", rows, in.share());
            const sj::Value v = in.need();
            const std::string difficulty = v["difficulty"].str("-");
            Group& g = group_of(in);
            if (g.size++ == 0) g.chapter = v["source"].str() + "\n" + top_chapter(v);
            g.rows[difficulty]++, chapters[g.chapter][difficulty]++, chapters[""][difficulty]++;
        }
        if (wanted >= rows) DIE("--test %zu: %s has %zu rows", wanted, a.files[0].c_str(), rows);
        std::vector<Group*> order; // by a hash of seed and chunk, so that the order of the rows changes nothing
        const std::string seed = std::to_string(a.number("--seed", 0, 0, SIZE_MAX));
        for (auto& [chunk, g] : groups) {
            g.order = mix(0, fnv1a(chunk, fnv1a(seed + "\n")));
            order.push_back(&g);
        }
        std::sort(order.begin(), order.end(), [](const Group* x, const Group* y) { return x->order < y->order; });
        missing = chapters;
        for (auto& [chapter, counts] : missing)
            for (auto& [difficulty, n] : counts) n *= (double)wanted / (double)rows;
        size_t left = wanted;
        choose_tests(order, missing, left);
        taken = wanted - left;
        if (!taken) DIE("--test %zu: every chunk has more rows", wanted);
    }
    void tell_shares() {
        say(format("test %zu rows, train %zu rows; no chunk is on both sides", taken, rows - taken));
        for (auto& [difficulty, count] : chapters[""]) {
            const double target = count * (double)wanted / (double)rows, got = target - missing[""][difficulty];
            say(format("  %-8s %5.1f%% of all rows, %5.1f%% of the test's", difficulty.c_str(),
                       100 * count / (double)rows, 100 * got / (double)taken));
        }
    }
    void name(const std::vector<size_t>& leaks, const Leakage& leakage, const Strings& names) const {
        constexpr size_t SHOWN = 5;
        for (size_t i = 0; i < leaks.size() && i < SHOWN; i++) {
            const size_t test = leaks[i];
            const std::string why = leakage.asked[test].empty()
                ? format("%.0f%% of its n-grams stand in train", 100 * leakage.share(test))
                : "train asks the like in " + leakage.asked[test];
            say(format("  %s leaks: %s (%s)", score_excerpt(names[test], 60).c_str(),
                       score_excerpt(leakage.tests[test].question, 70).c_str(), score_excerpt(why, 100).c_str()));
        }
        if (leaks.size() > SHOWN) say(format("  and %zu more", leaks.size() - SHOWN));
    }

    int run() {
        if (!wanted) DIE("--test N is needed: how many rows are kept for testing");
        choose();
        std::vector<Conversation> tests;
        Strings names;
        each(true, [&](const Reader& in) { tests.push_back(need_conversation(in)), names.push_back(name_of(in)); });
        Leakage leakage(tests, limits);
        each(false, [&](const Reader& in) { leakage.train(need_conversation(in), name_of(in)); });
        tell_shares();
        const std::vector<size_t> leaks = leakage.report();
        name(leaks, leakage, names);
        std::unique_ptr<Report> report;
        std::set<size_t> gone; // rows of train, by number
        if (a.has("--drop-leaks")) {
            report = std::make_unique<Report>(a.dropped(), Strings{"leak"});
            gone = leaking_rows(leakage, [&](auto f) {
                each(false, [&](const Reader& in) { f(need_conversation(in), in.number); });
            });
        } else if ((double)leaks.size() > limits["split.leak_rows"] * (double)taken) {
            DIE("%zu of %zu test rows leak, more than split.leak_rows allows: nothing was written. --drop-leaks leaves "
                "out what they share text with in train, --seed N splits in another way", leaks.size(), taken);
        }
        Output train(folder + "/train.jsonl"), test(folder + "/test.jsonl");
        each(true, [&](const Reader& in) { test.line(one_line(in.text)); });
        each(false, [&](const Reader& in) {
            if (gone.count(in.number)) return report->drop("leak", "shares text or a question with a test row", in);
            train.line(one_line(in.text));
            if (report) report->kept++;
        });
        if (report && !report->kept) DIE("no row of train would be left: nothing was written");
        train.commit();
        test.commit();
        if (report) report->finish("rows of train");
        return 0;
    }
};
static int run_split(const Arguments& a) { return Split(a).run(); }

// ======================================================================================== 11 pack, unpack, stats

using Words = std::vector<uint32_t>; // of a packed row

// A row of tokens: what the model is fed when it has to give this answer (the template with what was said before, and
// an empty think block if nothing is thought), not trained; then the answer and <|im_end|>\n, trained. Prompt and
// answer are tokenized apart, as in the answer's making.
static Words render_row(const Tokenizer& tokenizer, const std::vector<Message>& before, const Message& answer,
                        const Strings& tools, bool thinks) {
    std::vector<Message> with = before;
    with.push_back(answer);
    const auto prompt = render(before, {thinks, true}, tools).parts;
    auto whole = render(with, {thinks, false}, tools).parts;
    std::vector<int> ids;
    auto encode = [&](const std::vector<ChatText::Part>& parts, size_t from, size_t to) {
        for (size_t k = from; k < to; k++)
            if (!parts[k].special) tokenizer.encode(ids, parts[k].text, false);
            else if (const int id = tokenizer.id(parts[k].text); id >= 0) ids.push_back(id);
            else DIE("the tokenizer has no %s", parts[k].text.c_str());
    };
    const size_t last = prompt.size() - 1; // a text, in whole's part of the same number goes on with the answer
    const std::string& asked = prompt[last].text;
    bool same = whole.size() > last && whole[last].text.compare(0, asked.size(), asked) == 0;
    for (size_t k = 0; same && k < last; k++) same = prompt[k].text == whole[k].text;
    if (!same)
        DIE("messages: the assistant's turn %zu does not follow a question as the chat template wants it",
            before.size());
    encode(prompt, 0, last + 1);
    const size_t trained_from = ids.size();
    whole[last].text.erase(0, asked.size());
    encode(whole, last, whole.size());
    Words row(ids.begin(), ids.end());
    for (size_t k = trained_from; k < row.size(); k++) row[k] |= TRAIN;
    return row;
}
static int need_end_of_text(const Tokenizer& tokenizer) {
    const int id = tokenizer.id("<|endoftext|>");
    if (id < 0) DIE("the tokenizer has no <|endoftext|>");
    return id;
}
static bool thinks(const Message& m) { return !split_thought(m).first.empty(); }

// One row for each answer of a conversation. So every answer of a long one is learnt after the very tokens that it is
// asked for with; one row with all turns could not have that, since the template shows earlier answers without the
// think block.
static std::vector<Words> render_rows(const Tokenizer& tokenizer, const Conversation& c) {
    std::vector<Words> rows;
    bool asked = false;
    for (size_t i = 0; i < c.messages.size(); i++) {
        const Message& m = c.messages[i];
        asked |= m.role == "user";
        if (m.role != "assistant" || !asked) continue;
        rows.push_back(render_row(tokenizer, {c.messages.begin(), c.messages.begin() + (ptrdiff_t)i}, m, c.tools,
                                  thinks(m)));
    }
    return rows;
}
// The chosen and the rejected answer, each behind the same tokens: if one of them thinks, the other does not think in
// its own words.
static std::vector<Words> render_pair(const Tokenizer& tokenizer, const Preference& p) {
    std::vector<Words> rows;
    for (const Message* m : {&p.chosen, &p.rejected}) {
        if (p.kind != "text") {
            rows.push_back(render_row(tokenizer, p.prompt, *m, p.tools, thinks(p.chosen) || thinks(p.rejected)));
            continue;
        }
        std::vector<int> ids = tokenizer.encode(p.prompt[0].content, false);
        const size_t trained_from = ids.size();
        tokenizer.encode(ids, m->content, false);
        ids.push_back(need_end_of_text(tokenizer));
        rows.emplace_back(ids.begin(), ids.end());
        for (size_t k = trained_from; k < ids.size(); k++) rows.back()[k] |= TRAIN;
    }
    if (rows[0] == rows[1]) DIE("chosen and rejected are the same");
    return rows;
}
// A row of plain text, {"text": ...}: all of it is trained, and the end.
static Words render_text_row(const Tokenizer& tokenizer, const std::string& text) {
    std::vector<int> ids = tokenizer.encode(text, false);
    ids.push_back(need_end_of_text(tokenizer));
    if (ids.size() < 2) DIE("text: empty");
    Words words(ids.begin(), ids.end());
    for (size_t k = 1; k < words.size(); k++) words[k] |= TRAIN;
    return words;
}

// A whole file of JSON.
struct JsonFile {
    const MappedFile file;
    sj::Doc doc;
    explicit JsonFile(const std::string& path) : file(path) {
        if (const std::string fault = sj::parse(doc, file.text()); !fault.empty())
            DIE("%s: %s", path.c_str(), fault.c_str());
    }
};

// An entry of LLaMA-Factory's dataset_info.json: the file it names, and how to read it.
static Layout read_dataset_info(const std::string& path, const std::string& name, std::string* file) {
    const JsonFile info(path);
    const std::string where = path + ": " + in_quotes(name);
    const sj::Value entry = info.doc.root()[name];
    if (!entry.is(sj::Object)) DIE("%s: no such dataset (--name)", where.c_str());
    if (!entry["file_name"].is(sj::String)) DIE("%s: no file_name; other sources are not read", where.c_str());
    *file = path.substr(0, path.rfind('/') + 1) + entry["file_name"].str();
    Layout layout;
    layout.formatting = entry["formatting"].str("alpaca");
    if (layout.formatting != "alpaca" && layout.formatting != "sharegpt")
        DIE("%s: formatting %s is not known", where.c_str(), in_quotes(layout.formatting).c_str());
    for (auto part : {"columns", "tags"})
        for (auto [key, value] : entry[part].members())
            if (layout.name.count(key) && value.is(sj::String)) layout.name[key] = value.str();
    return layout;
}

// Enters the file there under its name, leaves the others as they are, and reads it back.
static void write_dataset_info(const std::string& path, const std::string& file, const std::string& kind,
                               const std::set<std::string>& columns, bool pairs) {
    const std::string name = file.substr(0, file.rfind('.'));
    std::map<std::string, std::string> entries;
    if (access(path.c_str(), F_OK) == 0) {
        const JsonFile old(path);
        for (auto [key, value] : old.doc.root().members()) entries[key] = sj::dump(value);
    }
    sj::Writer w;
    w.object().field("file_name", file);
    w.field("formatting", kind == "openai" ? "sharegpt" : kind == "text" ? "alpaca" : kind);
    if (pairs) w.field("ranking", true);
    w.key("columns").object();
    if (kind == "text") w.field("prompt", "text");
    if (kind == "openai") w.field("messages", "messages");
    for (auto& [key, column] : Layout().name) {
        const bool answer = key == "chosen" || key == "rejected";
        if (key.find("_tag") == key.npos && columns.count(column) && (answer ? pairs : kind != "openai"))
            w.field(key, column);
    }
    w.end();
    if (kind == "openai") {
        w.key("tags").object().field("role_tag", "role").field("content_tag", "content").field("user_tag", "user");
        w.field("assistant_tag", "assistant").field("system_tag", "system").end();
    }
    entries[name] = w.end().text;
    OutputFile out(path);
    std::string separator = "{\n  ";
    for (auto& [key, text] : entries) {
        std::string line = separator;
        sj::quote(line, key);
        out.write(line + ": " + text);
        separator = ",\n  ";
    }
    out.write("\n}\n");
    out.commit();
    std::string again;
    read_dataset_info(path, name, &again);
    if (again != path.substr(0, path.rfind('/') + 1) + file)
        DIE("%s: %s does not read back", path.c_str(), name.c_str());
}

static size_t count_trained(DatasetRow row) {
    return (size_t)std::count_if(row.begin(), row.end(), [](uint32_t word) { return word & TRAIN; });
}
static DatasetRow view(const Words& words) { return {words.data(), words.data() + words.size()}; }

// What a line of rows becomes.
struct Packed {
    std::string kind;
    std::vector<Words> rows; // of a preference the chosen and the rejected
    bool pair = false;

    Packed(const Tokenizer& tokenizer, sj::Value v, const Layout& layout) {
        if (v.is(sj::Object) && is_preference(v, layout)) {
            const Preference p = read_preference(v, layout);
            kind = p.kind, rows = render_pair(tokenizer, p), pair = true;
        } else if (v["text"].is(sj::String) && !v["messages"] && !v["conversations"] && !v[layout.name.at("prompt")]) {
            kind = "text", rows = {render_text_row(tokenizer, v["text"].str())};
        } else {
            const Conversation c = read_conversation(v, layout);
            kind = c.kind, rows = render_rows(tokenizer, c);
        }
    }
};

static int run_pack(const Arguments& a) {
    if (a.files.size() != 2) DIE("pack takes two files: the rows and the dataset to write");
    std::string input = a.files[0];
    const std::string info_name = "dataset_info.json", name = input.substr(input.rfind('/') + 1);
    const std::string over = a.text("--over", "drop");
    const bool by_info = name == info_name;
    if (over != "drop" && over != "refuse") DIE("--over %s: expected drop or refuse", over.c_str());
    const Layout layout = by_info ? read_dataset_info(input, a.need("--name"), &input) : Layout();
    const size_t longest = a.number("--max-len", 512, 2, 1 << 24);
    const Tokenizer tokenizer(a.tokenizer());
    Reader in(input);
    Report report(a.text("--dropped", input + ".dropped"), {"too long"});
    DatasetWriter out(a.files[1], tokenizer.hash(), template_hash());
    Progress progress;
    std::set<std::string> kinds, columns;
    size_t conversations = 0, trained = 0;
    bool pairs = false;
    while (in.next()) {
        progress.show("pack", conversations++, in.share());
        const sj::Value v = in.need();
        const Packed packed = [&] {
            try {
                return Packed(tokenizer, v, layout);
            } catch (const Error& e) {
                DIE("%s: %s", in.where().c_str(), e.what());
            }
        }();
        if (conversations == 1) pairs = packed.pair;
        if (packed.pair != pairs)
            DIE("%s: %s", in.where().c_str(), pairs ? "no chosen and rejected answer, which the rows before it have"
                                                    : "a chosen and a rejected answer, and no row before it has them");
        kinds.insert(packed.kind);
        for (auto [key, value] : v.members())
            if (!is_absent(value)) columns.insert(key);
        const size_t together = pairs ? 2 : 1;
        for (size_t i = 0; i < packed.rows.size(); i += together) {
            const Words &row = packed.rows[i], &last = packed.rows[i + together - 1];
            if (const size_t size = std::max(row.size(), last.size()); size > longest) {
                const std::string fault = format("%zu tokens, more than %zu", size, longest);
                if (over == "refuse")
                    DIE("%s: %s (--over drop leaves such rows out)", in.where().c_str(), fault.c_str());
                report.drop("too long", fault, in);
                continue;
            }
            if (pairs) out.add_pair(row, last);
            else out.add(row);
            report.kept++;
            trained += count_trained(view(row)) + (pairs ? count_trained(view(last)) : 0);
        }
    }
    const uint64_t tokens = out.begins.back();
    if (!report.kept) DIE("%s: %s", input.c_str(), conversations ? "all rows are too long" : "no row in it");
    out.commit();
    report.finish("rows");
    say(format("%s: %zu %s, %llu tokens, %zu of them trained", a.files[1].c_str(), conversations,
               pairs ? "pairs" : "conversations", (unsigned long long)tokens, trained));
    if (pairs && kinds.count("text"))
        say("a prompt that is a text is continued without the chat template, as TRL does; a list of messages is asked");
    const std::string info = a.text("--info", input.substr(0, input.rfind('/') + 1) + info_name);
    if (by_info || info == "none" || a.files[0] == "-") return 0;
    if (kinds.size() != 1) say("no " + info_name + ": rows of more than one kind");
    else if (pairs && (kinds.count("trl") || kinds.count("text")))
        say("no " + info_name + ": it has no words for TRL's pairs");
    else write_dataset_info(info, name, *kinds.begin(), columns, pairs);
    return 0;
}

// A packed row says its messages, or its text; a pair says its prompt and two answers, as TRL has them.
struct Unpacker {
    const Tokenizer& tokenizer;
    const int start = tokenizer.id("<|im_start|>"), end = tokenizer.id("<|im_end|>");

    using Ids = std::vector<int>;
    bool is_text(DatasetRow row) const { return (int)(*row.begin() & ~TRAIN) != start; }
    std::string text(Ids ids) const {
        if (!ids.empty() && ids.back() == tokenizer.id("<|endoftext|>")) ids.pop_back();
        return tokenizer.decode(ids, false);
    }
    static Ids ids_of(DatasetRow row) {
        Ids ids;
        for (uint32_t word : row) ids.push_back((int)(word & ~TRAIN));
        return ids;
    }

    std::vector<Message> messages(DatasetRow row) const { // <|im_start|>role\ncontent<|im_end|>\n
        const std::string no_thought = "<think>\n\n</think>\n\n";
        const Ids ids = ids_of(row);
        std::vector<Message> all;
        for (auto from = ids.begin(); from != ids.end();) {
            const auto to = std::find(from, ids.end(), end);
            std::string text = tokenizer.decode({from + (*from == start), to}, false);
            from = to == ids.end() ? to : to + 1;
            if (text == "\n" && from == ids.end() && !all.empty()) break; // after the last
            if (text[0] == '\n') text.erase(0, 1);
            if (text.compare(0, 12, "<|im_start|>") == 0) text.erase(0, 12);
            const size_t line = std::min(text.find('\n'), text.size());
            std::string content = text.substr(std::min(line + 1, text.size()));
            if (content.compare(0, no_thought.size(), no_thought) == 0) content.erase(0, no_thought.size());
            all.push_back({text.substr(0, line), content});
        }
        return all;
    }
    static void write(sj::Writer& w, const char* key, const std::vector<Message>& messages) {
        w.key(key).array();
        for (auto& m : messages) w.object().field("role", m.role).field("content", m.content).end();
        w.end();
    }

    void write_row(sj::Writer& w, DatasetRow row) const {
        if (is_text(row)) w.field("text", text(ids_of(row)));
        else write(w, "messages", messages(row));
    }
    void write_pair(sj::Writer& w, DatasetRow chosen, DatasetRow rejected) const {
        for (DatasetRow row : {chosen, rejected}) {
            const bool first = row.begin() == chosen.begin();
            const char* key = first ? "chosen" : "rejected";
            if (is_text(row)) {
                const auto answer = std::find_if(row.begin(), row.end(), [](uint32_t word) { return word & TRAIN; });
                if (first) w.field("prompt", text(ids_of({row.begin(), answer})));
                w.field(key, text(ids_of({answer, row.end()})));
                continue;
            }
            std::vector<Message> before = messages(row), last = {before.back()};
            before.pop_back();
            if (first) write(w, "prompt", before);
            write(w, key, last);
        }
    }
};
static int run_unpack(const Arguments& a) {
    const Tokenizer tokenizer(a.tokenizer());
    const Dataset data(a.files[0]);
    data.must_match(tokenizer.hash(), template_hash());
    const Unpacker unpacker = {tokenizer};
    Output out(a.output());
    Progress progress;
    for (size_t i = 0; i < data.rows(); i += data.group()) {
        progress.show("unpack", i, (double)i / (double)data.rows());
        const DatasetRow row = data.row(i), last = data.row(i + data.group() - 1);
        sj::Writer w;
        w.object().field("hash", hex(data.hash(i)));
        w.field("tokens", row.size() + (data.pairs() ? last.size() : 0));
        w.field("trained", count_trained(row) + (data.pairs() ? count_trained(last) : 0));
        if (data.pairs()) unpacker.write_pair(w, row, last);
        else unpacker.write_row(w, row);
        out.line(w.end().text);
    }
    out.commit();
    return 0;
}

// Text on the left, numbers on the right; a CJK character is two columns wide.
static std::string cell(const std::string& s, int width) {
    int used = 0;
    for (char32_t c : decode(s)) used += is_cjk(c) || (c >= 0xFF01 && c <= 0xFF60) ? 2 : 1;
    const std::string blank((size_t)std::max(0, std::abs(width) - used), ' ');
    return width < 0 ? s + blank : blank + s;
}

struct Lengths {
    std::string name;
    std::vector<uint32_t> values = {};
    void print() {
        if (values.empty()) return;
        std::sort(values.begin(), values.end());
        uint64_t sum = 0;
        for (uint32_t v : values) sum += v;
        std::string line = cell(name, -20) + cell(std::to_string(sum), 12);
        const size_t n = values.size();
        const uint64_t shown[] = {values[0], values[n / 2], sum / n, values[n * 95 / 100], values[n - 1]};
        for (uint64_t v : shown)
            line += cell(std::to_string(v), 9);
        printf("%s\n", line.c_str());
    }
};

static int run_stats(const Arguments& a) {
    Lengths tokens{"tokens"}, trained{"  trained"}, questions{"question characters"}, answers{"answer characters"};
    std::map<std::string, std::map<std::string, size_t>> table; // chapter, difficulty
    std::set<std::string> difficulties;
    auto take = [&](DatasetRow row) {
        tokens.values.push_back((uint32_t)row.size());
        trained.values.push_back((uint32_t)count_trained(row));
    };
    size_t rows = 0, faults = 0;
    std::set<uint64_t> hashes;
    bool packed = false;
    if (a.files[0] != "-") {
        const MappedFile file(a.files[0]);
        packed = file.size >= 8 && !memcmp(file.data, DatasetHeader().magic, 8);
    }
    if (packed) {
        const Dataset data(a.files[0]);
        for (; rows < data.rows(); rows++) take(data.row(rows)), hashes.insert(data.hash(rows));
        printf("rows      %zu, %zu of them different%s\n", rows, hashes.size(), data.pairs() ? "; pairs" : "");
        printf("tokenizer %s\n", hex(data.header.tokenizer).c_str());
        printf("template  %s\n", hex(data.header.chat_template).c_str());
    } else {
        const Tokenizer tokenizer(a.tokenizer());
        Reader in(a.files[0]);
        for (Progress progress; in.next(); rows++) {
            progress.show("stats", rows, in.share());
            try {
                if (const sj::Value v = in.row(); v.is(sj::Object) && is_preference(v, {})) {
                    for (auto& row : render_pair(tokenizer, read_preference(v, {}))) take(view(row));
                } else {
                    const Conversation c = read_conversation(v);
                    for (auto& row : render_rows(tokenizer, c)) take(view(row));
                    questions.values.push_back((uint32_t)count_characters(c.question));
                    answers.values.push_back((uint32_t)count_characters(c.answer));
                }
            } catch (const Error&) {
                faults++;
            }
            const std::string difficulty = in.row()["difficulty"].str("-");
            table[top_chapter(in.row())][difficulty]++;
            difficulties.insert(difficulty);
        }
        printf("rows      %zu, %zu of them no conversation\n", rows, faults);
    }
    printf("\n%s%s\n", cell("", -20).c_str(), "         sum      min   median     mean      95%      max");
    for (Lengths* l : {&tokens, &trained, &questions, &answers}) l->print();
    for (uint32_t limit : {256, 512, 1024, 2048, 4096}) {
        const auto over = tokens.values.end() - std::upper_bound(tokens.values.begin(), tokens.values.end(), limit);
        const double share = (double)over / (double)tokens.values.size();
        if (over) printf("over %-6u%10zu rows, %.1f%%\n", limit, (size_t)over, 100 * share);
    }
    if (table.empty()) return 0;
    Strings columns; // easy, medium, hard, then what else there is
    for (auto d : DIFFICULTIES)
        if (difficulties.erase(d)) columns.push_back(d);
    columns.insert(columns.end(), difficulties.begin(), difficulties.end());
    printf("\n%s", cell("chapter", -50).c_str());
    for (auto& d : columns) printf("%s", cell(d, 9).c_str());
    printf("%s\n", cell("rows", 9).c_str());
    for (auto& [chapter, counts] : table) {
        size_t sum = 0;
        printf("%s", cell(chapter.empty() ? "-" : chapter, -50).c_str());
        for (auto& d : columns) printf("%s", cell(std::to_string(counts[d]), 9).c_str()), sum += counts[d];
        printf("%s\n", cell(std::to_string(sum), 9).c_str());
    }
    return 0;
}

// ============================================================================================================= 12 main

struct Command {
    const char *name, *files, *options; // of OPTIONS; those that every command knows are not named again
    size_t fewest, most;                // files
    int (*run)(const Arguments&);
    const char* help;
};
static const Command COMMANDS[] = {
    {"chunk", "BOOK...", "--characters --tokens --overlap --clean -z", 1, SIZE_MAX, run_chunk,
     "cuts books into chunks at headings, paragraphs and sentences. Markdown and text in UTF-8; PDF where\n"
     "pdftotext (poppler-utils) is installed, HTML, DOCX and EPUB where pandoc is"},
    {"prompt", "chunks.jsonl", "--model --max-tokens --subject --examples --lang --chapter-quota --dropped", 1, 1,
     run_prompt, "makes requests in OpenAI's Batch format from the templates in data/datagen/prompts/"},
    {"generate", "requests.jsonl", "--url --key-env --model --parallel --timeout --retries --journal --dropped", 1, 1,
     run_generate, "asks an OpenAI-compatible endpoint (--url URL, --key-env NAME of the variable with the key)"},
    {"collect", "responses.jsonl", "--chunks --dropped", 1, 1, run_collect,
     "makes Alpaca rows of the replies (--chunks chunks.jsonl)"},
    {"filter", "qa.jsonl", "--chunks --terms --skip --lang -z --dropped", 1, 1, run_filter,
     "keeps the good rows, once (--chunks chunks.jsonl compares answers with their source)"},
    {"split", "clean.jsonl", "--test --seed --drop-leaks --dropped", 1, 1, run_split,
     "writes train.jsonl and test.jsonl (--test N rows) into the folder -o, by chunk; measures leakage"},
    {"pack", "rows.jsonl out.bin", "-z --max-len --over --info --name --dropped", 2, 2, run_pack,
     "tokenizes; also reads dataset_info.json (--name NAME)"},
    {"unpack", "data.bin", "-z", 1, 1, run_unpack, "the rows of a dataset as JSONL"},
    {"stats", "rows.jsonl|data.bin", "-z", 1, 1, run_stats, "rows, tokens, lengths, difficulties by chapter"},
};

// What each option means; Arguments::given has it under its first name. Some defaults come from limits.txt: a test sees
// that the two agree.
static std::vector<Option> option_table(Arguments& a) {
    std::vector<Option> table = {
        {"-o", "--output", "FILE", "default: standard output. split: a folder (default: this one)", {}},
        {"-z", "--tokenizer", "FILE", "default: tokenizer.bin in this folder or beside the program", {}},
        {"", "--data", "DIR", "limits, patterns and prompts (default: data/datagen here or beside the\nprogram)", {}},
        {"", "--dropped", "FILE", "what is not passed on, and why (default: INPUT.dropped)", {}},
        {"", "--characters", "N", "of a chunk, at most (default 3500)", {}},
        {"", "--tokens", "N", "the same in tokens, instead of --characters", {}},
        {"", "--overlap", "N", "characters that a chunk repeats of the one before (default 200)", {}},
        {"", "--clean", "auto|yes|no", "whether page numbers, running heads and feet, page breaks and hyphens at\n"
         "line ends go; auto (the default): where the text was a PDF", {}},
        {"", "--model", "NAME", "that is asked (default: what the requests name; generate: else the\n"
         "endpoint's only one)", {}},
        {"", "--max-tokens", "N", "of a reply, at most; 0: no limit (default: 400, 700, 1500 for each easy,\n"
         "medium, hard question of the request)", {}},
        {"", "--subject", "TEXT", "what the book is about (default: the templates do not say)", {}},
        {"", "--examples", "DIR|none", "en/easy.json and so on in DIR: examples for the templates (default: of\n"
         "several everyday subjects)", {}},
        {"", "--lang", "NAME", "prompt: language of the templates (default: each chunk's); filter: zh or\n"
         "en, the language of the rows (default: what each row says)", {}},
        {"", "--chapter-quota", "N", "questions a chapter, at most (default: no limit)", {}},
        {"", "--url", "URL", "an OpenAI-compatible endpoint, with or without /v1; needed", {}},
        {"", "--key-env", "NAME", "of the variable with the API key (default: no key is sent)", {}},
        {"", "--parallel", "N", "requests at once (default 8)", {}},
        {"", "--timeout", "SECONDS", "for a reply (default 300)", {}},
        {"", "--retries", "N", "of a request that failed (default 6)", {}},
        {"", "--journal", "FILE", "where replies go as they come (default: INPUT.journal)", {}},
        {"", "--chunks", "FILE", "what `chunk` wrote: the source of each row (collect needs it; filter's\n"
         "default: answers are not compared with their source)", {}},
        {"", "--terms", "FILE|auto", "terms of the subject, one of which a row has to name; auto takes them\n"
         "from the chunks (default: none, and the rule is off)", {}},
        {"", "--skip", "RULE,...", "rules that are turned off (default: none)", {}},
        {"", "--test", "N", "rows of the test set; needed", {}},
        {"", "--seed", "N", "of the split (default 0)", {}},
        {"", "--drop-leaks", "", "leaves out the rows of train that test rows share text with", {}},
        {"", "--max-len", "N", "tokens of a row, at most (default 512)", {}},
        {"", "--over", "drop|refuse", "what becomes of longer rows (default: drop)", {}},
        {"", "--info", "FILE", "dataset_info.json to write, or none (default: beside the rows)", {}},
        {"", "--name", "NAME", "of the dataset in dataset_info.json; needed to read one", {}},
    };
    for (auto& o : table)
        o.set = [&a, key = std::string(*o.brief ? o.brief : o.name)](const char*, const char* v) { a.given[key] = v; };
    return table;
}

static std::string usage() {
    std::string all = "usage: datagen COMMAND FILES [options]\n       datagen --version\n\n";
    for (auto& c : COMMANDS) {
        std::string help = c.help;
        for (size_t at = 0; (at = help.find('\n', at)) != help.npos; at++) help.replace(at, 1, "\n           ");
        all += format("  %-9s%-20s %s\n           %s\n", c.name, c.files, c.options, help.c_str());
    }
    all += format("  %-9s%-20s %s\n           %s\n", "score", "answers.jsonl reference.jsonl",
                  "--train --compat --json --seed --dict",
                  "ROUGE, BLEU-4, key facts and choices of answers, with 95% intervals");
    Arguments none;
    all += "\nEvery command: -o FILE, --data DIR, and --help for its own options. A file that is read once may be -,\n"
           "which is standard input.\n";
    return all + help_text(option_table(none));
}

int run(int argc, char** argv) {
    const std::string name = argc > 1 ? argv[1] : "";
    if (name.empty()) return fputs(usage().c_str(), stderr), 1;
    if (told_version("datagen", argc, argv)) return 0;
    if (name == "-h" || name == "--help") return write_stdout(usage()), 0;
    if (name == "score") return score_main(argc - 1, argv + 1); // (score.h)
    for (auto& c : COMMANDS) {
        if (name != c.name) continue;
        Arguments a;
        bool help = false;
        std::vector<Option> table = option_table(a);
        const std::string known = std::string(" -o --data ") + c.options + " ";
        auto foreign = [&](const Option& o) {
            return known.find(format(" %s ", *o.brief ? o.brief : o.name)) == known.npos;
        };
        table.erase(std::remove_if(table.begin(), table.end(), foreign), table.end());
        table.push_back({"-h", "--help", "", "this text", flag(help)});
        a.files = parse(table, argc - 1, argv + 1);
        const std::string usage = format("usage: datagen %s %s [options]\n%s\n", c.name, c.files, c.help);
        if (help) return print_help(usage.c_str(), table), 0;
        if (a.files.size() < c.fewest || a.files.size() > c.most)
            DIE("usage: datagen %s %s [%s]", c.name, c.files, c.options);
        return c.run(a);
    }
    DIE("unknown command %s; datagen --help lists them", name.c_str());
}

#ifndef DATAGEN_NO_MAIN
int main(int argc, char** argv) {
    take_signals({SIGINT, SIGTERM}, {SIGPIPE});
    auto run_or_stop = [](int argc, char** argv) {
        try {
            return run(argc, argv);
        } catch (const Interrupted&) {
            print_error("datagen", "interrupted");
            return 130;
        }
    };
    return run_program("datagen", run_or_stop, argc, argv);
}
#endif // DATAGEN_NO_MAIN
