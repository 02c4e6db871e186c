// libFuzzer: a request's body in one of the four dialects becomes jobs that are within every limit, or a refusal that is
// JSON.
#include "base/error.h"
#include "model/tokenizer.h"
#include "search/rerank.h"
#include "server/api/answer.h"
#include "server/api/asked.h"
#include "server/api/limits.h"
#include "server/api/messages.h"
#include "server/api/paths.h"
#include "server/api/refusal.h"
#include "server/api/service.h"
#include "server/engine/job.h"
#include "server/engine/speech.h"
#include "sj.h"
#include "tests/fuzz/model.h"
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

using namespace server;

static void must(bool ok) { if (!ok) abort(); }

static void must_be_json(std::string_view text) {
    sj::Doc doc;
    must(sj::parse(doc, text).empty());
}
// Every event is JSON, but for the word at the end of a chat.
static void must_be_events(const std::string& text) {
    for (size_t at = 0, end; at < text.size(); at = end + 2) {
        end = text.find("\n\n", at);
        must(end != text.npos);
        const std::string event = text.substr(at, end - at);
        const size_t data = event.find("data: ");
        must(data == 0 || (data != event.npos && event.compare(0, 7, "event: ") == 0 && event.find('\n') == data - 1));
        if (event != "data: [DONE]") must_be_json(event.substr(data + 6));
    }
}
// Vectors or a ranking.
static void ask_for_texts(const std::string& path, std::string_view body) {
    static const std::string folder = "tests/fixtures/embed";
    static const Tokenizer tokenizer(folder + "/tokenizer.bin");
    static const ModelFile file(folder);
    static const Weights<bf16> weights(file);
    static const Service service = [] {
        Service s = {&tokenizer, "tiny", "", 512, false};
        s.dimensions = file.config.C, s.rerank = std::make_shared<RerankPrompt>(tokenizer);
        s.relevance = std::make_shared<Relevance>(Context{}, weights, *s.rerank);
        return s;
    }();
    const Asked asked = read_asked(service, path, body, 1);
    const Ask& ask = asked.ask;
    must(!ask.jobs.empty() && ask.jobs.size() <= MAX_TEXTS && ask.prompt_tokens <= MAX_TEXT_TOKENS);
    Answer& answer = *asked.answer;
    for (const Job& job : ask.jobs) {
        must(job.pooled && !job.prompt.empty() && job.prompt.size() <= 512 && (job.space == 0 || job.space >> 63));
        for (int id : job.prompt) must(id >= 0 && id < tokenizer.size());
        Piece piece;
        piece.choice = job.choice, piece.finish = "stop", piece.hidden.assign((size_t)file.config.C, (float)job.prompt[0] - 300);
        answer.add(std::move(piece));
    }
    sj::Doc doc;
    const std::string text = answer.whole();
    must(sj::parse(doc, text).empty());
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const Tokenizer tokenizer("tests/fixtures/tiny/tokenizer.bin");
    const Service service = {&tokenizer, "tiny", "Be brief.", 512, false};
    if (size == 0) return 0;
    const std::string_view body((const char*)data + 1, size - 1);
    try {
        const char* const PATHS[] = {COMPLETION, CHAT, RESPONSES, MESSAGES, EMBEDDINGS, "/v1/rerank", EMBEDDINGS, COUNT_TOKENS};
        const std::string path = PATHS[data[0] % 8];
        if (path == COUNT_TOKENS) return must_be_json(count_message_tokens(service, body)), 0;
        if (path == EMBEDDINGS || is_ranking(path)) return ask_for_texts(path, body), 0;
        const Asked asked = read_asked(service, path, body, 1);
        const Ask& ask = asked.ask;
        Answer& answer = *asked.answer;
        must(!ask.jobs.empty() && ask.jobs.size() <= (size_t)MAX_CHOICES && ask.jobs.size() % ask.each == 0);
        for (const Job& job : ask.jobs) {
            const Sampling& how = job.how;
            must(!job.prompt.empty() && job.max_tokens > 0 && job.prompt.size() + job.max_tokens <= 512);
            for (int id : job.prompt) must(id >= 0 && id < tokenizer.size());
            must(how.temperature >= 0 && how.temperature <= 2 && how.top_p >= 0 && how.top_p <= 1 && how.min_p >= 0 && how.min_p <= 1);
            must(how.top_k >= 0 && how.repeat >= 0.009f && how.repeat <= 100 && std::fabs(how.presence) <= 2 && std::fabs(how.frequency) <= 2);
            must(job.bias.size() <= (size_t)MAX_NAMED + 1 && job.ends.size() <= MAX_ENDS && job.min_tokens <= job.max_tokens);
            for (int id : job.ends) must(id >= 0 && id < tokenizer.size());
            must((job.space == 0 || job.space >> 63) && job.salt == 1);
            must(job.stops.size() <= MAX_STOPS && job.alternatives >= -1 && job.alternatives <= MAX_ALTERNATIVES);
            for (auto [id, more] : job.bias) must(id >= 0 && id < tokenizer.size() && (std::fabs(more) <= ALLOW + 100 || more == BAN));
            for (auto& stop : job.stops) must(!stop.empty() && stop.size() <= MAX_STOP);
            // The echo of a prompt's end.
            Speech speech(tokenizer, job);
            Piece piece, last;
            for (size_t i = job.prompt.size() - std::min<size_t>(job.prompt.size(), 8); i < job.prompt.size(); i++) {
                Piece one;
                speech.feed(one, {job.prompt[i], -1, "", {{job.prompt[i], -1}}});
                one.choice = job.choice;
                if (ask.stream) must_be_events(answer.events(one));
                else answer.add(std::move(one));
            }
            speech.finish(last);
            last.choice = job.choice, last.finish = "length";
            if (ask.stream) {
                must_be_events(answer.events(last));
            } else {
                answer.add(std::move(last));
                if (answer.complete()) must_be_json(answer.whole());
            }
        }
    } catch (const Refusal& r) {
        must(r.status == 400 || r.status == 404);
        must_be_json(error_json(r));
        must_be_json(message_error_json(r, "id"));
    }
    return 0;
}
