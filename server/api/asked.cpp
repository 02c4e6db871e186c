// asked.cpp: selects the reader of a request by its path.
#include "server/api/asked.h"
#include "server/api/embed_api.h"
#include "server/api/fields.h"
#include "server/api/messages.h"
#include "server/api/paths.h"
#include "server/api/predict.h"
#include "server/api/prompts.h"
#include "server/api/responses.h"
#include "server/api/turns.h"
#include <climits>
#include <utility>

namespace server {

static const Names RESPONSE_NAMES = {{"messages", "input"}, {"max_completion_tokens", "max_output_tokens"},
                                     {"response_format", "text"}, {"reasoning_effort", "reasoning"}},
                   MESSAGE_NAMES = {{"response_format", "output_config"}, {"stop", "stop_sequences"},
                                    {"parallel_tool_calls", "tool_choice"}};

Asked read_asked(const Service& service, const std::string& path, std::string_view body, uint64_t salt) {
    auto as_it_is = [&](Ask&& ask) {
        auto answer = std::make_unique<Answer>(service, ask);
        return Asked{std::move(ask), std::move(answer)};
    };
    const bool texts = path == EMBEDDINGS || is_ranking(path);
    if (!texts && !service.generates)
        throw Refusal(400, "this server makes no text (serve --task generate)", "model");
    if (path == PREDICT) return read_predict(service, body, salt);
    if (path == CHAT || path == COMPLETION) return as_it_is(read_ask(service, body, path == CHAT, salt));
    sj::Doc doc;
    const Fields f(parse_body(doc, body));
    if (texts) return as_it_is(path == EMBEDDINGS ? read_embeddings(service, f, salt) : read_ranking(service, f, salt));

    const bool response = path == RESPONSES;
    const std::string chat = response ? chat_of_response(f) : chat_of_message(f, false);
    Asked a;
    a.ask = renamed(response ? RESPONSE_NAMES : MESSAGE_NAMES, [&] { return read_ask(service, chat, true, salt); });
    a.ask.id = (response ? "resp_" : "msg_") + a.ask.id.substr(a.ask.id.find('-') + 1);
    if (response) a.answer = std::make_unique<ResponseAnswer>(service, a.ask, f);
    else a.answer = std::make_unique<MessageAnswer>(service, a.ask);
    return a;
}

std::string count_message_tokens(const Service& service, std::string_view body) {
    sj::Doc doc, chat;
    const Fields f(parse_body(doc, body));
    const std::string text = chat_of_message(f, true);
    const Fields translated(parse_body(chat, text));
    const size_t n = renamed(MESSAGE_NAMES, [&] {
        const PromptOptions any{chat_options_from_json(service, translated), SIZE_MAX};
        Ask ask = ask_from_json(service, translated, true);
        job_from_json(service, translated, ask, may_think(*service.tokenizer, any.chat), 1);
        translated.integer("min_tokens", 0, translated.integer("max_tokens", 1, INT_MAX, INT_MAX), 0);
        return chat_prompt(service, translated, any, &ask).size();
    });
    sj::Writer w;
    return w.object().field("input_tokens", n).end().text;
}

} // namespace server
