// Shared by fuzzers of the model and of the server.
#pragma once
#include "base/error.h"
#include "model/model_file.h"
#include "model/session.h"
#include "model/weights.h"
#include "qwen3.cu"
#include <cstdint>
#include <cstdlib>
#include <string>
#include <sys/mman.h>
#include <unistd.h>

// The path of a file in memory that has these bytes; the same path each time.
static const std::string& path_of(const uint8_t* data, size_t size) {
    static const int fd = memfd_create("model", MFD_CLOEXEC);
    static const std::string path = format("/proc/self/fd/%d", fd);
    if (ftruncate(fd, 0) != 0 || pwrite(fd, data, size, 0) != (ssize_t)size) abort();
    return path;
}

// A model that loads must also run: three tokens are fed to it, and one is sampled. packed: see Weights.
template <class T> void use(const ModelFile& file, bool packed = false) {
    const Weights<T> weights(file, Format::PLAIN, packed);
    const Config& c = file.config;
    const int n = std::min(3, c.max_positions);
    Session<T> session(c, weights, n);
    std::vector<int> ids = {0, c.V - 1, c.V / 2};
    ids.resize((size_t)n);
    int rows = 0;
    session.feed(ids, nullptr, [&](const acc<T>*) { rows++; });
    const int id = sample(session.logits, c.V, Sampling{}, session.ids.size());
    if (rows != n || id < 0 || id >= c.V) abort();
}
