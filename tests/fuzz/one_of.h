// Several fuzzers as one program: the Makefile puts them into it, each behind FUZZER(name), in a namespace and with its
// functions renamed. The program's name says which of them it is.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

struct Fuzzer {
    int (*input)(const uint8_t* data, size_t size);
    size_t (*mutator)(uint8_t* data, size_t size, size_t max_size, unsigned seed); // or null
};
static std::map<std::string, Fuzzer>& fuzzers() {
    static std::map<std::string, Fuzzer> all;
    return all;
}
#define FUZZER(name)                                                                                                   \
    extern "C" int name##_input(const uint8_t*, size_t);                                                               \
    extern "C" __attribute__((weak)) size_t name##_mutator(uint8_t*, size_t, size_t, unsigned);                        \
    static const bool name##_is = fuzzers().insert({#name, {name##_input, name##_mutator}}).second;

// The entry point of libFuzzer.
static Fuzzer chosen;
extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);
extern "C" int LLVMFuzzerInitialize(int*, char*** argv) {
    const std::string path = (*argv)[0], name = path.substr(path.rfind('/') + 1);
    if (!fuzzers().count(name)) return fprintf(stderr, "%s: no fuzzer of this name\n", path.c_str()), exit(1), 1;
    chosen = fuzzers()[name];
    return 0;
}
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) { return chosen.input(data, size); }
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned seed) {
    return chosen.mutator ? chosen.mutator(data, size, max_size, seed) : LLVMFuzzerMutate(data, size, max_size);
}
