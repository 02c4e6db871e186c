#include "tests/numbers.h"
#include "model/random.h"
#include <cmath>

uint32_t random_word(uint64_t seed, uint64_t counter) { return philox(seed, counter, 99).v[0]; }

template <class T> std::vector<double> as_double(const std::vector<T>& v) {
    std::vector<double> d(v.size());
    for (size_t i = 0; i < d.size(); i++) d[i] = to_acc(v[i]);
    return d;
}
template <class T> std::vector<double> magnitudes(const std::vector<T>& v) {
    std::vector<double> d = as_double(v);
    for (double& x : d) x = std::fabs(x);
    return d;
}
template <class T> std::vector<double> wide_numbers(const Linear<T>& W, bool magnitudes) {
    std::vector<double> d;
    d.reserve((size_t)W.out() * W.in);
    for (int r = 0; r < W.out(); r++)
        for (int i = 0; i < W.in; i++) d.push_back(magnitudes ? std::fabs((double)W.at(r, i)) : (double)W.at(r, i));
    return d;
}

#define INSTANTIATE(T)                                              \
    template std::vector<double> as_double(const std::vector<T>&);  \
    template std::vector<double> magnitudes(const std::vector<T>&); \
    template std::vector<double> wide_numbers(const Linear<T>&, bool);
INSTANTIATE(bf16)
INSTANTIATE(float)
INSTANTIATE(double)
