// search/index_builder.cpp: collects and writes passages and postings; see index_builder.h.
#include "search/index_builder.h"
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>

IndexBuilder::IndexBuilder(const std::string& path, uint64_t made_by) : out(path) {
    h.made_by = made_by;
    out.write(&h, sizeof h); // reserves its place
}

void IndexBuilder::add_file(std::string_view name, Index::File f) {
    f.name = name_at(name), f.name_bytes = (uint32_t)name.size();
    f.first = (uint32_t)passages.size(), f.passages = 0;
    files.push_back(f);
}

void IndexBuilder::add_passage(std::string_view text, std::string_view heading, uint32_t line, uint32_t length) {
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

void IndexBuilder::add_words(uint32_t first, const std::vector<WordCounts>& words) {
    on_all_shards([&](size_t s) {
        for (size_t i = 0; i < words.size(); i++) {
            const auto begin = words[i].begin(), end = words[i].end();
            auto it = std::lower_bound(begin, end, std::pair(first_of(s), 0u));
            for (; it != end && shard_of(it->first) == s; ++it) append(it->first, first + (uint32_t)i, it->second);
        }
    });
}

void IndexBuilder::take_over(const Index& old, const std::vector<std::optional<int64_t>>& times) {
    constexpr uint32_t GONE = UINT32_MAX, LONGEST_NAME = 1 << 14;
    auto need = [&](bool good) { if (!good) throw IndexFault(old.path() + ": a damaged index"); };
    std::vector<uint32_t> number(old.header().passages, GONE); // new numbers of its passages
    uint64_t next = 0, text = 0; // passages and their text are contiguous, so that nothing is written twice
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

void IndexBuilder::finish() {
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

void IndexBuilder::on_all_shards(const std::function<void(size_t)>& f) {
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

void IndexBuilder::append(uint64_t hash, uint32_t passage, uint32_t count) { // passages arrive in order
    List& list = shards[shard_of(hash)][hash];
    for (uint32_t x : {passage - list.last, count}) {
        for (; x >= 0x80; x >>= 7) list.bytes += (char)(x | 0x80);
        list.bytes += (char)x;
    }
    list.last = passage, list.passages++;
}
