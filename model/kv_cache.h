// model/kv_cache.h: one layer's keys or values in pages of 16 tokens, in bf16 or FP8.
#pragma once
#include "model/bf16.h"
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

constexpr int PAGE = 16;              // tokens
inline constexpr int SPLIT = 8 * PAGE; // keys of a block in the GPU's attention of single tokens

// One layer's keys or values: (pages, K, 16, D).
BOTH inline size_t kv_offset(int page, int head, int within, int K, int D) {
    return (((size_t)page * K + head) * PAGE + within) * D;
}

// Bytes of an FP8 cache before the rows of a page and head, and from there to their exponents.
BOTH inline size_t fp8_rows(int page, int head, int K, int D) {
    return ((size_t)page * K * (D + 1) + (size_t)head * D) * PAGE;
}
BOTH inline int fp8_exponents(int head, int K, int D) { return (K * D - head * (D - 1)) * PAGE; }

// The key or value of a token and head in one layer's cache.
// FP8: a page is (K, 16, D) e4m3, then (K, 16) bytes e: a number is q 2^(e - 128). (Rows lie in whole lines of a GPU's
// cache where K is a multiple of 8.) The e of a row is the smallest for which all its numbers are at most 448; e = 0
// marks a row with a non-finite number: all of it reads as NaN. Each number is a bf16 and a row depends on no other
// row, so attention has the bits of attention over a bf16 cache of these numbers.
template <class T> struct KVRow {
    const T* plain;
    const uint8_t* q;
    acc<T> factor;
    KVRow(const T* cache, bool fp8, int page, int head, int within, int K, int D)
        : plain(cache + kv_offset(page, head, within, K, D)), q(nullptr), factor(1) {
        if (!fp8) return;
        const uint8_t* rows = (const uint8_t*)cache + fp8_rows(page, head, K, D);
        q = rows + (size_t)within * D, factor = scale(rows[fp8_exponents(head, K, D) + within]);
    }
    acc<T> operator[](int i) const { return q ? (acc<T>)e4m3_to_float(q[i]) * factor : to_acc(plain[i]); }
    static acc<T> scale(uint8_t e) {
        return e ? (acc<T>)std::ldexp(1.f, e - 128) : std::numeric_limits<acc<T>>::quiet_NaN();
    }
};
// Stores row (D), the key or value of a token and head.
template <class T> void store_kv(T* cache, bool fp8, int slot, int head, const T* row, int K, int D) {
    const int page = slot / PAGE, within = slot % PAGE;
    if (!fp8) return (void)std::copy_n(row, D, cache + kv_offset(page, head, within, K, D));
    uint8_t* rows = (uint8_t*)cache + fp8_rows(page, head, K, D);
    bool finite = true;
    float largest = 0;
    for (int i = 0; i < D; i++) {
        const float size = std::fabs((float)to_acc(row[i]));
        finite &= size <= std::numeric_limits<float>::max(), largest = std::max(largest, size);
    }
    const int e = kv_exponent(finite ? largest : 0);
    rows[fp8_exponents(head, K, D) + within] = finite ? (uint8_t)(e + 128) : (uint8_t)0;
    for (int i = 0; i < D; i++)
        rows[(size_t)within * D + i] = float_to_e4m3((float)std::ldexp((float)to_acc(row[i]), -e));
}
