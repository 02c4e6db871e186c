// book/rows.h: reads rows from JSON lines or one JSON array, one at a time; writes lines.
#pragma once
#include "base/file.h"
#include "sj.h"
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>

namespace book {

// The rows of a file, one after another: JSONL, or one JSON array; the first character tells which. Blank lines and
// a byte order mark are skipped. A row of invalid JSON does not end the reading: `fault` describes the error.
// It shares parse_line and mark_of with each_json_line (base/json_lines.h), which maps a whole file, takes lines only,
// refuses an empty file and ends at the first bad row; a Reader also takes pipes and arrays, in little memory.
struct Reader {
    static constexpr size_t LONGEST = 64 << 20;
    std::string path;
    size_t number = 0;      // the row's line, or its index in the array
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
    // The row; a bad row ends the program.
    sj::Value need() const;
    double share() const { return size ? (double)(base + at) / (double)size : 0; }
    bool seekable() const { return regular && file != stdin; }
    // Returns to an earlier row, by its offset and length.
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
    uint64_t size = 0, base = 0; // file size (0: unknown); file offset of buffer[0]
    std::string buffer;
    size_t at = 0;
    size_t lines = 1;            // of an array: the line of buffer[at]
    bool regular = false, array = false, closed = false; // closed: its ] was read

    // Whether there is a byte at buffer[at + n]; reads more if need be.
    bool has(size_t n);
    bool found(size_t begin, size_t length);
    // Discards a row that is too long, while it is read.
    void forget(size_t& n);

    bool find_line();
    bool find_item();
};

// The destination: a file that appears by commit(), or stdout.
struct Output {
    std::unique_ptr<OutputFile> named;
    explicit Output(const std::string& path) { if (path != "-") named = std::make_unique<OutputFile>(path); }
    void line(std::string_view text);
    void commit();
};

} // namespace book
