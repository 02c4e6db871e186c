// search/index_builder.h: writes an index of documents.
#pragma once
#include "base/file.h"
#include "search/index.h"
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

// Collects passages, then writes the index. Text goes to the file at once; postings wait in memory, in their final
// encoding. Words are divided among shards by the first bits of their hash, so that no thread waits for another.
// Memory: about half of the text.
struct IndexBuilder {
    using Index = DocumentIndex;
    static constexpr size_t SHARD_BITS = 6, SHARDS = 1 << SHARD_BITS;

    IndexBuilder(const std::string& path, uint64_t made_by);

    // Adds a file; its passages follow. f holds all but name and passages.
    void add_file(std::string_view name, Index::File f);
    void add_passage(std::string_view text, std::string_view heading, uint32_t line, uint32_t length);
    // Adds the words of the passages just added, the first of which has number `first`.
    void add_words(uint32_t first, const std::vector<WordCounts>& words);
    // Copies the passages of those files of another index that have a time here. Must precede all others. Throws
    // IndexFault if it is damaged.
    void take_over(const Index& old, const std::vector<std::optional<int64_t>>& times);

    // Writes the postings, and gives the file its name.
    void finish();
    // Calls f(shard) for all shards on all threads. Exceptions must not leave a parallel loop: rethrown after it.
    static void on_all_shards(const std::function<void(size_t)>& f);
    size_t count() const { return passages.size(); }
    uint64_t text_bytes() const { return h.text_bytes; }

  private:
    struct List {
        std::string bytes;
        uint32_t last = 0, passages = 0;
    };
    OutputFile out;
    Index::Header h{};
    std::vector<Index::File> files;
    std::vector<Index::Passage> passages;
    std::vector<uint32_t> lengths;
    std::string names, last_heading;
    std::array<std::unordered_map<uint64_t, List>, SHARDS> shards;

    static size_t shard_of(uint64_t hash) { return hash >> (64 - SHARD_BITS); }
    static uint64_t first_of(size_t shard) { return (uint64_t)shard << (64 - SHARD_BITS); }
    uint64_t name_at(std::string_view name) { return names += name, names.size() - name.size(); }
    void append(uint64_t hash, uint32_t passage, uint32_t count);
};
