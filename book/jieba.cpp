#include "book/jieba.h"
#include "base/file.h"
#include "model/utf8.h"
#include <cmath>
#include <cstring>
#include <limits>
#include <unistd.h>

uint32_t Jieba::label(std::string_view s) {
    if (s.empty()) return 0;
    const uint8_t c = (uint8_t)s[0];
    if (c < 0x80) return is_alphanumeric(c) || (c && strchr("+#&._%-", c)) ? c : 0u;
    if (c < 0xE4 || c > 0xE9 || utf8_length(s.data(), s.size()) != 3) return 0;
    const char* p = s.data();
    const uint32_t code = utf8_read(p);
    return code >= FIRST_HAN && code <= LAST_HAN ? code - FIRST_HAN + HAN : 0;
}

uint32_t Jieba::child(uint32_t n, uint32_t label) const {
    if (n == 0) return root[label];
    uint32_t low = first[n], high = first[n + 1];
    while (low < high) {
        const uint32_t middle = (low + high) / 2, l = nodes[middle - 1] & 0x7FFF;
        if (l == label) return middle;
        if (l < label) low = middle + 1;
        else high = middle;
    }
    return 0;
}

Jieba::Jieba(const std::string& path) : file(path), first(), root(LABELS) {
    auto need = [&](bool good, const char* fault) { if (!good) DIE("%s: %s", path.c_str(), fault); };
    Header h;
    need(file.size >= sizeof h && memcmp(file.data, "qwen3jba", 8) == 0, "not a jieba.bin");
    memcpy(&h, file.data, sizeof h);
    need(h.version == 1, "a jieba.bin of another version");
    const uint64_t size = sizeof h + 8 * (20 + (uint64_t)h.probabilities) +
                          4 * ((uint64_t)h.frequencies + h.nodes) + 10 * (uint64_t)h.emissions;
    need(file.size == size, "its size is not what its header says");
    need(h.nodes < 1u << 31 && h.frequencies <= 1 << 15, "it has more nodes or frequencies than can be numbered");
    const double* reals = (const double*)(file.data + sizeof h); // the header has 40 bytes: everything is aligned
    const double* probability = reals + 20;
    const uint32_t* frequencies = (const uint32_t*)(probability + h.probabilities);
    nodes = frequencies + h.frequencies;
    const uint16_t* emission = (const uint16_t*)(nodes + h.nodes);

    need(h.total > 0 && h.frequencies > 0 && frequencies[0] == 0, "it has no frequencies");
    log_frequency.push_back(0 - std::log((double)h.total));
    for (uint32_t i = 1; i < h.frequencies; i++) {
        need(frequencies[i] > 0 && frequencies[i] <= h.total, "a frequency is out of range");
        log_frequency.push_back(std::log((double)frequencies[i]) - std::log((double)h.total));
    }

    // Every node must be the child of one earlier node: so it is one trie, whose depth is the stored one.
    first.reserve((size_t)h.nodes + 2);
    uint32_t next = 1, level_end = 1, depth = 0; // the next node without a parent; where n's level ends
    for (uint32_t n = 0; n <= h.nodes; n++) {
        need(n == 0 || n < next, "a node of its trie has no parent");
        if (n == level_end) level_end = next, depth++;
        first.push_back(next);
        if (n && !(nodes[n - 1] >> 31)) continue;
        for (uint32_t previous = 0, last = 0; !last; next++) {
            need(next <= h.nodes, "its trie ends too early");
            const uint32_t node = nodes[next - 1], label = node & 0x7FFF;
            need(label > previous && label < LABELS, "a label of its trie is out of order");
            need(frequency(next) < h.frequencies, "a frequency is out of range");
            if (n == 0) root[label] = next;
            previous = label, last = node >> 15 & 1;
        }
    }
    first.push_back(next);
    need(depth == h.depth && depth <= MOST_DEPTH, "its trie is deeper than it may be");

    for (const double* p = reals; p < (const double*)frequencies; p++)
        need(std::isfinite(*p), "a probability is no number");
    memcpy(&start, reals, sizeof start);
    memcpy(&trans, reals + 4, sizeof trans);
    emit.assign(LABELS - HAN, {NEVER, NEVER, NEVER, NEVER});
    for (uint32_t i = 0, previous = HAN - 1; i < h.emissions; i++, emission += 5) {
        need(emission[0] > previous && emission[0] < LABELS, "a character is out of order");
        previous = emission[0];
        for (int state = 0; state < 4; state++) {
            const uint16_t index = emission[1 + state];
            need(index < h.probabilities || index == 0xFFFF, "a probability is out of range");
            if (index != 0xFFFF) emit[previous - HAN][(size_t)state] = probability[index];
        }
    }
}

// Cuts one block, a run of characters that have labels, and keeps its memory for the next one.
struct Jieba::Cutter {
    const Jieba& jieba;
    std::vector<std::string_view>& out;
    const char* at = nullptr;       // the text not cut yet
    std::vector<uint16_t> block;    // labels
    size_t done = 0;                // ... those already cut
    std::vector<double> best;       // log probability of the likeliest path from here to the end
    std::vector<uint8_t> length;    // characters of the first word on that path
    std::vector<uint8_t> states;

    // Appends the next n characters as a word.
    void word(size_t n) {
        size_t bytes = 0;
        for (const size_t end = done + n; done < end; done++) bytes += block[done] < HAN ? 1 : 3;
        out.emplace_back(at, bytes);
        at += bytes;
    }

    // The likeliest sequence of words, computed from the end: a word's probability is its share of all text; a
    // character where no word begins has 1 / total. On ties the longer first word is taken. Adjacent words of one
    // character may form a word that the dictionary lacks: the HMM decides.
    void cut() {
        const size_t n = block.size();
        best.assign(n + 1, 0);
        length.assign(n, 0);
        for (size_t i = n; i-- > 0;) {
            double most = -std::numeric_limits<double>::infinity();
            uint32_t node = 0;
            for (size_t end = i; end < n && (node = jieba.child(node, block[end])); end++) {
                if (!jieba.frequency(node)) continue;
                const double p = jieba.log_frequency[jieba.frequency(node)] + best[end + 1];
                if (p >= most) most = p, length[i] = (uint8_t)(end + 1 - i);
            }
            if (!length[i]) most = jieba.log_frequency[0] + best[i + 1], length[i] = 1;
            best[i] = most;
        }
        done = 0;
        while (done < n) {
            size_t singles = 0;
            while (done + singles < n && length[done + singles] == 1) singles++;
            if (singles) cut_singles(singles);
            else word(length[done]);
        }
    }

    void cut_singles(size_t n) {
        const size_t end = done + n;
        uint32_t node = 0;
        for (size_t i = done; i < end && (i == done || node); i++) node = jieba.child(node, block[i]);
        if (n == 1 || (node && jieba.frequency(node))) { // a word that the likeliest path did not take
            while (done < end) word(1);
            return;
        }
        auto run = [&](size_t i, auto is) {
            while (i < end && is(block[i])) i++;
            return i;
        };
        while (done < end) {
            size_t i = done;
            if (block[i] >= HAN) {
                cut_han(run(i, [](uint32_t c) { return c >= HAN; }) - done);
            } else if (is_alphanumeric(block[i])) { // [a-zA-Z0-9]+(\.[0-9]+)?%?
                i = run(i, is_alphanumeric);
                if (i + 1 < end && block[i] == '.' && is_digit(block[i + 1])) i = run(i + 1, is_digit);
                if (i < end && block[i] == '%') i++;
                word(i - done);
            } else {
                word(run(i, [](uint32_t c) { return c < HAN && !is_alphanumeric(c); }) - done);
            }
        }
    }

    // Viterbi: the likeliest states of n Chinese characters. Each state has only two predecessors. On ties the later
    // letter is taken, as everywhere. (That matters: NEVER plus anything is NEVER.)
    void cut_han(size_t n) {
        static constexpr State before[4][2] = {{E, S}, {B, M}, {B, M}, {E, S}};
        auto emit = [&](size_t t) { return jieba.emit[block[done + t] - HAN]; };
        states.assign(n, 0); // first: bit s says that before[s][1] comes before state s
        std::array<double, 4> v, e = emit(0);
        for (size_t s = 0; s < 4; s++) v[s] = jieba.start[s] + e[s];
        for (size_t t = 1; t < n; t++) {
            const std::array<double, 4> old = v;
            e = emit(t);
            for (size_t s = 0; s < 4; s++) {
                const double p0 = old[before[s][0]] + jieba.trans[before[s][0]][s] + e[s];
                const double p1 = old[before[s][1]] + jieba.trans[before[s][1]][s] + e[s];
                v[s] = p1 >= p0 ? p1 : p0;
                states[t] |= (uint8_t)((p1 >= p0) << s);
            }
        }
        State state = v[S] >= v[E] ? S : E;
        for (size_t t = n; t-- > 0;) { // now backwards: the state
            const State previous = before[state][states[t] >> state & 1];
            states[t] = state;
            state = previous;
        }
        for (size_t t = 0, begin = 0; t < n; t++)
            if (states[t] == E || states[t] == S) word(t + 1 - begin), begin = t + 1;
    }
};

void Jieba::cut(std::vector<std::string_view>& out, std::string_view text) const {
    Cutter cutter{*this, out, nullptr, {}, 0, {}, {}, {}};
    while (!text.empty()) {
        cutter.at = text.data();
        cutter.block.clear();
        while (const uint32_t l = label(text)) {
            cutter.block.push_back((uint16_t)l);
            text.remove_prefix(l < HAN ? 1 : 3);
        }
        if (!cutter.block.empty()) {
            cutter.cut();
        } else { // characters that no word can contain are separate words, except \r\n
            const int length = utf8_length(text.data(), text.size());
            const size_t n = text.substr(0, 2) == "\r\n" ? 2 : length > 0 ? (size_t)length : 1;
            out.push_back(text.substr(0, n));
            text.remove_prefix(n);
        }
    }
}

std::string find_jieba(const char* else_) {
    const std::string name = "data/datagen/jieba.bin";
    for (const std::string& path : {program_folder() + "/" + name, name})
        if (access(path.c_str(), F_OK) == 0) return path;
    DIE("no data/datagen/jieba.bin beside the program or in this folder%s", else_);
}
