// server/engines.h: several engines behind one desk, a GPU each (or all on the CPU): which of them gets a job, and what
// becomes of an engine's jobs when it fails. Part of serve.cu.
//
//   Window     what one engine takes its jobs from, and leaves its figures at
//   Router     where prompts that begin alike were sent
#pragma once

// What the desk has for one engine. `mutex` of the desk guards all but `load` and `figures`.
struct Window {
    std::vector<Job> inbox;       // not yet taken
    using Handed = std::unique_ptr<void, void (*)(void*)>;
    std::vector<Handed> handed;   // Engine::Sequences of an engine that failed
    size_t inside = 0;            // jobs that the engine has
    std::shared_ptr<const Figures> figures = std::make_shared<Figures>(); // as of the last step: see Desk::look_at_each
    bool gone = false;            // its engine has failed
    std::shared_ptr<std::atomic<size_t>> load = std::make_shared<std::atomic<size_t>>(0); // tokens of jobs not done

    // The tokens that a job is likely to take; counted here until it is destroyed.
    void count(Job& job) {
        struct Counted {
            std::shared_ptr<std::atomic<size_t>> load;
            size_t tokens;
            ~Counted() { *load -= tokens; }
        };
        const size_t tokens = job.prompt.size() + std::min<size_t>(job.max_tokens, 1024);
        *load += tokens;
        job.counted = std::shared_ptr<Counted>(new Counted{load, tokens});
    }
};

// Prompts that begin alike go to the engine that has seen their beginning, if that is half of the prompt or more (so
// that a short system prompt which all share sends them not all to one) and if it has not far more to do than another;
// all else goes to the least loaded. What an engine has dropped meanwhile is not known here: then its prompt is computed.
struct Router {
    static constexpr size_t MOST = 1 << 18, AHEAD = 16384; // beginnings known; tokens a loaded engine may be ahead
    std::unordered_map<uint64_t, int> seen; // beginnings of whole pages: the engine
    std::deque<uint64_t> order;             // ... the oldest first
    size_t turn = 0;                        // who comes first of those that have equally little to do

    int choose(const Job& job, const std::vector<Window*>& windows) {
        int least = -1;
        for (size_t i = 0; i < windows.size(); i++) {
            const size_t k = (turn + i) % windows.size();
            if (!windows[k]->gone && (least < 0 || *windows[k]->load < *windows[(size_t)least]->load)) least = (int)k;
        }
        if (least < 0) return 0; // (the server ends)
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
};
