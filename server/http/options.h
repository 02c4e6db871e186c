// options.h: how the server listens, which clients it accepts, and its timeouts.
#pragma once
#include <string>
#include <unistd.h>
#include <vector>

namespace server {

struct ApiKey {
    std::string key, name; // the name is for the log
};

struct ServerOptions {
    std::string host = "127.0.0.1";
    int port = 8000;
    std::vector<ApiKey> keys;               // empty: open to all
    std::vector<std::string> origins;       // web sites whose scripts may call
    int deadline = 60;                      // seconds for a request line, and then for headers and body
    int drain = 300;                        // ... and for work in progress after a signal
    std::string title = "Warp";             // of the chat page
    std::vector<std::string> starters;      // questions that it offers; none: neutral ones
    std::string files;                      // folder of Files and Batches; "": not offered
    int think = 0;                          // whether its switch for thinking is initially on
    bool docs = false;                      // whether it has one for documents
    std::string predict_status = "batch";   // of GET / once the model is ready: ok (one question at a time) or batch
    bool swaps = false;                     // whether clients may load and unload adapters
    int log = STDOUT_FILENO;                // where log lines go
    unsigned idle() const { return (unsigned)(deadline + 1) / 2; } // seconds without a byte
    double fetch() const { return 5. * deadline; }                 // to read a complete answer
    double quiet() const { return deadline / 6.; }                 // silence in a stream, until a comment is sent
};

} // namespace server
