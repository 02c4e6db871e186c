// search/hybrid.cpp: an embedding model and a reranker, each loaded once and shared by all threads; see hybrid.h.
#include "search/hybrid.h"
#include "base/file.h" // fnv1a
#include "model/device.h"
#include "model/model_file.h"
#include "model/pace.h"
#include "model/tokenizer.h"
#include "model/weights.h"
#include "search/embed.h"
#include "search/embedder.h"
#include "search/index.h" // IndexFault
#include "search/rerank.h"
#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace {

// A model for occasional calls from any thread; one call runs at a time.
template <class T> struct KeptModel {
    static constexpr int MOST = 2048; // tokens of a text; longer ones are cut. A passage has 1,200 characters at most

    KeptModel(const ModelOptions& o, std::unique_ptr<ModelFile> from)
        : options(o), file(std::move(from)), ctx(choose_device(o, *file)), tokenizer(tokenizer_of(tokenizer_path(o), *file)), weights(*file),
          embedder(file->config, weights, std::min(MOST, file->config.max_positions), ctx) {
        to_device(ctx, *file, weights);
    }
    // Calls f(i, hidden) for every text in order; stops early if interrupted.
    void run(const std::vector<std::vector<int>>& texts, const typename Embedder<T>::Each& f) {
        std::lock_guard lock(mutex);
        options.use_threads(); // in the calling thread
        ThreadPace pace(options, ctx);
        pace.begin();
        embedder.run(texts, lookup_stop, [&](size_t i, const std::vector<float>& hidden) {
            if (!all_finite(hidden)) throw IndexFault(options.model + ": the model's numbers are not finite");
            f(i, hidden);
            pace.step();
        });
    }
    static constexpr uint64_t SHOWN = 1; // version of the models' input; changes with it
    uint64_t hash() const {
        const uint64_t of[] = {file->hash(), tokenizer.hash(), (uint64_t)embedder.capacity, sizeof(T), SHOWN};
        return fnv1a(of, sizeof of);
    }

    const ModelOptions options;
    const std::unique_ptr<ModelFile> file;
    const Context ctx;
    const Tokenizer tokenizer;
    Weights<T> weights;
    Embedder<T> embedder;
    std::mutex mutex;
};

template <class T> struct EmbeddingModel : VectorModel {
    KeptModel<T> model;

    EmbeddingModel(const ModelOptions& o, std::unique_ptr<ModelFile> file) : model(o, std::move(file)) {
        end_of_text(model.tokenizer);
    }
    uint64_t hash() const override { return model.hash(); }
    size_t dimensions() const override { return (size_t)model.file->config.C; }
    void passages(const std::vector<std::string>& texts, const Each& each) override {
        std::vector<std::vector<int>> ids;
        for (auto& text : texts) ids.push_back(shown(text));
        model.run(ids, [&](size_t i, const std::vector<float>& hidden) { each(i, unit_vector(hidden, dimensions())); });
    }
    std::vector<float> question(const std::string& text) override {
        std::vector<float> vector;
        model.run({shown(with_task(RETRIEVAL_TASK, text))},
                  [&](size_t, const std::vector<float>& hidden) { vector = unit_vector(hidden, dimensions()); });
        if (vector.empty()) throw LookupStopped("interrupted");
        return vector;
    }

  private:
    std::vector<int> shown(const std::string& text) const {
        return embedding_ids(model.tokenizer, text, (size_t)model.embedder.capacity);
    }
};

template <class T> struct RerankingModel : RankModel {
    KeptModel<T> model;
    const RerankPrompt prompt;
    const Relevance relevance;

    RerankingModel(const ModelOptions& o, std::unique_ptr<ModelFile> file)
        : model(o, std::move(file)), prompt(model.tokenizer), relevance(model.ctx, model.weights, prompt) {
        if (2 * prompt.length() > (size_t)model.embedder.capacity)
            DIE("%s: a context of %d tokens has no room for a passage", o.model.c_str(), model.embedder.capacity);
    }
    uint64_t hash() const override { return model.hash(); }
    std::vector<double> scores(const std::string& question, const std::vector<std::string>& passages) override {
        const size_t room = (size_t)model.embedder.capacity - prompt.length();
        std::vector<int> query = prompt.query_ids(model.tokenizer, RETRIEVAL_TASK, question);
        cut_text(query, room / 2); // a long question must leave room for a passage
        std::vector<std::vector<int>> ids;
        for (auto& text : passages) ids.push_back(prompt.ids(model.tokenizer, query, text, room + prompt.length()));
        std::vector<double> all;
        model.run(ids, [&](size_t, const std::vector<float>& hidden) { all.push_back(relevance(hidden)); });
        if (all.size() < passages.size()) throw LookupStopped("interrupted");
        return all;
    }
};

} // namespace

DocumentModels open_document_models(const ModelOptions& like, const DocumentOptions& documents) {
    DocumentModels models;
    ModelOptions o;
    o.device = like.device, o.threads = like.threads, o.invariant = like.invariant;
    if (!documents.embed.empty()) {
        o.model = documents.embed;
        auto file = std::make_unique<ModelFile>(o.model);
        says_it_embeds(*file); // throws if its vectors are made differently
        file->logits = false;
        if (wide(o, *file)) models.vectors = std::make_shared<EmbeddingModel<float>>(o, std::move(file));
        else models.vectors = std::make_shared<EmbeddingModel<bf16>>(o, std::move(file));
    }
    if (!documents.rerank.empty()) {
        o.model = documents.rerank;
        auto file = std::make_unique<ModelFile>(o.model);
        if (wide(o, *file)) models.ranks = std::make_shared<RerankingModel<float>>(o, std::move(file));
        else models.ranks = std::make_shared<RerankingModel<bf16>>(o, std::move(file));
    }
    return models;
}
