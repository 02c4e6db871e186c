// reply.h: the pieces of answers, and the mailbox from the engine to a request.
#pragma once
#include "form/tools.h"
#include "server/engine/budget.h"
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace server {

struct Alternative {
    int id;
    float logprob;
};

// Log-probabilities reported per token. The joined texts are the answer.
struct TokenInfo {
    int id;
    float logprob;
    std::string text;
    std::vector<Alternative> top;
};

// The next piece of one of a request's answers.
struct Piece {
    int choice = 0;
    bool thought = false; // part of the thought
    std::string text;
    std::vector<TokenInfo> tokens;
    std::vector<TokenInfo> prompt{}; // in the first piece, if requested; the first token's log-probability is NaN
    std::vector<CallPart> calls{};
    const char* finish = nullptr;  // in the last piece: "stop", "length" or "tool_calls",
    size_t count = 0;              // tokens sampled, the end token included
    size_t cached = 0, read = 0;   // prompt tokens from the cache; of these read from the disk,
    size_t thoughts = 0;           // ... tokens of the thought,
    std::string stop{};            // ... and the stop string that ended it
    std::vector<float> hidden{};   // (C) of a pooled job, which has only this piece
};

size_t bytes_of(const Piece& piece);

// A mailbox: the engine adds pieces, the request takes them.
struct Reply {
    std::mutex mutex;
    std::vector<Piece> pieces;        // not yet taken
    bool whole = false;               // read only at the end: an answer's pieces are joined
    int left = 0;                     // unfinished answers
    std::atomic<bool> cancelled{false};
    std::shared_ptr<Budget::Share> share{}; // of the data waiting to be sent; null: not counted
    size_t kept = 0;                  // bytes of the request that are kept until it is sent
    double first = 0, last = 0;       // when pieces came
    std::function<void()> wake;       // called with `mutex` held after every piece

    void put(Piece&& piece);
};

} // namespace server
