// model/dataset.cpp: datasets, read and checked, and written.
#include "model/dataset.h"
#include <cmath>

uint64_t dataset_hash(DatasetRow row) {
    uint64_t h = 0xCBF29CE484222325;
    for (uint32_t word : row)
        for (int shift = 0; shift < 32; shift += 8) h = (h ^ ((word & ~TRAIN) >> shift & 0xFF)) * 0x100000001B3;
    return h;
}

const char* dataset_fault(DatasetRow row) {
    if (row.size() == 0 || row.size() > INT32_MAX) return "the number of its tokens is out of range";
    if (row.first[0] & TRAIN) return "its first token is to be trained, which nothing foresees";
    if (std::none_of(row.begin(), row.end(), [](uint32_t word) { return word & TRAIN; })) return "nothing to train";
    return nullptr;
}

const char* outcomes_fault(uint32_t token, const uint32_t* id, const float* log_p, size_t K) {
    double sum = 0;
    size_t n = 0;
    for (; n < K && id[n] != NO_ID; n++) {
        if (id[n] & TRAIN || std::find(id, id + n, id[n]) != id + n) return "ids that are not distinct";
        if (!(log_p[n] <= 0 && log_p[n] >= -1e6f)) return "a log-probability that is none";
        sum += std::exp((double)log_p[n]);
    }
    if (n == 0 || id[0] != token) return "the trained token is not the first of its ids";
    if (sum > 1.001) return "probabilities that add up to more than 1";
    for (; n < K; n++)
        if (id[n] != NO_ID || log_p[n] != 0) return "numbers behind the last id";
    return nullptr;
}

const char* dataset_fault(DatasetRow chosen, DatasetRow rejected, bool labelled) {
    auto answer = [](DatasetRow row) {
        return std::find_if(row.begin(), row.end(), [](uint32_t word) { return word & TRAIN; });
    };
    if (!std::equal(chosen.begin(), answer(chosen), rejected.begin(), answer(rejected)))
        return labelled ? "their prompts differ" : "chosen and rejected answer different prompts";
    for (DatasetRow row : {chosen, rejected})
        if (!std::all_of(answer(row), row.end(), [](uint32_t word) { return word & TRAIN; }))
            return "a token behind the prompt is not trained";
    if (!labelled && std::equal(chosen.begin(), chosen.end(), rejected.begin(), rejected.end()))
        return "chosen and rejected are the same";
    return nullptr;
}

Dataset::Dataset(const std::string& path) : file(path) {
    auto need = [&](bool holds, const char* fault) { if (!holds) DIE("%s: %s", path.c_str(), fault); };
    const DatasetHeader mine;
    need(file.size >= sizeof header, "too short for a dataset");
    memcpy(&header, file.data, sizeof header);
    need(!memcmp(header.magic, mine.magic, sizeof mine.magic), "not a dataset (datagen pack makes them)");
    if (header.version < header.OF_ROWS || header.version > header.OF_TAUGHT)
        DIE("%s: a dataset of version %u, not %u to %u", path.c_str(), header.version, header.OF_ROWS,
            header.OF_TAUGHT);
    need(header.zero == 0, "bad header");
    need(header.rows > 0, "a dataset without rows");
    need(header.rows % group() == 0, "a row without its pair");
    const uint64_t limit = (uint64_t)1 << 40; // the sums below stay far from 2^64
    need(header.rows < limit && header.tokens < limit, "bad counts");
    const uint64_t padded = header.tokens + header.tokens % 2;
    const uint64_t size = sizeof header + 4 * padded +
                          8 * (2 * header.rows + 1 + (labelled() ? header.rows / 2 : 0));
    if (taught() ? file.size < size + 8 : size != file.size)
        DIE("%s: %zu bytes where the header promises %llu: cut short or damaged", path.c_str(), file.size,
            (unsigned long long)size);
    token = (const uint32_t*)(file.data + sizeof header);
    begin = (const uint64_t*)(token + padded);
    row_hash = begin + header.rows + 1, label = row_hash + header.rows;
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
    for (size_t i = 0; group() == 2 && i < rows(); i += 2)
        if (const char* fault = dataset_fault(row(i), row(i + 1), labelled()))
            DIE("%s: rows %zu and %zu: %s", path.c_str(), i, i + 1, fault);
    for (size_t i = 0; labelled() && i < rows() / 2; i++) need(label[i] <= 1, "a label that is neither 0 nor 1");
    if (taught()) open_outcomes();
}

void Dataset::open_outcomes() {
    places = *label;
    if (places < 1 || places > MOST_OUTCOMES) DIE("%s: bad number of ids per token", path());
    const size_t at = (size_t)((const uint8_t*)(label + 1) - file.data); // (the sizes before it were checked)
    if (file.size - at != 8 * trained_count * places)
        DIE("%s: %zu bytes of log-probabilities, not %llu: cut short or damaged", path(), file.size - at,
            (unsigned long long)(8 * trained_count * places));
    outcome_id = (const uint32_t*)(label + 1), outcome_p = (const float*)(outcome_id + trained_count * places);
    size_t n = 0; // trained tokens
    for (size_t i = 0; i < rows(); i++) {
        first_trained.push_back(n);
        for (uint32_t word : row(i)) {
            if (!(word & TRAIN)) continue;
            const uint32_t* id = outcome_id + n * places;
            if (const char* fault = outcomes_fault(word & ~TRAIN, id, outcome_p + n * places, places))
                DIE("%s: row %zu: %s", path(), i, fault);
            for (size_t k = 0; k < places && id[k] != NO_ID; k++) largest = std::max(largest, id[k]);
            n++;
        }
    }
}

void Dataset::must_match(uint64_t tokenizer, uint64_t chat_template, const std::string& advice) const {
    if (header.tokenizer != tokenizer)
        DIE("%s: made with another tokenizer; %s", file.path.c_str(), advice.c_str());
    if (header.chat_template != chat_template)
        DIE("%s: made with another chat template; pack it again", file.path.c_str());
}

DatasetWriter::DatasetWriter(const std::string& path, uint64_t tokenizer, uint64_t chat_template) : out(path) {
    if (out.temporary.empty()) DIE("%s: a dataset needs a regular file", path.c_str());
    header.tokenizer = tokenizer, header.chat_template = chat_template;
    out.write(&header, sizeof header);
}

void DatasetWriter::add_pair(const std::vector<uint32_t>& chosen, const std::vector<uint32_t>& rejected) {
    add_two(chosen, rejected, header.OF_PAIRS);
}

void DatasetWriter::add_labelled(const std::vector<uint32_t>& answer, const std::vector<uint32_t>& mismatched,
                                 bool desirable) {
    add_two(answer, mismatched, header.OF_LABELLED);
    labels.push_back(desirable);
}

void DatasetWriter::add_two(const std::vector<uint32_t>& a, const std::vector<uint32_t>& b, uint32_t version) {
    header.version = version;
    add(a), add(b);
    if (const char* fault = dataset_fault(row_of(a), row_of(b), version == header.OF_LABELLED))
        DIE("%s: rows %zu and %zu: %s", out.path.c_str(), hashes.size() - 2, hashes.size() - 1, fault);
}

void DatasetWriter::add_taught(const std::vector<uint32_t>& words,
                               const std::vector<std::vector<Outcome>>& outcomes) {
    header.version = header.OF_TAUGHT;
    add(words);
    size_t k = 0;
    for (uint32_t word : words) {
        if (!(word & TRAIN)) continue;
        std::vector<uint32_t> id;
        std::vector<float> log_p;
        if (k < outcomes.size())
            for (const Outcome& o : outcomes[k]) id.push_back(o.id), log_p.push_back(o.log_p);
        const char* fault = outcomes_fault(word & ~TRAIN, id.data(), log_p.data(), id.size());
        if (fault || id.size() > MOST_OUTCOMES)
            DIE("%s: row %zu: %s", out.path.c_str(), hashes.size() - 1, fault ? fault : "too many ids of a token");
        taught.push_back(outcomes[k++]);
    }
}

void DatasetWriter::add(const std::vector<uint32_t>& words) {
    const DatasetRow row = row_of(words);
    if (const char* fault = dataset_fault(row)) DIE("%s: row %zu: %s", out.path.c_str(), hashes.size(), fault);
    out.write(words.data(), 4 * words.size());
    hashes.push_back(dataset_hash(row));
    begins.push_back(begins.back() + words.size());
}

void DatasetWriter::commit() {
    header.rows = hashes.size(), header.tokens = begins.back();
    if (hashes.empty()) DIE("%s: a dataset without rows", out.path.c_str());
    const uint32_t zero = 0;
    out.write(&zero, 4 * (header.tokens % 2));
    out.write(begins.data(), 8 * begins.size());
    out.write(hashes.data(), 8 * hashes.size());
    out.write(labels.data(), 8 * labels.size());
    if (!taught.empty()) write_taught();
    if (fseek(out.file, 0, SEEK_SET) != 0) DIE("%s: %s", out.path.c_str(), strerror(errno));
    out.write(&header, sizeof header);
    out.commit();
}

void DatasetWriter::write_taught() {
    uint64_t K = 0;
    for (auto& outcomes : taught) K = std::max<uint64_t>(K, outcomes.size());
    out.write(&K, 8);
    auto write_all = [&](auto unused, auto number_of) {
        std::vector<decltype(unused)> places(K);
        for (auto& outcomes : taught) {
            std::fill(places.begin(), places.end(), unused);
            std::transform(outcomes.begin(), outcomes.end(), places.begin(), number_of);
            out.write(places.data(), 4 * K);
        }
    };
    write_all(NO_ID, [](const Outcome& o) { return o.id; });
    write_all(0.f, [](const Outcome& o) { return o.log_p; });
}
