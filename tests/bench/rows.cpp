// A dataset of rows of 513 (or TOKENS) random tokens, all trained but the first, for speeds of training:
//     make NVCC=none build/g++/bench/rows && build/g++/bench/rows tokenizer.bin full.bin 2048
#include "base/error.h"
#include "model/chat_template.h"
#include "model/dataset.h"
#include "model/tokenizer.h"
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

int main(int argc, char** argv) {
    if (argc != 4 && argc != 5) return fprintf(stderr, "usage: rows TOKENIZER.bin OUT.bin ROWS [TOKENS]\n"), 1;
    try {
        const Tokenizer tokenizer(argv[1]);
        DatasetWriter out(argv[2], tokenizer.hash(), template_hash());
        uint32_t state = 1;
        for (int row = 0; row < atoi(argv[3]); row++) {
            std::vector<uint32_t> words(argc == 5 ? (size_t)std::max(2, atoi(argv[4])) : 513);
            for (uint32_t& word : words) state = state * 1664525 + 1013904223, word = (state >> 8) % 150000 | TRAIN;
            words[0] &= ~TRAIN;
            out.add(words);
        }
        out.commit();
    } catch (const Error& e) {
        return fprintf(stderr, "rows: %s\n", e.what()), 1;
    }
}
