// answer.h: turns pieces into OpenAI's JSON: whole, in parts, or as server-sent events.
#pragma once
#include "model/tokenizer.h"
#include "search/documents.h"
#include "server/api/pooled.h"
#include "server/api/request.h"
#include "server/api/service.h"
#include "server/engine/random_bits.h"
#include "server/engine/reply.h"
#include "sj.h"
#include <ctime>
#include <memory>
#include <string>
#include <vector>

namespace server {

// A single token's text. A token that is not whole characters becomes U+FFFD; its bytes are reported exactly.
std::string token_text(const Tokenizer& t, int id);

// The token's name where names are keys. A token that is not whole characters is named by its bytes, as in
// "bytes:\xe2\x80", so that few tokens share a name.
std::string token_name(const Tokenizer& t, int id);

// One request's answers as JSON: whole, in parts of limited size, or in chunks as they arrive.
struct Answer {
    const Tokenizer& tokenizer;
    std::string id, model;
    bool chat, usage, logprobs, echoes;
    int alternatives, prompt_logprobs; // to each token; see Ask
    size_t prompt_tokens, each;
    long created = (long)time(nullptr);
    struct Choice {
        std::string text, thought;
        std::vector<TokenInfo> tokens; // with `echoes` the prompt's come first
        std::vector<TokenInfo> prompt{}; // for prompt_logprobs
        std::vector<CallPart> calls{}; // complete calls
        size_t calls_begun = 0;        // for a stream
        bool begun = false;
        size_t offset = 0, count = 0, cached = 0, read = 0, thoughts = 0;
        std::string stop{};
        const char* finish = nullptr;
    };
    std::vector<Choice> choices;
    std::vector<std::string> echo;         // one per prompt, or empty
    bool documents;                        // sources are reported,
    std::vector<Source> sources;           // ... in a stream with the first event
    std::shared_ptr<const Pooled> how;     // for `pooled`
    std::unique_ptr<PooledAnswer> pooled;  // vectors or a ranking; null: text
    uint64_t call_seed = random_bits();
    static constexpr size_t PART = 1 << 16; // bytes, approximately

    Answer(const Service& service, const Ask& ask);
    virtual ~Answer() = default;

    bool complete() const {
        return std::all_of(choices.begin(), choices.end(), [](const Choice& c) { return c.finish; });
    }
    size_t count() const;
    const char* broken() const { return pooled ? pooled->broken : nullptr; } // why there is no result
    size_t cached() const; // tokens; of each prompt, those of its first answer;
    size_t read() const;   // ... those of them that came from the disk

    // Takes a piece, to be reported later as a whole.
    virtual void add(Piece&& piece);
    std::string whole();

    // Adds to the request's line in the log.
    virtual void log(sj::Writer&) const {}

    // The whole answer in parts: the next part, until told() is true. Log-probabilities already written are freed.
    virtual bool told() const { return place.told; }
    virtual std::string part();

    // A piece as server-sent events; the last piece also closes the stream.
    virtual std::string events(const Piece& piece);

  protected:
    Choice& note(const Piece& piece);

  private:
    // The tokens that a piece reports, with `echoes` the prompt's first.
    std::vector<TokenInfo> reported(const Piece& piece) const;
    // Unique per answer, since a client may keep the calls of many answers in one list.
    std::string call_id(size_t choice, size_t index) const {
        return format("call_%016llx", (unsigned long long)(call_seed + (choice << 32) + index));
    }
    void write_calls(sj::Writer& w, const Choice& c, size_t choice) const;
    void begin(sj::Writer& w, const char* object) const;
    void write_usage(sj::Writer& w) const;
    const std::string& echo_of(size_t choice) const;

    // Log-probabilities: an object of lists with one entry per token. A chat has one list, a completion has four.
    bool tells(const std::vector<TokenInfo>& tokens) const { return logprobs && !(chat && tokens.empty()); }
    size_t columns() const { return chat ? 1 : 4; }
    void write_logprobs(sj::Writer& w, Choice& c, const std::vector<TokenInfo>& tokens);
    // Writes about PART bytes, from `place` on.
    void write_some(sj::Writer& w, Choice& c, const std::vector<TokenInfo>& tokens);
    void write_entry(sj::Writer& w, Choice& c, const TokenInfo& t) const;
    // vLLM's prompt_logprobs, about PART bytes from `place` on. True: they are complete.
    bool write_prompt(sj::Writer& w, const std::vector<TokenInfo>& prompt);

    sj::Writer writer{};
    struct { size_t choice = 0, column = 0, token = 0; bool told = false; } place; // the next entry to write
};

} // namespace server
