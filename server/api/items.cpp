// items.cpp: pieces become items.
#include "server/api/items.h"

namespace server {

std::string ItemAnswer::part() {
    ending = true;
    return whole_json();
}

std::string ItemAnswer::events(const Piece& piece) {
    if (!std::exchange(begun, true)) begin(piece);
    take(piece);
    if (complete()) ending = true, close(), end();
    return std::exchange(out, {});
}

void ItemAnswer::take(const Piece& piece) {
    note(piece);
    if (!piece.text.empty()) say(piece.thought ? Item::THOUGHT : Item::TEXT, piece.text);
    for (const CallPart& part : piece.calls)
        if (!part.name.empty()) open({Item::CALL, "", part.name});
        else say(Item::CALL, part.arguments);
}

void ItemAnswer::say(Item::Kind kind, const std::string& more) {
    if (closed || items.back().kind != kind) open({kind});
    items.back().text += more;
    if (stream) tell(items.size() - 1, more);
}

void ItemAnswer::open(Item&& item) {
    close();
    items.push_back(std::move(item));
    closed = false;
    if (stream) open_item(items.size() - 1);
}

} // namespace server
