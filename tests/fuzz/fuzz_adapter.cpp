// Fuzzes the reader of adapters: the bytes are an adapter_config.json, a zero byte, and an adapter_model.safetensors, for
// the model in fixtures/tiny. What is accepted must also run: two tokens are fed to the model with it.
// An Error is a fine answer; a crash, a leak or a read outside a file is not.
// Seed: tests/fixtures/fuzz/adapter/, made by tests/reference/make_train_fixtures.py.
#include "model/adapters.h"
#include "tests/fuzz/model.h"

// A folder of our own, whose files are in memory.
static std::string make_folder() {
    std::string name = "/dev/shm/fuzz_adapter.XXXXXX";
    if (!mkdtemp(name.data())) abort();
    return name;
}
static void write_whole(const std::string& path, const uint8_t* data, size_t size) {
    FILE* f = fopen(path.c_str(), "wb");
    if (!f || fwrite(data, 1, size, f) != size || fclose(f) != 0) abort();
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const std::string folder = make_folder();
    static const struct Remove {
        ~Remove() { // the fuzzer ends with exit
            for (const char* name : {"/adapter_config.json", "/adapter_model.safetensors", ""}) remove((folder + name).c_str());
        }
    } at_the_end;
    static const ModelFile file("tests/fixtures/tiny/model.bin");
    const uint8_t* end = (const uint8_t*)memchr(data, 0, size);
    const size_t config = end ? (size_t)(end - data) : size, skip = std::min(size, config + 1);
    write_whole(folder + "/adapter_config.json", data, config);
    write_whole(folder + "/adapter_model.safetensors", data + skip, size - skip);
    try {
        const AdapterFile adapter(folder, file.config);
        Weights<bf16> w(file);
        Context ctx;
        const AttachedAdapter<bf16> attached(ctx, w, adapter, 2);
        Session<bf16> session(file.config, w, 2);
        session.feed({1, 2});
    } catch (const Error& e) {
        if (std::string_view(e.what()).substr(0, folder.size()) != folder) abort(); // each names the file
    }
    return 0;
}

// Half of the mutations stay inside the config, a quarter in the header of the tensors, whose length stays true:
// otherwise nearly all inputs die at their first bytes.
extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned seed) {
    const uint8_t* zero = (const uint8_t*)memchr(data, 0, size);
    if (!zero || seed % 4 == 0) return LLVMFuzzerMutate(data, size, max_size);
    const size_t config = (size_t)(zero - data), tensors = config + 1;
    uint64_t length = 0;
    if (size >= tensors + 8) memcpy(&length, data + tensors, 8);
    const bool header = seed % 4 == 1 && size >= tensors + 8 && length <= size - tensors - 8;
    const size_t first = header ? tensors + 8 : 0, last = header ? first + length : config;
    const size_t room = max_size - (size - (last - first));
    if (room == 0) return LLVMFuzzerMutate(data, size, max_size); // given no room it would write a byte all the same
    const std::vector<uint8_t> rest(data + last, data + size);
    const size_t fresh = LLVMFuzzerMutate(data + first, last - first, room);
    if (header) memcpy(data + tensors, &(length = fresh), 8);
    std::copy(rest.begin(), rest.end(), data + first + fresh);
    return first + fresh + rest.size();
}
