// search/embed.h: vectors of texts, as Qwen3-Embedding makes them: the same model with another prompt. Its input, and
// the step from the last token's hidden state (after the final norm) to a vector. embedder.h has the hidden states.
// Source of prompt and pooling: https://huggingface.co/Qwen/Qwen3-Embedding-0.6B
#pragma once
#include "model/tokenizer.h"
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

struct ModelFile;

// The task of Qwen's own examples. A task is one English sentence, whatever the language of the texts.
constexpr const char* RETRIEVAL_TASK = "Given a web search query, retrieve relevant passages that answer the query";

// A query is preceded by its task, a document is unchanged.
std::string with_task(const std::string& task, std::string_view query);

// The id at the end of an input, whose hidden state becomes the vector.
int end_of_text(const Tokenizer& t);

// Keeps `most` ids of a text: the first, or the last.
void cut_text(std::vector<int>& ids, size_t most, bool keep_last = false);

// The ids of a text's input. Text never becomes a special token. most: ids to keep, the end included; 0: all.
std::vector<int> embedding_ids(const Tokenizer& t, std::string_view text, size_t most = 0, bool keep_last = false);

// Whether a model's folder describes an embedding model: a bare Qwen3Model, or sentence-transformers' modules.
// Throws Error if these do anything that we do not.
bool says_it_embeds(const ModelFile& file);

bool all_finite(const std::vector<float>& x);

// The first numbers of a hidden state, scaled to length 1. (Qwen3-Embedding was trained so that the first ones carry
// most: Kusupati et al., "Matryoshka representation learning", 2022.)
std::vector<float> unit_vector(const std::vector<float>& hidden, size_t dimensions);

// A vector as JSON. (Nine digits always read back as the same float; the shortest form would take ten times as long.)
void write_numbers(std::string& out, const std::vector<float>& v);
