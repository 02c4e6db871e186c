// cpu/amx.cpp: the inner loops of products for AMX.
#include "cpu/instruction_set.h"
#if defined(HAVE_SIMD) && !defined(QWEN3_DOUBLE)
#if !(defined(__AMX_BF16__) || defined(__AMXBF16__)) || !defined(__AVX512BF16__) // (clang 14: the second)
#error "compiled with avx512_bf16.cpp's flags, -mamx-tile and -mamx-bf16: see the Makefile"
#endif
#include "cpu/amx.h"
#include "cpu/amx_rows.h"
#include "cpu/avx512_vectors.h"
#include "cpu/byte_loops.h"
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

namespace {
// 16 tokens by two tiles of 16 rows, a group's columns deep; all bytes are signed. Sums go through memory to be scaled,
// those of BATCH groups at once, while the tiles of the next ones are multiplied.
struct AmxBytes : Vnni {
    static constexpr int SQUARE = 16, BATCH = 2;
    using Sums = Int[BATCH][STACK][SQUARE];

    template <class Kind>
    static INLINE int multiply_squares(float* y, ByteChunk<AmxBytes>& w, const int8_t* x, const RoundedGroup* group,
                                       size_t in, int N, NextLine next, int lines) {
        constexpr int ALL = BYTE_CHUNK / Kind::SIZE;
        alignas(64) Sums sums[2];
        int n = 0;
        if (N >= SQUARE && Kind::MOST != 255) move_codes<Kind>(w, -1); // (bytes are signed already)
        for (; n + SQUARE <= N; n += SQUARE, y += SQUARE * TILE_ROWS, x += SQUARE * in, group += SQUARE * in / GROUP) {
            multiply_groups<Kind>(sums[0], w, x, in, 0);
            for (int first = 0; first < ALL; first += BATCH) {
                const Sums& now = sums[first / BATCH % 2];
                if (first + BATCH < ALL) multiply_groups<Kind>(sums[(first / BATCH + 1) % 2], w, x, in, first + BATCH);
                asm volatile("" : "+m"(sums));
                for (int m = 0; m < SQUARE; m++, lines -= BATCH) {
                    if (lines > 0) next.fetch(BATCH);
                    add_groups<Kind>(y + m * TILE_ROWS, w, now, m, group + m * in / GROUP, first);
                }
            }
        }
        if (n > 0 && n < N) move_codes<Kind>(w, 1);
        return n;
    }
    template <class Kind> static INLINE void move_codes(ByteChunk<AmxBytes>& w, int sign) { // to signed, or back
        if constexpr (Kind::SHIFT >= 0)
            for (auto& of : w.code)
                UNROLL for (Int& code : of) {
                    const __m512i by = _mm512_set1_epi8((char)(sign * (1 << Kind::SHIFT)));
                    code = (Int)_mm512_add_epi8((__m512i)code, by);
                }
    }
    template <class Kind>
    static INLINE void multiply_groups(Sums& sums, const ByteChunk<AmxBytes>& w, const int8_t* x, size_t in,
                                       int first) {
        constexpr int SIZE = Kind::SIZE, QUADS = SIZE / 4;
        for (int g = 0; g < BATCH; g++) {
            const auto* code = w.code + (first + g) * QUADS;
            _tile_zero(0);
            _tile_zero(1);
            _tile_loadd(6, x + (first + g) * SIZE, in);
            _tile_loadd(4, &code[0][0], sizeof code[0]);
            _tile_loadd(5, &code[0][1], sizeof code[0]);
            _tile_dpbssd(0, 6, 4);
            _tile_dpbssd(1, 6, 5);
            _tile_stored(0, sums[g][0], 64);
            _tile_stored(1, sums[g][1], 64);
        }
    }
    template <class Kind>
    static INLINE void add_groups(float* y, const ByteChunk<AmxBytes>& w, const Sums& sums, int m,
                                  const RoundedGroup* group, int first) {
        Float sum[STACK];
        UNROLL for (int s = 0; s < STACK; s++) memcpy(&sum[s], y + s * ROWS, sizeof(Float));
        UNROLL for (int g = 0; g < BATCH; g++)
            UNROLL for (int s = 0; s < STACK; s++)
                add_group<Kind>(sum[s], sums[g][s][m], w, first + g, s, group[(first + g) * Kind::SIZE / GROUP]);
        UNROLL for (int s = 0; s < STACK; s++) memcpy(y + s * ROWS, &sum[s], sizeof(Float));
    }
};
} // namespace
static int amx_byte_tile(float* y, const StoredRows& W, int b, size_t row_bytes, size_t row, int rows, const int8_t* x,
                         const RoundedGroup* group, int N) {
    const int size = byte_group(W, b);
    if (N >= AmxBytes::SQUARE) AmxConfig().tiles(0, 1, 16, 64).tiles(4, 5, size / 4, 64).tiles(6, 6, 16, size).load();
    const int done = byte_tile<AmxBytes>(y, W, b, row_bytes, row, rows, x, group, N);
    if (N >= AmxBytes::SQUARE) _tile_release();
    return done;
}
const ByteTile amx_bytes = amx_byte_tile;

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
