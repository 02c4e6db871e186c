// Fuzzes the C API: the input says which calls follow each other, with which arguments.
#include "tests/capi.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    size_t at = 0;
    auto below = [&](uint32_t n) { return at < size ? data[at++] * 251u % n : 0; };
    RandomCalls<decltype(below)&> calls(below, "tests/fixtures/tiny/model.bin");
    calls.open();
    while (at < size) calls.one();
    calls.end();
    return 0;
}
