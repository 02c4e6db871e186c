// cli/prompt_cache.cpp: the keys and values of a prompt in a file.
#include "cli/prompt_cache.h"
#include "base/file.h"
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <unistd.h>
#include <utility>

namespace cli {

void PromptCache::check(const std::string& path) {
    if (path.empty() || (access(path.c_str(), F_OK) != 0 && errno == ENOENT)) return;
    const MappedFile map(path);
    const Header expected{};
    if (map.size < sizeof expected || memcmp(map.data, expected.magic, sizeof expected.magic) != 0)
        DIE("%s: not a prompt cache", path.c_str());
}

PromptCache::PromptCache(const std::string& path, const LoadedModel& model, uint64_t variant, Conversation& session)
    : path(path) {
    const Config& c = model.file.config;
    header.number = (uint32_t)model.number_bytes();
    header.layers = (uint32_t)c.L, header.kv_heads = (uint32_t)c.K, header.head_size = (uint32_t)c.D;
    header.tokens = 0;
    if (path.empty()) return;
    header.model = fnv1a(&variant, sizeof variant, model.file.hash());
    if (access(path.c_str(), F_OK) != 0 && errno == ENOENT) return;

    const MappedFile map(path);
    auto must = [&](bool ok, const char* fault) { if (!ok) DIE("%s: %s", path.c_str(), fault); };
    check(path);
    const Header expected = header;
    memcpy((void*)&header, map.data, sizeof header);
    must(header.version == expected.version, "a prompt cache of another version of this program");
    must(header.model == expected.model && header.number == expected.number &&
         header.layers == expected.layers && header.kv_heads == expected.kv_heads &&
         header.head_size == expected.head_size, "the prompt cache of another model or --dtype");
    must(header.tokens > 0 && header.tokens <= (uint32_t)c.max_positions, "damaged: its number of tokens");
    const size_t tokens = header.tokens, ids_bytes = (tokens + 1) / 2 * 8, block = session.block_bytes(tokens);
    must(map.size == sizeof header + ids_bytes + 2 * (size_t)c.L * block, "damaged: its length");
    const uint64_t sum = std::exchange(header.sum, 0);
    const uint64_t found = checksum(0, &header, sizeof header);
    must(checksum(found, map.data + sizeof header, map.size - sizeof header) == sum, "damaged: its checksum");

    ids.resize(tokens);
    memcpy(ids.data(), map.data + sizeof header, tokens * sizeof(int));
    for (int id : ids) must(id >= 0 && id < c.V, "damaged: an id that the model has not");
    const size_t n = std::min(tokens, (size_t)session.capacity());
    const uint8_t* at = map.data + sizeof header + ids_bytes;
    session.each_block(n, [&](void* pages) {
        memcpy(pages, at, session.block_bytes(n));
        at += block;
    });
    session.ids().assign(ids.begin(), ids.begin() + (ptrdiff_t)n);
}

void PromptCache::save(Conversation& session) {
    if (path.empty() || session.ids().size() <= ids.size()) return;
    if (!std::equal(ids.begin(), ids.end(), session.ids().begin())) return;
    ids = session.ids();
    header.tokens = (uint32_t)ids.size();
    std::vector<int> padded = ids;
    padded.resize((ids.size() + 1) / 2 * 2);
    const size_t block = session.block_bytes(ids.size());
    auto each_part = [&](auto use) {
        use(&header, sizeof header);
        use(padded.data(), padded.size() * sizeof(int));
        session.each_block(ids.size(), [&](void* pages) { use(pages, block); });
    };
    header.sum = 0;
    uint64_t sum = 0;
    each_part([&](const void* part, size_t bytes) { sum = checksum(sum, part, bytes); });
    header.sum = sum;
    OutputFile out(path);
    each_part([&](const void* part, size_t bytes) { out.write(part, bytes); });
    out.commit();
}

} // namespace cli
