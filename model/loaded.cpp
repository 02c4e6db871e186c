// model/loaded.cpp: a model in memory and its conversations, whatever type its numbers are stored as.
#include "model/loaded.h"
#include "base/stop_flag.h"
#include "model/step_bytes.h"
#include "model/device.h"
#include "model/weights.h"

template <class T> struct ConversationOf : Conversation {
    Session<T> session;

    ConversationOf(const Config& c, const Weights<T>& w, int tokens, const Context& where)
        : session(c, w, tokens, where) {}

    const Context& ctx() const override { return session.ctx; }
    const Config& config() const override { return session.config; }
    int capacity() const override { return session.capacity; }
    std::vector<int>& ids() override { return session.ids; }
    float* logits() override { return session.logits; }
    LookUp& lookup() override { return session.lookup; }

    void feed(const std::vector<int>& tokens, const StopFlag* stop, const Rows& rows) override {
        session.feed(tokens, stop, rows);
    }
    void rewind(size_t n) override { session.rewind(n); }
    bool full() const override { return session.full(); }
    bool can_look_up() const override { return session.can_look_up(); }
    int step_tokens() const override { return session.step_tokens(); }
    void begin_draws(const Sampling& how, int exist, size_t answer, size_t most) override {
        session.begin_draws(how, exist, answer, most);
    }
    int draw() override { return session.draw(); }
    void accept(int id) override { session.accept(id); }
    void generate(const Tokenizer* tokenizer, Generation& g,
                  const std::function<void(std::string_view)>& show) override {
        ::generate(session, tokenizer, g, show);
    }

    size_t block_bytes(size_t n) const override { return ::block_bytes(session, n); }
    void each_block(size_t n, const std::function<void(void* pages)>& f) override {
        ::each_block(session, n, [&](T* pages) { f(pages); });
    }
};

template <class T>
LoadedAs<T>::LoadedAs(const ModelFile& file, const Context& where, Format made, bool keeps)
    : LoadedModel(file, where, std::is_same_v<T, float>), weights(file, made, keeps) {}

template <class T> void LoadedAs<T>::attach(const AdapterFile& from) {
    adapter = std::make_unique<AttachedAdapter<T>>(ctx, weights, from, ctx.gpu ? Session<T>::GPU_CHUNK
                                                                              : Session<T>::CHUNK);
}

template <class T> void LoadedAs<T>::decode_for_long() const { ::decode_for_long(ctx, file, weights); }

template <class T> std::unique_ptr<Conversation> LoadedAs<T>::open(int tokens) const {
    return std::make_unique<ConversationOf<T>>(file.config, weights, tokens, ctx);
}

template <class T> const char* LoadedAs<T>::type_name() const { return ::type_name(weights); }
template <class T> size_t LoadedAs<T>::step_bytes(int experts) const { return ::step_bytes(weights, (size_t)experts); }
template <class T> size_t LoadedAs<T>::token_bytes() const {
    return KVCache<T>::bytes(file.config, 1, ctx.kv_fp8) / PAGE;
}

template struct LoadedAs<bf16>;
template struct LoadedAs<float>;

template <class T>
static std::unique_ptr<LoadedModel> load_as(const ModelFile& file, const Context& where, Format made, bool keeps,
                                            bool quiet) {
    auto model = std::make_unique<LoadedAs<T>>(file, where, made, keeps);
    if (!quiet) to_device(model->ctx, file, model->weights);
    else if constexpr (HAS_GPU<T>)
        if (model->ctx.gpu) model->weights.upload(model->ctx, file);
    return model;
}

std::unique_ptr<LoadedModel> load_model(const ModelFile& file, const Context& where, bool wide, Format made, bool keeps,
                                        bool quiet) {
    return wide ? load_as<float>(file, where, made, keeps, quiet) : load_as<bf16>(file, where, made, keeps, quiet);
}
