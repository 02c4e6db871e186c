// search/index_update.h: keeps the index of a folder of documents up to date.
//
// The index lies in the user's cache folder, under a name derived from the folder's, or where the user says. An
// unusable file is left out and reported.
#pragma once
#include "book/jieba.h"
#include "search/document_files.h"
#include "search/index.h"
#include "search/index_builder.h"
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

constexpr uint64_t RULES = 2; // increased when words.cpp changes its words, or DocumentText::read a file's text

// Brings the index of a folder up to date. Reads only files that are new or whose size or time changed; those with the
// same bytes as before keep their passages.
struct IndexUpdate {
    using Index = DocumentIndex;
    const std::string root, path; // of the documents, and of the index
    const Jieba& jieba;
    const Tell& tell;
    const uint64_t maker; // differs if passages or words are made differently
    size_t read = 0, unchanged = 0;
    LeftOut left_out{};
    std::string folder{}; // file names are relative to it

    bool written = false; // the index was written, since something changed
    std::map<const DocumentFile*, DocumentText> known_texts{}; // of documents that were converted to compare them

    // Returns the index, up to date.
    std::unique_ptr<Index> run();

    // Adds texts with their files to an index.
    void add_batch(IndexBuilder& builder, const std::vector<DocumentText>& batch, const DocumentFile* const* files);

  private:
    std::unique_ptr<Index> open_old() const;
    DocumentText text_of(const DocumentFile& f) const;
    bool update(const std::vector<DocumentFile>& files, const Index* old);
    bool only_faults(const Index& old, const std::vector<std::optional<int64_t>>& times,
                     const std::vector<const DocumentFile*>& fresh);
    void add_fresh(IndexBuilder& builder, const std::vector<const DocumentFile*>& fresh);
    void remove_abandoned() const;
};

// An index of texts that are no files of a folder. Its own file has no name any more: it goes with the index.
std::unique_ptr<DocumentIndex> index_of(std::vector<DocumentText> texts, const std::vector<std::string>& names,
                                        const Jieba& jieba);

// The default path of a folder's index.
std::string default_index(const std::string& root);

// The path without links, . and ..
std::string real_path(const std::string& path);
