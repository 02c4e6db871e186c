// model/dataset.h: the tokenized dataset that `datagen pack` writes and the trainer maps.
//
//   DatasetWriter out("train.bin", tokenizer.hash(), template_hash());
//   out.add(words);                                 // a row: token ids, | TRAIN on those that are trained
//   out.commit();                                   // the file appears, whole
// or, for preferences, out.add_pair(chosen, rejected) or out.add_labelled(answer, mismatched, desirable), or, with a
// teacher's log-probabilities, out.add_taught(words, outcomes), and nothing else
//
//   Dataset data("train.bin");                      // maps and checks all of it; throws Error
//   data.must_match(tokenizer.hash(), template_hash());
//   for (size_t i = 0; i < data.rows(); i++)
//       for (uint32_t word : data.row(i)) use(word & ~TRAIN, word & TRAIN);
//
// The file (little-endian; R rows, N tokens):
//   char magic[8]            "qwen3set"
//   u32  version             1; 2 if the rows are pairs; 3 if they are labelled answers; 4 if they are taught
//   u32  zero
//   u64  names of the tokenizer and the template of the rows: Tokenizer::hash(), template_hash()
//   u64  R, N
//   u32  token[N]            the rows, one after another; the top bit says "train on this one"
//   u32  zero                only if N is odd
//   u64  begin[R + 1]        row i is token[begin[i]] up to token[begin[i + 1]]
//   u64  hash[R]             FNV-1a 64 of the row's ids, 4 bytes each, without the top bit: it does not depend on
//                            which tokens are trained, so a row is recognised in another file
//   u64  desirable[R / 2]    only in version 3: 1, or 0 if the answer is undesirable
//   u64  K                   only in version 4, with M trained tokens: ids reported per token, at most
//   u32  id[M][K]            ... the token itself first, then others; unused places at the end: 2^32 - 1
//   f32  log_p[M][K]         ... their log-probabilities by the teacher; 0 in unused places
// The index follows the tokens, so a writer needs one pass and keeps 16 bytes a row in memory, whatever the
// rows are.
//
// Guarantees of a loaded file: at least one row; each row has a trained token, and never its first one (no
// token predicts it); hashes that are correct. The ids are below id_limit(), which the reader compares with its
// vocabulary. Limits: 2^31 - 1 tokens a row, 2^40 in all, 64 ids of a trained token; little-endian machines.
//
// Pairs: rows 2i and 2i + 1 are the chosen and the rejected answer to one prompt. Their prompt is the same, token by
// token; behind it every token is trained; and the answers differ. A program that knows only rows refuses versions 2
// to 4.
//
// Labelled answers: row 2i is an answer, desirable or not; row 2i + 1 is the same prompt with the answer to another
// one, which KTO measures and does not train. Their prompt is the same, token by token; behind it every token is
// trained.
//
// Taught rows: for each trained token some ids with the log-probabilities that a teacher gave them. The ids of a token
// are distinct, and their probabilities add up to 1.001 at most. The rest is of all other ids together.
#pragma once
#include "base/file.h"
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

constexpr uint32_t TRAIN = 0x80000000;

struct DatasetHeader {
    static constexpr uint32_t OF_ROWS = 1, OF_PAIRS = 2, OF_LABELLED = 3, OF_TAUGHT = 4; // versions
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

// An id and its log-probability.
struct Outcome { uint32_t id; float log_p; };
constexpr uint32_t NO_ID = UINT32_MAX;
constexpr size_t MOST_OUTCOMES = 64; // of a token

uint64_t dataset_hash(DatasetRow row);
// The fault of a row; nullptr if there is none.
const char* dataset_fault(DatasetRow row);
// The fault of K places for the ids of a trained token; nullptr if there is none.
const char* outcomes_fault(uint32_t token, const uint32_t* id, const float* log_p, size_t K);
// The fault of two valid rows that are a pair, or a labelled answer and its mismatched row; nullptr if there is none.
const char* dataset_fault(DatasetRow chosen, DatasetRow rejected, bool labelled);

struct Dataset {
    explicit Dataset(const std::string& path);

    bool pairs() const { return header.version == header.OF_PAIRS; }
    bool labelled() const { return header.version == header.OF_LABELLED; }
    bool taught() const { return header.version == header.OF_TAUGHT; }
    bool desirable(size_t unit) const { return label[unit] != 0; }
    size_t group() const { return pairs() || labelled() ? 2 : 1; } // rows that belong together
    const char* path() const { return file.path.c_str(); }
    size_t rows() const { return (size_t)header.rows; }
    uint64_t tokens() const { return header.tokens; }
    uint64_t trained() const { return trained_count; }
    uint32_t id_limit() const { return largest + 1; } // above every id
    DatasetRow row(size_t i) const { return {token + begin[i], token + begin[i + 1]}; }
    uint64_t hash(size_t i) const { return row_hash[i]; }
    // Taught rows: places per trained token; the ids and log-probabilities of a row's trained tokens, in order.
    size_t outcomes() const { return taught() ? (size_t)places : 0; }
    const uint32_t* outcome_ids(size_t i) const { return outcome_id + first_trained[i] * places; }
    const float* outcome_log_p(size_t i) const { return outcome_p + first_trained[i] * places; }

    // The ids mean nothing to another vocabulary, and rows of another template teach another conversation. advice: how
    // to resolve the first.
    void must_match(uint64_t tokenizer, uint64_t chat_template,
                    const std::string& advice = "pack it again with this one") const;

    MappedFile file;
    DatasetHeader header;

  private:
    const uint32_t* token;
    const uint64_t *begin, *row_hash, *label;
    const uint32_t* outcome_id = nullptr;
    const float* outcome_p = nullptr;
    std::vector<size_t> first_trained; // of taught rows: trained tokens before each
    uint64_t trained_count = 0, places = 0;
    uint32_t largest = 0;

    void open_outcomes();
};

struct DatasetWriter {
    DatasetWriter(const std::string& path, uint64_t tokenizer, uint64_t chat_template);
    void add_pair(const std::vector<uint32_t>& chosen, const std::vector<uint32_t>& rejected);
    void add_labelled(const std::vector<uint32_t>& answer, const std::vector<uint32_t>& mismatched, bool desirable);
    // outcomes: of each trained token, its own first.
    void add_taught(const std::vector<uint32_t>& words, const std::vector<std::vector<Outcome>>& outcomes);
    void add(const std::vector<uint32_t>& words);
    void commit();

    static DatasetRow row_of(const std::vector<uint32_t>& words) {
        return {words.data(), words.data() + words.size()};
    }
    OutputFile out;
    DatasetHeader header;
    std::vector<uint64_t> begins = {0}, hashes, labels;
    std::vector<std::vector<Outcome>> taught; // of all trained tokens

  private:
    void write_taught();
    void add_two(const std::vector<uint32_t>& a, const std::vector<uint32_t>& b, uint32_t version);
};
