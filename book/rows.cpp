#include "book/rows.h"
#include "base/json_lines.h"
#include "base/options.h"
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sys/stat.h>
#include <unistd.h>

namespace book {

static bool is_json_space(char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\n'; }

Reader::Reader(const std::string& p) : path(p == "-" ? "standard input" : p) {
    file = p == "-" ? stdin : fopen(p.c_str(), "rb");
    struct stat st;
    if (!file || fstat(fileno(file), &st) != 0) DIE("%s: %s", path.c_str(), strerror(errno));
    if (S_ISDIR(st.st_mode)) DIE("%s: is a directory", path.c_str());
    regular = S_ISREG(st.st_mode);
    size = regular ? (uint64_t)st.st_size : 0;
    has(3);
    at += mark_of(path, buffer);
    size_t first = 0;
    while (has(first) && is_json_space(buffer[at + first])) first++;
    array = has(first) && buffer[at + first] == '[';
    if (array) lines += (size_t)std::count(&buffer[at], &buffer[at + first], '\n'), at += first + 1;
}

bool Reader::next_text() {
    while (array ? find_item() : find_line()) {
        if (!fault.empty() || !std::all_of(text.begin(), text.end(), is_json_space)) return true;
    }
    return false;
}

bool Reader::next() {
    doc.nodes.clear();
    if (!next_text()) return false;
    if (fault.empty()) fault = parse_line(doc, text); // each row is a JSON text of its own
    return true;
}

std::string Reader::where() const {
    return format("%s: %s %zu", path.c_str(), array ? "item" : "line", number);
}

sj::Value Reader::need() const {
    if (!fault.empty()) DIE("%s: %s", where().c_str(), fault.c_str());
    if (!row().is(sj::Object)) DIE("%s: not an object", where().c_str());
    return row();
}

std::unique_ptr<Reader::Old> Reader::again(Place at) const {
    auto old = std::make_unique<Old>();
    old->text.resize(at.length);
    if (pread(fileno(file), old->text.data(), at.length, (off_t)at.offset) != (ssize_t)at.length)
        DIE("%s: changed while it was read", path.c_str());
    sj::parse(old->doc, old->text);
    return old;
}

bool Reader::has(size_t n) {
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

bool Reader::found(size_t begin, size_t length) {
    number++;
    offset = base + begin;
    text = std::string_view(buffer).substr(begin, length);
    return true;
}

void Reader::forget(size_t& n) {
    fault = format("longer than %zu MB", LONGEST >> 20), at += n, n = 0;
}

bool Reader::find_line() {
    fault.clear();
    size_t n = 0;
    while (has(n)) {
        const char* newline = (const char*)memchr(&buffer[at + n], '\n', buffer.size() - at - n);
        n = newline ? (size_t)(newline - &buffer[at]) : buffer.size() - at;
        if (n > LONGEST) forget(n);
        if (newline) break;
    }
    if (!has(0)) return fault.empty() ? false : found(at, 0);
    const size_t newline = has(n); // first, since it may move the buffer
    at += n + newline;
    return found(at - n - newline, n);
}

bool Reader::find_item() {
    fault.clear();
    while (closed && has(0))
        if (!is_json_space(buffer[at++])) DIE("%s: text after the array", path.c_str());
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
    size_t blank = 0; // an item's line is the one where it begins
    while (blank < n && is_json_space(buffer[at + blank])) lines += buffer[at + blank++] == '\n';
    if (!has(n))
        DIE("%s: line %zu: the array has no end; item %zu, which begins there, is the last", path.c_str(), lines,
            number + 1);
    lines += (size_t)std::count(&buffer[at + blank], &buffer[at + n], '\n');
    closed = buffer[at + n] == ']';
    at += n + 1;
    return found(at - n - 1, n);
}

void Output::line(std::string_view text) {
    FILE* file = named ? named->file : stdout;
    if (fwrite(text.data(), 1, text.size(), file) == text.size() && fputc('\n', file) != EOF) return;
    if (!named) stdout_failed();
    DIE("%s: %s", named->path.c_str(), strerror(errno));
}

void Output::commit() {
    if (named) named->commit();
    else if (fflush(stdout) != 0) stdout_failed();
}

} // namespace book
