// search/index.cpp: opens, checks and searches an index; see index.h.
#include "search/index.h"
#include "model/utf8.h"
#include <algorithm>
#include <cmath>
#include <cstring>
#include <unordered_map>

DocumentIndex::DocumentIndex(const std::string& path) : file(path) {
    need(file.size >= sizeof h && memcmp(file.data, "qwen3idx", 8) == 0, "no index of documents");
    memcpy(&h, file.data, sizeof h);
    need(h.version == VERSION, "an index of another version");
    uint64_t at = sizeof h;
    bool fits = h.passages < UINT32_MAX;
    auto section = [&](uint64_t count, size_t size) { // returns its offset
        const uint64_t begin = at;
        uint64_t bytes = 0;
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

uint64_t DocumentIndex::lower_word(uint64_t hash) const {
    auto less = [](const Word& w, uint64_t x) { return w.hash < x; };
    return (uint64_t)(std::lower_bound(words, words + h.words, hash, less) - words);
}

uint64_t DocumentIndex::passages_hash() const {
    uint64_t hash = fnv1a(&h.made_by, sizeof h.made_by);
    for (uint64_t i = 0; i < h.files; i++) {
        const uint64_t of[] = {files[i].hash, files[i].first, files[i].passages};
        hash = fnv1a(of, sizeof of, fnv1a(name_of(files[i]), hash));
    }
    return hash;
}

double DocumentIndex::idf(double n) const {
    const double N = (double)h.passages;
    return std::log(1 + (N - std::min(N, n) + 0.5) / (std::min(N, n) + 0.5));
}

std::vector<DocumentIndex::Hit> DocumentIndex::search(const WordCounts& question, size_t k) const {
    constexpr double k1 = 1.2, b = 0.75;
    std::vector<float> score(h.passages, 0);
    const double N = (double)h.passages, mean = std::max(1., (double)h.length / std::max(1., N));
    for (auto [hash, times] : question) {
        const uint64_t w = lower_word(hash);
        if (w == h.words || words[w].hash != hash) continue;
        const double weight = idf(words[w].passages) * times;
        each_posting(words[w], [&](uint32_t passage, uint32_t f) {
            const double longer = 1 - b + b * lengths[passage] / mean;
            score[passage] += (float)(weight * f * (k1 + 1) / (f + k1 * longer));
        });
    }
    return best(score, k, 0);
}

bool DocumentIndex::is_about(const Jieba& jieba, const WordCounts& question, const Hit& best) const {
    constexpr double SHARE = 0.5, RARE_WORDS = 1.35;
    const Passage& p = passage_at(best.passage);
    std::string text;
    utf8_repair(text, std::string(heading_of(p)) + "\n" + std::string(text_of(p)), true);
    uint32_t length = 0;
    const WordCounts passage = count_words(jieba, text, length);
    double all = 0, shared = 0;
    size_t words_shared = 0;
    for (auto [hash, times] : question) {
        const uint64_t w = lower_word(hash);
        const bool known = w < h.words && words[w].hash == hash;
        const double weight = idf(known ? words[w].passages : 1) * times;
        const auto at = std::lower_bound(passage.begin(), passage.end(), std::pair(hash, 0u));
        all += weight;
        if (at != passage.end() && at->first == hash) shared += weight, words_shared++;
    }
    if (words_shared < std::min<size_t>(question.size(), 2)) return false;
    return shared >= SHARE * all || best.score >= RARE_WORDS * idf(1);
}

std::vector<DocumentIndex::Hit> DocumentIndex::best(const std::vector<float>& score, size_t k, float least) const {
    std::vector<Hit> best; // a heap, the worst hit on top
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

std::vector<DocumentIndex::Hit> DocumentIndex::joined(const std::vector<std::vector<Hit>>& rankings, size_t k) const {
    std::unordered_map<uint32_t, double> sums;
    for (auto& ranking : rankings)
        for (size_t i = 0; i < ranking.size(); i++) sums[ranking[i].passage] += 1 / (60 + (double)i + 1);
    std::vector<Hit> all;
    for (auto [passage, sum] : sums) all.push_back({passage, (float)sum});
    std::sort(all.begin(), all.end(), [this](const Hit& x, const Hit& y) { return is_better(x, y); });
    if (all.size() > k) all.resize(k);
    return all;
}

// Checks all but postings, in one pass: a fault shows at the start, not in some later question.
void DocumentIndex::check() const {
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

std::string_view DocumentIndex::bytes(uint64_t section, uint64_t size, uint64_t at, uint64_t n) const {
    need(at <= size && n <= size - at);
    return {(const char*)file.data + section + at, n};
}

// On ties, the file whose name comes first, then the earlier passage: so the order in which files were indexed
// does not matter.
bool DocumentIndex::is_better(const Hit& x, const Hit& y) const {
    if (x.score != y.score) return x.score > y.score;
    const Passage &a = passage_at(x.passage), &b = passage_at(y.passage);
    if (a.file == b.file) return x.passage < y.passage;
    return name_of(file_at(a.file)) < name_of(file_at(b.file));
}
