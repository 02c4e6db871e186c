// doctest's main(), of every suite; and the programs' own, where suites are the programs too (tests/programs.h).
#define DOCTEST_CONFIG_IMPLEMENT
#include "tests/programs.h"
#include <doctest/doctest.h>

std::map<std::string, Main>& programs() {
    static std::map<std::string, Main> all;
    return all;
}
int main(int argc, char** argv) {
    const std::string path = argv[0];
    const auto program = programs().find(path.substr(path.rfind('/') + 1));
    return program == programs().end() ? doctest::Context(argc, argv).run() : program->second(argc, argv);
}
