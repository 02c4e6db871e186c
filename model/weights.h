// model/weights.h: from a model's files to the weights that ops take: converted where they must be, INT8 or FP8 where
// asked.
#pragma once
#include "model/model_file.h"
#include <atomic>

// ---- INT8
// 32 neighbours in a row of W share a scale s: W[r][i] = q[r][i] * s[r][i / 32], where q is w / s rounded to nearest
// even, -127..127. Such a product of 8 bits and a bf16's 8 bits is exact in a float: INT8 weights are weights like any
// others, of 8.5 bits each. Files hold them as NAME (I8) and NAME_scale (BF16, (rows, ceil(columns / 32))).
// The smallest usable s is the smallest bf16 with 127 s >= max |w|. It and the next seven are tried, and the one with
// the least squared error is taken: how well the multiples of s fit the weights is random, and the best of eight loses
// a fifth less (in KL) than the first.
constexpr int SCALES = 8;

// The smallest bf16 with 127 s >= largest.
bf16 int8_scale(float largest);
// Returns, of that scale and the next seven, the one with the least sum of squared errors, summed in the order of w
// (ties: the first).
bf16 int8_scale(const float* w, size_t n);

// Converts a matrix to INT8. False if a number is not finite: q and scale are then not completely written.
bool to_int8(int8_t* q,       // (rows, in) out
             bf16* scale,     // (rows, ceil(in / 32)) out
             const Tensor& t, // (rows, in)
             size_t rows, size_t in);

// For a GPU, whose kernels do not read GGUF's blocks: matrices kept as BLOCKS become INT8.
template <class T> void blocks_to_int8(Weights<T>& w, const ModelFile& file);

// The name of its numbers' type: "bfloat16", "int8", "q4_k", ...: the type of most of them.
template <class T> const char* type_name(const Weights<T>& w);

// ---- Huge pages. A decoding step reads every weight once, and bandwidth is a tenth higher with pages of 2 MB than
// with a file's pages of 4 KB. So long runs copy the files into huge pages. A copy costs about the time that 64 steps
// save, and the system cannot reclaim its memory as it can a file's.
constexpr size_t HUGE_PAGE = 2 << 20;
constexpr size_t STEPS_TO_HUGE_PAGES = 64; // an answer of this length pays for the copy

// True if the kernel has most of the mapping in huge pages: possible for a file read from disk at once.
bool in_huge_pages(const MappedFile& map);

// Replaces the mapping by a copy of the file, in huge pages if the kernel gives them: no pointer to it changes. False:
// there is no memory for it.
bool copy_to_huge_pages(const MappedFile& map);

// For a CPU's weights, if they are used where the files are mapped, are larger than the caches, and fit into half of
// the available memory.
template <class T> void use_huge_pages(const ModelFile& file, const Weights<T>& w);
