// options.h: serve's options. serve.cu has their table.
#pragma once
#include "model/options.h"
#include "qwen3.cu"
#include "search/document_options.h"
#include "server/engine/engine_options.h"
#include "server/http/options.h"
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace server {

struct Options : ModelOptions {
    std::string name, system, key_file, batch, output, predict_system;
    std::vector<std::string> tasks; // empty: as the model's folder says
    std::vector<std::pair<std::string, std::string>> adapters; // name, folder
    ServerOptions server;
    EngineOptions engine;
    std::string cache;              // folder of the prefix cache on disk; "": none
    size_t cache_bytes = 0;         // ... its size; 0: 20 GB
    int max_queue = 1024, think = 0, gpus = 1, predict_tokens = 384;
    int jump = -1, lookup = -1; // negative: the device's default
    DocumentOptions documents{};
    Context ctx{};

    bool does(const char* task) const { return std::find(tasks.begin(), tasks.end(), task) != tasks.end(); }
};

} // namespace server
