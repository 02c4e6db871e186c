/* capi/library.cpp: the C API of qwen3.h.   Build: make libqwen3.so */
#include "qwen3.h"
#include "base/error.h"
#include "model/chat_template.h"
#include "model/device.h"
#include "model/loaded.h"
#include "model/model_file.h"
#include "model/options.h"
#include "model/session.h"
#include "model/tokenizer.h"
#include "qwen3.cu"
#include <algorithm>
#include <csignal>
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

// f(), or `failed` and a text for qwen3_error() if it throws.
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

struct qwen3_model {
    ModelFile file;
    Tokenizer tokenizer;
    std::unique_ptr<LoadedModel> loaded;

    qwen3_model(ModelFile&& model, const std::string& vocabulary, const Context& where, bool wide, bool packed)
        : file(std::move(model)), tokenizer(tokenizer_of(vocabulary, file)),
          loaded(load_model(file, where, wide, false, packed, true)) {}
};

struct qwen3_context {
    const qwen3_model& model;
    std::vector<Message> messages; // of qwen3_ask
    std::unique_ptr<Conversation> session;
    size_t answer = 0; // where the last answer begins, or will

    qwen3_context(const qwen3_model& m, int tokens) : model(m), session(m.loaded->open(tokens)) {}

    std::vector<int>& ids() { return session->ids(); }
    void rewind(size_t n) { session->rewind(n), answer = n; }
    void feed(const std::vector<int>& tokens) { session->feed(tokens), answer = ids().size(); }
    int draw(const Sampling& how) {
        const int V = session->config().V;
        std::vector<float> copy(session->logits(), session->logits() + V);
        penalize(copy.data(), how, ids(), answer, V);
        return sample(copy.data(), model.tokenizer.size(), how, ids().size());
    }
    size_t generate(Generation& g, const std::function<void(std::string_view)>& show) {
        const size_t before = ids().size();
        session->generate(&model.tokenizer, g, show);
        // All but the last token of the answer are in the session; a next question wants them all.
        session->rewind(before + g.ids.size());
        std::vector<int> missing(g.ids.begin() + (ptrdiff_t)(ids().size() - before), g.ids.end());
        if (!missing.empty() && !session->full()) session->feed(missing);
        return g.ids.size();
    }
};

static Sampling sampling_of(const qwen3_sampling* s) {
    Sampling how;
    if (!s) return how;
    how.temperature = s->temperature, how.top_k = s->top_k, how.top_p = s->top_p, how.min_p = s->min_p;
    how.repeat = s->repeat_penalty, how.presence = s->presence_penalty, how.frequency = s->frequency_penalty;
    how.seed = s->seed;
    return how;
}

template <class U> static long hand_out(const std::vector<U>& all, U* out, size_t room) {
    std::copy_n(all.begin(), std::min(room, all.size()), out);
    return (long)all.size();
}

extern "C" {

API int qwen3_version(void) { return QWEN3_VERSION; }
API const char* qwen3_error(void) { return last_error.c_str(); }

API qwen3_model* qwen3_open(const char* path, const char* tokenizer, const char* device) {
    return guarded<qwen3_model*>(nullptr, [&]() -> qwen3_model* {
        ModelOptions o;
        o.model = path, o.tokenizer = tokenizer ? tokenizer : "", o.device = device ? device : "";
        const std::string vocabulary = find_tokenizer(o.tokenizer, o.model);
        if (vocabulary.empty()) DIE("no tokenizer.bin beside the model, beside the program or in this folder");
        ModelFile file(o.model);
        const Context ctx = choose_device(o, file);
        const bool floats = wide(o, file), keeps = !floats && keeps_packed<bf16>(o, ctx);
        return new qwen3_model(std::move(file), vocabulary, ctx, floats, keeps);
    });
}
API void qwen3_close(qwen3_model* model) { delete model; }
API int qwen3_vocabulary(const qwen3_model* model) { return model->tokenizer.size(); }
API int qwen3_context_limit(const qwen3_model* model) { return model->file.config.max_positions; }

API long qwen3_tokenize(const qwen3_model* model, const char* text, size_t bytes, int special, int* out, size_t room) {
    return guarded(-1L, [&] { return hand_out(model->tokenizer.encode({text, bytes}, special), out, room); });
}
API long qwen3_detokenize(const qwen3_model* model, const int* ids, size_t count, char* out, size_t room) {
    return guarded(-1L, [&] {
        const std::string text = model->tokenizer.decode({ids, ids + count}, false);
        return hand_out(std::vector<char>(text.begin(), text.end()), out, room);
    });
}
API long qwen3_prompt(const qwen3_model* model, const char* system, const char* question, int thinking, int* out,
                      size_t room) {
    return guarded(-1L, [&] {
        std::vector<Message> messages;
        if (system) messages.push_back({"system", system});
        messages.push_back({"user", question});
        ChatOptions options;
        options.thinking = thinking;
        return hand_out(render_chat(model->tokenizer, messages, options), out, room);
    });
}

API qwen3_context* qwen3_context_new(const qwen3_model* model, int tokens) {
    return guarded<qwen3_context*>(nullptr, [&] {
        const int limit = model->file.config.max_positions;
        if (tokens == 0) tokens = std::min(4096, limit);
        if (tokens < 1 || tokens > limit) DIE("a context of %d tokens; the model's limit is %d", tokens, limit);
        return new qwen3_context(*model, tokens);
    });
}
API void qwen3_context_free(qwen3_context* context) { delete context; }
API int qwen3_tokens(const qwen3_context* context) { return (int)const_cast<qwen3_context*>(context)->ids().size(); }
API int qwen3_rewind(qwen3_context* context, int tokens) {
    return guarded(-1, [&] {
        if (tokens < 0 || tokens > qwen3_tokens(context))
            DIE("rewind to %d of %d tokens", tokens, qwen3_tokens(context));
        context->rewind((size_t)tokens);
        return 0;
    });
}

API int qwen3_feed(qwen3_context* context, const int* ids, size_t count) {
    return guarded(-1, [&] { return context->feed({ids, ids + count}), 0; });
}
API const float* qwen3_logits(qwen3_context* context, size_t* count) {
    if (count) *count = (size_t)context->model.file.config.V;
    return context->session->logits();
}

API qwen3_sampling qwen3_default_sampling(int thinking) {
    const Sampling how;
    return {thinking ? 0.6f : how.temperature, how.top_k, thinking ? 0.95f : how.top_p, how.min_p, 1, 0, 0, 0, 0};
}
API int qwen3_draw(qwen3_context* context, const qwen3_sampling* how) {
    return guarded(-1, [&] {
        if (context->ids().empty()) DIE("nothing to answer: feed a prompt first");
        return context->draw(sampling_of(how));
    });
}
API int qwen3_generate(qwen3_context* context, const qwen3_sampling* how, qwen3_show show, void* user) {
    return guarded(-1, [&] {
        if (context->ids().empty()) DIE("nothing to answer: feed a prompt first");
        volatile sig_atomic_t stopped = 0;
        Generation g;
        g.sampling = sampling_of(how);
        if (how && how->max_tokens > 0) g.max_tokens = (size_t)how->max_tokens;
        g.interrupt = &stopped;
        return (int)context->generate(g, [&](std::string_view s) {
            if (show && !stopped && show(s.data(), s.size(), user)) stopped = 1;
        });
    });
}
API int qwen3_ask(qwen3_context* context, const char* question, const qwen3_sampling* how, qwen3_show show,
                  void* user) {
    std::string answer;
    auto keep = [&](std::string_view s) { return answer += s, show ? show(s.data(), s.size(), user) : 0; };
    const int fed = guarded(-1, [&] {
        std::vector<Message>& messages = context->messages;
        messages.push_back({"user", question});
        const std::vector<int> prompt = render_chat(context->model.tokenizer, messages), &ids = context->ids();
        size_t same = 0; // what the context holds of it already; the last token's logits are needed anew
        while (same < ids.size() && same + 1 < prompt.size() && ids[same] == prompt[same]) same++;
        context->rewind(same);
        context->feed({prompt.begin() + (ptrdiff_t)same, prompt.end()});
        return 0;
    });
    if (fed < 0) return context->messages.pop_back(), -1;
    const auto pass = [](const char* text, size_t bytes, void* f) { return (*(decltype(keep)*)f)({text, bytes}); };
    const int count = qwen3_generate(context, how, pass, &keep);
    return guarded(-1, [&] { return context->messages.push_back({"assistant", answer}), count; });
}

} // extern "C"
