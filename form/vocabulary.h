// form/vocabulary.h: a tokenizer's tokens by their bytes, for the walks that make masks.
#pragma once
#include "form/grammar.h"
#include "model/tokenizer.h"
#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

// Tokens by their bytes, as a trie in depth-first order.
struct TokenTrie {
    struct Node {
        uint32_t end;   // index behind its descendants
        uint32_t token; // the token that ends here, or none
        uint16_t depth; // in bytes
        uint8_t byte;   // the last of them
    };
    std::vector<Node> nodes;
    size_t longest = 0;

    TokenTrie(std::vector<std::pair<std::string, int>> tokens, int none);
};

// Most tokens are words: short, of whole characters without a meaning in JSON. Where a grammar accepts any text, these
// need no walk.
struct Vocabulary {
    static constexpr size_t SHORT = 16, LONG = 1024; // bytes of a token; longer tokens are never allowed
    enum Kind { WORDS, OTHERS, LONG_ONES, KINDS };

    const Tokenizer& tokenizer;
    std::vector<TokenTrie> tries{}; // by kind
    std::array<std::vector<uint32_t>, SHORT + 1> words_of{}; // words of at most n characters, one bit per token

    explicit Vocabulary(const Tokenizer& t);
    size_t words() const { return ((size_t)tokenizer.size() + 31) / 32; }

    // A token's bytes, as a grammar sees them.
    std::string bytes(int id) const;
    static bool in_words(uint8_t byte) { return byte >= ' ' && byte != '"' && byte != '\\' && byte != 0x7F; }

  private:
    static size_t characters_of(std::string_view s);
};
