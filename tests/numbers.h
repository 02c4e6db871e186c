// The loops over numbers that most suites share, in an object of their own: suites are compiled without optimising.
#pragma once
#include "qwen3.cu"
#include <cstdint>
#include <vector>

// The counter's number of a stream that only tests use.
uint32_t random_word(uint64_t seed, uint64_t counter);

// Numbers in double, or their magnitudes; a Linear's (out, in), whatever it stores.
template <class T> std::vector<double> as_double(const std::vector<T>& v);
template <class T> std::vector<double> magnitudes(const std::vector<T>& v);
template <class T> std::vector<double> wide_numbers(const Linear<T>& W, bool magnitudes);
