// cpu/byte_loops.h: byte_products (model/int8_activations.h) for vector instructions: a lane is a row of W.
// (Rules for sources of instruction sets: cpu/loops.h.)
#pragma once
#include "cpu/byte_rows.h"
#include "cpu/lanes.h"

// A struct `Set`:
//     Int, Float    vectors of ROWS numbers of 32 bits
//     NARROW        products of unsigned bytes are added in 16 bits
//     panel         lane r of v[i] is word i of the 16 bytes at p + r * apart
//     gather        lane r is the word at p + r * apart
//     half          a finite half in a lane's lower 16 bits
//     fill          the word at p in all lanes
//     multiply_add  sum += the products of four unsigned bytes of each lane and four signed ones. NARROW: neighbours
//                   add up in 16 bits; `widen` adds these up in 32
//     SIGNED        it has multiply_add_signed: of signed bytes, in 32 bits
//     fma           sum += a * b, rounded once
//     SQUARE        tokens that multiply_squares multiplies at once (0: none); it returns the number of those it did
//     SUMS          it has int8_sums: sum[r][g] of `columns` columns of `rows` rows, which are read in memory order
namespace {
constexpr int STACK = 2; // vectors of rows of a chunk

// BYTE_CHUNK columns of STACK * ROWS rows. Bytes are unsigned: those of signed formats less 8, 32 or 128 (SIGNED: those
// of 128 are signed).
template <class Set> struct ByteChunk {
    typename Set::Int code[BYTE_CHUNK / 4][STACK]; // of four columns
    typename Set::Float d[BYTE_CHUNK / 16][STACK], m[BYTE_CHUNK / 32][STACK];
};

// The lines to prefetch: the next rows, in memory order. Panels prefetch as many as they read; with squares of tokens
// the first square prefetches those of a chunk, since it takes longer.
struct NextLine {
    const char* at;
    INLINE void fetch(int lines) {
        for (int i = 0; i < lines; i++, at += 64) __builtin_prefetch(at, 0, 2);
    }
};

template <class Set> struct ByteReader {
    using Int = typename Set::Int;
    using Float = typename Set::Float;
    ByteChunk<Set>& to;
    int s; // of STACK
    size_t apart;
    NextLine next;
    bool squares; // of tokens, for which signed bytes stay so

    INLINE void panel(Int (&v)[4], const uint8_t* p) {
        if (!squares) next.fetch(Set::ROWS / 4);
        Set::panel(v, p, apart);
    }
    static INLINE void floats(Float& v, const Int& u) { v = __builtin_convertvector(u, Float); }
    static INLINE void halves(Float (&v)[8], const Int (&u)[4]) {
        UNROLL for (int i = 0; i < 4; i++) Set::half(v[2 * i], u[i]), Set::half(v[2 * i + 1], u[i] >> 16);
    }
    // 32 bytes of two groups each, the first one's in the lower halves.
    INLINE void pairs(const uint8_t* p, const Int (&fifth)[8], bool has_fifth) {
        for (int g = 0; g < 8; g += 2, p += 32)
            UNROLL for (int half = 0; half < 2; half++) {
                Int v[4];
                panel(v, p + 16 * half);
                UNROLL for (int i = 0; i < 4; i++) {
                    Int low = v[i] & 0x0f0f0f0f, high = v[i] >> 4 & 0x0f0f0f0f;
                    if (has_fifth) {
                        low |= (fifth[4 * half + i] >> g & 0x01010101) << 4;
                        high |= (fifth[4 * half + i] >> (g + 1) & 0x01010101) << 4;
                    }
                    to.code[8 * g + 4 * half + i][s] = low, to.code[8 * g + 8 + 4 * half + i][s] = high;
                }
            }
    }
    INLINE void signed_bytes(const uint8_t* p, int columns, int quad) {
        for (int k = 0; k < columns; k += 16) {
            Int v[4];
            panel(v, p + k);
            UNROLL for (int i = 0; i < 4; i++)
                to.code[quad + k / 4 + i][s] = Set::SIGNED || squares ? v[i] : v[i] ^ (int)0x80808080;
        }
    }
    INLINE void int8(const uint8_t* p, const uint8_t* scale, size_t groups) {
        Float d[8];
        signed_bytes(p, BYTE_CHUNK, 0);
        int8_scales(d, scale, groups);
        UNROLL for (int i = 0; i < 8; i++) to.d[i][s] = d[i];
    }
    static INLINE void int8_scales(Float (&d)[8], const uint8_t* scale, size_t groups) {
        Int v[4];
        Set::panel(v, scale, 2 * groups);
        UNROLL for (int i = 0; i < 4; i++)
            d[2 * i] = (Float)(v[i] << 16), d[2 * i + 1] = (Float)(v[i] & (int)0xffff0000);
    }
    INLINE void int4(const uint8_t* p, const uint8_t* scale, const uint8_t* zero, size_t groups, int group) {
        Int v[4];
        Float d[8];
        pairs(p, {}, false);
        Set::panel(v, scale, 2 * groups); // (past the last row there is memory)
        halves(d, v);
        for (int g = 0; g < 8; g++) {
            const int at = g * GROUP / group;
            to.d[g][s] = d[at];
            if (!zero) continue;
            Set::gather(v[0], zero + at / 4 * 4, groups);
            floats(to.m[g][s], v[0] >> at % 4 * 8 & 255);
            to.m[g][s] *= -d[at];
        }
    }
    // d and m of eight groups: see ScalesOfSix.
    INLINE void scales_of_six(const uint8_t* p) {
        Int v[4];
        Float d, m, by;
        panel(v, p);
        Set::half(d, v[0]), Set::half(m, v[0] >> 16), m = -m;
        UNROLL for (int g = 0; g < 4; g++) {
            floats(by, v[1] >> 8 * g & 63), to.d[g][s] = by * d;
            floats(by, v[2] >> 8 * g & 63), to.m[g][s] = by * m;
            floats(by, (v[3] >> 8 * g & 15) | (v[1] >> (8 * g + 6) & 3) << 4), to.d[4 + g][s] = by * d;
            floats(by, (v[3] >> (8 * g + 4) & 15) | (v[2] >> (8 * g + 6) & 3) << 4), to.m[4 + g][s] = by * m;
        }
    }
    INLINE void q4_k(const uint8_t* p) { scales_of_six(p), pairs(p + 16, {}, false); }
    INLINE void q5_k(const uint8_t* p) {
        Int fifth[8], v[4];
        UNROLL for (int half = 0; half < 2; half++) {
            panel(v, p + 16 + 16 * half);
            UNROLL for (int i = 0; i < 4; i++) fifth[4 * half + i] = v[i];
        }
        scales_of_six(p), pairs(p + 48, fifth, true);
    }
    INLINE void q6_k(const uint8_t* p) {
        Int low[4], high[2][4], v[4];
        Float d, by;
        for (int h = 0; h < 2; h++) {
            UNROLL for (int i = 0; i < 2; i++) panel(high[i], p + 128 + 32 * h + 16 * i);
            UNROLL for (int j = 0; j < 4; j++) {
                panel(low, p + 64 * h + 16 * j);
                UNROLL for (int i = 0; i < 4; i++) {
                    const Int bits = high[j % 2][i];
                    Int(&at)[STACK] = to.code[32 * h + 4 * j + i], (&more)[STACK] = to.code[32 * h + 16 + 4 * j + i];
                    at[s] = (low[i] & 0x0f0f0f0f) | (bits >> (j / 2 * 2) & 0x03030303) << 4;
                    more[s] = (low[i] >> 4 & 0x0f0f0f0f) | (bits >> (4 + j / 2 * 2) & 0x03030303) << 4;
                }
            }
        }
        panel(v, p + 192);
        Set::gather(low[0], p + 206, apart);
        Set::half(d, low[0] >> 16);
        UNROLL for (int i = 0; i < 16; i++) floats(by, v[i / 4] << (24 - i % 4 * 8) >> 24), to.d[i][s] = by * d;
    }
    INLINE void q8_0(const uint8_t* p) {
        for (int g = 0; g < 8; g++, p += BlockQ8_0::BYTES) {
            Int v;
            Set::gather(v, p, apart);
            Set::half(to.d[g][s], v);
            signed_bytes(p + 2, GROUP, 8 * g);
        }
    }
    INLINE void q4_0(const uint8_t* p) {
        for (int g = 0; g < 8; g++, p += BlockQ4_0::BYTES) {
            Int v[4], d;
            Set::gather(d, p, apart);
            Set::half(to.d[g][s], d);
            panel(v, p + 2);
            UNROLL for (int i = 0; i < 4; i++) {
                to.code[8 * g + i][s] = v[i] & 0x0f0f0f0f;
                to.code[8 * g + 4 + i][s] = v[i] >> 4 & 0x0f0f0f0f;
            }
        }
    }
};

// How a format's chunks are multiplied: groups of SIZE, bytes up to MOST, less 2^SHIFT (-1: nothing), and an m.
template <int SIZE_, int MOST_, int SHIFT_, bool OFFSET_> struct ByteKind {
    static constexpr int SIZE = SIZE_, MOST = MOST_, SHIFT = SHIFT_;
    static constexpr bool OFFSET = OFFSET_;
};

// sum += a token's part of group g.
template <class Kind, class Set>
static INLINE void add_group(typename Set::Float& sum, const typename Set::Int& total, const ByteChunk<Set>& w, int g,
                             int s, const RoundedGroup& of) {
    typename Set::Int scale, offset;
    Set::fill(scale, &of.scale), Set::fill(offset, &of.offset);
    Set::fma(sum, __builtin_convertvector(total, typename Set::Float), w.d[g][s] * (typename Set::Float)scale);
    if constexpr (Kind::OFFSET) Set::fma(sum, w.m[g][s], (typename Set::Float)offset);
}

// y[m][r] += a chunk's part, for M tokens.
template <class Set, class Kind, int M>
static void multiply_chunk(float* y, const ByteChunk<Set>& w, const int8_t* x, const RoundedGroup* group, size_t in) {
    using Int = typename Set::Int;
    using Float = typename Set::Float;
    constexpr int SIZE = Kind::SIZE, QUADS = SIZE / 4, ROWS = Set::ROWS;
    constexpr bool SIGNED = Set::SIGNED && Kind::MOST == 255, NARROW = Set::NARROW && !SIGNED;
    constexpr int RUN = NARROW ? smaller(QUADS, 32767 / (2 * 127 * Kind::MOST)) : QUADS; // that fit into 16 bits
    constexpr int SHIFT = SIGNED ? -1 : Kind::SHIFT;
    Float sum[STACK][M];
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int s = 0; s < STACK; s++) memcpy(&sum[s][m], y + m * TILE_ROWS + s * ROWS, sizeof(Float));
    for (int g = 0; g < BYTE_CHUNK / SIZE; g++) {
        const RoundedGroup* of = group + g * SIZE / GROUP;
        Int total[STACK][M] = {};
        if constexpr (SHIFT >= 0) UNROLL for (int m = 0; m < M; m++) {
            const RoundedGroup& token = of[m * in / GROUP];
            Int less;
            Set::fill(less, SIZE == GROUP ? &token.less : &token.half[g % 2]);
            UNROLL for (int s = 0; s < STACK; s++) total[s][m] = less << larger(0, SHIFT);
        }
        UNROLL for (int first = 0; first < QUADS; first += RUN) {
            Int part[STACK][M] = {};
            UNROLL for (int q = 0; q < RUN; q++) {
                const Int(&code)[STACK] = w.code[g * QUADS + first + q];
                UNROLL for (int m = 0; m < M; m++) {
                    Int b;
                    Set::fill(b, x + m * in + g * SIZE + 4 * (first + q));
                    UNROLL for (int s = 0; s < STACK; s++)
                        if constexpr (SIGNED) Set::multiply_add_signed(total[s][m], code[s], b);
                        else if constexpr (NARROW) Set::multiply_add(part[s][m], code[s], b);
                        else Set::multiply_add(total[s][m], code[s], b);
                }
            }
            if constexpr (NARROW) UNROLL for (int m = 0; m < M; m++)
                UNROLL for (int s = 0; s < STACK; s++) Set::widen(total[s][m], part[s][m]);
        }
        UNROLL for (int m = 0; m < M; m++)
            UNROLL for (int s = 0; s < STACK; s++)
                add_group<Kind>(sum[s][m], total[s][m], w, g, s, of[m * in / GROUP]);
    }
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int s = 0; s < STACK; s++) memcpy(y + m * TILE_ROWS + s * ROWS, &sum[s][m], sizeof(Float));
}

template <class Set, class Kind>
static void multiply_tokens(float* y, ByteChunk<Set>& w, const int8_t* x, const RoundedGroup* group, size_t in, int N,
                            [[maybe_unused]] NextLine next, [[maybe_unused]] int lines) {
    constexpr int M = Set::TOKENS;
    int n = 0;
    if constexpr (Set::SQUARE > 0) n = Set::template multiply_squares<Kind>(y, w, x, group, in, N, next, lines);
    for (; n + M <= N; n += M)
        multiply_chunk<Set, Kind, M>(y + n * TILE_ROWS, w, x + n * in, group + n * in / GROUP, in);
    for (; n < N; n++) multiply_chunk<Set, Kind, 1>(y + n * TILE_ROWS, w, x + n * in, group + n * in / GROUP, in);
}

// STACK * ROWS rows of INT8 for one token. Rows are read one after another, at most INT8_PIECE columns at once: panels
// of all rows ask for fewer lines of memory ahead (docs/notes/cpu.md).
constexpr int INT8_PIECE = 4096;
template <class Set>
static void int8_column(float* y, const StoredRows& W, int b, size_t row, const int8_t* x, const RoundedGroup* group) {
    using Int = typename Set::Int;
    using Float = typename Set::Float;
    constexpr int ROWS = Set::ROWS, COUNT = STACK * ROWS;
    const size_t in = (size_t)W.in, groups = in / GROUP;
    alignas(64) int sums[COUNT * INT8_PIECE / GROUP];
    for (size_t start = 0; start < in; start += INT8_PIECE) {
        const int columns = smaller(INT8_PIECE, (int)(in - start)), count = columns / GROUP;
        Set::int8_sums(sums, (const int8_t*)W.q[b] + row * in + start, in, COUNT, x + start, columns);
        for (int s = 0; s < STACK; s++) {
            const uint8_t* scales = (const uint8_t*)W.scale[b] + 2 * ((row + s * ROWS) * groups + start / GROUP);
            const uint8_t* rows = (const uint8_t*)(sums + s * ROWS * count);
            const RoundedGroup* of = group + start / GROUP;
            Float sum, d[8];
            memcpy(&sum, y + s * ROWS, sizeof sum);
            for (int g = 0; g < count; g += 4, rows += 16, of += 4) {
                Int total[4], less, scale;
                if (g % 8 == 0) ByteReader<Set>::int8_scales(d, scales + 2 * g, groups);
                Set::panel(total, rows, count * sizeof(int));
                UNROLL for (int i = 0; i < 4; i++) {
                    Set::fill(less, &of[i].less), Set::fill(scale, &of[i].scale);
                    const Float whole = __builtin_convertvector(total[i] + (less << 7), Float);
                    Set::fma(sum, whole, d[g % 8 + i] * (Float)scale);
                }
            }
            memcpy(y + s * ROWS, &sum, sizeof sum);
        }
    }
}

// The first rows of a tile, as many as are whole chunks; returns their number.
template <class Set>
static int byte_tile(float* y, const StoredRows& W, int b, size_t apart, size_t row, int rows, const int8_t* x,
                     const RoundedGroup* group, int N) {
    constexpr int ROWS = Set::ROWS;
    const size_t in = (size_t)W.in, groups = in / W.group;
    const Dtype type = W.type[b];
    const size_t scale_bytes = W.scale[b] ? 2 * groups : 0;
    ByteChunk<Set> chunk;
    int done = 0;
    for (; done + STACK * ROWS <= rows; done += STACK * ROWS, row += STACK * ROWS, y += STACK * ROWS) {
        for (int n = 0; n < N; n++) memset(y + n * TILE_ROWS, 0, STACK * ROWS * sizeof(float));
        const uint8_t* first = (const uint8_t*)W.q[b] + row * apart;
        const uint8_t* scales = (const uint8_t*)W.scale[b] + (row + STACK * ROWS) * scale_bytes; // of the next rows
        for (size_t i = 0; i < STACK * ROWS * scale_bytes; i += 64) __builtin_prefetch(scales + i, 0, 2);
        if constexpr (Set::SUMS) if (N == 1 && W.format == Format::INT8) {
            int8_column<Set>(y, W, b, row, x, group);
            continue;
        }
        for (size_t k = 0; k < in; k += BYTE_CHUNK) {
            for (int s = 0; s < STACK; s++) {
                const size_t r = row + s * ROWS, g = r * groups + k / W.group;
                const uint8_t* p = (const uint8_t*)W.q[b] + r * apart + apart * k / in;
                const uint8_t* scale = (const uint8_t*)W.scale[b] + 2 * g;
                const size_t seen = (k + s * BYTE_CHUNK / STACK) * apart / in * STACK * ROWS;
                ByteReader<Set> read{chunk, s, apart, {(const char*)first + STACK * ROWS * apart + seen},
                                     Set::SQUARE > 0 && N >= Set::SQUARE};
                if (W.format == Format::INT8) read.int8(p, scale, groups);
                else if (W.format == Format::INT4)
                    read.int4(p, scale, W.zero[b] ? W.zero[b] + g : nullptr, groups, W.group);
                else if (type == Dtype::Q4_K) read.q4_k(p);
                else if (type == Dtype::Q5_K) read.q5_k(p);
                else if (type == Dtype::Q6_K) read.q6_k(p);
                else if (type == Dtype::Q8_0) read.q8_0(p);
                else read.q4_0(p);
            }
            auto multiply = multiply_tokens<Set, ByteKind<32, 15, 3, false>>; // INT4, Q4_0
            if (W.format == Format::INT8 || type == Dtype::Q8_0)
                multiply = multiply_tokens<Set, ByteKind<32, 255, 7, false>>;
            else if (type == Dtype::Q6_K) multiply = multiply_tokens<Set, ByteKind<16, 63, 5, false>>;
            else if (type == Dtype::Q5_K) multiply = multiply_tokens<Set, ByteKind<32, 31, -1, true>>;
            else if (type == Dtype::Q4_K || W.zero[b]) multiply = multiply_tokens<Set, ByteKind<32, 15, -1, true>>;
            const size_t bytes = STACK * ROWS * apart; // of the next rows
            multiply(y, chunk, x + k, group + k / GROUP, in, N, {(const char*)first + bytes + bytes * k / in},
                     (int)(bytes * BYTE_CHUNK / in / 64));
        }
    }
    return done;
}
} // namespace
