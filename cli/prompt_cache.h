// cli/prompt_cache.h: --prompt-cache, the keys and values of a prompt in a file.
#pragma once
#include "model/loaded.h"
#include <cstdint>
#include <string>
#include <vector>

namespace cli {

// --prompt-cache: the keys and values of a prompt in a file, so that another start need not compute them.
//   Header; u32 ids[tokens], padded to 8 bytes; the pages of the keys, then of the values, layer by layer
// The file serves any prompt with a common beginning. It is checked whole before a byte of it is used, and a mismatch
// is an error: never a wrong answer. (That protects against damage and mix-ups. A forged file can make the model say
// anything.)
struct PromptCache {
    // Throws Error if the file is there and is no prompt cache.
    static void check(const std::string& path);

    struct Header {
        char magic[8] = {'q', 'w', 'e', 'n', '3', 'k', 'v', 0};
        uint32_t version = 1;
        uint32_t number;             // bytes of a key's or value's number
        uint32_t layers, kv_heads, head_size, tokens;
        uint64_t model;              // see ModelFile::hash; and Options::variant
        uint64_t sum = 0;            // of the whole file, with this field 0
    };
    std::string path;     // "": no cache is wanted
    Header header;
    std::vector<int> ids; // of the file, once it is there

    // Restores the file's contents into the new session, if the file exists, as far as the context reaches.
    // variant: see Options.
    PromptCache(const std::string& path, const LoadedModel& model, uint64_t variant, Conversation& session);

    // Writes the session's contents, if there is no file yet or the whole file is only their beginning.
    void save(Conversation& session);
};

} // namespace cli
