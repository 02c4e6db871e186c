// book/requests.h: requests in OpenAI's Batch format, where they go, and the journal of their answers.
#pragma once
#include "book/rows.h"
#include "sj.h"
#include <cstdint>
#include <string>
#include <string_view>
#include <unistd.h>
#include <unordered_map>

namespace book {

// The name of the JSON schema that `prompt` asks for.
constexpr const char* ANSWER_FORM = "questions";

// What is asked, as OpenAI's Batch format has it. id names the whole request, not only what its author called it.
struct Request {
    std::string custom_id, url, body, id;
    std::string model; // that the row names
    Reader::Place place;
    size_t number;
    explicit Request(const Reader& in);
    // A row without a model asks whatever model there is: its id stays.
    void set_model(const std::string& name);
    // The form of the answer that `prompt` asks for is a help for the endpoint, and no part of the request: without it
    // the id is the same.
    bool has_form() const;
    void remove_form();
    // Says after the last message why an earlier reply could not be used.
    void complain(const std::string& why);
};

// The answers so far, in OpenAI's Batch output format, each appended and synced as it comes. A line that a kill cut
// short is cut off. Only what was answered is in here: what failed is asked again by the next run.
struct Journal {
    struct Place { uint64_t offset; size_t length; std::string id; };
    std::string path;
    std::unordered_map<std::string, Place> answers; // by custom_id

    explicit Journal(const std::string& p);
    Journal(const Journal&) = delete;
    ~Journal() { if (fd >= 0) close(fd); }

    bool has(const Request& r) const;
    void add(const Request& r, long status, const std::string& reply);
    std::string line(const Request& r) const;

  private:
    int fd = -1;
    uint64_t end = 0;
};

// Where a request goes: its url after the endpoint's, which may end in a version (/v1, /v4) that takes /v1's place,
// or be the whole address of the chat already.
std::string address(std::string endpoint, const std::string& url);

// A text without a key that may stand in it, however JSON, a URL or HTML escape its characters: *** in its place.
std::string without_key(std::string_view text, const std::string& key);

// What an endpoint says of a fault: OpenAI's {"error": {"message"}}, or others' {"error": text}, {"message"},
// {"detail"}; else the beginning of the reply. One line.
std::string words_of(sj::Value reply, const std::string& text);

} // namespace book
