#include "book/datagen/intervals.h"
#include <algorithm>
#include <cmath>
#include <cstddef>

namespace book {

Interval bootstrap(const std::vector<double>& values, uint64_t seed) {
    const size_t n = values.size();
    auto random = [&] { // splitmix64; the high half of a product is a number below n
        uint64_t z = seed += 0x9E3779B97F4A7C15;
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
        z = (z ^ z >> 27) * 0x94D049BB133111EB;
        return (size_t)((unsigned __int128)(z ^ z >> 31) * n >> 64);
    };
    double sum = 0;
    for (double x : values) sum += x;
    std::vector<double> means(RESAMPLES);
    for (double& mean : means) {
        mean = 0;
        for (size_t i = 0; i < n; i++) mean += values[random()];
        mean /= (double)n;
    }
    std::sort(means.begin(), means.end());
    return {sum / (double)n, means[RESAMPLES / 40], means[RESAMPLES - 1 - RESAMPLES / 40]};
}

Interval wilson(double right, double n) {
    const double z = 1.959963984540054, p = right / n, of = 1 + z * z / n;
    const double middle = (p + z * z / (2 * n)) / of;
    const double half = z / of * std::sqrt(p * (1 - p) / n + z * z / (4 * n * n));
    return {100 * p, std::max(100 * (middle - half), 0.0), std::min(100 * (middle + half), 100.0)};
}

} // namespace book
