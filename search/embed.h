// search/embed.h: vectors of texts, as Qwen3-Embedding makes them: it is this model, asked in another way. What it is
// shown, and from the last token's hidden state (after the final norm) to a vector. embedder.h has the hidden states.
// https://huggingface.co/Qwen/Qwen3-Embedding-0.6B says what is shown and how it is read.
#pragma once
#include "model/tokenizer.h"
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

struct ModelFile;

// The task of Qwen's own examples. A task is one sentence in English, whatever the language of the texts.
constexpr const char* RETRIEVAL_TASK = "Given a web search query, retrieve relevant passages that answer the query";

// A query is shown with its task, a document as it is.
std::string with_task(const std::string& task, std::string_view query);

// The id that ends what is made a vector, of which the hidden state is taken.
int end_of_text(const Tokenizer& t);

// Keeps `most` ids of a text, its first (or its last).
void cut_text(std::vector<int>& ids, size_t most, bool keep_last = false);

// What is shown for a vector. Text stays text, whatever it looks like. most: ids that stay, the end among them; 0: all.
std::vector<int> embedding_ids(const Tokenizer& t, std::string_view text, size_t most = 0, bool keep_last = false);

// Whether a model's folder says that it makes vectors: it is a bare Qwen3Model, or has sentence-transformers' modules.
// Throws Error if these do anything else than we do.
bool says_it_embeds(const ModelFile& file);

bool all_finite(const std::vector<float>& x);

// The first numbers of a hidden state at length 1. (Qwen3-Embedding was trained so that the first ones say most:
// Kusupati et al., "Matryoshka representation learning", 2022.)
std::vector<float> unit_vector(const std::vector<float>& hidden, size_t dimensions);

// A vector as JSON. (Nine digits read back as the same float, always; the fewest that do would take ten times as long.)
void write_numbers(std::string& out, const std::vector<float>& v);
