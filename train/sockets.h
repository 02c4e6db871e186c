// train/sockets.h: connections between ranks: whole messages over TCP.
#pragma once
#include <cstddef>
#include <string>
#include <unistd.h>

namespace sockets {

struct Gone {}; // thrown: the other end of a connection
struct Descriptor { // closed in the end
    const int fd;
    explicit Descriptor(int of) : fd(of) {}
    ~Descriptor() { close(fd); }
};

// All n bytes, or Gone.
void send_all(int fd, const void* bytes, size_t n);
void receive_all(int fd, void* bytes, size_t n);
void send_text(int fd, const std::string& text);
std::string receive_text(int fd); // Gone if it is longer than 1 MiB

// From now on a byte is awaited so many seconds; 0: without end.
void give_up_after(int fd, double s);

// A TCP socket that listens at host:port or is connected to it; -1: not possible now; errno has the reason.
int open_socket(const std::string& host, int port, bool listening);

} // namespace sockets
