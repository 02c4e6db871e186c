// model/loaded.h: a model in memory and its conversations, whatever type its numbers are stored as: Weights<T> and
// Session<T> for code that is compiled once.
#pragma once
#include "base/stop_flag.h"
#include "model/adapters.h"
#include "model/lookup.h"
#include "model/session.h"
#include "model/tokenizer.h"
#include "qwen3.cu"
#include <cstddef>
#include <functional>
#include <memory>
#include <string_view>
#include <vector>

// A Session<T>, which documents the members.
struct Conversation {
    using Rows = std::function<void(const float* logits)>; // (V)

    virtual ~Conversation() = default;
    virtual const Context& ctx() const = 0;
    virtual const Config& config() const = 0;
    virtual int capacity() const = 0;
    virtual std::vector<int>& ids() = 0;
    virtual float* logits() = 0;
    virtual LookUp& lookup() = 0;

    virtual void feed(const std::vector<int>& tokens, const StopFlag* stop = nullptr,
                      const Rows& rows = nullptr) = 0;
    virtual void rewind(size_t n) = 0;
    virtual bool full() const = 0;
    virtual bool can_look_up() const = 0;
    virtual int step_tokens() const = 0;
    virtual void begin_draws(const Sampling& how, int exist, size_t answer, size_t most) = 0;
    virtual int draw() = 0;
    virtual void accept(int id) = 0;
    virtual void generate(const Tokenizer* tokenizer, Generation& g,
                          const std::function<void(std::string_view)>& show) = 0;

    // The keys and values of the first n tokens: see block_bytes and each_block.
    virtual size_t block_bytes(size_t n) const = 0;
    virtual void each_block(size_t n, const std::function<void(void* pages)>& f) = 0;
};

// Weights<T>, where they are used.
struct LoadedModel {
    const ModelFile& file; // outlives it
    Context ctx;
    const bool wide; // numbers are float, else bf16

    virtual ~LoadedModel() = default;
    virtual void attach(const AdapterFile& adapter) = 0; // once
    virtual void decode_for_long() const = 0;            // see model/device.h
    virtual std::unique_ptr<Conversation> open(int tokens) const = 0;

    virtual const char* type_name() const = 0;    // of most of its numbers
    virtual size_t step_bytes(int experts) const = 0; // read by a step that chooses so many experts a layer
    virtual size_t token_bytes() const = 0;       // of a token's keys and values
    size_t number_bytes() const { return wide ? sizeof(float) : sizeof(bf16); }

  protected:
    LoadedModel(const ModelFile& f, const Context& where, bool is_wide) : file(f), ctx(where), wide(is_wide) {}
};

template <class T> struct LoadedAs : LoadedModel {
    Weights<T> weights;
    std::unique_ptr<AttachedAdapter<T>> adapter;

    LoadedAs(const ModelFile& file, const Context& where, Format made, bool packed);
    void attach(const AdapterFile& from) override;
    void decode_for_long() const override;
    std::unique_ptr<Conversation> open(int tokens) const override;
    const char* type_name() const override;
    size_t step_bytes(int experts) const override;
    size_t token_bytes() const override;
};

// Reads the weights, to the GPU if ops run there. wide: as float, else as bf16; made, keeps: see made_format and
// keeps_packed; quiet: nothing on stderr.
std::unique_ptr<LoadedModel> load_model(const ModelFile& file, const Context& where, bool wide, Format made, bool keeps,
                                        bool quiet = false);

// f(Weights<T>), for work that needs their type.
template <class F> auto with_weights(const LoadedModel& model, F f) {
    if (model.wide) return f(static_cast<const LoadedAs<float>&>(model).weights);
    return f(static_cast<const LoadedAs<bf16>&>(model).weights);
}
