/* capi/library.cpp: the C API of qwen3.h.   Build: make libqwen3.so */
#include "qwen3.h"
#include "base/error.h"
#include "base/stop_flag.h"
#include "model/chat_template.h"
#include "model/device.h"
#include "model/loaded.h"
#include "model/model_file.h"
#include "model/options.h"
#include "model/session.h"
#include "model/tokenizer.h"
#include "qwen3.cu"
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#define API __attribute__((visibility("default")))

static thread_local std::string last_error;

// Returns f(); if f throws, returns `failed` and keeps a text for qwen3_error().
template <class R, class F> static R guarded(R failed, F f) {
    try {
        return f();
    } catch (const std::exception& e) {
        last_error = e.what();
    } catch (...) {
        last_error = "unknown error";
    }
    return failed;
}

// The part of a model that its contexts share. It lives as long as any of them, even if the model is closed.
struct Opened {
    ModelFile file;
    Tokenizer tokenizer;
    std::unique_ptr<LoadedModel> loaded;

    Opened(ModelFile&& model, const std::string& vocabulary, const Context& where, bool wide, bool packed)
        : file(std::move(model)), tokenizer(tokenizer_of(vocabulary, file)),
          loaded(load_model(file, where, wide, Format::PLAIN, packed, true)) {}
};
struct qwen3_model {
    std::shared_ptr<const Opened> opened;
};

struct qwen3_context {
    struct Turn { std::string question, answer; size_t end; }; // `end`: tokens in the context after it

    const std::shared_ptr<const Opened> model;
    const std::unique_ptr<Conversation> session;
    std::vector<Turn> turns; // of qwen3_ask
    size_t answer = 0;       // where the last answer begins, or will
    bool scored = false;     // the session's logits are those after its last token
    std::atomic<bool> busy = false;

    qwen3_context(const qwen3_model& m, int tokens) : model(m.opened), session(model->loaded->open(tokens)) {}

    std::vector<int>& ids() { return session->ids(); }
    void rewind(size_t n) {
        scored &= n == ids().size();
        session->rewind(n), answer = n;
    }
    void feed(const std::vector<int>& tokens) {
        if (tokens.empty()) return;
        scored = false;
        session->feed(tokens);
        scored = true, answer = ids().size();
    }
    // The logits after the last token; computed again if a rewind or an answer's draws have replaced them.
    const float* logits() {
        if (ids().empty()) DIE("nothing to answer: feed a prompt first");
        if (const int last = ids().back(); !scored) {
            session->rewind(ids().size() - 1);
            session->feed({last});
            scored = true;
        }
        return session->logits();
    }
    int draw(const Sampling& how) {
        const int V = session->config().V;
        std::vector<float> copy(logits(), logits() + V);
        penalize(copy.data(), how, ids(), answer, V);
        return sample(copy.data(), model->tokenizer.size(), how, ids().size());
    }
    size_t generate(Generation& g, const std::function<void(std::string_view)>& show) {
        logits();
        const size_t before = ids().size();
        scored = false; // (draws write penalties into them)
        session->generate(&model->tokenizer, g, show);
        // All but the last token of the answer are in the session; a next question needs all of them.
        session->rewind(before + g.ids.size());
        answer = before;
        const std::vector<int> missing(g.ids.begin() + (ptrdiff_t)(ids().size() - before), g.ids.end());
        if (!missing.empty() && !session->full()) session->feed(missing), scored = true;
        return g.ids.size();
    }
    std::vector<int> prompt(const std::string& question) const {
        std::vector<Message> messages;
        for (const Turn& t : turns) messages.push_back({"user", t.question}), messages.push_back({"assistant", t.answer});
        messages.push_back({"user", question});
        return render_chat(model->tokenizer, messages);
    }
};

// Null handles and pointers, and a second call on a context while one is under way, are errors.
static void need(const void* pointer, const char* name) {
    if (!pointer) DIE("%s is NULL", name);
}
template <class U> static U* need(U* array, size_t count, const char* name) {
    if (count) need(array, name);
    return array;
}
template <class R, class F> static R with(const qwen3_model* model, R failed, F f) {
    return guarded(failed, [&] { return need(model, "model"), f(*model->opened); });
}
template <class R, class F> static R with(qwen3_context* context, R failed, F f) {
    return guarded(failed, [&] {
        need(context, "context");
        if (context->busy.exchange(true)) DIE("this context is in another call, of another thread or of its own `show`");
        struct Free { std::atomic<bool>& busy; ~Free() { busy = false; } } when_done{context->busy};
        return f(*context);
    });
}

static Sampling sampling_of(const qwen3_sampling* s) {
    Sampling how;
    if (!s) return how;
    auto within = [](const char* name, double x, double low, double high) {
        if (!(x >= low && x <= high)) DIE("%s %g is outside %g..%g", name, x, low, high);
        return (float)x;
    };
    how.temperature = within("temperature", s->temperature, 0, 100);
    how.top_p = within("top_p", s->top_p, 0, 1), how.min_p = within("min_p", s->min_p, 0, 1);
    how.repeat = within("repeat_penalty", s->repeat_penalty, 0.01, 100);
    how.presence = within("presence_penalty", s->presence_penalty, -100, 100);
    how.frequency = within("frequency_penalty", s->frequency_penalty, -100, 100);
    if (s->top_k < 0) DIE("top_k %d is negative", s->top_k);
    if (s->max_tokens < 0) DIE("max_tokens %d is negative", s->max_tokens);
    how.top_k = s->top_k, how.seed = s->seed;
    return how;
}

template <class U> static long hand_out(const std::vector<U>& all, U* out, size_t room) {
    std::copy_n(all.begin(), std::min(room, all.size()), need(out, room, "out"));
    return (long)all.size();
}

// Generates an answer after the fed tokens.
static int answer(qwen3_context& context, const qwen3_sampling* how, bool in_thought,
                  const std::function<int(std::string_view)>& show) {
    StopFlag stopped = 0;
    Generation g;
    g.in_thought = in_thought;
    g.sampling = sampling_of(how);
    if (how && how->max_tokens > 0) g.max_tokens = (size_t)how->max_tokens;
    g.interrupt = &stopped;
    return (int)context.generate(g, [&](std::string_view s) {
        if (!stopped && show(s)) stopped = 1;
    });
}

extern "C" {

API int qwen3_version(void) { return QWEN3_VERSION; }
API const char* qwen3_error(void) { return last_error.c_str(); }

API qwen3_model* qwen3_open(const char* path, const char* tokenizer, const char* device) {
    return guarded<qwen3_model*>(nullptr, [&]() -> qwen3_model* {
        need(path, "path");
        ModelOptions o;
        o.model = path, o.tokenizer = tokenizer ? tokenizer : "", o.device = device ? device : "";
        const std::string vocabulary = find_tokenizer(o.tokenizer, o.model);
        if (vocabulary.empty()) DIE("no tokenizer.bin beside the model, beside the program or in this folder");
        ModelFile file(o.model);
        const Context ctx = choose_device(o, file);
        const bool floats = wide(o, file), keeps = !floats && keeps_packed<bf16>(o, ctx);
        return new qwen3_model{std::make_shared<Opened>(std::move(file), vocabulary, ctx, floats, keeps)};
    });
}
API void qwen3_close(qwen3_model* model) { delete model; }
API int qwen3_vocabulary(const qwen3_model* model) {
    return with(model, -1, [](const Opened& m) { return m.tokenizer.size(); });
}
API int qwen3_context_limit(const qwen3_model* model) {
    return with(model, -1, [](const Opened& m) { return m.file.config.max_positions; });
}

API long qwen3_tokenize(const qwen3_model* model, const char* text, size_t bytes, int special, int* out, size_t room) {
    return with(model, -1L, [&](const Opened& m) {
        return hand_out(m.tokenizer.encode({need(text, bytes, "text"), bytes}, special), out, room);
    });
}
API long qwen3_detokenize(const qwen3_model* model, const int* ids, size_t count, char* out, size_t room) {
    return with(model, -1L, [&](const Opened& m) {
        need(ids, count, "ids");
        const std::string text = m.tokenizer.decode({ids, ids + count}, false);
        return hand_out(std::vector<char>(text.begin(), text.end()), out, room);
    });
}
API long qwen3_prompt(const qwen3_model* model, const char* system, const char* question, int thinking, int* out,
                      size_t room) {
    return with(model, -1L, [&](const Opened& m) {
        need(question, "question");
        std::vector<Message> messages;
        if (system) messages.push_back({"system", system});
        messages.push_back({"user", question});
        ChatOptions options;
        options.thinking = thinking;
        return hand_out(render_chat(m.tokenizer, messages, options), out, room);
    });
}

API qwen3_context* qwen3_context_new(const qwen3_model* model, int tokens) {
    return with<qwen3_context*>(model, nullptr, [&](const Opened& m) {
        const int limit = m.file.config.max_positions;
        if (tokens == 0) tokens = std::min(4096, limit);
        if (tokens < 1 || tokens > limit) DIE("a context of %d tokens; the model's limit is %d", tokens, limit);
        return new qwen3_context(*model, tokens);
    });
}
API void qwen3_context_free(qwen3_context* context) { delete context; }
API int qwen3_tokens(const qwen3_context* context) {
    return guarded(-1, [&] { return need(context, "context"), (int)context->session->ids().size(); });
}
API int qwen3_rewind(qwen3_context* context, int tokens) {
    return with(context, -1, [&](qwen3_context& c) {
        if (tokens < 0 || (size_t)tokens > c.ids().size()) DIE("rewind to %d of %zu tokens", tokens, c.ids().size());
        c.rewind((size_t)tokens);
        while (!c.turns.empty() && c.turns.back().end > (size_t)tokens) c.turns.pop_back();
        return 0;
    });
}

API int qwen3_feed(qwen3_context* context, const int* ids, size_t count) {
    return with(context, -1, [&](qwen3_context& c) { return need(ids, count, "ids"), c.feed({ids, ids + count}), 0; });
}
API const float* qwen3_logits(qwen3_context* context, size_t* count) {
    return with<const float*>(context, nullptr, [&](qwen3_context& c) {
        const float* logits = c.logits();
        if (count) *count = (size_t)c.model->file.config.V;
        return logits;
    });
}

API qwen3_sampling qwen3_default_sampling(int thinking) {
    const Sampling how;
    return {thinking ? 0.6f : how.temperature, how.top_k, thinking ? 0.95f : how.top_p, how.min_p, 1, 0, 0, 0, 0};
}
API int qwen3_draw(qwen3_context* context, const qwen3_sampling* how) {
    return with(context, -1, [&](qwen3_context& c) { return c.draw(sampling_of(how)); });
}
API int qwen3_generate(qwen3_context* context, const qwen3_sampling* how, qwen3_show show, void* user) {
    return with(context, -1, [&](qwen3_context& c) {
        return answer(c, how, false, [&](std::string_view s) { return show ? show(s.data(), s.size(), user) : 0; });
    });
}
API int qwen3_ask(qwen3_context* context, const char* question, const qwen3_sampling* how, qwen3_show show,
                  void* user) {
    return with(context, -1, [&](qwen3_context& c) {
        need(question, "question");
        sampling_of(how);
        const std::vector<int> prompt = c.prompt(question), &ids = c.ids();
        if (prompt.size() > (size_t)c.session->capacity())
            DIE("%zu tokens do not fit: the context holds %d", prompt.size(), c.session->capacity());
        size_t same = 0; // the prefix that the context already holds; the last token's logits must be computed again
        while (same < ids.size() && same + 1 < prompt.size() && ids[same] == prompt[same]) same++;
        c.rewind(same);
        c.feed({prompt.begin() + (ptrdiff_t)same, prompt.end()});
        qwen3_context::Turn turn = {question, "", 0};
        const int count = answer(c, how, opens_thought(c.model->tokenizer, prompt), [&](std::string_view s) {
            return turn.answer += s, show ? show(s.data(), s.size(), user) : 0;
        });
        turn.end = ids.size();
        return c.turns.push_back(std::move(turn)), count;
    });
}

} // extern "C"
