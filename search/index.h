// search/index.h: which passages may answer a question. No model in it: words (words.h), an index, a formula.
//
//   const DocumentIndex index("notes.index");
//   for (auto hit : index.search(question_words(jieba, "什么是 warp？"), 4))
//       ... hit.score ... index.text_of(index.passage_at(hit.passage)) ...
//
// An inverted index is what the end of a book has: for each word the list of the places where it stands. Here a place
// is a passage (a chunk of a file, see chunks.h), and the list says how often the word stands in it. To answer a
// question the lists of its words are read, and nothing else, whatever the size of all text.
//
// Which passage is best? BM25, of S. Robertson et al., "Okapi at TREC-3", 1994 (S. Robertson and H. Zaragoza, "The
// Probabilistic Relevance Framework: BM25 and Beyond", 2009, derive it). Over the words w of the question:
//
//   score(passage) = sum of  idf(w) * f * (k1 + 1) / (f + k1 * (1 - b + b * length / mean length))
//   idf(w)         = log(1 + (N - n + 0.5) / (n + 0.5))
//
// f: how often w stands in the passage; length: its words; N: passages, n: those with w. A rare word says more than a
// common one (idf); the second time a word stands there says less than the first (k1 = 1.2); a long passage has more of
// every word, and is held back for it (b = 0.75). The 1 in the logarithm is Lucene's: no word counts against a passage.
//
// The index is a file that is mapped: to open it takes milliseconds, and a question touches what it needs.
// Little-endian:
//   Header                     counts and sizes; all else follows without a gap
//   char    text[]             of all passages, one after another
//   u8      postings[]         of each word pairs of numbers: how many passages on from the last one, how often; each
//                              in bytes of 7 bits, the lowest first; the highest bit says that another byte follows
//   char    names[]            of files and headings; then zeros up to a multiple of 8
//   File    file[files]        name, size, time and hash, by which a file is known to be unchanged
//   Passage passage[passages]  where its text is, and of which file
//   Word    word[words]        sorted by the 64-bit hash that stands for a word; where its postings are
//   u32     length[passages]   in words
// It is not trusted: sizes, files, passages and words are checked when it is opened, postings where they are read, and
// every offset once more where it is used. It must not be changed in place while it is used: to cut it short ends the
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

// An index that cannot be used. The message names the file.
struct IndexFault : Error {
    using Error::Error;
};

struct DocumentIndex {
    struct Header {
        char magic[8];    // "qwen3idx"
        uint64_t version; // 1
        uint64_t made_by; // what the words depend on; see maker()
        uint64_t text_bytes, posting_bytes, name_bytes, files, passages, words;
        uint64_t length;  // of all passages together, in words
    };
    // Why a file has no passage.
    enum Fault : uint32_t { FINE, BINARY, NOT_UTF8, TOO_LARGE, UNREADABLE, CHANGING, TOO_MANY_LINES, FAULTS };
    struct File {
        uint64_t name, size;
        int64_t time; // of its last change, in ns
        uint64_t hash;
        uint32_t name_bytes, fault, first, passages; // its passages are first, first + 1, ...
    };
    struct Passage {
        uint64_t text, heading;
        uint32_t bytes, heading_bytes, file, line; // line: where it begins in its file, from 1 on
    };
    struct Word {
        uint64_t hash, postings;
        uint32_t bytes, passages; // of its postings; in which it stands
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

    // The first word whose hash is not less.
    uint64_t lower_word(uint64_t hash) const;
    // f(passage, how often) for the places of a word.
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

    // Names the passages and their order: the files, their bytes, and the rules by which they are cut.
    uint64_t passages_hash() const;

    // The best k passages for these words, the best first. A word that the question says twice counts twice.
    std::vector<Hit> search(const WordCounts& question, size_t k) const;

    // Whether the best passage is about the question: it has at least half of the question's words, by weight, or its
    // score is that of 1.35 words that stand in no other passage. A word that is nowhere weighs as if in one passage.
    // Both limits were chosen on questions about the texts and about other subjects: docs/retrieval.md.
    bool is_about(const Jieba& jieba, const WordCounts& question, const Hit& best) const;

    // The k passages with the highest scores (one for each passage) among those above `least`, the best first.
    std::vector<Hit> best(const std::vector<float>& score, size_t k, float least) const;

    // Several rankings as one, the best k of it: a passage's score is the sum of 1 / (60 + rank) over the rankings that
    // it is in, the first rank being 1 (G. Cormack et al., "Reciprocal rank fusion outperforms Condorcet and individual
    // rank learning methods", 2009; 60 is theirs). Scores of different kinds need not be made comparable.
    std::vector<Hit> joined(const std::vector<std::vector<Hit>>& rankings, size_t k) const;

  private:
    double idf(double n) const; // of a word that is in n passages
    MappedFile file;
    Header h;
    uint64_t text, postings, names; // where they begin
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
