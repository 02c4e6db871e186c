// job.cpp: spaces of prompts that share pages.
#include "base/file.h"
#include "server/engine/job.h"
#include "server/engine/random_bits.h"

namespace server {

uint64_t salted_space(uint64_t key, const std::string& salt) {
    static const uint64_t secret = random_bits();
    return 1ull << 63 | key << 40 | fnv1a(salt.data(), salt.size(), secret) >> 24;
}

void Job::use_cache_salt(const std::string& text) { space = salted_space(salt, text), cache_salt = sha256(text); }

} // namespace server
