// embed_api.cpp: texts and their limits.
#include "model/tokenizer.h"
#include "search/embed.h"
#include "search/rerank.h"
#include "server/api/embed_api.h"
#include "server/api/limits.h"
#include "server/api/pooled.h"
#include "server/api/prompts.h"
#include "server/engine/random_bits.h"
#include <algorithm>
#include <climits>
#include <utility>
#include <vector>

namespace server {

// Fields accepted with these values only; others would change the answer.
static void refuse_of_pooled(const Fields& f, const std::vector<std::pair<const char*, Values>>& only) {
    for (auto& [name, values] : only)
        if (f[name]) refuse_value(name, f[name], values);
}

// truncate_prompt_tokens and truncation_side: how many ids of a text are kept, its first or its last.
struct Cut {
    size_t most = 0; // 0: a text that does not fit is refused
    bool keep_last = false;
};
static Cut cut_from_json(const Service& service, const Fields& f) {
    const int64_t most = f.integer("truncate_prompt_tokens", -1, service.context, 0);
    if (most == 0 && f["truncate_prompt_tokens"])
        throw Refusal(400, "truncate_prompt_tokens must be -1 or positive", "truncate_prompt_tokens");
    const std::string side = f.text("truncation_side");
    if (!side.empty() && side != "left" && side != "right")
        throw Refusal(400, "truncation_side must be left or right", "truncation_side");
    return {(size_t)(most < 0 ? service.context : most), side == "left"};
}

// The request without its jobs.
static Ask pooled_ask(const Service& service, const Fields& f, const char* prefix, std::shared_ptr<Pooled> how) {
    Ask ask;
    ask.adapter = asked_adapter(service, f);
    ask.chat = false;
    ask.id = prefix + request_name(f);
    ask.pooled = std::move(how);
    f.text("user");
    return ask;
}

// Checks and stores a text's ids. `name` is the field, `tokens` counts those of the texts so far.
static void add_text(const Service& service, std::vector<std::vector<int>>& texts, std::vector<int>&& ids,
                     const char* name, size_t& tokens) {
    if (ids.empty()) throw Refusal(400, format("%s %zu has no token", name, texts.size()), name);
    if (ids.size() > (size_t)service.context)
        throw Refusal(400, format("the context is %d tokens: %s %zu has %zu (truncate_prompt_tokens cuts)",
                                  service.context, name, texts.size(), ids.size()), name, "context_length_exceeded");
    if ((tokens += ids.size()) > MAX_TEXT_TOKENS)
        throw Refusal(400, format("at most %zu tokens in a request: ask in several", MAX_TEXT_TOKENS), name);
    texts.push_back(std::move(ids));
}

// Adds one job per text.
static void add_pooled_jobs(const Fields& f, Ask& ask, std::vector<std::vector<int>>&& texts, uint64_t salt) {
    Job job;
    job.salt = salt, job.adapter = ask.adapter, job.pooled = true, job.max_tokens = 1;
    if (const std::string own = f.text("cache_salt"); !own.empty()) job.use_cache_salt(own);
    else if (f["cache_salt"]) throw Refusal(400, "cache_salt must not be empty", "cache_salt");
    job.priority = (int)f.integer("priority", INT_MIN, INT_MAX, 0);
    job.reply = std::make_shared<Reply>();
    job.reply->whole = true;
    for (auto& ids : texts) {
        ask.prompt_tokens += ids.size();
        Job one = job;
        one.choice = one.reply->left++;
        one.prompt = std::move(ids);
        ask.jobs.push_back(std::move(one));
    }
}

Ask read_embeddings(const Service& service, const Fields& f, uint64_t salt) {
    if (!service.dimensions) throw Refusal(400, "this server makes no vectors (serve --task embed)", "model");
    refuse_of_pooled(f, {{"messages", {}}, {"embed_dtype", {"\"float32\""}}, {"endianness", {"\"little\""}},
                         {"normalize", {"true"}}, {"use_activation", {"true"}}, {"padding", {"\"do_not_pad\""}},
                         {"chat_template", {}}, {"mm_processor_kwargs", {}}});
    auto how = std::make_shared<Pooled>();
    how->dimensions = (size_t)f.integer("dimensions", 1, service.dimensions, service.dimensions);
    const std::string encoding = f.text("encoding_format");
    if (!encoding.empty() && encoding != "float" && encoding != "base64")
        throw Refusal(400, "encoding_format must be float or base64", "encoding_format");
    how->base64 = encoding == "base64";
    Ask ask = pooled_ask(service, f, "embd-", how);

    const Cut cut = cut_from_json(service, f);
    const bool end = f.boolean("add_special_tokens", true);
    const PromptOptions fits{{}, cut.most};
    std::vector<std::vector<int>> texts;
    size_t tokens = 0;
    auto add = [&](sj::Value v) { // a string, or ids, which are used as given
        std::vector<int> ids;
        if (v.is(sj::Array)) {
            ids = ids_from_json(service, v, "input");
            if (cut.most) cut_text(ids, cut.most, cut.keep_last);
        } else if (v.is(sj::String)) {
            const std::string text = v.str();
            check_length(service, text.size(), fits, "input");
            ids = embedding_ids(*service.tokenizer, text, cut.most, cut.keep_last);
            if (!end) ids.pop_back();
        } else throw Refusal(400, "input: neither a string nor a list of token ids", "input");
        add_text(service, texts, std::move(ids), "input", tokens);
    };
    const sj::Value input = f["input"];
    const bool list = input.is(sj::Array) && input.size() > 0;
    if (!list && !input.is(sj::String))
        throw Refusal(400, "input must be a string, a list of strings or of token ids, or a list of such lists",
                      "input");
    if (!list || input[(size_t)0].is(sj::Number)) add(input);
    else {
        if (input.size() > MAX_TEXTS) throw Refusal(400, format("at most %zu inputs in a request", MAX_TEXTS), "input");
        for (sj::Value v : input.items()) add(v);
    }
    add_pooled_jobs(f, ask, std::move(texts), salt);
    return ask;
}

Ask read_ranking(const Service& service, const Fields& f, uint64_t salt) {
    if (!service.rerank) throw Refusal(400, "this server makes no rankings (serve --task rerank)", "model");
    refuse_of_pooled(f, {{"use_activation", {"true"}}, {"mm_processor_kwargs", {}}, {"rank_fields", {}},
                         {"max_chunks_per_doc", {}}});
    auto how = std::make_shared<Pooled>();
    how->ranking = true, how->relevance = service.relevance;
    how->documents_too = f.boolean("return_documents", true);
    const std::string query = f.text("query"), task = f.text("instruct");
    if (query.empty()) throw Refusal(400, "query must be a string that is not empty", "query");
    const sj::Value documents = f["documents"];
    if (!documents.is(sj::Array) || documents.size() == 0)
        throw Refusal(400, "documents must be a list of strings, or of objects with text", "documents");
    if (documents.size() > MAX_TEXTS)
        throw Refusal(400, format("at most %zu documents in a request", MAX_TEXTS), "documents");
    how->most = (size_t)f.integer("top_n", 0, INT_MAX, 0); // 0: all, as in vLLM
    if (how->most == 0) how->most = documents.size();

    const Cut cut = cut_from_json(service, f);
    const PromptOptions fits{{}, cut.most};
    const size_t alone = service.rerank->length();
    if (cut.most && cut.most <= alone)
        throw Refusal(400, format("truncate_prompt_tokens: the question alone is %zu tokens", alone),
                      "truncate_prompt_tokens");
    check_length(service, query.size(), fits, "query");
    const RerankPrompt& prompt = *service.rerank;
    std::vector<int> question = prompt.query_ids(*service.tokenizer, task.empty() ? RETRIEVAL_TASK : task, query);
    cut_text(question, (size_t)service.context, cut.keep_last); // the rest would be cut anyway, and is copied each time
    std::vector<std::vector<int>> texts;
    size_t tokens = 0, kept = 0;
    for (sj::Value v : documents.items()) {
        const sj::Value text = v.is(sj::Object) ? v["text"] : v;
        if (!text.is(sj::String))
            throw Refusal(400, "documents: neither a string nor an object with text", "documents");
        std::string document = text.str();
        check_length(service, document.size(), fits, "documents");
        add_text(service, texts, prompt.ids(*service.tokenizer, question, document, cut.most, cut.keep_last),
                 "documents", tokens);
        if (!how->documents_too) continue;
        kept += sizeof document + document.size();
        how->documents.push_back(std::move(document));
    }
    Ask ask = pooled_ask(service, f, "rerank-", how);
    add_pooled_jobs(f, ask, std::move(texts), salt);
    ask.jobs[0].reply->kept = kept;
    return ask;
}

} // namespace server
