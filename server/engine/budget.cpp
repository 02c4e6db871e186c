// budget.cpp: selects the share to drop when the memory is used up.
#include "server/engine/budget.h"
#include <algorithm>
#include <map>
#include <utility>

namespace server {

bool Budget::add(Share& share, size_t n) {
    std::lock_guard lock(mutex);
    return add_locked(share, n);
}

bool Budget::add_locked(Share& share, size_t n) {
    if (share.lost) return false;
    shares.insert(&share);
    share.bytes += n, used += n;
    while (used > limit) lose_one();
    return !share.lost;
}

void Budget::remove(Share& share, size_t n) {
    std::lock_guard lock(mutex);
    if (share.lost) return;
    share.bytes -= n, used -= n;
    if (share.bytes == 0) shares.erase(&share);
}

void Budget::remove(Share& share) {
    std::lock_guard lock(mutex);
    if (shares.erase(&share)) used -= std::exchange(share.bytes, 0);
}

void Budget::lose_one() {
    std::map<uint64_t, size_t> held;
    for (Share* s : shares) held[s->who] += s->bytes;
    const double now = seconds();
    auto rank = [&](const Share* s) { return std::pair(held[s->who], (double)s->bytes * (now - s->since)); };
    Share* worst = *std::max_element(shares.begin(), shares.end(),
                                     [&](Share* a, Share* b) { return rank(a) < rank(b); });
    shares.erase(worst);
    used -= worst->bytes, lost++;
    worst->lost = true;
    if (worst->drop) worst->drop();
}

} // namespace server
