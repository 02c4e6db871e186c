// dataset.h: the tokenized dataset that `datagen pack` writes and the trainer maps.
//
//   DatasetWriter out("train.bin", tokenizer.hash(), template_hash());
//   out.add(words);                                 // a row: token ids, | TRAIN on those that are trained
//   out.commit();                                   // the file appears, whole
// or, for preferences, out.add_pair(chosen, rejected) and nothing else
//
//   Dataset data("train.bin");                      // maps and checks all of it; throws Error
//   data.must_match(tokenizer.hash(), template_hash());
//   for (size_t i = 0; i < data.rows(); i++)
//       for (uint32_t word : data.row(i)) use(word & ~TRAIN, word & TRAIN);
//
// The file (little-endian; R rows, N tokens):
//   char magic[8]            "qwen3set"
//   u32  version             1; 2 if the rows are pairs
//   u32  zero
//   u64  tokenizer, template names of what the rows were made with: Tokenizer::hash(), template_hash()
//   u64  R, N
//   u32  token[N]            the rows, one after another; the top bit says "train on this one"
//   u32  zero                only if N is odd
//   u64  begin[R + 1]        row i is token[begin[i]] up to token[begin[i + 1]]
//   u64  hash[R]             FNV-1a 64 of the row's ids, 4 bytes each, without the top bit: what is said, and not
//                            what of it is trained, so that a row is known again in another file
// The index stands behind the tokens and not before them, so that a writer needs one pass and keeps 16 bytes a
// row in memory, whatever the rows are.
//
// What a loaded file promises: at least one row; each with a token that is trained, and never its first (nothing
// foresees that one); hashes that are true. The ids are below id_limit(), which the reader compares with its
// vocabulary. Limits: 2^31 - 1 tokens a row, 2^40 in all; little-endian machines.
//
// Pairs: rows 2i and 2i + 1 are the chosen and the rejected answer to one prompt. Their prompt is the same, token by
// token; behind it every token is trained; and the answers differ. A program that knows only rows refuses version 2.
#pragma once
#include "base/file.h"
#include <algorithm>
#include <vector>

constexpr uint32_t TRAIN = 0x80000000;

struct DatasetHeader {
    static constexpr uint32_t OF_ROWS = 1, OF_PAIRS = 2; // versions
    char magic[8] = {'q', 'w', 'e', 'n', '3', 's', 'e', 't'};
    uint32_t version = OF_ROWS, zero = 0;
    uint64_t tokenizer = 0, chat_template = 0, rows = 0, tokens = 0;
};
static_assert(sizeof(DatasetHeader) == 48);

struct DatasetRow { // for a range-for
    const uint32_t *first, *last;
    const uint32_t* begin() const { return first; }
    const uint32_t* end() const { return last; }
    size_t size() const { return (size_t)(last - first); }
};

inline uint64_t dataset_hash(DatasetRow row) {
    uint64_t h = 0xCBF29CE484222325;
    for (uint32_t word : row)
        for (int shift = 0; shift < 32; shift += 8) h = (h ^ ((word & ~TRAIN) >> shift & 0xFF)) * 0x100000001B3;
    return h;
}

// What is wrong with a row; nullptr if nothing is.
inline const char* dataset_fault(DatasetRow row) {
    if (row.size() == 0 || row.size() > INT32_MAX) return "the number of its tokens is out of range";
    if (row.first[0] & TRAIN) return "its first token is to be trained, which nothing foresees";
    if (std::none_of(row.begin(), row.end(), [](uint32_t word) { return word & TRAIN; })) return "nothing to train";
    return nullptr;
}

// What is wrong with a pair of good rows; nullptr if nothing is.
inline const char* dataset_fault(DatasetRow chosen, DatasetRow rejected) {
    auto answer = [](DatasetRow row) {
        return std::find_if(row.begin(), row.end(), [](uint32_t word) { return word & TRAIN; });
    };
    if (!std::equal(chosen.begin(), answer(chosen), rejected.begin(), answer(rejected)))
        return "chosen and rejected answer different prompts";
    for (DatasetRow row : {chosen, rejected})
        if (!std::all_of(answer(row), row.end(), [](uint32_t word) { return word & TRAIN; }))
            return "a token behind the prompt is not trained";
    if (std::equal(chosen.begin(), chosen.end(), rejected.begin(), rejected.end()))
        return "chosen and rejected are the same";
    return nullptr;
}

struct Dataset {
    explicit Dataset(const std::string& path) : file(path) {
        auto need = [&](bool holds, const char* fault) { if (!holds) DIE("%s: %s", path.c_str(), fault); };
        const DatasetHeader mine;
        need(file.size >= sizeof header, "too short for a dataset");
        memcpy(&header, file.data, sizeof header);
        need(!memcmp(header.magic, mine.magic, sizeof mine.magic), "not a dataset (datagen pack makes them)");
        if (header.version != header.OF_ROWS && !pairs())
            DIE("%s: a dataset of version %u, not %u or %u", path.c_str(), header.version, header.OF_ROWS,
                header.OF_PAIRS);
        need(header.zero == 0, "bad header");
        need(header.rows > 0, "a dataset without rows");
        need(header.rows % group() == 0, "a row without its pair");
        const uint64_t limit = (uint64_t)1 << 40; // the sums below stay far from 2^64
        need(header.rows < limit && header.tokens < limit, "bad counts");
        const uint64_t padded = header.tokens + header.tokens % 2;
        const uint64_t size = sizeof header + 4 * padded + 8 * (2 * header.rows + 1);
        if (size != file.size)
            DIE("%s: %zu bytes where the header promises %llu: cut short or damaged", path.c_str(), file.size,
                (unsigned long long)size);
        token = (const uint32_t*)(file.data + sizeof header);
        begin = (const uint64_t*)(token + padded);
        row_hash = begin + header.rows + 1;
        need(padded == header.tokens || token[header.tokens] == 0, "bad padding");
        need(begin[0] == 0 && begin[header.rows] == header.tokens, "bad index of rows");
        for (size_t i = 0; i < rows(); i++) // before any row is looked at
            need(begin[i] <= begin[i + 1] && begin[i + 1] <= header.tokens, "bad index of rows");
        for (size_t i = 0; i < rows(); i++) {
            if (const char* fault = dataset_fault(row(i))) DIE("%s: row %zu: %s", path.c_str(), i, fault);
            if (dataset_hash(row(i)) != row_hash[i])
                DIE("%s: row %zu: its tokens are not those that were written", path.c_str(), i);
            for (uint32_t word : row(i)) largest = std::max(largest, word & ~TRAIN), trained_count += word >> 31;
        }
        for (size_t i = 0; pairs() && i < rows(); i += 2)
            if (const char* fault = dataset_fault(row(i), row(i + 1)))
                DIE("%s: rows %zu and %zu: %s", path.c_str(), i, i + 1, fault);
    }

    bool pairs() const { return header.version == header.OF_PAIRS; }
    size_t group() const { return pairs() ? 2 : 1; } // rows that belong together
    size_t rows() const { return (size_t)header.rows; }
    uint64_t tokens() const { return header.tokens; }
    uint64_t trained() const { return trained_count; }
    uint32_t id_limit() const { return largest + 1; } // above every id
    DatasetRow row(size_t i) const { return {token + begin[i], token + begin[i + 1]}; }
    uint64_t hash(size_t i) const { return row_hash[i]; }

    // The ids mean nothing to another vocabulary, and rows of another template teach another conversation.
    void must_match(uint64_t tokenizer, uint64_t chat_template) const {
        if (header.tokenizer != tokenizer)
            DIE("%s: made with another tokenizer; pack it again with this one", file.path.c_str());
        if (header.chat_template != chat_template)
            DIE("%s: made with another chat template; pack it again", file.path.c_str());
    }

    MappedFile file;
    DatasetHeader header;

  private:
    const uint32_t* token;
    const uint64_t *begin, *row_hash;
    uint64_t trained_count = 0;
    uint32_t largest = 0;
};

struct DatasetWriter {
    DatasetWriter(const std::string& path, uint64_t tokenizer, uint64_t chat_template) : out(path) {
        if (out.temporary.empty()) DIE("%s: a dataset needs a regular file", path.c_str());
        header.tokenizer = tokenizer, header.chat_template = chat_template;
        out.write(&header, sizeof header);
    }
    void add_pair(const std::vector<uint32_t>& chosen, const std::vector<uint32_t>& rejected) {
        header.version = header.OF_PAIRS;
        add(chosen), add(rejected);
        if (const char* fault = dataset_fault(row_of(chosen), row_of(rejected)))
            DIE("%s: rows %zu and %zu: %s", out.path.c_str(), hashes.size() - 2, hashes.size() - 1, fault);
    }
    void add(const std::vector<uint32_t>& words) {
        const DatasetRow row = row_of(words);
        if (const char* fault = dataset_fault(row)) DIE("%s: row %zu: %s", out.path.c_str(), hashes.size(), fault);
        out.write(words.data(), 4 * words.size());
        hashes.push_back(dataset_hash(row));
        begins.push_back(begins.back() + words.size());
    }
    void commit() {
        header.rows = hashes.size(), header.tokens = begins.back();
        if (hashes.empty()) DIE("%s: a dataset without rows", out.path.c_str());
        const uint32_t zero = 0;
        out.write(&zero, 4 * (header.tokens % 2));
        out.write(begins.data(), 8 * begins.size());
        out.write(hashes.data(), 8 * hashes.size());
        if (fseek(out.file, 0, SEEK_SET) != 0) DIE("%s: %s", out.path.c_str(), strerror(errno));
        out.write(&header, sizeof header);
        out.commit();
    }

    static DatasetRow row_of(const std::vector<uint32_t>& words) {
        return {words.data(), words.data() + words.size()};
    }
    OutputFile out;
    DatasetHeader header;
    std::vector<uint64_t> begins = {0}, hashes;
};
