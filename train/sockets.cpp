// train/sockets.cpp: connections between ranks.
#include "train/sockets.h"
#include "base/error.h"
#include <cerrno>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

namespace sockets {

void send_all(int fd, const void* bytes, size_t n) {
    for (size_t sent = 0; sent < n;) {
        const ssize_t k = send(fd, (const char*)bytes + sent, n - sent, MSG_NOSIGNAL);
        if (k < 0 && errno == EINTR) continue;
        if (k <= 0) throw Gone();
        sent += (size_t)k;
    }
}
void receive_all(int fd, void* bytes, size_t n) {
    for (size_t got = 0; got < n;) {
        const ssize_t k = recv(fd, (char*)bytes + got, n - got, 0);
        if (k < 0 && errno == EINTR) continue;
        if (k <= 0) throw Gone();
        got += (size_t)k;
    }
}
void send_text(int fd, const std::string& text) {
    const uint32_t n = (uint32_t)text.size();
    send_all(fd, &n, sizeof n), send_all(fd, text.data(), n);
}
std::string receive_text(int fd) {
    uint32_t n;
    receive_all(fd, &n, sizeof n);
    if (n > 1 << 20) throw Gone(); // not one of us
    std::string text(n, '\0');
    receive_all(fd, text.data(), n);
    return text;
}

void give_up_after(int fd, double s) {
    const timeval limit = {(time_t)s, 0};
    for (int way : {SO_RCVTIMEO, SO_SNDTIMEO}) setsockopt(fd, SOL_SOCKET, way, &limit, sizeof limit);
}

int open_socket(const std::string& host, int port, bool listening) {
    addrinfo hints = {}, *list = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    if (const int fault = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list))
        DIE("MASTER_ADDR %s: %s", host.c_str(), gai_strerror(fault));
    int fd = -1;
    for (addrinfo* a = list; a && fd < 0; a = a->ai_next) {
        fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
        const int on = 1;
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        const bool good = fd >= 0 && (listening ? bind(fd, a->ai_addr, a->ai_addrlen) == 0 && listen(fd, 1024) == 0
                                                : connect(fd, a->ai_addr, a->ai_addrlen) == 0);
        if (good || fd < 0) continue;
        const int fault = errno;
        close(fd), fd = -1, errno = fault;
    }
    freeaddrinfo(list);
    return fd;
}

} // namespace sockets
