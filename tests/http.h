// A small HTTP client on plain sockets, for the server's tests and its bench, and a listener for endpoints that tests
// play. Throws Error.
#pragma once
#include "base/file.h"
#include <arpa/inet.h>
#include <atomic>
#include <functional>
#include <map>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <thread>
#include <vector>

struct HttpReply {
    int status = 0;
    std::map<std::string, std::string> headers; // names in lower case
    std::string body;
};

struct Http {
    int fd;
    std::string buffer; // received and not yet taken
    bool chunked = false;
    int patience = 30'000;  // ms without a byte

    // segment: bytes of a packet; 0: what the network likes (loopback: 64 KB). from: the client's own address.
    explicit Http(int port, const char* host = "127.0.0.1", int segment = 0, const char* from = nullptr)
        : fd(socket(AF_INET, SOCK_STREAM, 0)) {
        sockaddr_in at = {}, own = {};
        own.sin_family = AF_INET;
        if (from && (inet_pton(AF_INET, from, &own.sin_addr) != 1 || bind(fd, (sockaddr*)&own, sizeof own)))
            DIE("%s: %s", from, strerror(errno));
        at.sin_family = AF_INET, at.sin_port = htons((uint16_t)port);
        inet_pton(AF_INET, host, &at.sin_addr);
        const int one = 1;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        if (segment) setsockopt(fd, IPPROTO_TCP, TCP_MAXSEG, &segment, sizeof segment);
        if (connect(fd, (sockaddr*)&at, sizeof at) != 0) {
            const int fault = errno;
            ::close(fd);
            DIE("%s:%d: %s", host, port, strerror(fault));
        }
    }
    Http(const Http&) = delete;
    ~Http() { close(); }
    void close() {
        if (fd >= 0) ::close(fd);
        fd = -1;
    }

    void send(std::string_view bytes) {
        while (!bytes.empty()) {
            const ssize_t n = ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
            if (n <= 0) DIE("send: %s", strerror(errno));
            bytes.remove_prefix((size_t)n);
        }
    }
    // More bytes; false: the peer has closed.
    bool fill() {
        pollfd p = {fd, POLLIN, 0};
        if (poll(&p, 1, patience) != 1) DIE("no answer within %d ms", patience);
        char some[65536];
        const ssize_t n = recv(fd, some, sizeof some, 0);
        if (n > 0) buffer.append(some, (size_t)n);
        return n > 0;
    }
    std::string take(size_t n) {
        while (buffer.size() < n)
            if (!fill()) DIE("the peer closed early");
        std::string out = buffer.substr(0, n);
        buffer.erase(0, n);
        return out;
    }
    std::string line() {
        size_t end;
        while ((end = buffer.find("\r\n")) == std::string::npos)
            if (!fill()) DIE("the peer closed early");
        const std::string out = take(end);
        take(2);
        return out;
    }

    void ask(const std::string& method, const std::string& path, std::string_view body = "", const std::string& headers = "") {
        std::string all = method + " " + path + " HTTP/1.1\r\nHost: localhost\r\n" + headers;
        if (method == "POST") all += format("Content-Type: application/json\r\nContent-Length: %zu\r\n", body.size());
        send(all + "\r\n" + std::string(body));
    }
    HttpReply head() {
        HttpReply r;
        const std::string first = line();
        if (sscanf(first.c_str(), "HTTP/1.1 %d", &r.status) != 1) DIE("not HTTP: %.60s", first.c_str());
        for (std::string h; !(h = line()).empty();) {
            const size_t colon = h.find(": ");
            std::string name = h.substr(0, colon);
            for (char& c : name) c = (char)tolower(c);
            r.headers[name] = h.substr(colon + 2);
        }
        chunked = r.headers["transfer-encoding"] == "chunked";
        return r;
    }
    bool chunk(std::string& out) { // false: that was the last
        const size_t n = strtoul(line().c_str(), nullptr, 16);
        out += take(n);
        line();
        return n > 0;
    }
    HttpReply reply() {
        HttpReply r = head();
        if (chunked) while (chunk(r.body)) {}
        else r.body = take((size_t)atol(r.headers["content-length"].c_str()));
        return r;
    }
    HttpReply call(const std::string& method, const std::string& path, std::string_view body = "", const std::string& headers = "") {
        ask(method, path, body, headers);
        return reply();
    }
};

// The data of an event stream, an event each; without comments, which say that it lives.
inline std::vector<std::string> events_of(const std::string& body) {
    std::vector<std::string> all;
    for (size_t at = 0, end; (end = body.find("\n\n", at)) != std::string::npos; at = end + 2) {
        if (body[at] == ':') continue;
        if (body.compare(at, 6, "data: ") != 0) DIE("not an event: %.60s", body.c_str() + at);
        all.push_back(body.substr(at + 6, end - at - 6));
    }
    return all;
}

// A port of this machine that nothing listens at.
inline int free_port() {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in at = {};
    at.sin_family = AF_INET, at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof at;
    const bool bound = bind(fd, (sockaddr*)&at, size) == 0 && getsockname(fd, (sockaddr*)&at, &size) == 0;
    ::close(fd);
    if (!bound) DIE("no free port");
    return ntohs(at.sin_port);
}

// A port of this machine; `serve` gets each connection in a thread of its own, and does not close it. When serve is to
// wait, it asks with receive(), which comes back once the listener ends.
class Listener {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    std::atomic<bool> stopping{false};
    std::vector<std::thread> peers;
    std::thread acceptor;

  public:
    int port = 0;

    explicit Listener(std::function<void(int peer)> serve) {
        sockaddr_in at = {};
        at.sin_family = AF_INET, at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        socklen_t size = sizeof at;
        if (bind(fd, (sockaddr*)&at, size) != 0 || listen(fd, 100) != 0 || getsockname(fd, (sockaddr*)&at, &size) != 0) {
            const int fault = errno;
            ::close(fd);
            DIE("a port to listen on: %s", strerror(fault));
        }
        port = ntohs(at.sin_port);
        acceptor = std::thread([this, serve] {
            while (!stopping) {
                pollfd p = {fd, POLLIN, 0};
                if (poll(&p, 1, 20) <= 0) continue;
                const int peer = accept4(fd, nullptr, nullptr, SOCK_CLOEXEC);
                if (peer >= 0) peers.emplace_back([serve, peer] { serve(peer), ::close(peer); });
            }
        });
    }
    Listener(const Listener&) = delete;
    ~Listener() {
        stopping = true;
        acceptor.join();
        for (auto& t : peers) t.join();
        ::close(fd);
    }

    // More bytes; false: the peer has closed, or the listener ends.
    bool receive(int peer, std::string& in) const {
        char some[65536];
        while (!stopping) {
            pollfd p = {peer, POLLIN, 0};
            if (poll(&p, 1, 20) <= 0) continue;
            const ssize_t n = recv(peer, some, sizeof some, 0);
            if (n > 0) in.append(some, (size_t)n);
            return n > 0;
        }
        return false;
    }
    // The next request of a connection: its head, without the blank line, and its body. `in` keeps what comes after it.
    bool request(int peer, std::string& in, std::string& head, std::string& body) const {
        size_t end;
        while ((end = in.find("\r\n\r\n")) == in.npos)
            if (!receive(peer, in)) return false;
        head = in.substr(0, end);
        const size_t said = head.find("Content-Length: ");
        const size_t length = said == head.npos ? 0 : (size_t)std::stoul(head.substr(said + 16));
        while (in.size() < end + 4 + length)
            if (!receive(peer, in)) return false;
        body = in.substr(end + 4, length);
        in.erase(0, end + 4 + length);
        return true;
    }
};
