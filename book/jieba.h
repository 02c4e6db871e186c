// book/jieba.h: cuts Chinese text into words, exactly as jieba 0.42.1 does.
//
//   Jieba jieba("data/datagen/jieba.bin");
//   std::vector<std::string_view> words;
//   jieba.cut(words, "我们在学习CUDA编程");                       // 我们 在 学习 CUDA 编程
//
// jieba.bin (made by data/datagen/jieba_bin.py from the package's own files; little-endian). A character is stored as
// its label: ASCII as its own code, U+4E00..U+9FD5 as the numbers from 128 on. The dictionary is a trie, stored level
// by level, siblings adjacent and sorted: first the children of the first inner node, then those of the second,
// and so on.
//   char magic[8]            "qwen3jba"
//   u32  version             1
//   u32  N, depth, F, E, D   nodes, letters of the longest word, frequencies, characters, probabilities
//   u64  total               sum of all frequencies
//   f64  start[4]            log probability of the first state; states are B, E, M, S
//   f64  trans[4][4]         ... of the second state after the first
//   f64  probability[D]      log probabilities of a character in a state
//   u32  frequency[F]        frequency[0] is 0
//   u32  node[N]             label | last of its siblings << 15 | index of the frequency << 16 | inner << 31
//   u16  emission[E][5]      label, and for each state the index of the probability; 65535: never
//
// Limits: little-endian machines. A Jieba is immutable: any number of threads may use one.
#pragma once
#include "base/file.h"
#include <array>
#include <string>
#include <string_view>
#include <vector>

struct Jieba {
    enum State { B, E, M, S }; // a character begins, ends or is inside a word, or is one by itself
    static constexpr uint32_t FIRST_HAN = 0x4E00, LAST_HAN = 0x9FD5; // jieba's range of Chinese characters
    static constexpr uint32_t HAN = 128, LABELS = HAN + LAST_HAN - FIRST_HAN + 1;
    static constexpr uint32_t MOST_DEPTH = 64;     // limits the steps per character; jieba's own is 16
    static constexpr double NEVER = -3.14e100;     // jieba's logarithm of 0: finite, but it absorbs any other

    explicit Jieba(const std::string& path); // throws Error

    // Appends the words of a text, from left to right and without a gap: joined they are the text. A byte
    // that is not UTF-8 is a word by itself.
    void cut(std::vector<std::string_view>& out, std::string_view text) const;

    // The label of the first character of s, if it is one of [\u4E00-\u9FD5a-zA-Z0-9+#&._%-]; otherwise 0.
    static uint32_t label(std::string_view s);
    static bool is_digit(uint32_t c) { return c - '0' < 10; }
    static bool is_alphanumeric(uint32_t c) { return is_digit(c) || (c | 32) - 'a' < 26; }

  private:
    struct Header {
        char magic[8];
        uint32_t version, nodes, depth, frequencies, emissions, probabilities;
        uint64_t total;
    };
    struct Cutter;

    MappedFile file;
    const uint32_t* nodes;              // node n is nodes[n - 1]; node 0 is the root
    std::vector<uint32_t> first;        // node n's children are first[n] .. first[n + 1] - 1
    std::vector<uint32_t> root;         // the root's child by label; 0: none
    std::vector<double> log_frequency;  // log(frequency / total) by index; [0]: that of frequency 1
    std::array<double, 4> start;
    std::array<std::array<double, 4>, 4> trans;
    std::vector<std::array<double, 4>> emit; // by label - HAN

    uint32_t frequency(uint32_t n) const { return nodes[n - 1] >> 16 & 0x7FFF; }
    uint32_t child(uint32_t n, uint32_t label) const; // 0: none
};

// data/datagen/jieba.bin beside the program or in the working folder. `else_`: the error's hint for the user.
std::string find_jieba(const char* else_ = "");
