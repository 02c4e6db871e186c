// items.h: an answer as a list of items: thoughts, texts and calls.
#pragma once
#include "server/api/answer.h"
#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace server {

// An answer as a list of items in output order: thoughts, texts and calls.
struct ItemAnswer : Answer {
    struct Item {
        enum Kind { THOUGHT, TEXT, CALL } kind;
        std::string text{}, name{}; // text: for a call, its arguments
    };
    std::vector<Item> items;
    const bool stream;
    bool begun = false, closed = true; // closed: the last item is complete
    bool ending = false;               // no further piece follows
    std::string out;                   // events

    ItemAnswer(const Service& service, const Ask& ask) : Answer(service, ask), stream(ask.stream) {}

    bool told() const override { return ending; }
    void add(Piece&& piece) override { take(piece); }
    std::string part() override;
    std::string events(const Piece& piece) override;

  protected:
    virtual std::string whole_json() = 0;
    virtual void begin(const Piece& first) = 0; // events of the answer,
    virtual void end() = 0;
    virtual void open_item(size_t i) = 0;       // ... and of an item
    virtual void tell(size_t i, const std::string& more) = 0;
    virtual void close_item(size_t i) = 0;

    // Whether item i is incomplete, because the answer was cut off in it.
    bool cut(size_t i) const { return ending && i + 1 == items.size() && !strcmp(choices[0].finish, "length"); }
    std::string item_id(const char* kind, size_t i) const {
        return format("%s_%016llx", kind, (unsigned long long)(call_seed + i));
    }
    template <class F> void event(const char* name, F fill) {
        sj::Writer w;
        w.object().field("type", name);
        fill(w);
        out += format("event: %s\ndata: ", name) + w.end().text + "\n\n";
    }

  private:
    void take(const Piece& piece);
    void say(Item::Kind kind, const std::string& more);
    void open(Item&& item);
    void close() {
        if (!std::exchange(closed, true) && stream) close_item(items.size() - 1);
    }
};

} // namespace server
