// request.h: a request of OpenAI's API, with vLLM's additions, from JSON to jobs for the engine. Included by serve.cu,
// which says what a Job is. Every field that either of the two documents is done here or refused by name: what would be
// ignored would be missed only later. docs/server.md has the table.
#pragma once

constexpr size_t MAX_BODY = 8 << 20; // bytes of a request
constexpr int MAX_CHOICES = 128;     // answers to one request
constexpr size_t MAX_STOPS = 16, MAX_STOP = 128; // stop strings; bytes of one
constexpr int MAX_NAMED = 1024;      // ids that logit_bias, bad_words and allowed_token_ids may name together
constexpr int MAX_ALTERNATIVES = 20;
constexpr size_t MAX_TOLD = 2 << 20; // log-probabilities in one request's answers; a hundred bytes of JSON each
constexpr size_t NFC_SHRINKS = 4;    // bytes of a text to one of its NFC, at most (U+1FBE U+0308 U+0301: 7 to 2)

struct Refusal : Error {
    int status;
    std::string param, code;
    Refusal(int status, const std::string& message, const std::string& param = "", const std::string& code = "")
        : Error(message), status(status), param(param), code(code) {}
};

// The forms of late requests, by their text: the next one with the same need not read it, and finds its masks made.
struct Forms {
    static constexpr size_t KEPT = 16, LONGEST = 64 << 10; // forms; bytes of a text that is looked up
    static constexpr size_t ALL_BYTES = 256 << 20;         // of the grammars that running and waiting answers keep to

    // `grammar` makes it.
    template <class F> std::shared_ptr<Automaton> get(const Tokenizer& tokenizer, std::string text, F grammar) {
        std::shared_ptr<const Vocabulary> all;
        Kept dropped; // its memory is given back outside of the lock
        {
            std::lock_guard lock(mutex);
            if (!vocabulary) vocabulary = std::make_shared<const Vocabulary>(tokenizer);
            all = vocabulary;
            for (auto it = kept.begin(); it != kept.end(); ++it)
                if (it->first == text) {
                    std::rotate(kept.begin(), it, it + 1); // to the front
                    return kept.front().second;
                }
            if (Automaton::grammar_bytes > ALL_BYTES) dropped.swap(kept);
        }
        dropped.clear(); // what answers keep to stays
        if (Automaton::grammar_bytes > ALL_BYTES) throw Refusal(503, "too many different forms are asked for");
        auto form = std::make_shared<Automaton>(grammar(), all);
        Matcher(form).mask(); // the first mask takes longest
        std::lock_guard lock(mutex);
        if (text.size() > LONGEST) return form;
        for (auto& [other, made] : kept) // by a request that came at the same time
            if (other == text) return made;
        kept.insert(kept.begin(), {std::move(text), form});
        if (kept.size() > KEPT) kept.pop_back();
        return form;
    }

  private:
    using Kept = std::vector<std::pair<std::string, std::shared_ptr<Automaton>>>;
    std::mutex mutex;
    std::shared_ptr<const Vocabulary> vocabulary;
    Kept kept; // the latest first
};

// What all requests share.
struct Service {
    const Tokenizer* tokenizer = nullptr; // null: still loading
    std::string name, system;
    int context = 0;
    bool thinking = false;                // where the request does not say
    std::shared_ptr<Forms> forms = std::make_shared<Forms>();
    std::shared_ptr<const Documents> documents{}; // that answers are looked up in; none: no --docs
    bool generates = true;                // answers are made;
    int dimensions = 0;                   // ... vectors of so many numbers, 0: none;
    std::shared_ptr<const RerankPrompt> rerank{}; // ... rankings, or (null) none
    std::shared_ptr<const Relevance> relevance{};
    std::string path{};                   // of the model's files
    std::shared_ptr<Adapters> adapters = std::make_shared<Adapters>(); // further models, by name
};
struct Pooled; // embed_api.h: how hidden states are told

// A request, understood.
struct Ask {
    bool chat = true, stream = false, usage = false, logprobs = false;
    std::string id;
    AdapterPtr adapter{};    // the model that is asked for; null: the base model
    std::vector<Job> jobs;   // one for each answer,
    size_t each = 1;         // ... so many to a prompt
    size_t prompt_tokens = 0;
    std::vector<std::string> echo{}; // of each prompt: what its answers begin with, if that is wanted
    bool documents = false;          // the question gets passages
    std::vector<Source> sources{};   // ... these
    std::shared_ptr<const Pooled> pooled{}; // vectors or a ranking are wanted, no text
};

// The members of a JSON object, each to be asked for in its range.
struct Fields {
    std::map<std::string, sj::Value> all;
    Fields() = default;
    explicit Fields(sj::Value object, const char* what = "the body") {
        if (!object.is(sj::Object)) throw Refusal(400, format("%s is not a JSON object", what));
        if (object.size() > 1000) throw Refusal(400, format("%s has more than 1,000 members", what));
        for (auto [key, value] : object.members()) all[key] = value;
    }
    sj::Value operator[](const std::string& name) const { // null is as good as absent
        const auto it = all.find(name);
        return it == all.end() || it->second.is(sj::Null) ? sj::Value{} : it->second;
    }
    double number(const char* name, double low, double high, double otherwise) const {
        const sj::Value v = (*this)[name];
        if (!v) return otherwise;
        const double x = v.number(NAN);
        if (!(x >= low && x <= high))
            throw Refusal(400, format("%s must be a number from %g to %g", name, low, high), name);
        return x;
    }
    int64_t integer(const char* name, int64_t low, int64_t high, int64_t otherwise) const {
        const sj::Value v = (*this)[name];
        int64_t x = otherwise;
        if (v && (!v.integer(&x) || x < low || x > high))
            throw Refusal(400, format("%s must be an integer from %lld to %lld", name, (long long)low, (long long)high),
                          name);
        return x;
    }
    bool boolean(const char* name, bool otherwise) const {
        const sj::Value v = (*this)[name];
        if (v && !v.is_bool()) throw Refusal(400, format("%s must be true or false", name), name);
        return v.boolean(otherwise);
    }
    std::string text(const char* name) const {
        const sj::Value v = (*this)[name];
        if (v && !v.is(sj::String)) throw Refusal(400, format("%s must be a string", name), name);
        return v.str();
    }
};

inline std::vector<int> ids_from_json(const Service& service, sj::Value list, const char* name) {
    std::vector<int> ids;
    for (sj::Value v : list.items()) {
        int64_t id = -1;
        if (!v.integer(&id) || id < 0 || id >= service.tokenizer->size())
            throw Refusal(400, format("%s: a token must be an integer from 0 to %d", name,
                                      service.tokenizer->size() - 1), name);
        ids.push_back((int)id);
    }
    return ids;
}

// ------------------------------------------------------------------------------------------------- what is refused

// Of a field that is in no document. (A long name is not repeated as the fault's param.)
[[noreturn]] inline void refuse_name(const std::string& name) {
    throw Refusal(400, format("%s is not supported", in_quotes(name).c_str()), name.size() > 64 ? "" : name);
}

// Refuses fields that are not among these. Null is as good as absent.
using FieldList = std::initializer_list<const char*>;
inline void refuse_others(const Fields& f, FieldList known) {
    for (auto& [name, value] : f.all)
        if (!value.is(sj::Null) && std::find(known.begin(), known.end(), name) == known.end()) refuse_name(name);
}

// Refuses a field that has another value than those named here (with none: any).
using Values = std::vector<const char*>;
inline void refuse_value(const char* name, sj::Value v, const Values& values) {
    const std::string given = sj::dump(v);
    if (std::any_of(values.begin(), values.end(), [&](const char* value) { return given == value; })) return;
    std::string known;
    for (const char* value : values) known += (known.empty() ? "" : " or ") + std::string(value);
    if (values.empty()) throw Refusal(400, format("%s is not supported", name), name);
    throw Refusal(400, format("%s: only %s is supported", name, known.c_str()), name);
}
// The same of many. Empty lists and strings are as good as absent.
inline void refuse_values(const Fields& f, const std::vector<std::pair<const char*, Values>>& only) {
    for (auto& [name, values] : only) {
        const sj::Value v = f[name];
        const bool empty = (v.is(sj::Array) && v.size() == 0) || (v.is(sj::String) && v.str().empty());
        if (v && !empty) refuse_value(name, v, values);
    }
}

// Nothing else is to be done for those that stay.
inline void refuse_what_is_not_done(const Fields& f) {
    const Values never = {}, no = {"false"}, either = {"true", "false"}, no_call = {"\"none\"", "\"auto\""};
    refuse_values(f, {
        // tools and forced forms
        {"functions", never}, {"function_call", no_call}, {"guided_decoding_backend", never},
        {"guided_whitespace_pattern", never}, {"structural_tag", never},
        // what goes in
        {"suffix", never}, {"documents", never}, {"chat_template", never}, {"mm_processor_kwargs", never},
        {"add_special_tokens", either}, {"prediction", never}, {"web_search_options", never},
        // how tokens are chosen
        {"use_beam_search", no}, {"length_penalty", {"1", "1.0"}}, {"early_stopping", no}, {"logits_processors", never},
        {"thinking_token_budget", never}, {"verbosity", {"\"medium\""}},
        // what comes out
        {"audio", never}, {"modalities", {"[\"text\"]"}}, {"prompt_logprobs", never}, {"return_token_ids", no},
        {"return_tokens_as_token_ids", no}, {"include_stop_str_in_output", no}, {"include_reasoning", {"true"}},
        {"spaces_between_special_tokens", either},
        // where it is kept and computed
        {"store", no}, {"service_tier", {"\"auto\"", "\"default\""}}, {"kv_transfer_params", never},
        {"vllm_xargs", never},
    });
}

// ------------------------------------------------------------------------------------------------------ the prompts

// How a conversation is rendered and a prompt cut.
struct PromptOptions {
    ChatOptions chat{};
    size_t truncate = 0; // tokens of the prompt that stay, its last; 0: all
};

// A text that is too long for the context whatever its tokens are is refused before they are made.
inline void check_length(const Service& service, size_t bytes, const PromptOptions& o, const char* name) {
    const size_t most = service.tokenizer->longest() * NFC_SHRINKS * (size_t)service.context;
    if (!o.truncate && bytes > most)
        throw Refusal(400, format("the context is %d tokens: %zu bytes cannot fit", service.context, bytes), name,
                      "context_length_exceeded");
}

// A string, a list of strings, of ids, or of lists of ids. Text stays text, whatever it looks like.
inline std::vector<std::vector<int>> prompts_from_json(const Service& service, sj::Value v, const PromptOptions& o) {
    std::vector<std::vector<int>> prompts;
    auto encode = [&](const std::string& text) {
        check_length(service, text.size(), o, "prompt");
        return service.tokenizer->encode(text, false);
    };
    const auto first = v.items().begin();
    const bool of_ids = v.size() && (*first).is(sj::Number);
    if (v.is(sj::String)) return {encode(v.str())};
    if (!v.is(sj::Array) || v.size() == 0)
        throw Refusal(400, "prompt must be a string, a list of strings or of token ids", "prompt");
    if (of_ids) return {ids_from_json(service, v, "prompt")};
    if (v.size() > MAX_CHOICES) throw Refusal(400, format("at most %d prompts in a request", MAX_CHOICES), "prompt");
    for (sj::Value p : v.items()) {
        if (!p.is(sj::String) && !p.is(sj::Array))
            throw Refusal(400, "prompt: neither a string nor a list of token ids", "prompt");
        prompts.push_back(p.is(sj::String) ? encode(p.str()) : ids_from_json(service, p, "prompt"));
    }
    return prompts;
}

// What of the documents goes with the question, so that `room` tokens of the context are left for the answer.
inline std::vector<Source> add_passages(const Service& service, std::vector<Message>& messages, const PromptOptions& o,
                                        const std::vector<std::string>& tools, size_t room) {
    const Tokenizer& tokenizer = *service.tokenizer;
    auto rendered = [&](const std::vector<Message>& m) { return render_chat(tokenizer, m, o.chat, tools).size(); };
    auto measure = [&](std::string_view s) { return tokenizer.encode(s, false).size(); };
    const size_t context = (size_t)service.context;
    try {
        return add_passages(*service.documents, messages, context - std::min(context, room), rendered, measure);
    } catch (const LookupStopped&) {
        throw Refusal(503, "the lookup in documents was given up");
    } catch (const IndexFault& e) { // no fault of the request; its path is no matter of the client's
        print_error("serve", e.what());
        throw Refusal(500, "the documents cannot be looked up");
    }
}

// `ask`: gets the sources, if it wants passages of the documents.
inline std::vector<int> chat_prompt(const Service& service, const Fields& f, const PromptOptions& o,
                                    Ask* ask = nullptr) {
    try {
        std::vector<Message> messages = messages_from_json(f["messages"]);
        for (Message& m : messages)
            if (m.role == "developer") m.role = "system";
        if (!service.system.empty() && (messages.empty() || messages[0].role != "system"))
            messages.insert(messages.begin(), {"system", service.system});
        size_t bytes = 0;
        for (const Message& m : messages) bytes += m.content.size();
        const std::vector<std::string> tools = tools_from_json(f["tools"]);
        for (auto& tool : tools) bytes += tool.size();
        check_length(service, bytes, o, "messages");
        if (ask && ask->documents) {
            const int64_t quarter = service.context / 4, most = f.integer("max_tokens", 1, INT_MAX, quarter);
            const size_t room = (size_t)f.integer("max_completion_tokens", 1, INT_MAX, most);
            ask->sources = add_passages(service, messages, o, tools, room);
        }
        return render_chat(*service.tokenizer, messages, o.chat, tools);
    } catch (const Refusal&) {
        throw;
    } catch (const Error& e) {
        throw Refusal(400, e.what(), "messages");
    }
}

// Whether it thinks: as the request says in one of two ways, else as the server does.
inline ChatOptions chat_options_from_json(const Service& service, const Fields& f) {
    ChatOptions o{service.thinking, true};
    const std::string effort = f.text("reasoning_effort");
    if (!effort.empty()) { // the model knows no degrees
        const bool little = effort == "none" || effort == "minimal";
        if (!little && effort != "low" && effort != "medium" && effort != "high")
            throw Refusal(400, "reasoning_effort must be none, minimal, low, medium or high", "reasoning_effort");
        o.thinking = !little;
    }
    if (f["chat_template_kwargs"]) {
        const Fields kwargs(f["chat_template_kwargs"], "chat_template_kwargs");
        for (auto& [name, value] : kwargs.all)
            if (name != "enable_thinking")
                throw Refusal(400, "chat_template_kwargs: only enable_thinking is supported", "chat_template_kwargs");
        const bool wanted = kwargs.boolean("enable_thinking", o.thinking);
        if (!effort.empty() && wanted != o.thinking)
            throw Refusal(400, "reasoning_effort contradicts enable_thinking", "reasoning_effort");
        o.thinking = wanted;
    }
    o.continue_final = f.boolean("continue_final_message", false);
    o.generation_prompt = f.boolean("add_generation_prompt", !o.continue_final);
    if (o.continue_final && o.generation_prompt)
        throw Refusal(400, "continue_final_message needs add_generation_prompt: false", "add_generation_prompt");
    return o;
}

// ------------------------------------------------------------------------------------------------------- the answers

// Draws as the request wants them; what it does not say is Qwen's advice.
inline Sampling sampling_from_json(const Fields& f, bool thinking) {
    Sampling how;
    how.temperature = (float)f.number("temperature", 0, 2, thinking ? 0.6f : 0.7f);
    how.top_p = (float)f.number("top_p", 0, 1, thinking ? 0.95f : 0.8f);
    how.top_k = (int)std::max<int64_t>(0, f.integer("top_k", -1, INT_MAX, 20));
    how.min_p = (float)f.number("min_p", 0, 1, 0);
    how.repeat = (float)f.number("repetition_penalty", 0.01, 100, 1);
    how.presence = (float)f.number("presence_penalty", -2, 2, 0);
    how.frequency = (float)f.number("frequency_penalty", -2, 2, 0);
    how.seed = f["seed"] ? (uint64_t)f.integer("seed", INT64_MIN, INT64_MAX, 0) : random_bits();
    return how;
}

inline sj::Value parse_body(sj::Doc& doc, std::string_view body) {
    const std::string fault = sj::parse(doc, body);
    if (!fault.empty()) throw Refusal(400, "the body is not valid JSON: " + fault);
    return doc.root();
}

inline std::vector<std::string> stops_from_json(sj::Value stop) {
    std::vector<std::string> stops;
    if (stop.is(sj::String)) stops.push_back(stop.str());
    else if (stop) {
        if (!stop.is(sj::Array) || stop.size() > MAX_STOPS)
            throw Refusal(400, format("stop must be a string or a list of at most %zu", MAX_STOPS), "stop");
        for (sj::Value s : stop.items()) stops.push_back(s.str());
    }
    for (auto& s : stops)
        if (s.empty() || s.size() > MAX_STOP)
            throw Refusal(400, format("stop: each must be a string of 1 to %zu bytes", MAX_STOP), "stop");
    return stops;
}

// The id of a word that is one token. vLLM takes a word also with a space before it, if that is one token too.
inline void ban_word(const Tokenizer& tokenizer, const std::string& word, std::map<int, float>& bias) {
    const std::vector<int> plain = tokenizer.encode(word, false), spaced = tokenizer.encode(" " + word, false);
    if (plain.size() != 1)
        throw Refusal(400, "bad_words: only words that are one token each are supported", "bad_words");
    bias[plain[0]] = BAN;
    if (spaced.size() == 1) bias[spaced[0]] = BAN;
}

// What is added to logits: logit_bias, bad_words and allowed_token_ids.
inline std::vector<std::pair<int, float>> biases_from_json(const Service& service, const Fields& f,
                                                           const Sampling& how) {
    std::map<int, float> of;
    if (const sj::Value bias = f["logit_bias"]) {
        if (!bias.is(sj::Object) || bias.size() > MAX_NAMED)
            throw Refusal(400, format("logit_bias must be an object of at most %d members", MAX_NAMED), "logit_bias");
        for (auto [key, value] : bias.members()) {
            const double x = value.number(NAN);
            char* end;
            errno = 0;
            const long id = strtol(key.c_str(), &end, 10);
            const bool number = isdigit((unsigned char)key.c_str()[0]) && !*end && !errno;
            if (!number || id >= service.tokenizer->size() || !(x >= -100 && x <= 100))
                throw Refusal(400, "logit_bias must hold token ids and numbers from -100 to 100", "logit_bias");
            of[(int)id] = (float)x;
        }
    }
    if (const sj::Value list = f["allowed_token_ids"]) {
        if (!list.is(sj::Array) || list.size() == 0 || list.size() > MAX_NAMED)
            throw Refusal(400, format("allowed_token_ids must be a list of 1 to %d ids", MAX_NAMED),
                          "allowed_token_ids");
        if (has_penalties(how))
            throw Refusal(400, "allowed_token_ids is not supported beside penalties", "allowed_token_ids");
        const std::vector<int> ids = ids_from_json(service, list, "allowed_token_ids");
        for (int id : std::set<int>(ids.begin(), ids.end())) of[id] += ALLOW;
    }
    if (const sj::Value words = f["bad_words"]) {
        if (!words.is(sj::Array) || words.size() > MAX_NAMED)
            throw Refusal(400, format("bad_words must be a list of at most %d strings", MAX_NAMED), "bad_words");
        for (sj::Value word : words.items()) {
            if (word.str().empty() || word.str().size() > MAX_STOP)
                throw Refusal(400, format("bad_words: each must be a string of 1 to %zu bytes", MAX_STOP), "bad_words");
            ban_word(*service.tokenizer, word.str(), of);
        }
    }
    if (of.size() > MAX_NAMED)
        throw Refusal(400, format("at most %d ids in logit_bias, allowed_token_ids and bad_words together", MAX_NAMED),
                      "logit_bias");
    return {of.begin(), of.end()};
}

// ------------------------------------------------------------------------------------------------- forms and tools

// A grammar's fault is that of the field which it comes from.
template <class F> auto blame(const char* field, F f) {
    try {
        return f();
    } catch (const Refusal&) {
        throw;
    } catch (const Error& e) {
        throw Refusal(400, format("%s: %s", field, e.what()), field);
    }
}
inline std::shared_ptr<Automaton> form_of(const Service& service, const char* field, const std::string& kind,
                                          sj::Value v) {
    return blame(field, [&] {
        return service.forms->get(*service.tokenizer, kind + std::string(v.raw()), [&] {
            if (kind == "object") return grammar_of_json_object();
            if (kind == "json") {
                sj::Doc doc;
                const std::string text = v.str(); // vLLM takes it as text too
                if (!v.is(sj::String)) return grammar_of_schema(v);
                if (const std::string fault = sj::parse(doc, text); !fault.empty()) DIE("not JSON: %s", fault.c_str());
                return grammar_of_schema(doc.root());
            }
            if (kind == "choice") {
                std::vector<std::string> words;
                if (!v.is(sj::Array) || v.size() == 0) DIE("choice must be a list of strings");
                for (sj::Value word : v.items())
                    if (word.str().empty()) DIE("choice must be a list of strings that are not empty");
                    else words.push_back(word.str());
                return grammar_of_choice(words);
            }
            if (!v.is(sj::String)) DIE("%s must be a string", kind.c_str());
            return kind == "regex" ? grammar_of_regex(v.str()) : grammar_of_gbnf(v.str());
        });
    });
}

// response_format, structured_outputs and vLLM's older guided_*: at most one of all.
inline std::shared_ptr<Automaton> form_from_json(const Service& service, const Fields& f) {
    std::vector<std::tuple<const char*, std::string, sj::Value>> wanted; // field, kind, what
    if (const sj::Value v = f["response_format"]) {
        const char* field = "response_format";
        const std::string type = v["type"].str();
        if (!v.is(sj::Object)) throw Refusal(400, "response_format must be an object", field);
        if (type == "json_object") wanted.push_back({field, "object", {}});
        else if (type == "json_schema") {
            const sj::Value schema = v["json_schema"]["schema"];
            if (!schema) throw Refusal(400, "response_format: json_schema has no schema", field);
            wanted.push_back({field, "json", schema});
        } else if (type != "text")
            throw Refusal(400, "response_format: type must be text, json_object or json_schema", field);
    }
    static const char *const KINDS[] = {"json", "regex", "choice", "grammar"};
    if (const sj::Value v = f["structured_outputs"]) {
        const char* field = "structured_outputs";
        const Fields all(v, field);
        for (auto& [name, value] : all.all) {
            const bool known = std::find(std::begin(KINDS), std::end(KINDS), name) != std::end(KINDS);
            if (value.is(sj::Null) || (!known && value.is(sj::False))) continue;
            if (known) wanted.push_back({field, name, value});
            else if (name == "json_object" && value.is(sj::True)) wanted.push_back({field, "object", {}});
            else throw Refusal(400, format("structured_outputs: %s is not supported", in_quotes(name).c_str()), field);
        }
    }
    static const std::pair<const char*, const char*> OLDER[] = {
        {"guided_json", "json"}, {"guided_regex", "regex"}, {"guided_choice", "choice"}, {"guided_grammar", "grammar"}};
    for (auto [field, kind] : OLDER)
        if (f[field]) wanted.push_back({field, kind, f[field]});
    if (wanted.empty()) return nullptr;
    const auto& [field, kind, what] = wanted.back();
    if (wanted.size() > 1) throw Refusal(400, "more than one form is asked for", field);
    return form_of(service, field, kind, what);
}

// tools, tool_choice and parallel_tool_calls, to the job.
inline void add_tools(const Service& service, const Fields& f, const Ask& ask, Job& job) {
    const bool parallel = f.boolean("parallel_tool_calls", true);
    const sj::Value choice = f["tool_choice"];
    const std::string word = choice.str("auto");
    const bool named = choice.is(sj::Object), some = f["tools"] && f["tools"].size() > 0;
    if (!named && word != "none" && word != "auto" && word != "required")
        throw Refusal(400, "tool_choice must be none, auto, required or a function", "tool_choice");
    if (!some) {
        if (named || word == "required") throw Refusal(400, "tool_choice needs tools", "tool_choice");
        if (f["tools"] && !f["tools"].is(sj::Array)) throw Refusal(400, "tools must be a list", "tools");
        return;
    }
    if (!ask.chat) throw Refusal(400, "tools are for /v1/chat/completions", "tools");
    std::vector<Tool> tools = blame("tools", [&] { return read_tools(f["tools"]); });
    const int open = service.tokenizer->id(CALL_OPEN), close = service.tokenizer->id(CALL_CLOSE);
    if (open < 0 || close < 0) throw Refusal(400, "the model's vocabulary has no <tool_call>", "tools");
    if (word == "none" && !named) return job.bias.push_back({open, BAN});
    if (job.form) throw Refusal(400, "a form of the answer is not supported beside tools", "tools");
    if (ask.logprobs) throw Refusal(400, "logprobs is not supported beside tools", "logprobs");
    std::set<std::string> names;
    for (const Tool& t : tools) names.insert(t.name);
    job.tools = std::make_shared<const std::set<std::string>>(names);
    std::string key = std::string(f["tools"].raw()) + std::string(choice.raw()) + (parallel ? "+" : "1");
    if (named) {
        const std::string name = choice["function"]["name"].str();
        if (choice["type"].str() != "function" || !names.count(name))
            throw Refusal(400, "tool_choice: no such function", "tool_choice");
        tools.erase(std::remove_if(tools.begin(), tools.end(), [&](auto& t) { return t.name != name; }), tools.end());
    }
    job.one_call = named || !parallel;
    const bool strict = std::any_of(tools.begin(), tools.end(), [](auto& t) { return t.strict; });
    if (!named && word == "auto" && !strict) return;
    job.sure_calls = true, job.form_of_calls = !named && word == "auto";
    job.form = blame("tools", [&] {
        return service.forms->get(*service.tokenizer, "tools" + key, [&] {
            return job.form_of_calls ? grammar_of_call_body(tools) : grammar_of_calls(tools, !job.one_call);
        });
    });
}

// All of a job but its prompt and its reply.
inline Job job_from_json(const Service& service, const Fields& f, const Ask& ask, bool thinking, uint64_t salt) {
    Job job;
    job.salt = salt, job.adapter = ask.adapter;
    if (const std::string name = f.text("cache_salt"); !name.empty()) job.space = salted_space(salt, name);
    else if (f["cache_salt"]) throw Refusal(400, "cache_salt must not be empty", "cache_salt");
    job.priority = (int)f.integer("priority", INT_MIN, INT_MAX, 0);
    job.thinking = thinking;
    job.how = sampling_from_json(f, thinking);
    job.ignore_eos = f.boolean("ignore_eos", false);
    job.specials = !f.boolean("skip_special_tokens", true);
    job.every = ask.stream;
    job.stops = stops_from_json(f["stop"]);
    job.bias = biases_from_json(service, f, job.how);
    job.form = form_from_json(service, f);
    add_tools(service, f, ask, job);
    if (const sj::Value list = f["stop_token_ids"]) {
        if (!list.is(sj::Array) || list.size() > MAX_ENDS)
            throw Refusal(400, format("stop_token_ids must be a list of at most %zu ids", MAX_ENDS), "stop_token_ids");
        job.ends = ids_from_json(service, list, "stop_token_ids");
    }
    if (ask.chat) {
        const int top = (int)f.integer("top_logprobs", 0, MAX_ALTERNATIVES, 0);
        if (f["top_logprobs"] && !ask.logprobs) throw Refusal(400, "top_logprobs needs logprobs: true", "top_logprobs");
        if (ask.logprobs) job.alternatives = top;
    } else if (ask.logprobs) {
        job.alternatives = (int)f.integer("logprobs", 0, MAX_ALTERNATIVES, 0);
    }
    return job;
}

// A part of the answer's id: the request's own, or a new one.
inline std::string request_name(const Fields& f) {
    const std::string name = f.text("request_id");
    auto plain = [](char c) { return isalnum((unsigned char)c) || c == '-' || c == '_'; };
    if (name.size() > 64 || !std::all_of(name.begin(), name.end(), plain))
        throw Refusal(400, "request_id must be at most 64 letters, digits, - and _", "request_id");
    return name.empty() ? format("%016llx", (unsigned long long)random_bits()) : name;
}

// The adapter that is asked for, by the name of a model; null: the base model.
inline AdapterPtr asked_adapter(const Service& service, const Fields& f) {
    const std::string model = f.text("model");
    if (model.empty() || model == service.name) return nullptr;
    AdapterPtr adapter = service.adapters->find(model);
    if (!adapter) throw Refusal(404, "no such model; /v1/models has those that there are", "model", "model_not_found");
    return adapter;
}

// What is asked for as a whole.
inline Ask ask_from_json(const Service& service, const Fields& f, bool chat) {
    Ask ask;
    ask.adapter = asked_adapter(service, f);
    refuse_what_is_not_done(f);
    ask.chat = chat;
    ask.id = (chat ? "chatcmpl-" : "cmpl-") + request_name(f);
    ask.stream = f.boolean("stream", false);
    if (f["stream_options"]) {
        if (!ask.stream) throw Refusal(400, "stream_options is only for stream: true", "stream_options");
        const Fields o(f["stream_options"], "stream_options");
        ask.usage = o.boolean("include_usage", false);
        for (const char* more : {"continuous_usage_stats", "include_obfuscation"})
            if (o.boolean(more, false)) throw Refusal(400, format("stream_options: %s is not supported", more), more);
    }
    ask.logprobs = chat ? f.boolean("logprobs", false) : (bool)f["logprobs"];
    for (const char* label : {"user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}) f.text(label);
    ask.documents = f.boolean("use_documents", chat && service.documents);
    if (ask.documents && !service.documents)
        throw Refusal(400, "use_documents: the server has no documents (--docs)", "use_documents");
    if (ask.documents && !chat) throw Refusal(400, "use_documents is not for /v1/completions", "use_documents");
    ask.each = (size_t)f.integer("n", 1, MAX_CHOICES, 1);
    if (f.integer("best_of", 1, MAX_CHOICES, (int64_t)ask.each) != (int64_t)ask.each)
        throw Refusal(400, "best_of is not supported", "best_of");
    if (f.boolean("echo", false) && (chat || ask.logprobs))
        throw Refusal(400, "echo is supported for /v1/completions without logprobs", "echo");
    return ask;
}

// Reads a request's body. `salt`: whose prompts it may share pages with.
inline Ask read_ask(const Service& service, std::string_view body, bool chat, uint64_t salt) {
    sj::Doc doc;
    const Fields f(parse_body(doc, body));
    Ask ask = ask_from_json(service, f, chat);
    PromptOptions how;
    if (chat) how.chat = chat_options_from_json(service, f);
    else how.chat.thinking = false;
    const Job job = job_from_json(service, f, ask, how.chat.thinking && !how.chat.continue_final, salt);

    const int64_t most = f.integer("max_tokens", 1, INT_MAX, chat ? INT_MAX : 16);
    const int64_t limit = f.integer("max_completion_tokens", 1, INT_MAX, most);
    const int64_t least = f.integer("min_tokens", 0, limit, 0);
    const bool limited = !chat || f["max_completion_tokens"] || f["max_tokens"];
    const int64_t wanted = limited ? limit : 1;
    if (const int64_t k = f.integer("truncate_prompt_tokens", -1, service.context, 0); k != 0)
        how.truncate = (size_t)(k > 0 ? k : std::max<int64_t>(1, service.context - wanted)); // -1: what leaves room
    else if (f["truncate_prompt_tokens"])
        throw Refusal(400, "truncate_prompt_tokens must be -1 or positive", "truncate_prompt_tokens");

    std::vector<std::vector<int>> prompts;
    if (chat) prompts.push_back(chat_prompt(service, f, how, &ask));
    else prompts = prompts_from_json(service, f["prompt"], how);
    if (prompts.size() * ask.each > (size_t)MAX_CHOICES)
        throw Refusal(400, format("at most %d answers to a request", MAX_CHOICES), "n");
    auto reply = std::make_shared<Reply>();
    reply->whole = !ask.stream;
    size_t told = 0;
    for (auto& prompt : prompts) {
        if (how.truncate && prompt.size() > how.truncate)
            prompt.erase(prompt.begin(), prompt.end() - (ptrdiff_t)how.truncate);
        const size_t room = (size_t)service.context - std::min((size_t)service.context, prompt.size());
        if (prompt.empty()) throw Refusal(400, "the prompt is empty", "prompt");
        if (room == 0 || (limited && (size_t)limit > room))
            throw Refusal(400, format("the context is %d tokens: the prompt has %zu%s", service.context, prompt.size(),
                                      room ? format(", and %lld are asked for", (long long)limit).c_str() : ""),
                          chat ? "messages" : "prompt", "context_length_exceeded");
        if (f.boolean("echo", false)) ask.echo.push_back(service.tokenizer->decode(prompt, false));
        ask.prompt_tokens += prompt.size();
        for (size_t i = 0; i < ask.each; i++) {
            Job one = job;
            one.reply = reply, one.choice = reply->left++;
            one.prompt = prompt;
            one.how.seed += (uint64_t)one.choice;
            one.max_tokens = std::min((size_t)limit, room);
            one.min_tokens = std::min((size_t)least, one.max_tokens);
            told += one.max_tokens * (size_t)(one.alternatives + 1);
            ask.jobs.push_back(std::move(one));
        }
    }
    if (told > MAX_TOLD)
        throw Refusal(400, format("at most %zu log-probabilities to a request: ask for fewer answers, tokens or "
                                  "alternatives", MAX_TOLD),
                      chat ? "top_logprobs" : "logprobs");
    return ask;
}
