// embed.h: vectors of texts, and how well documents answer a query, as Qwen3-Embedding and Qwen3-Reranker make them:
// they are this model, asked in another way. Included by cli.h.
//   Texts        what the models are shown: a task and a query, a document, a question of yes or no
//   Results      from the last token's hidden state (after the final norm) to a vector, or to a probability
//   Embedder     the hidden states of many texts, packed into ragged batches; no head is computed
//   embed_texts  texts to vectors, for retrieval
// https://huggingface.co/Qwen/Qwen3-Embedding-0.6B and Qwen3-Reranker-0.6B say what is shown and how it is read.
#pragma once
#include "model/chat_template.h"
#include "model/session.h"
#include "model/model_file.h"

// ------------------------------------------------------------------------------------------------------ Texts

// The task of Qwen's own examples. A task is one sentence in English, whatever the language of the texts.
constexpr const char* RETRIEVAL_TASK = "Given a web search query, retrieve relevant passages that answer the query";

// A query is shown with its task, a document as it is.
inline std::string with_task(const std::string& task, std::string_view query) {
    return "Instruct: " + task + "\nQuery:" + std::string(query);
}

// The id that ends what is made a vector, of which the hidden state is taken.
inline int end_of_text(const Tokenizer& t) {
    const int id = t.id("<|endoftext|>");
    if (id < 0) DIE("the vocabulary has no <|endoftext|>");
    return id;
}

// Keeps `most` ids of a text, its first (or its last).
inline void cut_text(std::vector<int>& ids, size_t most, bool keep_last = false) {
    if (ids.size() <= most) return;
    if (keep_last) ids.erase(ids.begin(), ids.end() - (ptrdiff_t)most);
    else ids.resize(most);
}

// What is shown for a vector. Text stays text, whatever it looks like. most: ids that stay, the end among them; 0: all.
inline std::vector<int> embedding_ids(const Tokenizer& t, std::string_view text, size_t most = 0,
                                      bool keep_last = false) {
    std::vector<int> ids = t.encode(text, false);
    if (most) cut_text(ids, most - 1, keep_last);
    ids.push_back(end_of_text(t));
    return ids;
}

// How the reranker is asked: does the document answer the query? The next token would be yes or no.
struct RerankPrompt {
    std::vector<int> before, after;
    int yes, no;

    explicit RerankPrompt(const Tokenizer& t) {
        before = t.encode("<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
                          "and the Instruct provided. Note that the answer can only be \"yes\" or \"no\".<|im_end|>\n"
                          "<|im_start|>user\n", true);
        after = t.encode("<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", true);
        const std::vector<int> words[] = {t.encode("yes", false), t.encode("no", false)};
        if (words[0].size() != 1 || words[1].size() != 1)
            DIE("\"yes\" and \"no\" are not one token each in the vocabulary");
        yes = words[0][0], no = words[1][0];
    }
    size_t length() const { return before.size() + after.size(); }

    // The part that all documents of a query share. (A line's end is always the end of a token.)
    std::vector<int> query_ids(const Tokenizer& t, const std::string& task, const std::string& query) const {
        return t.encode("<Instruct>: " + task + "\n<Query>: " + query + "\n", false);
    }
    // The whole. most: ids that stay, of which only those of the two texts can go; 0: all.
    std::vector<int> ids(const Tokenizer& t, const std::vector<int>& query_ids, const std::string& document,
                         size_t most = 0, bool keep_last = false) const {
        std::vector<int> texts = query_ids, all = before;
        t.encode(texts, "<Document>: " + document, false);
        if (most) cut_text(texts, most - std::min(most, length()), keep_last);
        all.insert(all.end(), texts.begin(), texts.end());
        all.insert(all.end(), after.begin(), after.end());
        return all;
    }
};

// Whether a model's folder says that it makes vectors: it is a bare Qwen3Model, or has sentence-transformers' modules.
// Throws Error if these do anything else than we do.
inline bool says_it_embeds(const ModelFile& file) {
    struct Json {
        MappedFile file; // what the values are read from
        sj::Doc doc;
        explicit Json(const std::string& path) : file(path) {
            const std::string fault = sj::parse(doc, file.text());
            if (!fault.empty()) DIE("%s: %s", path.c_str(), fault.c_str());
        }
    };
    const std::string path = file.path + "/modules.json";
    if (!ModelFile::exists(path)) {
        sj::Doc config;
        sj::parse(config, file.config_text);
        return config.root()["architectures"][(size_t)0].str() == "Qwen3Model";
    }
    bool pools = false;
    const Json modules(path);
    for (sj::Value module : modules.doc.root().items()) {
        const std::string type = module["type"].str(), name = type.substr(type.rfind('.') + 1);
        if (name != "Transformer" && name != "Pooling" && name != "Normalize")
            DIE("%s: the module %s is not supported", path.c_str(), name.c_str());
        if (name != "Pooling") continue;
        const std::string config = file.path + "/" + module["path"].str() + "/config.json";
        const Json pooling(config);
        const sj::Value how = pooling.doc.root();
        if (!how["pooling_mode_lasttoken"].boolean(false) && how["pooling_mode"].str() != "lasttoken")
            DIE("%s: only the last token's vector is supported (pooling_mode_lasttoken)", config.c_str());
        pools = true;
    }
    return pools;
}

// ---------------------------------------------------------------------------------------------------- Results

inline bool all_finite(const std::vector<float>& x) {
    return std::all_of(x.begin(), x.end(), [](float v) { return std::isfinite(v); });
}

// The first numbers of a hidden state at length 1. (Qwen3-Embedding was trained so that the first ones say most:
// Kusupati et al., "Matryoshka representation learning", 2022.)
inline std::vector<float> unit_vector(const std::vector<float>& hidden, size_t dimensions) {
    double squares = 0;
    for (size_t i = 0; i < dimensions; i++) squares += (double)hidden[i] * hidden[i];
    const double length = std::max(std::sqrt(squares), 1e-12);
    std::vector<float> v(dimensions);
    for (size_t i = 0; i < dimensions; i++) v[i] = (float)(hidden[i] / length);
    return v;
}

// A vector as JSON. (Nine digits read back as the same float, always; the fewest that do would take ten times as long.)
inline void write_numbers(std::string& out, const std::vector<float>& v) {
    char number[32];
    for (size_t i = 0; i < v.size(); i++)
        out.append(number, (size_t)snprintf(number, sizeof number, i ? ", %.9g" : "[%.9g", v[i]));
    out += ']';
}

// The probability of yes, where only yes and no are possible. Of the head it needs these two rows.
struct Relevance {
    std::vector<float> yes, no; // (C)

    template <class T> Relevance(const Context& where, const Weights<T>& w, const RerankPrompt& prompt) {
        Context ctx = where;
        for (auto [row, id] : {std::pair(&yes, prompt.yes), std::pair(&no, prompt.no)}) {
            std::vector<T> stored((size_t)w.head.in);
            if (!w.head.in) DIE("the model has no head, which says yes or no");
            if (id >= w.head.out()) DIE("id %d is not in the vocabulary of %d", id, w.head.out());
            if (ctx.gpu && w.head.format != Format::PLAIN) DIE("a reranker's weights do not stay packed on a GPU");
            if (ctx.gpu) copy_out(ctx, stored.data(), w.head.w[0] + (size_t)id * stored.size(), stored.size());
            for (int i = 0; i < w.head.in; i++) row->push_back(ctx.gpu ? to_acc(stored[(size_t)i]) : w.head.at(id, i));
        }
    }
    double operator()(const std::vector<float>& hidden) const {
        double lead = 0; // of yes over no, as logits
        for (size_t i = 0; i < hidden.size(); i++) lead += ((double)yes[i] - no[i]) * hidden[i];
        return 1 / (1 + std::exp(-lead));
    }
};

// --------------------------------------------------------------------------------------------------- Embedder

// Texts are packed into batches of `chunk` tokens, whole; only one that is longer than a batch is cut, and goes through
// several. On a CPU a text's numbers do not depend on those beside it.
template <class T> struct Embedder {
    static constexpr int MOST = 256; // texts in a batch
    Context ctx;
    const Config& config;
    const Weights<T>& weights;
    const int capacity; // tokens of a text

    Embedder(const Config& c, const Weights<T>& w, int longest, const Context& where)
        : ctx(where), config(c), weights(w), capacity(longest) {
        arena.gpu = ctx.gpu != nullptr;
        chunk = ctx.gpu ? Session<T>::GPU_CHUNK : Session<T>::CHUNK;
        max_pages = (capacity + PAGE - 1) / PAGE;
        plan();
        arena.allocate(format("texts of up to %d tokens", capacity).c_str());
        plan();
        std::vector<acc<T>> angles((size_t)capacity * c.D);
        fill_rope(angles.data(), capacity, c.D, c.rope_theta);
        copy_in(ctx, rope, angles.data(), angles.size());
    }
    Embedder(const Embedder&) = delete;

    // f(i, hidden) for every text in turn, each of 1 .. capacity ids. Stops early when *stop becomes non-zero.
    template <class F>
    void run(const std::vector<std::vector<int>>& texts, const volatile sig_atomic_t* stop, F f) {
        for (auto& ids : texts) {
            if (ids.empty() || ids.size() > (size_t)capacity)
                DIE("a text of %zu tokens; there is room for %d", ids.size(), capacity);
            for (int id : ids)
                if (id < 0 || id >= config.V) DIE("id %d is not in the vocabulary of %d", id, config.V);
        }
        std::vector<T> row((size_t)config.C);
        std::vector<float> hidden((size_t)config.C);
        for (size_t next = 0, done = 0; next < texts.size() && !(stop && *stop);) {
            const std::vector<Last> lasts = compute(texts, next, done, stop);
            if (stop && *stop) return;
            for (auto [i, n] : lasts) {
                copy_out(ctx, row.data(), activations.normed + (size_t)n * row.size(), row.size());
                for (size_t k = 0; k < row.size(); k++) hidden[k] = (float)to_acc(row[k]);
                f(i, hidden);
            }
        }
    }

  private:
    struct Last { size_t text; int row; }; // where a text ends in a batch
    int chunk, max_pages;
    Arena arena;
    Activations<T> activations;
    KVCache<T> cache;
    acc<T>* rope;
    int *token, *pos, *seq, *slot, *table; // a Batch

    // Text 0 of a batch, which may be going on, has the first max_pages pages; the others have what they need.
    void plan() {
        cache.plan(arena, config, (size_t)max_pages + (size_t)chunk / PAGE + MOST);
        activations.plan(arena, config, chunk, !ctx.gpu);
        rope = arena.take<acc<T>>((size_t)capacity * config.D);
        for (int** list : {&token, &pos, &seq, &slot}) *list = arena.take<int>((size_t)chunk);
        table = arena.take<int>((size_t)MOST * max_pages);
#ifdef __CUDACC__
        if (ctx.gpu) plan_scratch(ctx, arena, config, chunk, 0, 1, 0);
#endif
    }

    // One batch from texts[next] on, of which `done` tokens are computed. Both move on.
    std::vector<Last> compute(const std::vector<std::vector<int>>& texts, size_t& next, size_t& done,
                              const volatile sig_atomic_t* stop) {
        std::vector<int> tokens, positions, sequences, slots, pages;
        std::vector<Last> lasts;
        int B = 0, free = max_pages, longest = 0;
        for (; next < texts.size() && B < MOST; B++) {
            const std::vector<int>& ids = texts[next];
            const size_t room = (size_t)chunk - tokens.size(), n = std::min(ids.size() - done, room);
            if (n == 0 || (B > 0 && ids.size() > room)) break;
            const int first = B == 0 ? 0 : free, needed = B == 0 ? max_pages : (int)((n + PAGE - 1) / PAGE);
            if (B > 0) free += needed;
            for (int p = 0; p < max_pages; p++) pages.push_back(p < needed ? first + p : 0);
            for (const size_t end = done + n; done < end; done++) {
                tokens.push_back(ids[done]), positions.push_back((int)done), sequences.push_back(B);
                slots.push_back(first * PAGE + (int)done);
            }
            longest = std::max(longest, (int)done);
            if (done < ids.size()) { B++; break; }
            lasts.push_back({next++, (int)tokens.size() - 1});
            done = 0;
        }
        const int N = (int)tokens.size();
        copy_in(ctx, token, tokens.data(), tokens.size());
        copy_in(ctx, pos, positions.data(), tokens.size());
        copy_in(ctx, seq, sequences.data(), tokens.size());
        copy_in(ctx, slot, slots.data(), tokens.size());
        copy_in(ctx, table, pages.data(), pages.size());
        Batch batch = {N, B, token, pos, seq, slot, table, max_pages};
        batch.longest = longest;
        ctx.stop = stop;
        forward(ctx, config, weights, batch, activations, cache, rope);
        return lasts;
    }
};

// The vectors of documents; or, with a task, of queries.
template <class T>
std::vector<std::vector<float>> embed_texts(Embedder<T>& model, const Tokenizer& tokenizer,
                                            const std::vector<std::string>& texts, const std::string& task = "") {
    std::vector<std::vector<int>> ids;
    for (auto& text : texts)
        ids.push_back(embedding_ids(tokenizer, task.empty() ? text : with_task(task, text), (size_t)model.capacity));
    std::vector<std::vector<float>> vectors;
    model.run(ids, nullptr, [&](size_t, const std::vector<float>& hidden) {
        vectors.push_back(unit_vector(hidden, hidden.size()));
    });
    return vectors;
}
