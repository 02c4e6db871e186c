// main() of every suite: doctest's.
#define DOCTEST_CONFIG_IMPLEMENT
#include <csignal>
#include <doctest/doctest.h>

int main(int argc, char** argv) {
    // Programs inherit ignored signals, such as Python's SIGPIPE and SIGINT after a shell's &.
    for (int number : {SIGHUP, SIGINT, SIGQUIT, SIGPIPE, SIGTERM, SIGXFSZ}) signal(number, SIG_DFL);
    return doctest::Context(argc, argv).run();
}
