// cli/prompt_cache.h: --prompt-cache, the keys and values of a prompt in a file.
#pragma once
#include "model/loaded.h"
#include <cstdint>
#include <string>
#include <vector>

namespace cli {

// --prompt-cache: the keys and values of a prompt in a file, so that another start need not compute them.
//   Header; u32 ids[tokens], padded to 8 bytes; the pages of the keys, then of the values, layer by layer
// The file is of use to any prompt that begins like its own. It is checked whole before a byte of it is used, and
// one that does not fit is an error: never a wrong answer. (Against damage and mix-ups, that is. Who can forge
// the file can make the model say anything.)
struct PromptCache {
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

    // Restores into the new session what the file holds, if it exists, as far as the context reaches.
    // variant: see Options.
    PromptCache(const std::string& path, const LoadedModel& model, uint64_t variant, Conversation& session);

    // Writes what the session holds, if there is no file yet or all of the file is only its beginning.
    void save(Conversation& session);
};

} // namespace cli
