// cpu/adapter_rows.h: an adapter's part of a few rows of a product.
#pragma once
#include "cpu/lanes.h"

// y[i] += B[row + i] . h, i < rows: an adapter's part of some rows of one block and a token. Each sum is that of `dot`,
// but those of 16 rows are made at once.
template <class T>
INLINE void add_adapter(acc<T>* y, const Adapter<T>& a, int block, int row, int rows, const T* h) { // h: (m * rank)
    const size_t ld = a.width();
    for (int j = 0; j < a.modules; j++) {
        if (a.block[j] != block) continue;
        const T *x = h + j * a.rank, *B = a.B + row * ld + j * a.rank;
        for (int r = 0; r < rows; r += LANES) { // (past the end it is the last row again)
            const int some = std::min(LANES, rows - r);
            lanes<T> sum[LANES] = {}, u, v;
            int i = 0;
            for (; i + LANES <= a.rank; i += LANES) {
                load_lanes(u, x + i);
                UNROLL for (int k = 0; k < LANES; k++)
                    load_lanes(v, B + (r + std::min(k, some - 1)) * ld + i), sum[k] += u * v;
            }
            if (i < a.rank) {
                load_some(u, x + i, a.rank - i);
                UNROLL for (int k = 0; k < LANES; k++)
                    load_some(v, B + (r + std::min(k, some - 1)) * ld + i, a.rank - i), sum[k] += u * v;
            }
            sum_lanes_of_each(sum);
            for (int k = 0; k < some; k++) y[r + k] += sum[0][k];
        }
    }
}
