// book/datagen/requests.h: requests in OpenAI's Batch format, their address, and the journal of their answers.
#pragma once
#include "book/rows.h"
#include "sj.h"
#include <cstdint>
#include <string>
#include <string_view>
#include <unistd.h>
#include <unordered_map>

namespace book {

// The name of the JSON schema that `prompt` requests.
constexpr const char* ANSWER_FORM = "questions";

// A request in OpenAI's Batch format. id covers the whole request, not only the author's custom_id.
struct Request {
    std::string custom_id, url, body, id;
    std::string model; // named by the row
    Reader::Place place;
    size_t number;
    explicit Request(const Reader& in);
    // For a row without a model; its id does not change.
    void set_model(const std::string& name);
    // The form that `prompt` requests of the answer helps the endpoint and is not part of the request: the id is the
    // same without it.
    bool has_form() const;
    void remove_form();
    // Appends to the last message why an earlier reply could not be used.
    void complain(const std::string& why);
};

// The answers so far, in OpenAI's Batch output format, each appended and synced as it arrives. A partial last line,
// left by a kill, is cut off. Only answers are stored: the next run repeats failed requests.
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

// The address of a request: its url after the endpoint's. The endpoint may end in a version (/v1, /v4), which replaces
// /v1, or be the whole address of the chat already.
std::string address(std::string endpoint, const std::string& url);

// Replaces a key in a text by ***, even if its characters are escaped as in JSON, a URL or HTML.
std::string without_key(std::string_view text, const std::string& key);

// An endpoint's error message: OpenAI's {"error": {"message"}}, or others' {"error": text}, {"message"}, {"detail"};
// otherwise the beginning of the reply. One line.
std::string words_of(sj::Value reply, const std::string& text);

} // namespace book
