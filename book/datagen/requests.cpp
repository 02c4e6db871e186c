#include "book/datagen/requests.h"
#include "base/appended_file.h"
#include "base/file.h"
#include "book/characters.h"
#include "book/text.h"
#include "model/utf8.h"
#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <utility>

namespace book {

Request::Request(const Reader& in) : place(in.place()), number(in.number) {
    const sj::Value v = in.need();
    custom_id = v["custom_id"].str(), url = v["url"].str(), body = v["body"].raw();
    model = v["body"]["model"].str();
    if (custom_id.empty()) DIE("%s: no custom_id", in.where().c_str());
    if (v["method"].str() != "POST" || url[0] != '/' || !v["body"].is(sj::Object))
        DIE("%s: expected a method POST, a url that begins with / and a body", in.where().c_str());
    const std::string whole = body;
    if (has_form()) remove_form();
    id = "batch_req_" + hex(fnv1a(url + "\n" + body));
    body = whole;
}

// A body with some members replaced. change(w, key, value) writes the new value, or returns false to keep the old one.
template <class F> static std::string rewritten(const std::string& body, const sj::Writer& begun, F change) {
    sj::Doc doc;
    sj::parse(doc, body);
    sj::Writer w = begun;
    for (auto [key, value] : doc.root().members())
        if (!change(w, key, value)) w.key(key).value(value);
    return w.end().text;
}

void Request::set_model(const std::string& name) {
    sj::Writer w;
    w.object().field("model", name);
    body = rewritten(body, w, [](sj::Writer&, const std::string& key, sj::Value) { return key == "model"; });
}

bool Request::has_form() const {
    sj::Doc doc;
    sj::parse(doc, body);
    return doc.root()["response_format"]["json_schema"]["name"].str() == ANSWER_FORM;
}

void Request::remove_form() {
    sj::Writer w;
    w.object();
    body = rewritten(body, w, [](sj::Writer&, const std::string& key, sj::Value) { return key == "response_format"; });
}

void Request::complain(const std::string& why) {
    sj::Writer w;
    w.object();
    body = rewritten(body, w, [&](sj::Writer& w, const std::string& key, sj::Value value) {
        if (key != "messages" || !value.size()) return false;
        w.key(key).array();
        size_t left = value.size();
        for (sj::Value message : value.items()) {
            if (--left || !message["content"].is(sj::String)) {
                w.value(message);
                continue;
            }
            w.object();
            for (auto [name, text] : message.members())
                if (name != "content") w.key(name).value(text);
            w.field("content", message["content"].str() + "\n\nAn earlier reply to this could not be used: " + why +
                               ". Reply with the JSON only, complete and valid.").end();
        }
        w.end();
        return true;
    });
}

Journal::Journal(const std::string& p) : path(p) {
    fd = open(p.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    struct stat st;
    if (fd < 0 || fstat(fd, &st) != 0) DIE("%s: %s", p.c_str(), strerror(errno));
    if (!S_ISREG(st.st_mode)) DIE("%s: not a regular file", p.c_str());
    if (flock(fd, LOCK_EX | LOCK_NB) != 0) DIE("%s: another run is writing it", p.c_str());
    for (end = (uint64_t)st.st_size; end > 0; end--) {
        char c;
        if (pread(fd, &c, 1, (off_t)end - 1) == 1 && c == '\n') break;
    }
    if (ftruncate(fd, (off_t)end) != 0) DIE("%s: %s", p.c_str(), strerror(errno));
    Reader in(p);
    while (in.next()) {
        const sj::Value v = in.need();
        if (!v["custom_id"].is(sj::String) || !v["response"]["body"])
            DIE("%s: not an answer; remove the file to start anew", in.where().c_str());
        answers[v["custom_id"].str()] = {in.offset, in.text.size(), v["id"].str()};
    }
}

bool Journal::has(const Request& r) const {
    const auto found = answers.find(r.custom_id);
    if (found == answers.end()) return false;
    if (found->second.id != r.id)
        DIE("%s: %s was asked something else; remove the file to start anew", path.c_str(), r.custom_id.c_str());
    return true;
}

void Journal::add(const Request& r, long status, const std::string& reply) {
    sj::Writer w;
    w.object().field("id", r.id).field("custom_id", r.custom_id).key("response").object();
    w.field("status_code", status).field("request_id", r.id).key("body").text += one_line(reply);
    std::string line = w.text + "}, \"error\": null}\n";
    answers[r.custom_id] = {end, line.size() - 1, r.id};
    end += line.size();
    append_whole(fd, path, line);
    if (fdatasync(fd) != 0) DIE("%s: %s", path.c_str(), strerror(errno));
}

std::string Journal::line(const Request& r) const {
    const Place& at = answers.at(r.custom_id);
    std::string s(at.length, '\0');
    if (pread(fd, s.data(), s.size(), (off_t)at.offset) != (ssize_t)s.size())
        DIE("%s: changed meanwhile", path.c_str());
    return s;
}

// The character at s[at], which may be escaped as in JSON (\u0041, also with more backslashes), a URL (%41) or HTML
// (&#65; &#x41; &amp;); n: its bytes.
static int escaped_character(std::string_view s, size_t at, size_t* n) {
    auto number = [&](size_t from, size_t digits, int base) {
        const std::string text(s.substr(std::min(from, s.size()), digits));
        char* end;
        const long c = strtol(text.c_str(), &end, base);
        const bool number = !*end && text.find_first_not_of("0123456789abcdefABCDEF") == text.npos;
        return number && text.size() == digits ? (int)c : -1;
    };
    if (s[at] == '%') return *n = 3, number(at + 1, 2, 16);
    if (s[at] == '\\') {
        const size_t behind = std::min(s.find_first_not_of('\\', at), s.size());
        if (behind == s.size()) return -1;
        if (s[behind] != 'u') return *n = behind + 1 - at, (uint8_t)s[behind];
        return *n = behind + 5 - at, number(behind + 1, 4, 16);
    }
    const std::string_view entity = s.substr(at, 10).substr(0, s.substr(at, 10).find(';'));
    *n = entity.size() + 1;
    if (entity.substr(0, 3) == "&#x") return number(at + 3, entity.size() - 3, 16);
    if (entity.substr(0, 2) == "&#") return number(at + 2, entity.size() - 2, 10);
    for (auto [name, c] : {std::pair("&amp", '&'), {"&lt", '<'}, {"&gt", '>'}, {"&quot", '"'}, {"&apos", '\''}})
        if (entity == name) return c;
    return -1;
}

std::string without_key(std::string_view text, const std::string& key) {
    std::string out;
    for (size_t at = 0; at < text.size();) {
        size_t end = at, matched = 0;
        while (matched < key.size() && end < text.size()) {
            size_t n = 1;
            const bool may = strchr("\\%&", text[end]);
            if (!may || escaped_character(text, end, &n) != (uint8_t)key[matched]) n = text[end] == key[matched];
            if (!n) break;
            matched++, end += n;
        }
        const bool found = !key.empty() && matched == key.size();
        if (found) out += "***", at = end;
        else out += text[at++];
    }
    return out;
}

std::string address(std::string endpoint, const std::string& url) {
    while (!endpoint.empty() && endpoint.back() == '/') endpoint.pop_back();
    const std::string path = url.compare(0, 4, "/v1/") ? url : url.substr(3), chat = "/chat/completions";
    const size_t base = endpoint.size() - std::min(endpoint.size(), chat.size());
    if (path != chat && endpoint.substr(base) == chat) endpoint.erase(base);
    if (endpoint.size() >= path.size() && !endpoint.compare(endpoint.size() - path.size(), path.size(), path))
        return endpoint;
    const std::string last = endpoint.substr(endpoint.rfind('/') + 1);
    const bool version = last.size() > 1 && last[0] == 'v' && last.find_first_not_of("0123456789", 1) == last.npos;
    return endpoint + (version ? path : url);
}

std::string words_of(sj::Value reply, const std::string& text) {
    const sj::Value error = reply["error"];
    for (sj::Value v : {error["message"], error, reply["message"], reply["detail"]}) {
        if (v.is(sj::String) && !v.str().empty()) return score_excerpt(v.str(), 500);
    }
    const sj::Value other = error ? error : reply["detail"];
    std::string valid;
    utf8_repair(valid, std::string_view(other ? other.raw() : text).substr(0, 2000), true);
    return score_excerpt(trimmed(valid), 200);
}

} // namespace book
