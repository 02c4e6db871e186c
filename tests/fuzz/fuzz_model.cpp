// Fuzzes the model loader: the bytes are a model.bin. What loads must also run: three tokens are fed to it.
// An Error is a fine answer; a crash, a leak or a read outside the file is not.
// Seeds: tests/fixtures/fuzz/model/, made by tests/fuzz/make_model_seeds.py.
#include "base/error.h"
#include "tests/fuzz/model.h"
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    const std::string& path = path_of(data, size);
    try {
        const ModelFile file(path);
        file.is_float32() ? use<float>(file) : use<bf16>(file);
        use<bf16>(file, true);
    } catch (const Error& e) {
        if (std::string_view(e.what()).substr(0, path.size()) != path) abort(); // each names the file
    }
    return 0;
}

// Every second mutation stays inside the header and keeps the length before it true: otherwise nearly all
// inputs die at their first eight bytes.
extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned seed) {
    uint64_t length = UINT64_MAX;
    if (size >= 8) memcpy(&length, data, 8);
    if (seed % 2 || size < 8 || length > size - 8) return LLVMFuzzerMutate(data, size, max_size);
    const size_t room = max_size - (size - length);
    if (room == 0) return LLVMFuzzerMutate(data, size, max_size); // given no room it would write a byte all the same
    const std::vector<uint8_t> tensors(data + 8 + length, data + size);
    length = LLVMFuzzerMutate(data + 8, length, room);
    memcpy(data, &length, 8);
    std::copy(tensors.begin(), tensors.end(), data + 8 + length);
    return 8 + length + tensors.size();
}
