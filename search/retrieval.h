// retrieval.h: which passages may answer a question. No model in it: words, an index, a formula; and vectors, which a
// model made. documents.h makes the index of a folder, and a prompt of what is found.
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
// Words: what jieba makes of Chinese; runs of letters and digits of other scripts in lower case, English without
// plural; of identifiers also the parts (cudaMemcpyAsync: cuda, memcpy, async); pairs of kana and Hangul. A question is
// without those that only ask (what, 什么).
// Limits: 2^32 passages; building takes memory of about half of the text. An index is immutable: any number of threads
// may search it.
#pragma once
#include "book/chunks.h"
#include "book/jieba.h"
#include <cmath>
#include <optional>
#include <unordered_map>

// ======================================================================================================== 1 Words

// A character as it is indexed: lower case (Latin, Greek, Cyrillic); full-width letters and digits as ASCII's.
inline uint32_t folded(uint32_t c) {
    if (c >= 0xFF01 && c <= 0xFF5E) c -= 0xFEE0;
    if (c < 0x80) return lower(c);
    auto in = [c](uint32_t first, uint32_t last) { return c >= first && c <= last; };
    if ((in(0xC0, 0xDE) && c != 0xD7) || in(0x391, 0x3A9) || in(0x410, 0x42F)) return c + 32;
    return in(0x400, 0x40F) ? c + 80 : c;
}

// English plurals as singulars: D. Harman's rules ("How effective is suffixing?", 1991).
inline void drop_plural(std::string& word) {
    auto ends = [&](std::string_view s) {
        return word.size() > s.size() && std::string_view(word).substr(word.size() - s.size()) == s;
    };
    if (word.size() < 4 || word.back() != 's') return;
    if (ends("ies")) {
        if (!ends("eies") && !ends("aies")) word.replace(word.size() - 3, 3, "y");
    } else if (ends("es")) {
        if (!ends("aes") && !ends("ees") && !ends("oes")) word.pop_back();
    } else if (!ends("us") && !ends("ss")) {
        word.pop_back();
    }
}

// Calls f(word) for the words of a text of valid UTF-8.
template <class F> void index_words(const Jieba& jieba, std::string_view text, F f) {
    const char *p = text.data(), *const end = p + text.size();
    std::vector<std::string_view> cut;
    std::string word, part;
    auto give = [&](std::string& w) {
        if (w.empty()) return;
        drop_plural(w);
        f(std::string_view(w));
    };
    auto next_is = [&](const char* at, auto is) { return at < end && is(utf8_read(at)); };
    // A run of letters, digits and _: as a whole, and if _ or capitals divide it, its parts (HTTPServer: http, server;
    // but GPUs is gpu).
    auto identifier = [&] {
        uint32_t before = 0, c;
        bool of_acronym = false; // it ends in capitals and s
        auto close = [&] {
            if (!part.empty() && part.size() < word.size()) give(part);
            part.clear();
        };
        auto is_capital = [](uint32_t x) { return is_word(x) && folded(x) != x; };
        auto is_small_at = [&](const char* at) { return at < end && *at >= 'a' && *at <= 'z'; };
        const char* const start = p;
        for (bool again : {false, true}) { // first the whole, then its parts, if it has more than one
            for (p = start, before = 0; p < end; before = c) {
                const char* at = p;
                c = utf8_read(p);
                const bool point = c == '.' && is_digit(before) && next_is(p, is_digit);
                if (!is_word(c) && c != '_' && !point) {
                    p = at;
                    break;
                }
                const bool hump = is_capital(c) && (!is_capital(before) || (is_small_at(p) && is_small_at(p + 1)));
                if (again && (c == '_' || (hump && is_word(before)))) close();
                if (!again) of_acronym = c == 's' && is_capital(before) && word.size() > 1;
                if (!again) utf8_append(word, folded(c));
                else if (c != '_') utf8_append(part, folded(c));
            }
            if (again) close();
        }
        if (of_acronym) word.pop_back();
        give(word);
        word.clear();
    };
    auto is_han = [](uint32_t c) { return c >= Jieba::FIRST_HAN && c <= Jieba::LAST_HAN; };
    auto is_other = [&](uint32_t c) { return is_cjk(c) && !is_han(c); };
    while (p < end) {
        const char* const start = p;
        const uint32_t c = utf8_read(p);
        if (is_word(c) || c == '_') {
            p = start;
            identifier();
        } else if (is_han(c)) {
            while (next_is(p, is_han)) p += 3;
            cut.clear();
            jieba.cut(cut, {start, (size_t)(p - start)});
            for (std::string_view w : cut) f(w);
        } else if (is_other(c)) {
            const char* first = start;
            const bool alone = !next_is(p, is_other);
            if (alone) f(std::string_view(start, (size_t)(p - start)));
            while (next_is(p, is_other)) {
                const char* second = p;
                utf8_read(p);
                f(std::string_view(first, (size_t)(p - first)));
                first = second;
            }
        }
    }
}

// Of each different word how often it stands there, by hash, sorted.
using WordCounts = std::vector<std::pair<uint64_t, uint32_t>>;
inline WordCounts counted_words(std::vector<uint64_t> all) {
    std::sort(all.begin(), all.end());
    WordCounts counts;
    for (uint64_t w : all)
        if (!counts.empty() && counts.back().first == w) counts.back().second++;
        else counts.push_back({w, 1});
    return counts;
}
inline WordCounts count_words(const Jieba& jieba, std::string_view text, uint32_t& length) {
    std::vector<uint64_t> all;
    index_words(jieba, text, [&](std::string_view w) { all.push_back(fnv1a(w)); });
    length = (uint32_t)all.size();
    return counted_words(std::move(all));
}

// Words that say that something is asked, and not about what: they are rare in texts that tell, and would weigh much.
inline bool only_asks(std::string_view word) {
    static const std::string_view WORDS = " 什么 为什么 怎样 怎么 如何 哪 哪个 哪些 哪里 几 多少 吗 呢 请 是 的 了 有 a an and are do "
                                          "does how in is it many much of or the to what when where which who why ";
    return WORDS.find(" " + std::string(word) + " ") != WORDS.npos;
}
inline WordCounts question_words(const Jieba& jieba, std::string_view question) {
    std::vector<uint64_t> all;
    index_words(jieba, question, [&](std::string_view w) { if (!only_asks(w)) all.push_back(fnv1a(w)); });
    return counted_words(std::move(all));
}

// ==================================================================================================== 2 The index

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

    explicit DocumentIndex(const std::string& path) : file(path) {
        need(file.size >= sizeof h && memcmp(file.data, "qwen3idx", 8) == 0, "no index of documents");
        memcpy(&h, file.data, sizeof h);
        need(h.version == VERSION, "an index of another version");
        uint64_t at = sizeof h;
        bool fits = h.passages < UINT32_MAX;
        auto section = [&](uint64_t count, size_t size) { // where it begins
            const uint64_t begin = at;
            uint64_t bytes;
            fits = fits && !__builtin_mul_overflow(count, size, &bytes) && bytes <= file.size - at;
            if (fits) at += bytes;
            return begin;
        };
        text = section(h.text_bytes, 1), postings = section(h.posting_bytes, 1), names = section(h.name_bytes, 1);
        if (fits) section((8 - at % 8) % 8, 1);
        files = (const File*)(file.data + section(h.files, sizeof(File)));
        passages = (const Passage*)(file.data + section(h.passages, sizeof(Passage)));
        words = (const Word*)(file.data + section(h.words, sizeof(Word)));
        lengths = (const uint32_t*)(file.data + section(h.passages, 4));
        need(fits && at == file.size, "an index whose size is not what its header says");
        check();
    }

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
    uint64_t lower_word(uint64_t hash) const {
        auto less = [](const Word& w, uint64_t x) { return w.hash < x; };
        return (uint64_t)(std::lower_bound(words, words + h.words, hash, less) - words);
    }
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
    uint64_t passages_hash() const {
        uint64_t hash = fnv1a(&h.made_by, sizeof h.made_by);
        for (uint64_t i = 0; i < h.files; i++) {
            const uint64_t of[] = {files[i].hash, files[i].first, files[i].passages};
            hash = fnv1a(of, sizeof of, fnv1a(name_of(files[i]), hash));
        }
        return hash;
    }

    // The best k passages for these words, the best first. A word that the question says twice counts twice.
    std::vector<Hit> search(const WordCounts& question, size_t k) const {
        constexpr double k1 = 1.2, b = 0.75;
        std::vector<float> score(h.passages, 0);
        const double N = (double)h.passages, mean = std::max(1., (double)h.length / std::max(1., N));
        for (auto [hash, times] : question) {
            const uint64_t w = lower_word(hash);
            if (w == h.words || words[w].hash != hash) continue;
            const double n = std::min(N, (double)words[w].passages);
            const double idf = std::log(1 + (N - n + 0.5) / (n + 0.5)) * times;
            each_posting(words[w], [&](uint32_t passage, uint32_t f) {
                const double longer = 1 - b + b * lengths[passage] / mean;
                score[passage] += (float)(idf * f * (k1 + 1) / (f + k1 * longer));
            });
        }
        return best(score, k, 0);
    }

    // The k passages with the highest scores (one for each passage) among those above `least`, the best first.
    std::vector<Hit> best(const std::vector<float>& score, size_t k, float least) const {
        std::vector<Hit> best; // a heap, the worst on top
        auto better = [this](const Hit& x, const Hit& y) { return is_better(x, y); };
        for (uint32_t i = 0; i < score.size(); i++) {
            const Hit hit = {i, score[i]};
            if (!(hit.score > least) || (best.size() == k && (k == 0 || !better(hit, best[0])))) continue;
            if (best.size() == k) std::pop_heap(best.begin(), best.end(), better), best.pop_back();
            best.push_back(hit), std::push_heap(best.begin(), best.end(), better);
        }
        std::sort_heap(best.begin(), best.end(), better);
        return best;
    }

    // Several rankings as one, the best k of it: a passage's score is the sum of 1 / (60 + rank) over the rankings that
    // it is in, the first rank being 1 (G. Cormack et al., "Reciprocal rank fusion outperforms Condorcet and individual
    // rank learning methods", 2009; 60 is theirs). Scores of different kinds need not be made comparable.
    std::vector<Hit> joined(const std::vector<std::vector<Hit>>& rankings, size_t k) const {
        std::unordered_map<uint32_t, double> sums;
        for (auto& ranking : rankings)
            for (size_t i = 0; i < ranking.size(); i++) sums[ranking[i].passage] += 1 / (60 + (double)i + 1);
        std::vector<Hit> all;
        for (auto [passage, sum] : sums) all.push_back({passage, (float)sum});
        std::sort(all.begin(), all.end(), [this](const Hit& x, const Hit& y) { return is_better(x, y); });
        if (all.size() > k) all.resize(k);
        return all;
    }

  private:
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
    // All but postings, in one pass: a fault is told at the start, and not by some question later on.
    void check() const {
        auto inside = [](uint64_t at, uint64_t n, uint64_t size) { return at <= size && n <= size - at; };
        bool good = true;
        for (uint64_t i = 0; i < h.files; i++) {
            const File& f = files[i];
            good &= inside(f.name, f.name_bytes, h.name_bytes) && inside(f.first, f.passages, h.passages) &&
                    f.fault < FAULTS;
        }
        for (uint64_t i = 0; i < h.passages; i++) {
            const Passage& p = passages[i];
            good &= p.file < h.files && inside(p.text, p.bytes, h.text_bytes) &&
                    inside(p.heading, p.heading_bytes, h.name_bytes);
        }
        for (uint64_t i = 0; i < h.words; i++)
            good &= inside(words[i].postings, words[i].bytes, h.posting_bytes) &&
                    (i == 0 || words[i - 1].hash < words[i].hash);
        need(good);
    }
    std::string_view bytes(uint64_t section, uint64_t size, uint64_t at, uint64_t n) const {
        need(at <= size && n <= size - at);
        return {(const char*)file.data + section + at, n};
    }
    std::string_view name_at(uint64_t at, uint64_t n) const { return bytes(names, h.name_bytes, at, n); }
    // Of equally good ones, that of the file whose name comes first, then that which stands first: so the order in
    // which files came into the index does not matter.
    bool is_better(const Hit& x, const Hit& y) const {
        if (x.score != y.score) return x.score > y.score;
        const Passage &a = passage_at(x.passage), &b = passage_at(y.passage);
        if (a.file == b.file) return x.passage < y.passage;
        return name_of(file_at(a.file)) < name_of(file_at(b.file));
    }
};

// ==================================================================================================== 3 Building it

// Collects passages, then writes the index. All text goes to the file at once; postings wait in memory, as they will be
// written. Words are divided among shards by the first bits of their hash, so that no thread waits for another.
struct IndexBuilder {
    using Index = DocumentIndex;
    static constexpr size_t SHARD_BITS = 6, SHARDS = 1 << SHARD_BITS;

    IndexBuilder(const std::string& path, uint64_t made_by) : out(path) {
        h.made_by = made_by;
        out.write(&h, sizeof h); // its place
    }

    // The next file; its passages follow. f has all but name and passages.
    void add_file(std::string_view name, Index::File f) {
        f.name = name_at(name), f.name_bytes = (uint32_t)name.size();
        f.first = (uint32_t)passages.size(), f.passages = 0;
        files.push_back(f);
    }
    void add_passage(std::string_view text, std::string_view heading, uint32_t line, uint32_t length) {
        if (passages.size() + 1 == UINT32_MAX) DIE("%s: more than 2^32 passages", out.path.c_str());
        Index::Passage p = {h.text_bytes, 0, (uint32_t)text.size(), (uint32_t)heading.size(), 0, line};
        p.file = (uint32_t)files.size() - 1;
        if (!passages.empty() && heading == last_heading) p.heading = passages.back().heading;
        else p.heading = name_at(heading), last_heading = heading;
        passages.push_back(p), lengths.push_back(length);
        files.back().passages++;
        h.text_bytes += text.size(), h.length += length;
        out.write(text);
    }
    // The words of passages that were just added, the first of which is number `first`.
    void add_words(uint32_t first, const std::vector<WordCounts>& words) {
        on_all_shards([&](size_t s) {
            for (size_t i = 0; i < words.size(); i++) {
                const auto begin = words[i].begin(), end = words[i].end();
                auto it = std::lower_bound(begin, end, std::pair(first_of(s), 0u));
                for (; it != end && shard_of(it->first) == s; ++it) append(it->first, first + (uint32_t)i, it->second);
            }
        });
    }
    // Takes over the passages of those files of another index that have a time here. Before any others. Throws
    // IndexFault if it is damaged.
    void take_over(const Index& old, const std::vector<std::optional<int64_t>>& times) {
        constexpr uint32_t GONE = UINT32_MAX, LONGEST_NAME = 1 << 14;
        auto need = [&](bool good) { if (!good) throw IndexFault(old.path() + ": a damaged index"); };
        std::vector<uint32_t> number(old.header().passages, GONE); // of its passages here
        uint64_t next = 0, text = 0; // passages and their text follow each other, so that nothing is written twice
        for (uint64_t i = 0; i < times.size(); i++) {
            if (!times[i]) continue;
            Index::File f = old.file_at(i);
            f.time = *times[i];
            need(f.first >= next && f.name_bytes <= LONGEST_NAME);
            next = (uint64_t)f.first + f.passages;
            add_file(old.name_of(f), f);
            for (uint64_t p = f.first; p < next; p++) {
                const Index::Passage& from = old.passage_at(p);
                need(from.file == i && from.text >= text && from.heading_bytes <= LONGEST_NAME);
                text = from.text + from.bytes;
                number[p] = (uint32_t)passages.size();
                add_passage(old.text_of(from), old.heading_of(from), from.line, old.length_at(p));
            }
        }
        on_all_shards([&](size_t s) {
            const uint64_t end = s + 1 == SHARDS ? old.header().words : old.lower_word(first_of(s + 1));
            for (uint64_t w = old.lower_word(first_of(s)); w < end; w++) {
                const Index::Word& word = old.word_at(w);
                need(shard_of(word.hash) == s);
                old.each_posting(word, [&](uint32_t passage, uint32_t count) {
                    if (number[passage] != GONE) append(word.hash, number[passage], count);
                });
            }
        });
    }

    // Writes what was waiting, and gives the file its name.
    void finish() {
        std::vector<Index::Word> words;
        for (auto& shard : shards) {
            const size_t first = words.size();
            for (auto& [hash, list] : shard) words.push_back({hash, 0, (uint32_t)list.bytes.size(), list.passages});
            std::sort(words.begin() + (ptrdiff_t)first, words.end(), [](auto& x, auto& y) { return x.hash < y.hash; });
            for (size_t i = first; i < words.size(); i++) {
                const List& list = shard[words[i].hash];
                if (list.bytes.size() > UINT32_MAX) DIE("%s: a word stands in too many passages", out.path.c_str());
                words[i].postings = h.posting_bytes;
                h.posting_bytes += list.bytes.size();
                out.write(list.bytes);
            }
            std::unordered_map<uint64_t, List>().swap(shard);
        }
        memcpy(h.magic, "qwen3idx", 8);
        h.version = Index::VERSION;
        h.name_bytes = names.size(), h.files = files.size(), h.passages = passages.size(), h.words = words.size();
        out.write(names);
        out.write(std::string((8 - (sizeof h + h.text_bytes + h.posting_bytes + h.name_bytes) % 8) % 8, '\0'));
        out.write(files.data(), files.size() * sizeof files[0]);
        out.write(passages.data(), passages.size() * sizeof passages[0]);
        out.write(words.data(), words.size() * sizeof words[0]);
        out.write(lengths.data(), lengths.size() * sizeof lengths[0]);
        if (fseek(out.file, 0, SEEK_SET) != 0) DIE("%s: %s", out.path.c_str(), strerror(errno));
        out.write(&h, sizeof h);
        out.commit();
    }
    // Calls f(shard) for all of them on all threads. Nothing may be thrown out of a parallel loop: a fault waits.
    template <class F> static void on_all_shards(F f) {
        std::exception_ptr fault;
        #pragma omp parallel for schedule(dynamic)
        for (size_t s = 0; s < SHARDS; s++) {
            try {
                f(s);
            } catch (...) { // Error, or bad_alloc
                #pragma omp critical
                fault = std::current_exception();
            }
        }
        if (fault) std::rethrow_exception(fault);
    }
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
    void append(uint64_t hash, uint32_t passage, uint32_t count) { // passages come in order
        List& list = shards[shard_of(hash)][hash];
        for (uint32_t x : {passage - list.last, count}) {
            for (; x >= 0x80; x >>= 7) list.bytes += (char)(x | 0x80);
            list.bytes += (char)x;
        }
        list.last = passage, list.passages++;
    }
};

// ===================================================================================================== 4 Vectors

// The vectors of an index's passages, of length 1, in a file beside it: the larger the product of a passage's and a
// question's, the nearer their meanings, as the model sees them. Little-endian:
//   Header
//   Record record[count]   u64 key      names the text that the vector is of: a passage that moves keeps its vector
//                          u64 check    of the record, so that a damaged one is never used
//                          u16 vector[dimensions]  the upper halves of floats (bf16)
// While vectors are made they are appended to a file of the same form, whose header says 0 for passages and count.
struct VectorFile {
    struct Header {
        char magic[8]; // "qwen3vec"
        uint64_t version = VERSION;
        uint64_t made_by = 0;    // the model, and how texts are shown to it
        uint64_t passages = 0;   // of what they are, in their order: DocumentIndex::passages_hash()
        uint64_t dimensions = 0, count = 0;
    };
    static constexpr uint64_t VERSION = 1, MOST_DIMENSIONS = 1 << 16;

    explicit VectorFile(const std::string& path) : file(path) {
        if (file.size < sizeof h || memcmp(file.data, "qwen3vec", 8) != 0)
            throw IndexFault(path + ": no vectors of documents");
        memcpy(&h, file.data, sizeof h);
        if (h.version != VERSION || h.dimensions == 0 || h.dimensions > MOST_DIMENSIONS)
            throw IndexFault(path + ": vectors of another version");
    }
    const Header& header() const { return h; }
    size_t stride() const { return 16 + 2 * (size_t)h.dimensions; }
    size_t size() const { return (file.size - sizeof h) / stride(); } // whole records
    bool has_all() const { return h.count == size() && file.size == sizeof h + size() * stride(); }
    const uint8_t* record(size_t i) const { return file.data + sizeof h + i * stride(); }
    uint64_t key(size_t i) const { return number_at(record(i)); }
    const uint16_t* vector(size_t i) const { return (const uint16_t*)(record(i) + 16); }
    bool is_good(size_t i) const { return number_at(record(i) + 8) == check_of(key(i), vector(i), h.dimensions); }
    size_t count_good() const {
        size_t good = 0;
        #pragma omp parallel for reduction(+ : good)
        for (size_t i = 0; i < size(); i++) good += is_good(i);
        return good;
    }

    // The products of a vector with all of them.
    std::vector<float> products(const std::vector<float>& v) const {
        std::vector<float> all(size());
        #pragma omp parallel for
        for (size_t i = 0; i < all.size(); i++) all[i] = product(v.data(), vector(i), (size_t)h.dimensions);
        return all;
    }

    static std::string record_of(uint64_t key, const std::vector<float>& v) {
        std::vector<uint16_t> halves;
        for (float x : v) halves.push_back(upper_half(x));
        return record_of(key, halves.data(), halves.size());
    }
    static std::string record_of(uint64_t key, const uint16_t* v, size_t dimensions) {
        const uint64_t check = check_of(key, v, dimensions);
        std::string record((const char*)&key, 8);
        return record.append((const char*)&check, 8).append((const char*)v, 2 * dimensions);
    }

  private:
    MappedFile file;
    Header h;

    static uint64_t number_at(const uint8_t* p) {
        uint64_t x;
        memcpy(&x, p, 8);
        return x;
    }
    // FNV-1a by eights of bytes: nothing that is changed inside one of them goes unseen.
    static uint64_t check_of(uint64_t key, const uint16_t* v, size_t dimensions) {
        uint64_t hash = fnv1a(&key, sizeof key);
        for (size_t i = 0; i < dimensions; i += 4) {
            uint64_t some = 0;
            memcpy(&some, v + i, 2 * std::min<size_t>(4, dimensions - i));
            hash = (hash ^ some) * 0x100000001b3;
        }
        return hash;
    }
    // To the nearest, of two as near the even one. (No infinity, no NaN.)
    static uint16_t upper_half(float x) {
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
    }
    // In sixteen sums, so that the compiler can use vectors.
    static float product(const float* a, const uint16_t* b, size_t n) {
        constexpr size_t LANES = 16;
        float sums[LANES] = {};
        auto add = [&](size_t i, size_t k) {
            const uint32_t bits = (uint32_t)b[i + k] << 16;
            float x;
            memcpy(&x, &bits, sizeof x);
            sums[k] += a[i + k] * x;
        };
        size_t i = 0;
        for (; i + LANES <= n; i += LANES)
            for (size_t k = 0; k < LANES; k++) add(i, k);
        for (size_t k = 0; i + k < n; k++) add(i, k);
        float all = 0;
        for (float s : sums) all += s;
        return all;
    }
};
