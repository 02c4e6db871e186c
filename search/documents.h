// search/documents.h: finds passages of a folder of documents that answer a question. Its index is kept up to date
// (index_update.h); grounding.h makes a prompt of the passages.
//
//   const Documents docs({"notes", "", 4}, tell);             // creates the index, or updates the existing one
//   std::vector<Source> sources = docs.find("什么是 warp？");
//   std::string asked = grounded("什么是 warp？", sources, room, measure);  // instruction, passages, question
#pragma once
#include "book/jieba.h"
#include "search/document_files.h"
#include "search/document_models.h"
#include "search/document_options.h"
#include "search/index.h"
#include "search/vector_file.h"
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

// A passage found.
struct Source {
    std::string file, heading, text;
    uint32_t line;
    float score;
};
// "notes/08-reduction.md:35, Reduction > Trees"
std::string name_of(const Source& s);

struct Documents {
    const DocumentOptions options;

    Documents(const DocumentOptions& o, const Tell& tell, const DocumentModels& with = {});

    // Texts of a conversation, by title. Of these something is always found: where no passage is about the question,
    // such as "Summarize this", their beginning.
    struct Text {
        std::string title, text;
    };
    explicit Documents(const std::vector<Text>& texts);

    // The best passages for a question. A question without words of its own ("Why?") is searched for as the one before.
    // Words alone find nothing if the best passage is not about the question. With vectors, two rankings are merged: by
    // words, and by the vectors' products. A reranker reorders the top of the result. Throws IndexFault if the
    // postings are damaged.
    std::vector<Source> find(std::string_view question, std::string_view before = "") const;

    // A hash of everything answers depend on: all files used, in any order, and how much of them is shown.
    uint64_t hash() const;

  private:
    static constexpr size_t MOST_ASKED = 8192; // bytes of a question that are searched for: each word costs time
    static constexpr size_t DEPTH = 1000; // of the merged rankings: a later passage would get less than 1 / 1,060
    static constexpr size_t RANKED = 20;  // passages given to a reranker, one prompt each
    const bool of_conversation = false;
    const DocumentModels models;
    const Jieba jieba;
    std::unique_ptr<DocumentIndex> index;
    std::unique_ptr<VectorFile> vectors;

    void open_vectors(const Tell& tell);
    std::vector<Source> beginning() const;
    Source source_of(const DocumentIndex::Hit& hit) const;
};
