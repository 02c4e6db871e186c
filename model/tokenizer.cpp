// model/tokenizer.cpp: byte-pair encoding as Hugging Face's `tokenizers` does it; see tokenizer.h.
#include "model/tokenizer.h"

// ------------------------------------------------------------------------------------------- hash tables

uint64_t Tokenizer::key_of(std::string_view token) {
    auto load = [](const char* at, auto word) { return memcpy(&word, at, sizeof word), (uint64_t)word; };
    const char* s = token.data();
    size_t n = token.size();
    if (n > 8) {
        uint64_t h = 0;
        for (; n > 8; s += 8, n -= 8) h = (h ^ load(s, uint64_t())) * GOLDEN, h ^= h >> 32;
        return (h ^ load(s + n - 8, uint64_t())) * GOLDEN;
    }
    if (n >= 4) return load(s, uint32_t()) | load(s + n - 4, uint32_t()) << 32; // they may overlap
    return n ? load(s, uint8_t()) | load(s + n / 2, uint8_t()) << 8 | load(s + n - 1, uint8_t()) << 16 : 0;
}

// Where the token is, or the free slot where it belongs.
const Tokenizer::TokenSlot* Tokenizer::token_slot(uint64_t key, std::string_view token) const {
    for (size_t i = first_slot(key, token.size());; i = (i + 1) & (token_slots.size() - 1)) {
        const TokenSlot* at = &token_slots[i];
        if (!at->length) return at;
        bool same = at->key == key && at->length == token.size();
        if (same && (at->length <= 8 || bytes((int)at->id) == token)) return at;
    }
}

// A slot is 4 bytes, so that the table stays in the cache: the tag rejects most other keys, and the file's list of
// merges decides.
uint32_t Tokenizer::rank_of(uint32_t left, uint32_t right) const {
    uint64_t h = pair_hash(left, right);
    uint32_t tag = (uint32_t)(h >> 32) << rank_bits;
    size_t mask = merge_slots.size() - 1, i = h & mask;
    for (; merge_slots[i] != NONE; i = (i + 1) & mask) {
        uint32_t rank = merge_slots[i] ^ tag;
        if (rank >= n_merges) continue;
        const uint32_t* m = merge + 3 * (size_t)rank;
        if (m[0] == left && m[1] == right) return rank;
    }
    return NONE;
}

// ------------------------------------------------------------------------------------------------ loading

static size_t slots(size_t n) { // at most half of them used
    size_t k = 2;
    while (k < 2 * n) k *= 2;
    return k;
}

void Tokenizer::need(bool condition, const char* fault) const {
    if (!condition) DIE("%s: %s", file.path.c_str(), fault);
}

Tokenizer::Tokenizer(const std::string& path, int rows) : file(path), most(rows) {
    need(file.size >= 36 && !memcmp(file.data, "qwen3tok", 8), "not a tokenizer file");
    const uint32_t* word = (const uint32_t*)(file.data + 8);
    if (word[0] != 1) DIE("%s: version %u of the format, not 1", path.c_str(), word[0]);
    n_tokens = word[1], n_merges = word[2], n_decompose = word[5], n_compose = word[6];
    const uint32_t n_text = word[3], n_ranges = word[4];
    uint64_t words = 7 + ((uint64_t)n_tokens + 1) + 3 * ((uint64_t)n_merges + n_ranges + n_compose)
                     + 5 * (uint64_t)n_decompose;
    need(8 + 4 * words + n_tokens + n_text == file.size, "its size is not what its header says");
    offset = word + 7;
    merge = offset + n_tokens + 1;
    const uint32_t* range = merge + 3 * (size_t)n_merges;
    decompositions = range + 3 * (size_t)n_ranges;
    compositions = decompositions + 5 * (size_t)n_decompose;
    flags = (const uint8_t*)(compositions + 3 * (size_t)n_compose);
    text = (const char*)(flags + n_tokens);

    need(n_tokens <= INT32_MAX && n_merges <= INT32_MAX, "more tokens than an int can count");
    need(offset[0] == 0 && offset[n_tokens] == n_text, "bad token offsets");
    for (uint32_t i = 0; i < n_tokens; i++) need(offset[i] < offset[i + 1], "bad token offsets");
    uint32_t kept = n_tokens;
    while ((int64_t)kept > rows && !(flags[kept - 1] & IN_VOCABULARY)) kept--;
    if ((int64_t)kept <= rows) n_tokens = kept; // (else it is not the model's)

    for (uint32_t i = 0; i < n_tokens; i++) need(flags[i] < ANYWHERE, "bad token flags");
    load_tokens();
    load_merges();
    load_properties(range, n_ranges);
    load_shortcuts();
    check_compositions();
}

// The table in which rank_of finds a pair of tokens.
void Tokenizer::load_merges() {
    merge_slots.assign(slots(n_merges), NONE);
    for (rank_bits = 1; n_merges >> rank_bits; rank_bits++) {}
    for (uint32_t rank = 0; rank < n_merges; rank++) {
        const uint32_t* m = merge + 3 * (size_t)rank;
        for (int i = 0; i < 3; i++)
            need(m[i] < n_tokens && flags[m[i]] & IN_VOCABULARY, "a merge of a token that is not there");
        std::string_view left = bytes((int)m[0]), right = bytes((int)m[1]), whole = bytes((int)m[2]);
        need(whole.size() == left.size() + right.size() && !memcmp(whole.data(), left.data(), left.size())
             && !memcmp(whole.data() + left.size(), right.data(), right.size()),
             "a merge that is not its two parts");
        need(rank_of(m[0], m[1]) == NONE, "two merges of the same tokens");
        uint64_t h = pair_hash(m[0], m[1]);
        size_t mask = merge_slots.size() - 1, at = h & mask;
        while (merge_slots[at] != NONE) at = (at + 1) & mask;
        merge_slots[at] = rank | (uint32_t)(h >> 32) << rank_bits;
    }
}

// `range`: n triples, first and last code point and the property of these.
void Tokenizer::load_properties(const uint32_t* range, uint32_t n) {
    property.assign(0x110000, 0);
    uint32_t free_from = 0;
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t* r = range + 3 * (size_t)i;
        need(r[0] >= free_from && r[0] <= r[1] && r[1] < 0x110000 && r[2] < 256, "bad Unicode ranges");
        std::fill(property.begin() + r[0], property.begin() + r[1] + 1, (uint8_t)r[2]);
        free_from = r[1] + 1;
    }
}

// The tables of Unicode's normal form: sorted, and of characters.
void Tokenizer::check_compositions() const {
    auto is_character = [](uint32_t c) { return c < 0xD800 || (c >= 0xE000 && c < 0x110000); };
    for (size_t i = 0; i < n_decompose; i++) {
        const uint32_t* d = decompositions + 5 * i;
        need((i == 0 || d[-5] < d[0]) && d[1], "bad Unicode decompositions");
        for (int k = 1; k < 5; k++) need(is_character(d[k]), "bad Unicode decompositions");
    }
    for (size_t i = 0; i < n_compose; i++) {
        const uint32_t* c = compositions + 3 * i;
        need(i == 0 || std::make_pair(c[-3], c[-2]) < std::make_pair(c[0], c[1]), "bad Unicode compositions");
        need(is_character(c[2]), "bad Unicode compositions");
    }
}

// Facts about the tokens that follow from their texts and flags.
void Tokenizer::load_tokens() {
    token_slots.assign(slots(n_tokens), TokenSlot());
    added.clear();
    n_vocabulary = 0;
    std::fill(byte_id, byte_id + 256, NONE);
    for (uint32_t i = 0; i < n_tokens; i++) {
        std::string_view token = bytes((int)i);
        longest_token = std::max(longest_token, token.size());
        uint8_t f = flags[i];
        need(f & (IN_VOCABULARY | ADDED) && (f & ADDED || !(f & SPECIAL)), "bad token flags");
        need(f & IN_VOCABULARY || !(f & WHOLE), "bad token flags");
        uint64_t key = key_of(token);
        const TokenSlot* slot = token_slot(key, token);
        need(!slot->length, "two tokens with the same text");
        token_slots[(size_t)(slot - token_slots.data())] = {key, (uint32_t)token.size(), i};
        all_flags |= f, n_vocabulary += f & IN_VOCABULARY;
        if (f & IN_VOCABULARY && token.size() == 1) byte_id[(uint8_t)token[0]] = i;
        if (!(f & ADDED)) continue;
        for (size_t at = 0, k; at < token.size(); at += k) { // so that a match never cuts a character
            int length = utf8_length(token.data() + at, token.size() - at);
            need(length > 0, "an added token that is not valid UTF-8");
            k = (size_t)length;
        }
        added.push_back((int)i);
        starts_added[(uint8_t)token[0]] = true;
    }
    for (uint32_t i : byte_id) need(i != NONE, "a byte without a token");
    std::sort(added.begin(), added.end(), [&](int a, int b) { return bytes(a).size() > bytes(b).size(); });
}

void Tokenizer::add(const std::vector<AddedToken>& tokens) {
    own.offset.assign(offset, offset + n_tokens + 1);
    own.flags.assign(flags, flags + n_tokens);
    own.text.assign(text, text + offset[n_tokens]);
    for (const AddedToken& token : tokens) {
        own.text.insert(own.text.end(), token.text.begin(), token.text.end());
        own.offset.push_back((uint32_t)own.text.size());
        const int kind = token.special ? SPECIAL : ANYWHERE, when = token.normalized ? NORMALIZED : 0;
        own.flags.push_back((uint8_t)(ADDED | kind | when));
    }
    n_tokens += (uint32_t)tokens.size();
    offset = own.offset.data(), flags = own.flags.data(), text = own.text.data();
    load_tokens();
}

// A character of several bytes may enter the byte-pair encoding as its one token instead of as its bytes, if
// - every token is made by one merge at most, whose rank is above those of its parts (so it is in all trained
//   vocabularies): then a merge that takes the character whole comes after those that make it,
// - its bytes alone become that token, and
// - no merge takes a part of it together with a neighbour: with the last byte of the character before it, or
//   with the first byte of the one after it. The few such pairs of bytes in the vocabulary are "torn".
void Tokenizer::load_shortcuts() {
    character_id.assign(0x10000, NONE);
    is_torn.assign(0x10000, false);
    std::vector<bool> is_made(n_tokens);
    for (uint32_t i : byte_id) is_made[i] = true;
    auto is_lead = [](char c) { return (c & 0xC0) != 0x80; };
    for (uint32_t rank = 0; rank < n_merges; rank++) {
        const uint32_t* m = merge + 3 * (size_t)rank;
        if (!is_made[m[0]] || !is_made[m[1]] || is_made[m[2]]) return;
        is_made[m[2]] = true;
        std::string_view s = bytes((int)m[2]);
        size_t first = 0, last = s.size() - 1; // the first and the last lead byte
        while (first < s.size() && !is_lead(s[first])) first++;
        while (last > 0 && !is_lead(s[last])) last--;
        auto tear = [&](size_t at) { is_torn[(size_t)(uint8_t)s[at - 1] << 8 | (uint8_t)s[at]] = true; };
        if (first > 0 && first < s.size()) tear(first);
        if (last > 0 && utf8_length(s.data() + last, s.size() - last) == 0) tear(last);
    }
    for (uint32_t i = 0; i < n_tokens; i++) {
        std::string_view s = bytes((int)i);
        const char* p = s.data();
        if (flags[i] & WHOLE && s.size() > 1 && utf8_length(p, s.size()) == (int)s.size())
            if (uint32_t c = utf8_read(p); c < 0x10000) character_id[c] = i;
    }
}

// ---------------------------------------------------------------------------------------------------- NFC
// Decompose, sort marks, compose: but only where a character is not inert, from the inert one before it on.

// Hangul syllables are computed (Unicode 3.12): L leading consonants, V vowels, T trailing ones or none.
static constexpr uint32_t HANGUL = 0xAC00, L_BASE = 0x1100, V_BASE = 0x1161, T_BASE = 0x11A7;
static constexpr uint32_t L_N = 19, V_N = 21, T_N = 28, HANGUL_N = L_N * V_N * T_N;

void Tokenizer::decompose(std::vector<uint32_t>& out, uint32_t c) const {
    if (uint32_t s = c - HANGUL; s < HANGUL_N) {
        out.push_back(L_BASE + s / (V_N * T_N));
        out.push_back(V_BASE + s / T_N % V_N);
        if (s % T_N) out.push_back(T_BASE + s % T_N);
        return;
    }
    size_t low = 0, high = n_decompose;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (decompositions[5 * middle] < c) low = middle + 1;
        else high = middle;
    }
    const uint32_t* d = decompositions + 5 * low;
    if (low == n_decompose || d[0] != c) return out.push_back(c);
    for (int k = 1; k < 5 && d[k]; k++) out.push_back(d[k]);
}

// The composition of a and b; 0 if there is none.
uint32_t Tokenizer::compose(uint32_t a, uint32_t b) const {
    if (a - L_BASE < L_N && b - V_BASE < V_N) return HANGUL + ((a - L_BASE) * V_N + b - V_BASE) * T_N;
    if (a - HANGUL < HANGUL_N && (a - HANGUL) % T_N == 0 && b - T_BASE - 1 < T_N - 1) return a + b - T_BASE;
    size_t low = 0, high = n_compose;
    while (low < high) {
        size_t middle = (low + high) / 2;
        const uint32_t* c = compositions + 3 * middle;
        if (c[0] < a || (c[0] == a && c[1] < b)) low = middle + 1;
        else high = middle;
    }
    const uint32_t* c = compositions + 3 * low;
    return low < n_compose && c[0] == a && c[1] == b ? c[2] : 0;
}

// Decomposed characters -> NFC, in place.
void Tokenizer::normalize(std::vector<uint32_t>& s) const {
    for (size_t i = 0, j; i < s.size(); i = j) { // marks between two characters of class 0
        for (j = i; j < s.size() && mark(s[j]); j++) {}
        std::stable_sort(s.begin() + (ptrdiff_t)i, s.begin() + (ptrdiff_t)j,
                         [&](uint32_t a, uint32_t b) { return mark(a) < mark(b); });
        j += j == i;
    }
    const size_t none = SIZE_MAX;
    size_t n = 0, starter = none; // s[starter] is the last character of class 0 in s[0..n)
    for (uint32_t c : s) {
        // c reaches the starter if nothing is between them, or only marks of lower classes
        if (starter != none && (n == starter + 1 || mark(s[n - 1]) < mark(c)))
            if (uint32_t composite = compose(s[starter], c)) {
                s[starter] = composite;
                continue;
            }
        if (!mark(c)) starter = n;
        s[n++] = c;
    }
    s.resize(n);
}

std::string Tokenizer::nfc(std::string_view valid) const {
    std::string out;
    std::vector<uint32_t> window;
    const char *p = valid.data(), *end = p + valid.size();
    const char *done = p, *inert = p; // copied up to here; the last inert character
    while (p < end) {
        const char* here = p;
        if (!is_active(utf8_read(p))) {
            inert = here;
            continue;
        }
        out.append(done, inert);
        window.clear();
        for (p = inert; p < end;) {
            const char* next = p;
            uint32_t c = utf8_read(next);
            if (p != inert && !is_active(c)) break;
            decompose(window, c);
            p = next;
        }
        normalize(window);
        for (uint32_t c : window) utf8_append(out, c);
        done = inert = p;
    }
    out.append(done, end);
    return out;
}

// -------------------------------------------------------------------------------------------------- split
// The pieces of this regular expression, whose first alternative that matches at a place wins there:
//   (?i:'s|'t|'re|'ve|'m|'ll|'d)     a contraction (U+017F is an s too)
//   [^\r\n\p{L}\p{N}]?\p{L}+         letters, and one character before them
//   \p{N}                            one digit
//    ?[^\s\p{L}\p{N}]+[\r\n]*        punctuation and all else, after one space; line ends belong to it
//   \s*[\r\n]+                       white space up to its last line end
//   \s+(?!\S)                        white space; its last character may begin the next piece
//   \s+

const char* Tokenizer::piece_end(const char* p, const char* end) const {
    auto while_kind = [&](const char* from, Kind wanted) {
        for (const char* next = from; from < end; from = next)
            if (kind(utf8_read(next)) != wanted) break;
        return from;
    };
    auto is_at = [&](const char* at, Kind wanted) { return at < end && kind(utf8_read(at)) == wanted; };
    const char* q = p; // after the first character c
    uint32_t c = utf8_read(q);
    Kind first = kind(c);
    if (first == LETTER) return while_kind(q, LETTER);
    if (first == NUMBER) return q;
    if (c == '\'' && q < end) {
        char a = q[0] | 0x20, b = end - q > 1 ? q[1] | 0x20 : 0; // lower case
        if (a == 's' || a == 't' || a == 'm' || a == 'd') return q + 1;
        if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l')) return q + 2;
        if (end - q > 1 && !memcmp(q, "\xC5\xBF", 2)) return q + 2;
    }
    if (c != '\r' && c != '\n' && is_at(q, LETTER)) return while_kind(q, LETTER);
    if (first == OTHER || (c == ' ' && is_at(q, OTHER))) {
        q = while_kind(q, OTHER);
        while (q < end && (*q == '\r' || *q == '\n')) q++;
        return q;
    }
    const char *behind_newline = nullptr, *last = p; // last: the last character of the white space
    for (const char* next = q = p; q < end; q = next) {
        c = utf8_read(next);
        if (kind(c) != SPACE) break;
        last = q;
        if (c == '\r' || c == '\n') behind_newline = next;
    }
    if (behind_newline) return behind_newline;
    return q == end || last == p ? q : last;
}

// ------------------------------------------------------------------------------------- byte-pair encoding

void Tokenizer::encode_piece(std::vector<int>& out, std::string_view piece, uint64_t key) const {
    const TokenSlot* whole = token_slot(key, piece);
    if (whole->length && flags[whole->id] & WHOLE) return out.push_back((int)whole->id);
    const size_t LIMIT = 96; // below, a scan for the lowest rank beats a heap
    if (piece.size() > LIMIT) return encode_long_piece(out, piece);

    uint32_t id[LIMIT], rank[LIMIT]; // rank[i]: of the pair id[i], id[i + 1]
    size_t n = 0;
    for (const char *p = piece.data(), *end = p + piece.size(); p < end;) {
        const char* begin = p;
        uint32_t c = utf8_read(p), known = c < 0x10000 ? character_id[c] : NONE;
        auto torn = [&](const char* at) { return is_torn[(size_t)(uint8_t)at[-1] << 8 | (uint8_t)at[0]]; };
        if (known != NONE && !(begin > piece.data() && torn(begin)) && !(p < end && torn(p))) id[n++] = known;
        else while (begin < p) id[n++] = byte_id[(uint8_t)*begin++];
    }
    for (size_t i = 0; i + 1 < n; i++) rank[i] = rank_of(id[i], id[i + 1]);
    while (n > 1) {
        size_t best = (size_t)(std::min_element(rank, rank + n - 1) - rank);
        if (rank[best] == NONE) break;
        id[best] = merge[3 * (size_t)rank[best] + 2];
        n--;
        std::copy(id + best + 2, id + n + 1, id + best + 1);
        std::copy(rank + best + 1, rank + n, rank + best);
        if (best > 0) rank[best - 1] = rank_of(id[best - 1], id[best]);
        if (best + 1 < n) rank[best] = rank_of(id[best], id[best + 1]);
    }
    out.insert(out.end(), id, id + n);
}

// The same for any length: the tokens are a linked list, and the pairs of each rank wait in a queue of their own. In a
// trained vocabulary a merge makes pairs of higher ranks only, so a queue is complete when its rank is the lowest, and
// nearly in order: a run of one character takes linear time.
void Tokenizer::encode_long_piece(std::vector<int>& out, std::string_view piece) const {
    struct Node {
        uint32_t id, rank, previous, next; // rank: of the pair that begins here; NONE also once it is gone
    };
    struct Line { uint32_t rank, last; };  // last: the latest of its entries
    struct Entry { uint32_t place, before; };
    const uint32_t n = (uint32_t)piece.size();
    std::vector<Node> list(n);
    std::vector<Entry> entries;
    std::vector<uint32_t> ranks, places;   // ranks: a heap of those that have a line
    std::vector<Line> lines(2);            // a hash table with linear probing; free if last is NONE
    const size_t most = std::min(3 * (size_t)n, (size_t)n_merges); // lines: a merge makes two new pairs
    while (lines.size() < 2 * most) lines.resize(2 * lines.size());
    std::fill(lines.begin(), lines.end(), Line{NONE, NONE});
    entries.reserve(n);
    auto line_of = [&](uint32_t rank) -> Line& {
        size_t i = pair_hash(rank, 0) & (lines.size() - 1);
        while (lines[i].rank != rank && lines[i].rank != NONE) i = (i + 1) & (lines.size() - 1);
        return lines[i];
    };
    auto wait = [&](uint32_t rank, uint32_t place) {
        Line& line = line_of(rank);
        if (line.last == NONE) ranks.push_back(rank), std::push_heap(ranks.begin(), ranks.end(), std::greater<>());
        entries.push_back({place, line.last});
        line = {rank, (uint32_t)entries.size() - 1};
    };
    auto add_pair = [&](uint32_t i) {
        Node& a = list[i];
        a.rank = a.next < n ? rank_of(a.id, list[a.next].id) : NONE;
        if (a.rank != NONE) wait(a.rank, i);
    };
    for (uint32_t i = 0; i < n; i++) list[i] = {byte_id[(uint8_t)piece[i]], NONE, i - 1, i + 1};
    for (uint32_t i = 0; i < n; i++) add_pair(i);
    while (!ranks.empty()) { // the lowest rank first, then the leftmost
        const uint32_t rank = ranks[0];
        std::pop_heap(ranks.begin(), ranks.end(), std::greater<>());
        ranks.pop_back();
        places.clear();
        for (uint32_t e = std::exchange(line_of(rank).last, NONE); e != NONE; e = entries[e].before)
            places.push_back(entries[e].place);
        std::reverse(places.begin(), places.end());
        if (!std::is_sorted(places.begin(), places.end())) std::sort(places.begin(), places.end());
        for (size_t k = 0; k < places.size(); k++) {
            const uint32_t i = places[k];
            if (!ranks.empty() && ranks[0] <= rank) { // (in an odd vocabulary)
                wait(rank, i);
                continue;
            }
            if (list[i].rank != rank) continue; // a neighbour was merged meanwhile
            Node &a = list[i], &b = list[a.next];
            a.id = merge[3 * (size_t)rank + 2];
            a.next = b.next;
            b.rank = NONE;
            if (a.next < n) list[a.next].previous = i;
            if (a.previous < n) add_pair(a.previous); // (the first node's is UINT32_MAX)
            add_pair(i);
        }
    }
    for (uint32_t i = 0; i < n; i = list[i].next) out.push_back((int)list[i].id);
}

void Tokenizer::encode_pieces(std::vector<int>& out, std::string_view valid) const {
    struct {
        std::string_view piece;
        uint64_t key;
    } ahead[16]; // their slots are prefetched while earlier pieces are encoded
    for (const char *p = valid.data(), *end = p + valid.size(); p < end;) {
        int n = 0;
        for (; n < 16 && p < end; n++) {
            const char* q = piece_end(p, end);
            std::string_view piece(p, (size_t)(q - p));
            ahead[n] = {piece, key_of(piece)};
            __builtin_prefetch(&token_slots[first_slot(ahead[n].key, piece.size())]);
            p = q;
        }
        for (int i = 0; i < n; i++) encode_piece(out, ahead[i].piece, ahead[i].key);
    }
}

void Tokenizer::encode(std::vector<int>& out, std::string_view input, bool specials) const {
    if (input.size() > INT32_MAX) DIE("a text of %zu bytes is too long for the tokenizer", input.size());
    std::string repaired;
    bool active = false;
    for (size_t i = 0; i < input.size();) {
        int length = utf8_length(input.data() + i, input.size() - i);
        if (length <= 0) { // start again with the output of utf8_repair
            utf8_repair(repaired, input, true);
            input = repaired;
            length = 0;
            i = 0;
            continue;
        }
        const char* p = input.data() + i;
        active |= is_active(utf8_read(p));
        i += (size_t)length;
    }
    // Cuts out added tokens, either those matched after NFC or the others; f gets the text between them.
    auto cut = [&](std::string_view s, uint8_t normalized, auto f) {
        size_t begin = 0, at = 0;
        const bool any = specials || all_flags & ANYWHERE, looks = any && (!normalized || all_flags & NORMALIZED);
        while (looks && at < s.size()) {
            int found = -1;
            if (starts_added[(uint8_t)s[at]])
                for (int i : added)
                    if (found < 0 && (flags[i] & NORMALIZED) == normalized && (specials || flags[i] & ANYWHERE) &&
                        s.compare(at, bytes(i).size(), bytes(i)) == 0)
                        found = i;
            if (found < 0) {
                at++;
                continue;
            }
            f(s.substr(begin, at - begin));
            out.push_back(found);
            begin = at += bytes(found).size();
        }
        f(s.substr(begin));
    };
    cut(input, 0, [&](std::string_view part) {
        const std::string normal = active ? nfc(part) : "";
        cut(active ? normal : part, NORMALIZED, [&](std::string_view plain) { encode_pieces(out, plain); });
    });
}
