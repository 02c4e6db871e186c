// book/rows.h: rows in: JSON lines or one JSON array, a row at a time; and lines out.
#pragma once
#include "base/file.h"
#include "sj.h"
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>

namespace book {

// The rows of a file, one after another: JSONL, or one JSON array, which its first character tells. Blank lines and
// a byte order mark are passed over. A row that is no JSON is not the end: its `fault` says what is wrong.
// It shares parse_line and mark_of with each_json_line (base/json_lines.h), which maps a whole file, takes lines only,
// refuses an empty file and ends at the first bad row; a Reader also takes pipes and arrays, in little memory.
struct Reader {
    static constexpr size_t LONGEST = 64 << 20;
    std::string path;
    size_t number = 0;      // of the row: its line, or its place in the array
    uint64_t offset = 0;    // of its text in the file
    std::string_view text;  // valid until next()
    std::string fault;
    sj::Doc doc;

    explicit Reader(const std::string& p);
    Reader(const Reader&) = delete;
    ~Reader() { if (file && file != stdin) fclose(file); }

    // The next row's text, not parsed. False at the end.
    bool next_text();
    bool next();
    sj::Value row() const { return doc.root(); }
    std::string where() const; // "rows.jsonl: line 3"
    // The row, where a bad one ends the program.
    sj::Value need() const;
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
    std::unique_ptr<Old> again(Place at) const;

  private:
    FILE* file = nullptr;
    uint64_t size = 0, base = 0; // of the file (0: not known); file offset of buffer[0]
    std::string buffer;
    size_t at = 0;
    size_t lines = 1;            // of an array: the line of buffer[at]
    bool regular = false, array = false, closed = false; // closed: its ] was read

    // Is there a byte at buffer[at + n]? Reads on if need be.
    bool has(size_t n);
    bool found(size_t begin, size_t length);
    // What is too long is thrown away as it comes.
    void forget(size_t& n);

    bool find_line();
    bool find_item();
};

// Where the bytes go: a file that appears by commit(), or stdout.
struct Output {
    std::unique_ptr<OutputFile> named;
    explicit Output(const std::string& path) { if (path != "-") named = std::make_unique<OutputFile>(path); }
    void line(std::string_view text);
    void commit();
};

} // namespace book
