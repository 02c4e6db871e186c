// router.cpp: sends a job to the engine that knows the beginning of its prompt, or to the least loaded one.
#include "base/file.h"
#include "server/engine/job.h"
#include "server/engine/router.h"
#include <algorithm>

namespace server {

Window::Window() = default;
Window::~Window() = default;

void Window::count(Job& job) {
    struct Counted {
        std::shared_ptr<std::atomic<size_t>> load;
        size_t tokens;
        ~Counted() { *load -= tokens; }
    };
    const size_t tokens = job.prompt.size() + std::min<size_t>(job.max_tokens, 1024);
    *load += tokens;
    job.counted = std::shared_ptr<Counted>(new Counted{load, tokens});
}

int Router::choose(const Job& job, const std::vector<Window*>& windows) {
    int least = -1;
    for (size_t i = 0; i < windows.size(); i++) {
        const size_t k = (turn + i) % windows.size();
        if (!windows[k]->gone && (least < 0 || *windows[k]->load < *windows[(size_t)least]->load)) least = (int)k;
    }
    if (least < 0) return 0; // the server is shutting down
    std::vector<uint64_t> names;
    const uint64_t space = job.space ? job.space : job.salt;
    uint64_t hash = fnv1a(&space, sizeof space);
    int to = least;
    for (size_t at = 0; at + PAGE < job.prompt.size(); at += PAGE) {
        names.push_back(hash = fnv1a(&job.prompt[at], PAGE * sizeof(int), hash));
        const auto it = seen.find(hash);
        if (it == seen.end() || 2 * (at + PAGE) < job.prompt.size()) continue;
        const Window& there = *windows[(size_t)it->second];
        if (!there.gone && *there.load <= *windows[(size_t)least]->load + AHEAD) to = it->second;
    }
    if (to == least) turn = (size_t)least + 1;
    for (uint64_t name : names) {
        if (seen.emplace(name, to).second) order.push_back(name);
        else seen[name] = to;
    }
    for (; order.size() > MOST; order.pop_front()) seen.erase(order.front());
    return to;
}

} // namespace server
