// service.h: state shared by all requests: the model's name and tokenizer, forms, documents, adapters.
#pragma once
#include "server/engine/adapters.h"
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

struct Automaton;
struct Documents;
struct Grammar;
struct Relevance;
struct RerankPrompt;
struct Tokenizer;
struct Vocabulary;

namespace server {

struct DiskPages;

// Recent forms, by their text: the next request with the same form need not parse it, and its masks exist already.
struct Forms {
    static constexpr size_t KEPT = 16, LONGEST = 64 << 10; // forms; bytes of a text that is cached
    static constexpr size_t ALL_BYTES = 256 << 20;         // of the grammars of running and waiting answers

    // grammar: creates it.
    std::shared_ptr<Automaton> get(const Tokenizer& tokenizer, std::string text,
                                   const std::function<Grammar()>& grammar);

  private:
    using Kept = std::vector<std::pair<std::string, std::shared_ptr<Automaton>>>;
    std::mutex mutex;
    std::shared_ptr<const Vocabulary> vocabulary;
    Kept kept; // latest first
};

struct Shelf;

// State shared by all requests.
struct Service {
    const Tokenizer* tokenizer = nullptr; // null: still loading
    std::string name, system;
    int context = 0;
    bool thinking = false;                // default, where the request does not say
    struct { std::string system; int max_tokens = 384; } predicts{}; // /predict: system prompt ("": `system`), limit
    std::shared_ptr<Forms> forms = std::make_shared<Forms>();
    std::shared_ptr<const Documents> documents{}; // searched for passages; null: no --docs
    std::shared_ptr<Shelf> shelf{};       // documents that came with requests
    bool quotes = false;                  // the best passage becomes the answer, where plain text is wanted
    bool generates = true;                // answers are generated;
    int dimensions = 0;                   // ... size of vectors, 0: none;
    std::shared_ptr<const RerankPrompt> rerank{}; // ... rankings, or (null) none
    std::shared_ptr<const Relevance> relevance{};
    std::string path{};                   // of the model
    const DiskPages* disk = nullptr;      // the prefix cache on disk; null: none
    std::string tokenizer_info{};         // the answer of /tokenizer_info
    std::shared_ptr<Adapters> adapters = std::make_shared<Adapters>(); // further models, by name
};

} // namespace server
