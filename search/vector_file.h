// search/vector_file.h: the vectors of passages, in a file beside their index.
#pragma once
#include "base/file.h"
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

// The vectors of an index's passages, of length 1, in a file beside it. The larger the product of a passage's and a
// question's vector, the nearer their meanings, as the model sees them. Little-endian:
//   Header
//   Record record[count]   u64 key      hash of the vector's text: a passage that moves keeps its vector
//                          u64 check    of the record, so that a damaged one is never used
//                          u16 vector[dimensions]  the upper halves of floats (bf16)
// New vectors are appended to a file of the same form, whose header has 0 for passages and count.
struct VectorFile {
    struct Header {
        char magic[8]; // "qwen3vec"
        uint64_t version = VERSION;
        uint64_t made_by = 0;    // the model, and the form of its input
        uint64_t passages = 0;   // which passages, in their order: DocumentIndex::passages_hash()
        uint64_t dimensions = 0, count = 0;
    };
    static constexpr uint64_t VERSION = 1, MOST_DIMENSIONS = 1 << 16;

    explicit VectorFile(const std::string& path);
    const Header& header() const { return h; }
    size_t stride() const { return 16 + 2 * (size_t)h.dimensions; }
    size_t size() const { return (file.size - sizeof h) / stride(); } // whole records
    bool has_all() const { return h.count == size() && file.size == sizeof h + size() * stride(); }
    const uint8_t* record(size_t i) const { return file.data + sizeof h + i * stride(); }
    uint64_t key(size_t i) const { return number_at(record(i)); }
    const uint16_t* vector(size_t i) const { return (const uint16_t*)(record(i) + 16); }
    bool is_good(size_t i) const { return number_at(record(i) + 8) == check_of(key(i), vector(i), h.dimensions); }
    size_t count_good() const;

    // The products of a vector with all vectors.
    std::vector<float> products(const std::vector<float>& v) const;

    static std::string record_of(uint64_t key, const std::vector<float>& v);
    static std::string record_of(uint64_t key, const uint16_t* v, size_t dimensions);

  private:
    MappedFile file;
    Header h;

    static uint64_t number_at(const uint8_t* p);
    static uint64_t check_of(uint64_t key, const uint16_t* v, size_t dimensions);
};
