// search/vector_file.cpp: reads, checks and multiplies vectors; see vector_file.h.
#include "search/vector_file.h"
#include "search/index.h" // IndexFault
#include <algorithm>
#include <cstring>

// Rounds to nearest, ties to even. (Not for infinity or NaN.)
static uint16_t upper_half(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// Sixteen partial sums, so that the compiler can use vector instructions.
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

VectorFile::VectorFile(const std::string& path) : file(path) {
    if (file.size < sizeof h || memcmp(file.data, "qwen3vec", 8) != 0)
        throw IndexFault(path + ": no vectors of documents");
    memcpy(&h, file.data, sizeof h);
    if (h.version != VERSION || h.dimensions == 0 || h.dimensions > MOST_DIMENSIONS)
        throw IndexFault(path + ": vectors of another version");
}

size_t VectorFile::count_good() const {
    size_t good = 0;
    #pragma omp parallel for reduction(+ : good)
    for (size_t i = 0; i < size(); i++) good += is_good(i);
    return good;
}

std::vector<float> VectorFile::products(const std::vector<float>& v) const {
    std::vector<float> all(size());
    #pragma omp parallel for
    for (size_t i = 0; i < all.size(); i++) all[i] = product(v.data(), vector(i), (size_t)h.dimensions);
    return all;
}

std::string VectorFile::record_of(uint64_t key, const std::vector<float>& v) {
    std::vector<uint16_t> halves;
    for (float x : v) halves.push_back(upper_half(x));
    return record_of(key, halves.data(), halves.size());
}

std::string VectorFile::record_of(uint64_t key, const uint16_t* v, size_t dimensions) {
    const uint64_t check = check_of(key, v, dimensions);
    std::string record((const char*)&key, 8);
    return record.append((const char*)&check, 8).append((const char*)v, 2 * dimensions);
}

uint64_t VectorFile::number_at(const uint8_t* p) {
    uint64_t x;
    memcpy(&x, p, 8);
    return x;
}

// FNV-1a over units of eight bytes: any change inside one unit is detected.
uint64_t VectorFile::check_of(uint64_t key, const uint16_t* v, size_t dimensions) {
    uint64_t hash = fnv1a(&key, sizeof key);
    for (size_t i = 0; i < dimensions; i += 4) {
        uint64_t some = 0;
        memcpy(&some, v + i, 2 * std::min<size_t>(4, dimensions - i));
        hash = (hash ^ some) * 0x100000001b3;
    }
    return hash;
}
