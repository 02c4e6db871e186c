// main() of every suite: doctest's.
#define DOCTEST_CONFIG_IMPLEMENT
#include <csignal>
#include <doctest/doctest.h>

int main(int argc, char** argv) {
    // Whoever started the suites may ignore signals (Python SIGPIPE, a shell's & SIGINT); programs inherit that.
    for (int number : {SIGHUP, SIGINT, SIGQUIT, SIGPIPE, SIGTERM, SIGXFSZ}) signal(number, SIG_DFL);
    return doctest::Context(argc, argv).run();
}
