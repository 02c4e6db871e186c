// cpu/amx.cpp: the inner loops of products for AMX.
#include "cpu/instruction_set.h"
#if defined(HAVE_SIMD) && !defined(QWEN3_DOUBLE)
#if !(defined(__AMX_BF16__) || defined(__AMXBF16__)) || !defined(__AVX512BF16__) // (clang 14: the second)
#error "compiled with avx512_bf16.cpp's flags, -mamx-tile and -mamx-bf16: see the Makefile"
#endif
#include "cpu/amx.h"
#include "cpu/amx_rows.h"
#include "cpu/avx512_vectors.h"
#include "cpu/ceilings.h"
#include "cpu/loops.h"
#include <immintrin.h>

namespace {
struct alignas(64) AmxConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    AmxConfig& tiles(int first, int last, int count, int bytes) {
        for (int t = first; t <= last; t++) rows[t] = (uint8_t)count, row_bytes[t] = (uint16_t)bytes;
        return *this;
    }
    void load() const {
        asm volatile("" ::"r"(this) : "memory"); // g++ 12 does not see that the next line reads all of it
        _tile_loadconfig(this);
    }
};
} // namespace

// Tiles 0-3: sums, 4 and 5: rows of W, 6 and 7: tokens. `width`: bytes of a row of tokens or sums.
static void amx_configure(int width) {
    AmxConfig().tiles(0, 7, 16, width).tiles(4, 5, 16, 64).load();
}

// 32 rows of W as tiles of 16 rows and 32 columns. CHUNK columns of all packed rows are widened, then their tiles are
// multiplied: a few rows and a tile in turns were slower (docs/notes/cpu.md).
template <Format F> struct AmxRows {
    static constexpr bool IN_PLACE = F == Format::PLAIN;
    const WeightRows<bf16>& w;
    const AmxWide wide;
    const size_t half = IN_PLACE ? (size_t)16 * w.in : 512;       // from a tile to that of the other 16 rows
    const size_t row_bytes = IN_PLACE ? (size_t)w.in * 2 : 64;
    const size_t apart = IN_PLACE ? 32 : (size_t)TILE_ROWS * 32;  // from a tile to that of the next columns

    // step(first 16 rows, other 16, k) for each 32 columns
    template <class Step> INLINE void each(Step step) const {
        [[maybe_unused]] ChunkRows<F> rows;
        for (int k = 0; k < w.in; k += CHUNK) {
            const int columns = smaller(CHUNK, w.in - k);
            const bf16* tile = IN_PLACE ? w.w + k : wide.tiles + (wide.ring ? 0 : (size_t)k * TILE_ROWS);
            const size_t ahead = TILE_ROWS * w.row_bytes;
            if (!IN_PLACE && !wide.ready && !(columns == CHUNK && rows.widen((bf16*)tile, w, k, ahead)))
                widen_rows<Bf16Dot, F>((bf16*)tile, 32, apart, w, TILE_ROWS, k, columns, ahead);
            for (int i = 0; i < columns; i += 32, tile += apart) step(tile, tile + half, k + i);
        }
    }
};

// One token: two columns of sums.
template <Format F> static void amx_column(float* y, const AmxRows<F>& rows, const bf16* x) {
    _tile_zero(0);
    _tile_zero(1);
    rows.each([&](const bf16* w, const bf16* w2, int k) {
        _tile_loadd(4, w, rows.row_bytes);
        _tile_loadd(6, x + k, 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, w2, rows.row_bytes);
        _tile_dpbf16ps(1, 5, 6);
    });
    _tile_stored(0, y, 4);
    _tile_stored(1, y + 16, 4);
}

// 32 rows by 32 tokens, or by 16 (then `two` is false).
template <Format F>
static void amx_square(float* sums, const AmxRows<F>& rows, const bf16* x, bool two) { // sums (rows, tokens)
    const bf16* x2 = two ? x + (size_t)16 * rows.w.in : x;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    rows.each([&](const bf16* w, const bf16* w2, int k) {
        _tile_loadd(4, w, rows.row_bytes);
        _tile_loadd(6, x + (size_t)k * 16, 64);
        _tile_loadd(5, w2, rows.row_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
        if (two) {
            _tile_loadd(7, x2 + (size_t)k * 16, 64);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    });
    _tile_stored(0, sums, 128);
    _tile_stored(1, sums + 16 * 32, 128);
    _tile_stored(2, sums + 16, 128);
    _tile_stored(3, sums + 16 * 32 + 16, 128);
}

template <Format F>
static void amx_product(float* y, const WeightRows<bf16>& w, AmxWide wide, const bf16* x, bool one, int N) {
    amx_configure(one ? 4 : 64);
    if (one) amx_column(y, AmxRows<F>{w, wide}, x);
    for (int n = 0; n < N && !one; n += 32, wide.ready = !wide.ring) {
        float sums[TILE_ROWS * 32];
        amx_square(sums, AmxRows<F>{w, wide}, x + (size_t)n * w.in, N - n > 16);
        for (int m = 0; m < smaller(32, N - n); m++)
            for (int r = 0; r < TILE_ROWS; r++) y[(n + m) * TILE_ROWS + r] = sums[r * 32 + m];
    }
    _tile_release();
}
const AmxTile amx_tile[5] = {amx_product<Format::PLAIN>, amx_product<Format::INT8>, amx_product<Format::INT4>,
                             amx_product<Format::FP8>, amx_product<Format::BLOCKS>};

double amx_multiply(MultiplyBlock* memory) {
    amx_configure(64);
    _tile_loadd(4, memory, 64);
    _tile_loadd(5, memory, 64);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int k = 0; k < 500; k++) {
        _tile_dpbf16ps(0, 4, 5);
        _tile_dpbf16ps(1, 4, 5);
        _tile_dpbf16ps(2, 4, 5);
        _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, memory, 64);
    _tile_release();
    return 2. * 16 * 16 * 32 * 4 * 500;
}
#endif
