// reply.h: the pieces of answers, and where the engine leaves them for whoever asked.
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

// What is told of a token when log-probabilities are asked for. Texts joined are the answer.
struct TokenInfo {
    int id;
    float logprob;
    std::string text;
    std::vector<Alternative> top;
};

// The next piece of one of a request's answers.
struct Piece {
    int choice = 0;
    bool thought = false; // what the model says to itself
    std::string text;
    std::vector<TokenInfo> tokens;
    std::vector<CallPart> calls{};
    const char* finish = nullptr;  // with the last piece: "stop", "length" or "tool_calls",
    size_t count = 0;              // tokens drawn for the answer, its end token too
    size_t cached = 0;             // tokens of the prompt from the cache,
    size_t thoughts = 0;           // ... of the thought,
    std::string stop{};            // ... and the stop string that ended it
    std::vector<float> hidden{};   // (C) of a pooled job, which has this one piece
};

size_t bytes_of(const Piece& piece);

// Where the engine leaves pieces, and whoever asked takes them.
struct Reply {
    std::mutex mutex;
    std::vector<Piece> pieces;        // not yet taken
    bool whole = false;               // nobody looks before the end: an answer's pieces are joined
    int left = 0;                     // answers that are not finished
    std::atomic<bool> cancelled{false};
    std::shared_ptr<Budget::Share> share{}; // of what waits to be sent; none: it is not counted
    size_t kept = 0;                  // bytes of the request that wait with it, to be sent too
    double first = 0, last = 0;       // when pieces came
    std::function<void()> wake;       // called with `mutex` held after every piece

    void put(Piece&& piece);
};

} // namespace server
