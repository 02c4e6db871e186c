// adapters.cpp: adds and removes adapters by name.
#include "base/error.h"
#include "server/engine/adapters.h"
#include <algorithm>
#include <cctype>
#include <cstring>

namespace server {

std::atomic<size_t>& LoadedAdapter::alive() {
    static std::atomic<size_t> n{0};
    return n;
}

std::atomic<size_t>& LoadedAdapter::alive_bytes() {
    static std::atomic<size_t> n{0};
    return n;
}

uint64_t LoadedAdapter::next() {
    static std::atomic<uint64_t> last{0};
    return ++last;
}

void check_adapter_name(const std::string& name) {
    auto plain = [](char c) { return isalnum((unsigned char)c) || (c && strchr("._-/:@+", c)); };
    if (name.empty() || name.size() > 128 || !std::all_of(name.begin(), name.end(), plain))
        DIE("an adapter's name has 1 to 128 letters, digits and ._-/:@+");
}

AdapterPtr Adapters::find(const std::string& name) const {
    std::lock_guard lock(mutex);
    const auto it = all.find(name);
    return it == all.end() ? nullptr : it->second;
}

std::map<std::string, AdapterPtr> Adapters::now() const {
    std::lock_guard lock(mutex);
    std::map<std::string, AdapterPtr> there;
    for (auto& [name, one] : all)
        if (one) there.emplace(name, one);
    return there;
}

void Adapters::add(const AdapterPtr& one) {
    std::lock_guard lock(mutex);
    all[one->name] = one;
}

AdapterPtr Adapters::load(const std::string& name, const std::string& folder) {
    check_adapter_name(name);
    {
        std::lock_guard lock(mutex);
        if (all.count(name)) DIE("%s: there is an adapter of this name", name.c_str());
        if (all.size() >= MAX_ADAPTERS || LoadedAdapter::alive() >= MAX_ADAPTERS)
            DIE("there are %zu adapters already, some maybe until their last answers end", MAX_ADAPTERS);
        all[name] = nullptr;
    }
    AdapterPtr one;
    try {
        one = open(name, folder);
    } catch (...) {
        std::lock_guard lock(mutex);
        all.erase(name);
        throw;
    }
    add(one);
    return one;
}

bool Adapters::unload(const std::string& name) {
    AdapterPtr last; // freed outside the lock
    std::lock_guard lock(mutex);
    const auto it = all.find(name);
    if (it == all.end() || !it->second) return false;
    last = std::move(it->second);
    all.erase(it);
    return true;
}

} // namespace server
