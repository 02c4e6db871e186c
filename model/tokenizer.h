// model/tokenizer.h: text <-> token ids, exactly as Hugging Face's `tokenizers` does it for Qwen3.
//
//   Tokenizer t("tokenizer.bin");
//   std::vector<int> ids = t.encode("Hello <think>", true);  // true: "<think>" becomes its one id
//   std::string text = t.decode(ids, false);
//
// encode, step by step:
//   1. Invalid UTF-8 becomes U+FFFD (one for each maximal part of a character, as in Python and Rust).
//   2. Added tokens ("<|im_end|>", "<think>") are cut out of the raw text, the leftmost and longest first.
//   3. The text between them is brought to Unicode's form NFC, where "e" + U+0301 is the one character "é".
//   4. It is split into pieces (words, digits, punctuation, white space); no token crosses their borders.
//   5. Byte-pair encoding: a piece starts as its bytes; of all neighbours that have a merge, those whose
//      merge ranks lowest become one token, again and again until no neighbours have one.
// decode is the way back: the bytes of the tokens in a row, invalid UTF-8 again as U+FFFD.
//
// tokenizer.bin (made by export.py --tokenizer; little-endian; T tokens, M merges):
//   char magic[8]            "qwen3tok"
//   u32  version             1
//   u32  T, M, B, R, D, C    counts of what follows
//   u32  offset[T + 1]       token i is text[offset[i]] up to text[offset[i + 1]]; never empty, all different
//   u32  merge[M][3]         left id, right id, merged id; in the order of their rank
//   u32  range[R][3]         Unicode: first, last code point, kind | mark << 2 (see Property)
//   u32  decompose[D][5]     code point, its full canonical decomposition (at most 4, then zeros)
//   u32  compose[C][3]       first, second, the character that they compose to; sorted
//   u8   flags[T]            1 in the vocabulary, 2 added, 4 special, 8 byte-pair encoding of it gives it
//   char text[B]
//
// Limits: 2 GiB a text; little-endian machines. A Tokenizer is immutable: any number of threads may use one.
#pragma once
#include "base/file.h"
#include "model/chat_style.h"
#include "model/utf8.h"
#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

// A token of a model that tokenizer.bin does not have.
struct AddedToken {
    std::string text;
    bool special, normalized; // normalized: it is matched after NFC
};

struct Tokenizer {
    // rows: of the model that uses it, if fewer than T. Added tokens at the end without a row do not exist: their texts
    // are ordinary texts. (Qwen3-Embedding-4B and 8B end before <tool_response> and <think>.)
    explicit Tokenizer(const std::string& path, int rows = INT32_MAX);

    ChatStyle chat; // the model's, see tokenizer_of

    // New ids from size() on. Those that are not special are recognised in any text, as `tokenizers` does it.
    void add(const std::vector<AddedToken>& tokens);

    bool extended() const { return !own.offset.empty(); } // by add

    int size() const { return (int)n_tokens; }
    int rows() const { return most; }                    // ids that may exist, at most
    size_t vocabulary() const { return n_vocabulary; }   // ids that are not added ones only
    bool has(std::string_view token) const { return find_token(token) >= 0; }
    int id_of(std::string_view token) const { return find_token(token); } // by its bytes; -1: none
    size_t longest() const { return longest_token; } // bytes of a token, at most
    size_t merges() const { return n_merges; }
    std::pair<int, int> merged(size_t rank) const { return {(int)merge[3 * rank], (int)merge[3 * rank + 1]}; }
    std::string_view bytes(int id) const {
        if (id < 0 || id >= size()) return {};
        return {text + offset[id], offset[id + 1] - offset[id]};
    }
    bool is_special(int id) const { return id >= 0 && id < size() && (flags[id] & SPECIAL); }
    int id(std::string_view added_token) const {
        int found = find_token(added_token);
        return found >= 0 && (flags[found] & ADDED) ? found : -1;
    }
    // A name for this vocabulary: FNV-1a 64 of the file.
    uint64_t hash() const {
        uint64_t h = 0xCBF29CE484222325;
        for (size_t i = 0; i < file.size; i++) h = (h ^ file.data[i]) * 0x100000001B3;
        return h;
    }

    // Appends the ids of a text. specials: added tokens in it are recognised; else they are ordinary text, but see add.
    void encode(std::vector<int>& out, std::string_view input, bool specials) const;
    std::vector<int> encode(std::string_view input, bool specials) const {
        std::vector<int> out;
        encode(out, input, specials);
        return out;
    }
    // skip_special leaves out the tokens that are special, not all that are added. Unknown ids are left out.
    std::string decode(const std::vector<int>& ids, bool skip_special) const {
        std::string raw, out;
        for (int i : ids)
            if (!(skip_special && is_special(i))) raw += bytes(i);
        utf8_repair(out, raw, true);
        return out;
    }
    // Valid UTF-8 in canonical composition (Unicode Standard Annex 15).
    std::string nfc(std::string_view valid) const;

  private:
    enum Flag : uint8_t { IN_VOCABULARY = 1, ADDED = 2, SPECIAL = 4, WHOLE = 8, ANYWHERE = 16, NORMALIZED = 32 };
    // The lower two bits of a code point's property are its class for the split. The upper six: 0 if NFC changes
    // neither it nor text before it; else its canonical combining class, renumbered 1, 2, ... in the same order; or
    // ACTIVE for class 0 that may change all the same (decomposes, or composes with the preceding character).
    enum Kind : uint8_t { OTHER, LETTER, NUMBER, SPACE };
    static constexpr uint8_t ACTIVE = 63;
    static constexpr uint32_t NONE = UINT32_MAX; // the rank of neighbours without a merge
    static constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15; // 2^64 / golden ratio, for hashing
    struct TokenSlot { // of a hash table; free if length is 0
        uint64_t key;  // the bytes themselves if there are 8 or less, else a hash of them
        uint32_t length, id;
    };

    MappedFile file;
    uint32_t n_tokens, n_merges, n_decompose, n_compose;
    size_t longest_token = 0, n_vocabulary = 0;
    int most;
    struct { // of add(): further contents of the file
        std::vector<uint32_t> offset;
        std::vector<uint8_t> flags;
        std::vector<char> text;
    } own;
    uint8_t all_flags = 0;
    const uint32_t *offset, *merge, *decompositions, *compositions; // as in the file
    const uint8_t* flags;
    const char* text;
    std::vector<uint8_t> property;      // of each code point
    std::vector<TokenSlot> token_slots; // hash tables with linear probing, a power of two of slots
    std::vector<uint32_t> merge_slots;  // rank | part of the hash << rank_bits; NONE if free
    int rank_bits;
    std::vector<int> added;             // ids, the longest text first
    bool starts_added[256] = {};        // first bytes of added tokens
    uint32_t byte_id[256];              // the token of a byte
    std::vector<uint32_t> character_id; // [code point up to U+FFFF] token, or NONE: see load_shortcuts
    std::vector<bool> is_torn;          // [last byte << 8 | first byte] of two characters

    Kind kind(uint32_t c) const { return (Kind)(property[c] & 3); }
    int mark(uint32_t c) const { return property[c] >> 2 == ACTIVE ? 0 : property[c] >> 2; }
    bool is_active(uint32_t c) const { return property[c] >> 2 != 0; }

    static uint64_t key_of(std::string_view token);
    size_t first_slot(uint64_t key, size_t length) const {
        uint64_t h = (key ^ length) * GOLDEN;
        return (h ^ h >> 32) & (token_slots.size() - 1);
    }
    const TokenSlot* token_slot(uint64_t key, std::string_view token) const;
    static uint64_t pair_hash(uint32_t left, uint32_t right) {
        uint64_t h = ((uint64_t)left << 32 | right) * GOLDEN;
        return h ^ h >> 32;
    }
    int find_token(std::string_view token) const {
        const TokenSlot* found = token_slot(key_of(token), token);
        return found->length ? (int)found->id : -1;
    }
    uint32_t rank_of(uint32_t left, uint32_t right) const;

    void need(bool condition, const char* fault) const; // else the file is bad
    void load_tokens();
    void load_merges();
    void load_properties(const uint32_t* range, uint32_t n);
    void check_compositions() const;
    void load_shortcuts();
    void decompose(std::vector<uint32_t>& out, uint32_t c) const;
    uint32_t compose(uint32_t a, uint32_t b) const;
    void normalize(std::vector<uint32_t>& s) const;
    const char* piece_end(const char* p, const char* end) const;
    void encode_pieces(std::vector<int>& out, std::string_view valid) const;
    void encode_piece(std::vector<int>& out, std::string_view piece, uint64_t key) const;
    void encode_long_piece(std::vector<int>& out, std::string_view piece) const;
};
