// search/document_files.h: the files of a folder of documents: their list, their text, and why some are left out.
//
// No file in the folder can end the program. Limits: files of 1 GB and 2^24 lines; 2^20 files.
#pragma once
#include "book/chunks.h"
#include "search/index.h"
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <sys/stat.h>
#include <vector>

using Tell = std::function<void(const std::string&)>; // a line for the user

// Passages are sections, cut if longer than `most` characters: four of them and an answer fit into 4,096 tokens.
inline const ChunkSizes PASSAGES = {1200, 200, 0, 120};

struct DocumentFile {
    std::string name; // relative to the folder
    uint64_t size;
    int64_t time;
};
int64_t time_of(const struct stat& st);

// The path of an index's vectors for a model: after a trial of another model, the first one's vectors are still there.
std::string vectors_path(const std::string& index, uint64_t model);
// Whether a path is an index's, or that of its vectors: INDEX.HASH.vectors, possibly with .partial.
bool is_of_index(const std::string& path, const std::string& index);
// ... or such a file while it is written: with .tmp, digits and the like.
bool is_temporary(const std::string& path, const std::string& index);

// The regular files of a folder and its subfolders, sorted by name. Names that begin with a dot are skipped. Symbolic
// links are not followed, so that no loop and no way out of the folder exists. `index` is skipped, should it lie there.
std::vector<DocumentFile> list_files(const std::string& root, const std::string& index, const Tell& tell,
                                     size_t most = 1 << 20);

// A file's text and passages.
struct DocumentText {
    using Index = DocumentIndex;
    static constexpr uint64_t MOST = 1 << 30;
    static constexpr ptrdiff_t MOST_LINES = 1 << 24; // cutting takes some 40 bytes per line
    Index::File file{}; // without name and passages
    std::string text;
    std::string detail;  // of a fault: the byte that is no UTF-8, why a document was not converted
    bool converted = false; // by a program
    std::vector<Chunk> chunks;
    std::vector<uint32_t> lines; // offsets of line beginnings

    // A file that is written to meanwhile is read again, up to three times. PDF, HTML, EPUB, DOCX and ODT are converted
    // and cleaned as by `datagen chunk`.
    void read(const std::string& path);
    void cut();

  private:
    size_t line = 1, line_at = 0; // of the text

    void add(size_t begin, size_t end, const std::string& heading);
    void read_once(const std::string& path);
    void convert(const std::string& path);
    bool fill(int fd, size_t at);
};

// Why files were left out: the number for each reason, and the first file.
struct LeftOut {
    std::array<size_t, DocumentIndex::FAULTS> count{};
    std::array<std::string, DocumentIndex::FAULTS> first{};

    void add(uint32_t fault, std::string_view name, const std::string& detail);
    std::string text() const;
};

// Whether a file begins with these eight bytes.
bool begins_with(const std::string& path, const char* magic);
