// search/document_models.h: interfaces of the models that find and rank passages. hybrid.h implements them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

// A model that makes vectors, of length 1. (Implemented in hybrid.h by Qwen3-Embedding.)
struct VectorModel {
    using Each = std::function<void(size_t i, const std::vector<float>& vector)>;
    virtual ~VectorModel() = default;
    virtual uint64_t hash() const = 0; // of everything the passages' vectors depend on
    virtual size_t dimensions() const = 0;
    virtual void passages(const std::vector<std::string>& texts, const Each& each) = 0; // ends early if interrupted
    virtual std::vector<float> question(const std::string& text) = 0;
};
// A model that scores how well passages answer a question: Qwen3-Reranker.
struct RankModel {
    virtual ~RankModel() = default;
    virtual uint64_t hash() const = 0;
    virtual std::vector<double> scores(const std::string& question, const std::vector<std::string>& passages) = 0;
};
struct DocumentModels {
    std::shared_ptr<VectorModel> vectors{}; // null: words alone
    std::shared_ptr<RankModel> ranks{};
};
