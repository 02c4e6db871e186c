// train/buckets.h: rows and gradients, divided among ranks.
#pragma once
#include <algorithm>
#include <cstddef>
#include <vector>

// Distributes the rows of a step. tokens: the number of trained tokens of each row. A list of places in the step for
// each rank, in order; all lists have minimal length. The row with the most tokens goes first, each to the rank with
// the fewest so far.
std::vector<std::vector<size_t>> deal(const std::vector<size_t>& tokens, int ranks);

// An array of `count` gradients is summed in buckets, each as soon as its numbers are complete. If the optimizer's
// state is divided, rank r owns the r-th piece of each bucket, and keeps its pieces one after another.
struct Buckets {
    static constexpr size_t MOST = 16, UNIT = 256; // UNIT numbers of a piece: aligned whatever their type, and a block
                                                   // of 8-bit moments
    size_t count = 0, bucket = 0, n = 0, piece = 0;

    Buckets() = default;
    Buckets(size_t numbers, int ranks);
    size_t padded() const { return n * bucket; } // the last one including its padding
    // Calls f(first, at, numbers) for each piece of a rank: its place in the whole array, and within its owner's
    // pieces.
    template <class F> void each_piece(int rank, F f) const {
        for (size_t b = 0; b < n; b++) {
            const size_t first = b * bucket + (size_t)rank * piece;
            if (first < count) f(first, b * piece, std::min(piece, count - first));
        }
    }
};
