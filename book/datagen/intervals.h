// book/datagen/intervals.h: 95% intervals of a mean and of a proportion.
#pragma once
#include <cstdint>
#include <vector>

namespace book {

struct Interval {
    double mean, low, high;
};

// A mean with its 95% bootstrap interval (B. Efron, 1979; the percentile method): a thousand resamples of the same
// size, drawn with replacement; the interval excludes the 25 lowest and highest means. The same seed and number of
// values select the same rows.
constexpr int RESAMPLES = 1000;
Interval bootstrap(const std::vector<double>& values, uint64_t seed);

// A proportion of n, in percent, with its 95% interval (E. B. Wilson, 1927). Its width is not zero if all or none are
// right, unlike the bootstrap's.
Interval wilson(double right, double n);

} // namespace book
