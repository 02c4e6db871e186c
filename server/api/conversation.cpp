// conversation.cpp: messages; tool results are sorted by the order of their calls.
#include "base/error.h"
#include "server/api/conversation.h"
#include <algorithm>
#include <cstddef>
#include <map>
#include <string>

namespace server {

static bool absent(sj::Value v) { return !v || v.is(sj::Null); }

// Fields of a message that messages_from_json does not know. `reasoning` is vLLM's name for reasoning_content.
static void read_further_fields(sj::Value v, size_t i, Message& m) {
    if (m.role != "assistant") return;
    for (const char* name : {"function_call", "audio", "refusal"})
        if (!absent(v[name]) && !(v[name].is(sj::String) && v[name].str().empty()))
            DIE("messages[%zu]: %s is not supported%s", i, name, *name == 'f' ? "; tool_calls is" : "");
    const sj::Value thought = v["reasoning"];
    if (absent(thought)) return;
    if (!thought.is(sj::String)) DIE("messages[%zu].reasoning: not a string", i);
    if (m.reasoning && *m.reasoning != thought.str()) DIE("messages[%zu]: reasoning and reasoning_content differ", i);
    m.reasoning = thought.str();
}

namespace {
// The calls so far, by id. A later message may reuse an id, which then belongs to its own call.
struct Calls {
    struct Named { size_t message = 0; std::vector<size_t> numbers{}; size_t answered = 0; };
    std::map<std::string, Named> by_id{};
    size_t count = 0;

    void add(sj::Value list, size_t message) {
        for (sj::Value call : list.items()) {
            const std::string id = call["id"].str();
            count++;
            if (id.empty()) continue;
            Named& named = by_id[id];
            if (named.message != message) named = {message};
            named.numbers.push_back(count);
        }
    }
    // The number of the call with this id. If one message has several such calls, the next one without a result.
    size_t answer(sj::Value id) {
        const auto found = by_id.find(id.str());
        if (!id.is(sj::String) || found == by_id.end())
            DIE("messages: no call before it has the id %s", in_quotes(id.str(id.raw())).c_str());
        Named& named = found->second;
        return named.numbers[std::min(named.answered++, named.numbers.size() - 1)];
    }
};
} // namespace

// Sorts each run of results by the calls they answer. A result without an id stays behind the one before it.
static void order_results(std::vector<Message>& messages, const std::vector<size_t>& call_of) {
    for (size_t begin = 0, end; begin < messages.size(); begin = end) {
        end = begin + 1;
        while (messages[begin].role == "tool" && end < messages.size() && messages[end].role == "tool") end++;
        std::vector<std::pair<size_t, size_t>> order; // call, position
        for (size_t i = begin; i < end; i++) order.push_back({call_of[i], i});
        std::sort(order.begin(), order.end());
        std::vector<Message> run;
        for (auto [call, i] : order) run.push_back(std::move(messages[i]));
        std::move(run.begin(), run.end(), messages.begin() + (ptrdiff_t)begin);
    }
}

std::vector<Message> conversation_from_json(sj::Value list) {
    std::vector<Message> messages = messages_from_json(list);
    std::vector<size_t> call_of(messages.size()); // of a result: the number of its call
    Calls calls;
    size_t i = 0;
    for (sj::Value v : list.items()) {
        Message& m = messages[i];
        read_further_fields(v, i, m);
        if (m.role == "assistant") calls.add(v["tool_calls"], i + 1);
        if (m.role == "tool") {
            if (const sj::Value id = v["tool_call_id"]; !absent(id)) call_of[i] = calls.answer(id);
            else if (i && messages[i - 1].role == "tool") call_of[i] = call_of[i - 1];
        }
        i++;
    }
    order_results(messages, call_of);
    return messages;
}

} // namespace server
