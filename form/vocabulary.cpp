// form/vocabulary.cpp: the tries of a tokenizer's tokens, see vocabulary.h.
#include "form/vocabulary.h"
#include "model/utf8.h"
#include <algorithm>
#include <string_view>

TokenTrie::TokenTrie(std::vector<std::pair<std::string, int>> tokens, int none) {
    std::sort(tokens.begin(), tokens.end());
    std::vector<uint32_t> path = {0};
    std::string_view before;
    nodes.push_back({0, (uint32_t)none, 0, 0});
    for (auto& [bytes, id] : tokens) {
        size_t same = 0;
        while (same < std::min(bytes.size(), before.size()) && bytes[same] == before[same]) same++;
        for (; path.size() > same + 1; path.pop_back()) nodes[path.back()].end = (uint32_t)nodes.size();
        for (size_t i = same; i < bytes.size(); i++) {
            path.push_back((uint32_t)nodes.size());
            nodes.push_back({0, (uint32_t)none, (uint16_t)(i + 1), (uint8_t)bytes[i]});
        }
        nodes[path.back()].token = (uint32_t)id;
        before = bytes;
        longest = std::max(longest, bytes.size());
    }
    for (uint32_t n : path) nodes[n].end = (uint32_t)nodes.size();
}

Vocabulary::Vocabulary(const Tokenizer& t) : tokenizer(t) {
    std::array<std::vector<std::pair<std::string, int>>, KINDS> tokens;
    for (auto& bits : words_of) bits.resize(words());
    for (int id = 0; id < tokenizer.size(); id++) {
        std::string own = bytes(id);
        const bool plain = own.find(ADDED_TOKEN, own[0] == ADDED_TOKEN && own.size() > 1) == std::string::npos;
        if (!plain || own.size() > LONG) continue;
        const size_t characters = own.size() <= SHORT ? characters_of(own) : 0;
        for (size_t n = characters; characters && n <= SHORT; n++) words_of[n][(size_t)id / 32] |= 1u << id % 32;
        tokens[own.size() > SHORT ? LONG_ONES : characters ? WORDS : OTHERS].push_back({std::move(own), id});
    }
    for (auto& some : tokens) tries.emplace_back(std::move(some), (int)words() * 32);
}

std::string Vocabulary::bytes(int id) const {
    const std::string_view own = tokenizer.bytes(id);
    return tokenizer.id(own) == id ? ADDED_TOKEN + std::string(own) : std::string(own);
}

size_t Vocabulary::characters_of(std::string_view s) { // 0: it is no word
    size_t n = 0;
    for (size_t i = 0; i < s.size(); n++) {
        const int k = utf8_length(s.data() + i, s.size() - i);
        if (k <= 0 || !in_words((uint8_t)s[i])) return 0;
        i += (size_t)k;
    }
    return n;
}
