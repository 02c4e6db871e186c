// book/intervals.h: 95% intervals of a mean and of a share.
#pragma once
#include <cstdint>
#include <vector>

namespace book {

struct Interval {
    double mean, low, high;
};

// A mean with its 95% bootstrap interval (B. Efron, 1979; the percentile method): as many values as there are are
// drawn with replacement, a thousand times; the interval leaves out the 25 lowest and highest means. The same seed and
// number of values draw the same rows.
constexpr int RESAMPLES = 1000;
Interval bootstrap(const std::vector<double>& values, uint64_t seed);

// A share of n, in percent, with its 95% interval (E. B. Wilson, 1927). It has a width where all or none are right,
// which a bootstrap has not.
Interval wilson(double right, double n);

} // namespace book
