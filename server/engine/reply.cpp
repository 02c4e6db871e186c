// reply.cpp: joins pieces of replies that are read only at the end.
#include "server/engine/reply.h"
#include <algorithm>
#include <iterator>

namespace server {

size_t bytes_of(const Piece& piece) {
    size_t n = sizeof piece + piece.text.size() + piece.hidden.size() * sizeof(float);
    for (auto* tokens : {&piece.tokens, &piece.prompt})
        for (auto& t : *tokens) n += sizeof t + t.text.size() + t.top.size() * sizeof(Alternative);
    for (auto& c : piece.calls) n += sizeof c + c.name.size() + c.arguments.size();
    return n;
}

void Reply::put(Piece&& piece) {
    auto joins = [&](const Piece& p) { return p.choice == piece.choice && p.thought == piece.thought; };
    const auto at = whole ? std::find_if(pieces.rbegin(), pieces.rend(), joins) : pieces.rend();
    const bool after_call = at != pieces.rend() && !at->calls.empty() && !piece.text.empty(); // keeps the order
    if (at == pieces.rend() || after_call) return pieces.push_back(std::move(piece));
    at->text += piece.text;
    std::move(piece.tokens.begin(), piece.tokens.end(), std::back_inserter(at->tokens));
    std::move(piece.prompt.begin(), piece.prompt.end(), std::back_inserter(at->prompt));
    std::move(piece.calls.begin(), piece.calls.end(), std::back_inserter(at->calls));
    at->finish = piece.finish, at->count = piece.count, at->cached = piece.cached, at->read = piece.read;
    at->thoughts = piece.thoughts, at->stop = std::move(piece.stop);
}

} // namespace server
