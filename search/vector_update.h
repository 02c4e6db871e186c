// search/vector_update.h: keeps the vectors of an index's passages up to date.
#pragma once
#include "search/document_files.h"
#include "search/document_models.h"
#include "search/index.h"
#include "search/vector_file.h"
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

// The model's input for a passage: with its headings, as words are searched for in them, too.
std::string shown_passage(const DocumentIndex& index, uint64_t i);

struct PartialVectors; // vectors in progress

// Brings the vectors of an index up to date: a passage whose text had a vector keeps it.
struct VectorUpdate {
    const std::string path;
    size_t made = 0;

    VectorUpdate(const DocumentIndex& of, VectorModel& by, const Tell& t)
        : path(vectors_path(of.path(), by.hash())), index(of), model(by), tell(t) {}

    std::unique_ptr<VectorFile> run();

  private:
    const DocumentIndex& index;
    VectorModel& model;
    const Tell& tell;
    std::vector<uint64_t> keys;                          // of the passages
    std::vector<std::unique_ptr<VectorFile>> files;      // usable ones
    std::unordered_map<uint64_t, const uint16_t*> known; // the vectors in them, by key

    VectorFile::Header header() const;
    std::unique_ptr<VectorFile> current() const;
    void know(const std::string& from);
    void make(PartialVectors& partial);
    void make_missing(PartialVectors& partial, const std::vector<uint32_t>& missing);
};
