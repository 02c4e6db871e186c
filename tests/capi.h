// The C API within the test's own program, so that sanitizers see it, and calls of it in any order.
#pragma once
#include "capi/library.cpp"
#include <cmath>
#include <cstdlib>

// A null pointer, a number out of range or a call at the wrong time is an error with a text; what goes well changes
// exactly as much as qwen3.h says, and logits are those of a context that was fed the same ids and nothing else.
template <class Draw> struct RandomCalls {
    static constexpr int CONTEXTS = 3, ROOM = 48;
    struct Known {
        qwen3_context* context = nullptr;
        int tokens = 0;
        std::vector<int> ids; // as far as they are known: an answer's are not
    };
    Draw draw; // (n): a number below n
    const char* path;
    qwen3_model* model = nullptr;
    Known all[CONTEXTS];

    static void must(bool ok, const char* what) {
        if (ok) return;
        fprintf(stderr, "C API: %s (%s)\n", what, qwen3_error());
        abort();
    }
#define MUST(x) must(x, #x)
    static void failed(long result) { MUST(result == -1 && *qwen3_error()); }

    RandomCalls(Draw d, const char* p) : draw(d), path(p) {}
    void open() { MUST((model = qwen3_open(path, nullptr, "cpu"))); }
    qwen3_sampling sampling(bool& good) {
        qwen3_sampling how = qwen3_default_sampling((int)draw(2));
        how.temperature = draw(2) ? 0 : 1, how.max_tokens = 1 + (int)draw(6), how.seed = draw(9);
        if (draw(3) == 0) how.presence_penalty = 3, how.repeat_penalty = 2;
        const float wrong[] = {-1, NAN, INFINITY, 101};
        if ((good = draw(5) != 0)) return how;
        float* const numbers[] = {&how.temperature, &how.top_p, &how.min_p, &how.repeat_penalty};
        if (const size_t which = draw(6); which < 4) *numbers[which] = wrong[draw(4)];
        else (which == 4 ? how.top_k : how.max_tokens) = -1;
        return how;
    }
    void texts() {
        const bool no_model = draw(4) == 0;
        const qwen3_model* m = no_model ? nullptr : model;
        int ids[8] = {};
        char text[8];
        const size_t room = draw(9);
        const bool no_text = draw(4) == 0, no_out = draw(4) == 0;
        const long n = qwen3_tokenize(m, no_text ? nullptr : "a <|im_end|>", 12, (int)draw(2), no_out ? nullptr : ids, room);
        if (no_model || no_text || (no_out && room)) failed(n);
        else MUST(n > 0);
        const long p = qwen3_prompt(m, draw(2) ? "s" : nullptr, no_text ? nullptr : "q", (int)draw(2), no_out ? nullptr : ids, room);
        if (no_model || no_text || (no_out && room)) failed(p);
        else MUST(p > 0);
        const long d = qwen3_detokenize(m, no_text ? nullptr : ids, draw(2) ? 8 : 0, no_out ? nullptr : text, room);
        if (no_model) failed(d);
        else MUST(d >= -1);
        const int v = qwen3_vocabulary(m), l = qwen3_context_limit(m);
        MUST(no_model ? v == -1 && l == -1 : v > 0 && l > 0);
    }
    void context(Known& k) {
        qwen3_context_free(k.context);
        k = {};
        if (draw(4) == 0) return;
        const int wrong[] = {-1, INT_MIN, INT_MAX};
        if (draw(5) == 0) MUST(!qwen3_context_new(model, wrong[draw(3)]) && *qwen3_error());
        MUST(!qwen3_context_new(nullptr, 1));
        MUST((k.context = qwen3_context_new(model, ROOM)));
    }
    void feed(Known& k) {
        std::vector<int> ids(draw(12));
        for (int& id : ids) id = (int)draw((uint32_t)qwen3_vocabulary(model));
        const bool none = draw(5) == 0, bad = !ids.empty() && draw(6) == 0;
        if (bad) ids[draw((uint32_t)ids.size())] = draw(2) ? -1 : INT_MAX;
        const int r = qwen3_feed(k.context, none ? nullptr : ids.data(), ids.size());
        if (!k.context || (none && !ids.empty()) || bad || k.tokens + ids.size() > ROOM) return failed(r);
        MUST(r == 0);
        if ((int)k.ids.size() == k.tokens) k.ids.insert(k.ids.end(), ids.begin(), ids.end());
        k.tokens += (int)ids.size();
    }
    void rewind(Known& k) {
        const int to = (int)draw(ROOM + 2) - 1, r = qwen3_rewind(k.context, to);
        if (!k.context || to < 0 || to > k.tokens) return failed(r);
        MUST(r == 0);
        k.tokens = to, k.ids.resize(std::min(k.ids.size(), (size_t)to));
    }
    void logits(Known& k) {
        size_t count = 0;
        const float* row = qwen3_logits(k.context, draw(2) ? &count : nullptr);
        if (!k.context || !k.tokens) return MUST(!row && *qwen3_error());
        MUST(row);
        if (!count || (int)k.ids.size() < k.tokens) return;
        qwen3_context* fresh = qwen3_context_new(model, ROOM);
        MUST(fresh && qwen3_feed(fresh, k.ids.data(), k.ids.size()) == 0);
        MUST(!memcmp(row, qwen3_logits(fresh, nullptr), count * sizeof(float)));
        qwen3_context_free(fresh);
    }
    struct Shown { qwen3_context* context; int left; };
    static int show(const char* text, size_t bytes, void* user) {
        Shown& s = *(Shown*)user;
        MUST(text && bytes);
        if (s.left == 1) failed(qwen3_rewind(s.context, 0)); // from within its own answer
        return s.left && --s.left == 0;
    }
    void answer(Known& k) {
        Shown shown = {k.context, (int)draw(4)};
        bool good = true;
        const qwen3_sampling how = sampling(good);
        const bool asks = draw(2), no_question = draw(4) == 0;
        const int before = k.tokens;
        const int n = asks ? qwen3_ask(k.context, no_question ? nullptr : "hi", &how, draw(3) ? show : nullptr, &shown)
                           : qwen3_generate(k.context, &how, draw(3) ? show : nullptr, &shown);
        if (!k.context) return failed(n);
        k.tokens = qwen3_tokens(k.context);
        if (!good || (asks ? no_question : !before)) return failed(n), MUST(k.tokens == before);
        if (!asks) MUST(n >= 0 && n <= how.max_tokens && k.tokens == std::min(before + n, ROOM));
        if (asks) k.ids.clear(); // (-1: the conversation has become too long)
        MUST(n >= -1 && k.tokens <= ROOM);
    }
    void one() {
        Known& k = all[draw(CONTEXTS)];
        bool good;
        switch (draw(9)) {
        case 0: return texts();
        case 1: return context(k);
        case 2: case 3: return feed(k);
        case 4: return rewind(k);
        case 5: case 6: return logits(k);
        case 7: return answer(k);
        default:
            const qwen3_sampling how = sampling(good);
            const int id = qwen3_draw(k.context, &how);
            if (!k.context || !k.tokens || !good) return failed(id);
            MUST(id >= 0 && id < qwen3_vocabulary(model));
        }
        MUST(k.context ? qwen3_tokens(k.context) == k.tokens : qwen3_tokens(nullptr) == -1);
    }
    // The model may be closed before its contexts.
    void end() {
        qwen3_close(model);
        for (Known& k : all) {
            if (k.tokens) MUST(qwen3_logits(k.context, nullptr));
            qwen3_context_free(k.context);
        }
    }
#undef MUST
};
