// search/index.h: finds passages that may answer a question. Without a model: words (words.h), an index, a formula.
//
//   const DocumentIndex index("notes.index");
//   for (auto hit : index.search(question_words(jieba, "什么是 warp？"), 4))
//       ... hit.score ... index.text_of(index.passage_at(hit.passage)) ...
//
// An inverted index is like the index of a book: for each word, the list of places where it occurs. Here a place is a
// passage (a chunk of a file, see chunks.h), and the list says how often the word occurs in it. A question reads the
// lists of its words and nothing else, whatever the size of all text.
//
// Ranking: BM25, of S. Robertson et al., "Okapi at TREC-3", 1994 (derived in S. Robertson and H. Zaragoza, "The
// Probabilistic Relevance Framework: BM25 and Beyond", 2009). Over the words w of the question:
//
//   score(passage) = sum of  idf(w) * f * (k1 + 1) / (f + k1 * (1 - b + b * length / mean length))
//   idf(w)         = log(1 + (N - n + 0.5) / (n + 0.5))
//
// f: how often w occurs in the passage; length: its words; N: passages, n: those with w. A rare word counts more than a
// common one (idf); each further occurrence counts less than the one before (k1 = 1.2); a long passage has more of
// every word, and its score is reduced for it (b = 0.75). The 1 in the logarithm is Lucene's: no word lowers a score.
//
// The index is a memory-mapped file: opening takes milliseconds, and a question touches only the parts it needs.
// Little-endian:
//   Header                     counts and sizes; the rest follows without gaps
//   char    text[]             of all passages, one after another
//   u8      postings[]         per word, pairs of numbers: passages since the last one, occurrences; each in
//                              groups of 7 bits, the lowest first; the highest bit says that another byte follows
//   char    names[]            of files and headings; then zeros up to a multiple of 8
//   File    file[files]        name, size, time and hash, which show whether a file is unchanged
//   Passage passage[passages]  where its text is, and its file
//   Word    word[words]        sorted by the word's 64-bit hash; where its postings are
//   u32     length[passages]   in words
// It is not trusted: sizes, files, passages and words are checked on opening, postings when they are read, and every
// offset once more when it is used. The file must not be changed in place while in use: truncating it ends the
// program.
//
// Limits: 2^32 passages. An index is immutable: any number of threads may search it.
#pragma once
#include "base/error.h"
#include "base/file.h"
#include "search/words.h"
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

// An unusable index. The message names the file.
struct IndexFault : Error {
    using Error::Error;
};

struct DocumentIndex {
    struct Header {
        char magic[8];    // "qwen3idx"
        uint64_t version; // 1
        uint64_t made_by; // of the rules for words; see maker()
        uint64_t text_bytes, posting_bytes, name_bytes, files, passages, words;
        uint64_t length;  // of all passages, in words
    };
    // Why a file has no passage.
    enum Fault : uint32_t {
        FINE, BINARY, NOT_UTF8, TOO_LARGE, UNREADABLE, CHANGING, TOO_MANY_LINES, NOT_CONVERTED, NO_TEXT, FAULTS
    };
    struct File {
        uint64_t name, size;
        int64_t time; // of its last change, in ns
        uint64_t hash;
        uint32_t name_bytes, fault, first, passages; // passages first, first + 1, ...
    };
    struct Passage {
        uint64_t text, heading;
        uint32_t bytes, heading_bytes, file, line; // line: its first line in the file, from 1 on
    };
    struct Word {
        uint64_t hash, postings;
        uint32_t bytes, passages; // of its postings; number of passages with it
    };
    struct Hit {
        uint32_t passage;
        float score;
    };
    static constexpr uint64_t VERSION = 1;

    explicit DocumentIndex(const std::string& path);

    const Header& header() const { return h; }
    const std::string& path() const { return file.path; }
    const File& file_at(uint64_t i) const { return need(i < h.files), files[i]; }
    const Passage& passage_at(uint64_t i) const { return need(i < h.passages), passages[i]; }
    const Word& word_at(uint64_t i) const { return need(i < h.words), words[i]; }
    uint32_t length_at(uint64_t i) const { return need(i < h.passages), lengths[i]; }
    std::string_view text_of(const Passage& p) const { return bytes(text, h.text_bytes, p.text, p.bytes); }
    std::string_view heading_of(const Passage& p) const { return name_at(p.heading, p.heading_bytes); }
    std::string_view name_of(const File& f) const { return name_at(f.name, f.name_bytes); }

    // The first word whose hash is not smaller.
    uint64_t lower_word(uint64_t hash) const;
    // Calls f(passage, occurrences) for the places of a word.
    template <class F> void each_posting(const Word& word, F f) const {
        const std::string_view list = bytes(postings, h.posting_bytes, word.postings, word.bytes);
        const uint8_t *p = (const uint8_t*)list.data(), *const end = p + list.size();
        auto number = [&] {
            uint32_t x = 0;
            for (int shift = 0;; shift += 7) {
                need(p < end && shift < 32);
                x |= (uint32_t)(*p & 0x7F) << shift;
                if (!(*p++ & 0x80)) return x;
            }
        };
        uint64_t passage = 0;
        bool first = true;
        while (p < end) {
            const uint32_t step = number(), count = number();
            need(count > 0 && (first || step > 0) && (passage += step) < h.passages);
            f((uint32_t)passage, count);
            first = false;
        }
    }

    // A hash of the passages and their order: the files, their bytes, and the rules for cutting them.
    uint64_t passages_hash() const;

    // The best k passages for these words, best first. A word that occurs twice in the question counts twice.
    std::vector<Hit> search(const WordCounts& question, size_t k) const;

    // Whether the best passage is about the question: it has two of the question's words, or its only one; and at least
    // half of them by weight, or a score of 1.35 words that occur in no other passage. An unknown word weighs as if in
    // one passage. The limits were chosen on questions about the texts and about other subjects: docs/retrieval.md.
    bool is_about(const Jieba& jieba, const WordCounts& question, const Hit& best) const;

    // The k passages with the highest scores (one per passage) among those above `least`, best first.
    std::vector<Hit> best(const std::vector<float>& score, size_t k, float least) const;

    // Merges several rankings and returns the best k: a passage's score is the sum of 1 / (60 + rank) over the rankings
    // that contain it, with ranks from 1 on (G. Cormack et al., "Reciprocal rank fusion outperforms Condorcet and
    // individual rank learning methods", 2009; 60 is theirs). Scores of different kinds need not be comparable.
    std::vector<Hit> joined(const std::vector<std::vector<Hit>>& rankings, size_t k) const;

  private:
    double idf(double n) const; // of a word in n passages
    MappedFile file;
    Header h;
    uint64_t text, postings, names; // offsets
    const File* files;
    const Passage* passages;
    const Word* words;
    const uint32_t* lengths;

    void need(bool good, const char* fault = "a damaged index") const {
        if (!good) throw IndexFault(format("%s: %s", file.path.c_str(), fault));
    }
    void check() const;
    std::string_view bytes(uint64_t section, uint64_t size, uint64_t at, uint64_t n) const;
    std::string_view name_at(uint64_t at, uint64_t n) const { return bytes(names, h.name_bytes, at, n); }
    bool is_better(const Hit& x, const Hit& y) const;
};
