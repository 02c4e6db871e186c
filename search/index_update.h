// search/index_update.h: the index of a folder of documents, brought up to date.
//
// The index lies in the user's cache folder, under a name made of the folder's own, or where the user says. A file that
// cannot be used is left out, and said.
#pragma once
#include "book/jieba.h"
#include "search/document_files.h"
#include "search/index.h"
#include "search/index_builder.h"
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

constexpr uint64_t WORD_RULES = 1; // another number where words.cpp makes other words

// Brings the index of a folder up to date: of the files in it only those are read whose size or time changed, or that
// are new; those of them whose bytes are the same keep their passages.
struct IndexUpdate {
    using Index = DocumentIndex;
    const std::string root, path; // of the documents, and of the index
    const Jieba& jieba;
    const Tell& tell;
    const uint64_t maker; // other passages or words: another index
    size_t read = 0, unchanged = 0;
    LeftOut left_out{};
    std::string folder{}; // that names of files are below

    bool written = false; // the index, since something changed

    // The index, up to date.
    std::unique_ptr<Index> run();

  private:
    std::unique_ptr<Index> open_old() const;
    bool update(const std::vector<DocumentFile>& files, const Index* old);
    bool only_faults(const Index& old, const std::vector<std::optional<int64_t>>& times,
                     const std::vector<const DocumentFile*>& fresh);
    void add_fresh(IndexBuilder& builder, const std::vector<const DocumentFile*>& fresh);
    void add_batch(IndexBuilder& builder, const std::vector<DocumentText>& batch, const DocumentFile* const* files);
    void remove_abandoned() const;
};

// Where the index of a folder lies, if the user does not say.
std::string default_index(const std::string& root);

// The path without links, . and ..
std::string real_path(const std::string& path);
