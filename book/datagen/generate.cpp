#include "book/datagen/generate.h"
#include "base/error.h"
#ifdef HAVE_CURL
#include "base/options.h"
#include "book/characters.h"
#include "book/datagen/requests.h"
#include "book/datagen/transfer.h"
#include "book/report.h"
#include "book/rows.h"
#include "book/text.h"
#include "book/words.h"
#include "model/chat_template.h"
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <unistd.h>
#include <unordered_set>
#include <utility>
#include <vector>

namespace book {
namespace {

// One connection: idle, in a request, or waiting to retry.
struct Slot : Transfer {
    std::unique_ptr<Request> request; // none: idle
    double retry_after = -1; // seconds, from the endpoint's header; -1: none given
    size_t attempts = 0;
    double wake = 0; // when to send; infinite during a request
    double begun = 0; // when its request was first sent
    bool formless = false; // retries without response_format, which was refused
};

struct Sender {
    const Limits limits;
    Journal& journal;
    const std::string url, key;
    const size_t retries, parallel, timeout, give_up;
    curl_slist* headers = json_headers();
    CURLM* multi = curl_multi_init();
    std::vector<std::unique_ptr<Slot>> slots;
    std::map<std::string, std::pair<size_t, std::string>> faults; // why requests were retried or given up: count, and
                                                                  // the endpoint's last message
    struct Refused { Reader::Place place; size_t number; long status; std::string why; };
    std::vector<Refused> refused;
    size_t answered = 0, failed = 0, failures_in_row = 0, cut = 0; // cut: answers cut off by max_tokens
    bool formless = false;                // the endpoint has no response_format
    double last_answer = 0;
    std::string fatal;                    // why sending more makes no sense

    Sender(const Arguments& a, Journal& journal)
        : limits(a), journal(journal), url(a.need("--url")), key(read_key(a)),
          retries(a.number("--retries", limits.count("generate.retries"), 0, 100)),
          parallel(a.number("--parallel", limits.count("generate.parallel"), 1, 1000)),
          timeout(a.number("--timeout", limits.count("generate.timeout"), 1, 86400)),
          give_up(limits.count("generate.give_up")) {
        if (!key.empty()) headers = curl_slist_append(headers, ("Authorization: Bearer " + key).c_str());
        while (slots.size() < parallel) slots.push_back(std::make_unique<Slot>());
    }
    static std::string read_key(const Arguments& a) {
        if (!a.has("--key-env")) return "";
        const std::string name = a.text("--key-env");
        const char* found = getenv(name.c_str());
        if (!found || !*found) DIE("--key-env %s: no such environment variable", name.c_str());
        if (strpbrk(found, "\r\n")) DIE("--key-env %s: holds a line break", name.c_str());
        return found;
    }
    ~Sender() {
        for (auto& s : slots) curl_multi_remove_handle(multi, s->easy);
        slots.clear();
        curl_multi_cleanup(multi);
        curl_slist_free_all(headers);
    }

    static size_t receive_header(char* bytes, size_t, size_t n, void* slot) {
        std::string line(bytes, n);
        for (char& c : line) c = (char)lower((uint8_t)c);
        for (auto [name, seconds] : {std::pair("retry-after-ms:", 1e-3), {"retry-after:", 1.}}) {
            if (line.compare(0, strlen(name), name)) continue;
            const std::string value(trimmed(std::string_view(line).substr(strlen(name))));
            char* end;
            const double wait = strtod(value.c_str(), &end) * seconds;
            if (end != value.c_str() && !*end && wait >= 0) ((Slot*)slot)->retry_after = wait;
        }
        return n;
    }
    void ask(Slot& s) {
        s.retry_after = -1;
        if (s.request && (formless || s.formless) && s.request->has_form()) s.request->remove_form();
        s.attempts++;
        s.prepare(address(url, s.request ? s.request->url : "/v1/models"), headers,
                  s.request ? &s.request->body : nullptr, 1000 * (long)timeout);
        s.set(CURLOPT_HEADERFUNCTION, receive_header);
        s.set(CURLOPT_HEADERDATA, (void*)&s);
        s.set(CURLOPT_PRIVATE, (void*)&s);
    }

    // The result of a transfer.
    struct Outcome {
        long status = 0;
        std::string fault;  // "": none
        std::string said;   // the endpoint's message
        bool again = false; // a retry may help
        bool empty = false; // a chat completion without content
        bool cut = false;   // ... cut off by max_tokens
        double wait = 0;    // ... after so many seconds
    };
    Outcome look_at(Slot& s, CURLcode code) const {
        Outcome o;
        curl_off_t date = 0; // Retry-After as a date; curl has no fractions
        get_info(s.easy, CURLINFO_RESPONSE_CODE, &o.status);
        get_info(s.easy, CURLINFO_RETRY_AFTER, &date);
        const double retry_after = s.retry_after < 0 ? (double)date : s.retry_after;
        if (!key.empty()) s.reply = without_key(s.reply, key); // an endpoint may echo the key
        sj::Doc doc;
        const bool json = sj::parse(doc, s.reply).empty(), well = o.status / 100 == 2, chat = (bool)s.request;
        const sj::Value list = doc.root()[chat ? "choices" : "data"];
        const bool answer = code == CURLE_OK && well && json && list.is(sj::Array) && (list.size() || !chat);
        o.empty = answer && chat && is_empty(list[0]);
        o.cut = answer && chat && list[0]["finish_reason"].str() == "length";
        if (answer && !o.empty) return o;
        o.fault = code != CURLE_OK ? curl_easy_strerror(code)
                : !well            ? format("HTTP status %ld", o.status)
                : o.empty          ? "a reply without content"
                : chat             ? "a reply that is no chat completion" : "a reply that is no list of models";
        if (code == CURLE_OK && !o.empty) o.said = words_of(json ? doc.root() : sj::Value(), s.reply);
        if (s.reply.find("context_length_exceeded") != s.reply.npos)
            o.said += " (datagen chunk --characters N makes shorter prompts, prompt --max-tokens N shorter answers)";
        o.again = code != CURLE_OK || well || o.status == 408 || o.status == 429 || o.status >= 500;
        const double doubled = limits["generate.backoff"] * std::pow(2, (double)s.attempts - 1);
        const std::string who = chat ? s.request->id : "";
        const double jitter = 0.75 + 0.5 * (double)(mix(s.attempts, fnv1a(who)) >> 40) / (1 << 24);
        const double backoff = std::min(doubled, limits["generate.longest_backoff"]) * jitter;
        o.wait = std::min(std::max(backoff, retry_after), limits["generate.longest_retry_after"]);
        return o;
    }

    // Whether a choice is empty, and a retry may help. (Not if max_tokens or a filter ended it.)
    static bool is_empty(sj::Value choice) {
        const sj::Value message = choice["message"], content = message["content"];
        const std::string finish = choice["finish_reason"].str();
        return (!content.is_container() || !content.size()) && trimmed(content.str()).empty() &&
               !message["tool_calls"].size() && finish != "length" && finish != "content_filter";
    }

    static std::string sentence(const Outcome& o) { return o.fault + (o.said.empty() ? "" : ": " + o.said); }

    // Ends a transfer: the answer goes into the journal, or the slot waits and retries, or gives up.
    void finish(Slot& s, CURLcode code) {
        const Outcome o = look_at(s, code);
        curl_multi_remove_handle(multi, s.easy);
        if (o.fault.empty()) {
            if (s.formless && !formless) say("the endpoint takes no response_format; asking without it");
            formless |= s.formless;
            journal.add(*s.request, o.status, s.reply);
            s.request.reset();
            answered++, failures_in_row = 0, cut += o.cut, last_answer = seconds();
            return;
        }
        const bool locked = o.status == 401 || o.status == 403 || o.status == 404; // the same for every request
        if (o.status / 100 > 2 && !o.again && !locked && !s.formless && s.request->has_form()) {
            s.formless = true, s.attempts = 0; // the form may be the cause
            s.wake = seconds();
            return;
        }
        faults[o.fault].first++, faults[o.fault].second = o.said;
        if (locked) fatal = "the endpoint answers " + sentence(o);
        if (!o.again || s.attempts > retries) {
            refused.push_back({s.request->place, s.request->number, o.status, sentence(o)});
            s.request.reset();
            failed++;
            const bool its_own = !o.again && answered; // the endpoint refuses only this request
            if (!its_own && ++failures_in_row >= give_up && fatal.empty())
                fatal = format("%zu requests in a row failed, the last with: %s", failures_in_row, sentence(o).c_str());
            return;
        }
        s.wake = seconds() + o.wait;
    }

    // The endpoint's only model, if none was named.
    std::string find_model() {
        const std::string where = address(url, "/v1/models");
        Slot s;
        for (;;) {
            stop_if_interrupted();
            ask(s);
            const CURLcode code = curl_easy_perform(s.easy);
            const Outcome o = look_at(s, code);
            if (o.fault.empty()) break;
            if (!o.again || s.attempts > retries)
                DIE("%s: %s; --model NAME names the model", where.c_str(), sentence(o).c_str());
            for (const double end = seconds() + o.wait; seconds() < end && !interrupted;) usleep(20'000);
        }
        sj::Doc doc;
        sj::parse(doc, s.reply);
        Strings names;
        for (sj::Value m : doc.root()["data"].items()) names.push_back(m["id"].str());
        if (names.size() == 1 && !names[0].empty()) return names[0];
        std::string all;
        for (size_t i = 0; i < names.size() && i < 20; i++) all += (i ? ", " : "") + score_excerpt(names[i], 80);
        if (names.size() > 20) all += format(" and %zu more", names.size() - 20);
        DIE("--model NAME is needed: the endpoint has %s", all.empty() ? "no model" : all.c_str());
    }

    // The time left, if answers come; the time waited, if none does.
    std::string outlook(double now, double start, size_t total) const {
        const double rate = (double)answered / (now - start), left = (double)(total - answered - failed);
        double longest = 0;
        size_t waiting = 0;
        for (auto& s : slots)
            if (s->request) waiting++, longest = std::max(longest, now - s->begun);
        const bool coming = answered && now - last_answer < std::max(10., 5 / rate);
        if (coming && left > (double)waiting) return format("%.2f/s, %.0f s left", rate, left / rate);
        return format("%zu on their way, the longest for %.0f s", waiting, longest);
    }

    // Sends the requests of `next` until it has no more. After Ctrl-C, answers in flight are still taken.
    template <class F> void run(F next, size_t total) {
        const double start = seconds();
        const bool terminal = isatty(2);
        double told = start;
        bool more = true;
        for (;;) {
            const bool stopping = interrupted || !fatal.empty();
            const double now = seconds();
            double wake = now + 0.5;
            bool busy = false;
            for (auto& s : slots) {
                if (!s->request && more && !stopping) {
                    s->request = next();
                    s->attempts = 0, s->wake = s->begun = now, s->formless = false;
                    more = (bool)s->request;
                }
                if (!s->request || (stopping && s->wake < INFINITY)) continue;
                if (s->wake <= now) {
                    ask(*s);
                    s->wake = INFINITY;
                    curl_multi_add_handle(multi, s->easy);
                }
                wake = std::min(wake, s->wake);
                busy = true;
            }
            if (!busy) break;
            int running;
            curl_multi_perform(multi, &running);
            for (int left; CURLMsg* m = curl_multi_info_read(multi, &left);) {
                Slot* s;
                const CURLcode code = m->data.result; // finish() frees the message
                get_info(m->easy_handle, CURLINFO_PRIVATE, &s);
                finish(*s, code);
                wake = now;
            }
            if (wake > now) curl_multi_poll(multi, nullptr, 0, std::max(1, (int)(1000 * (wake - now))), nullptr);
            if (now - told >= (terminal ? 1 : 30)) {
                fprintf(stderr, "%sanswered %zu of %zu, failed %zu, %s   %s", terminal ? "\r" : "", answered, total,
                        failed, outlook(now, start, total).c_str(), terminal ? "" : "\n");
                told = now;
            }
        }
        if (terminal && told > start) fputc('\n', stderr);
    }
};

} // namespace

// Writes the requests that were refused or failed for good, as other steps write dropped rows.
static void write_refused(const Arguments& a, const Reader& in, const std::vector<Sender::Refused>& refused) {
    Output out(a.dropped());
    for (auto& r : refused) {
        sj::Writer w;
        w.object().field("rule", r.status / 100 > 2 ? format("status %ld", r.status) : std::string("failed"));
        out.line(w.field("why", r.why).field("line", r.number).key("row").value(in.again(r.place)->row()).end().text);
    }
    out.commit();
    if (!refused.empty())
        say(format("%zu requests were refused or failed for good: %s says why", refused.size(),
                   a.dropped().c_str()));
}

// Replies that `collect` could not use: the reason by custom_id, with the reply's row. A reply that was replaced since
// then is not requested again: the journal holds the new one.
struct Unusable {
    struct Reply { std::string why, row; };
    std::unordered_map<std::string, Reply> replies;

    explicit Unusable(const std::string& path) {
        if (path.empty()) return;
        for (Reader in(path); in.next();) {
            const sj::Value v = in.need(), row = v["row"];
            const std::string rule = v["rule"].str();
            if (rule == "reply" || rule == "json" || rule == "status")
                replies[row["custom_id"].str()] = {v["why"].str(), sj::dump(row)};
        }
    }
    // "": the journal's reply was not dropped
    std::string why(const Journal& journal, const Request& r) const {
        const auto found = replies.find(r.custom_id);
        if (found == replies.end() || !journal.has(r)) return "";
        const std::string line = journal.line(r);
        sj::Doc doc;
        sj::parse(doc, line);
        return sj::dump(doc.root()) == found->second.row ? found->second.why : "";
    }
};

// The number of requests in a file, and of those answered.
static std::pair<size_t, size_t> count_requests(const Arguments& a, const Journal& journal, const Unusable& unusable) {
    size_t total = 0, there = 0;
    std::unordered_set<std::string> ids;
    for (Reader in(a.files[0]); in.next(); total++) {
        const Request r(in);
        if (!ids.insert(r.custom_id).second)
            DIE("%s: custom_id %s is there twice", in.where().c_str(), r.custom_id.c_str());
        if (a.has("--model") && !r.model.empty() && r.model != a.text("--model"))
            DIE("%s: asks the model %s, --model says %s", in.where().c_str(), in_quotes(r.model).c_str(),
                a.text("--model").c_str());
        there += journal.has(r) && unusable.why(journal, r).empty();
    }
    return {total, there};
}

int run_generate(const Arguments& a) {
    if (a.files[0] == "-") DIE("the requests are read more than once, so they have to be in a file");
    check_url(a.need("--url"));
    Journal journal(a.text("--journal", a.files[0] + ".journal"));
    const Unusable unusable(a.text("--again"));
    const auto [total, there] = count_requests(a, journal, unusable);
    curl_global_init(CURL_GLOBAL_DEFAULT);
    Sender sender(a, journal);
    if (there) say(format("%s: %zu of %zu requests are answered", journal.path.c_str(), there, total));
    std::string model = a.text("--model");
    Reader pending(a.files[0]);
    sender.run([&]() -> std::unique_ptr<Request> {
        while (!interrupted && pending.next()) {
            auto r = std::make_unique<Request>(pending);
            const std::string why = unusable.why(journal, *r);
            if (journal.has(*r) && why.empty()) continue;
            if (!why.empty()) r->complain(why);
            if (r->model.empty()) {
                if (model.empty()) say("asking the only model there: " + in_quotes(model = sender.find_model()));
                r->set_model(model);
            }
            return r;
        }
        return nullptr;
    }, total - there);
    for (auto& [fault, what] : sender.faults)
        say(format("  %6zu times: %s%s%s", what.first, fault.c_str(), what.second.empty() ? "" : ": ",
                   what.second.c_str()));
    if (sender.cut)
        say(format("%zu of the new answers were cut off at max_tokens (prompt --max-tokens N gives more room)",
                   sender.cut));
    write_refused(a, pending, sender.refused);
    const size_t missing = total - there - sender.answered;
    if (missing)
        say(format("%zu of %zu answers are missing; those that came are in %s, and the same command goes on", missing,
                   total, journal.path.c_str()));
    if (interrupted) throw Interrupted();
    if (!sender.fatal.empty()) DIE("%s", sender.fatal.c_str());

    Output out(a.output());
    for (Reader in(a.files[0]); in.next();)
        if (const Request r(in); journal.has(r)) out.line(journal.line(r));
    out.commit();
    if (!missing) say(format("%zu answers, %zu of them new", total, sender.answered));
    return missing ? 1 : 0;
}

} // namespace book
#else
int book::run_generate(const Arguments&) {
    DIE("generate: built without libcurl; install libcurl4-openssl-dev and run make datagen again");
}
#endif
