// cli/embed.cpp: vectors of texts, and their scores for a query.
#include "cli/embed.h"
#include "base/file.h"
#include "base/json_lines.h"
#include "base/options.h"
#include "base/progress.h"
#include "cli/screen.h"
#include "model/pace.h"
#include "search/embed.h"
#include "search/embedder.h"
#include "search/rerank.h"
#include "sj.h"
#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace cli {

struct TextRow {
    std::string id, text; // id: JSON, "" if the row has none
};

// The texts of -i, or of --texts. Every line is one, an empty line too.
static std::vector<TextRow> read_texts(const Options& o) {
    if (o.texts.empty()) return {{"", o.input == "-" ? input_text("-") : o.input}};
    std::vector<TextRow> rows;
    if (o.texts.size() > 6 && o.texts.compare(o.texts.size() - 6, 6, ".jsonl") == 0) {
        const MappedFile file(o.texts);
        each_json_line(file, [&](size_t line, std::string_view, sj::Value row) {
            const sj::Value text = row.is(sj::Object) ? row["text"] : row;
            if (!text.is(sj::String))
                DIE("%s: line %zu: neither a string nor an object with \"text\"", o.texts.c_str(), line);
            rows.push_back({row.is(sj::Object) && row["id"] ? sj::dump(row["id"]) : "", text.str()});
        });
    } else {
        const std::string input = input_text(o.texts);
        for (size_t at = 0, end; at < input.size(); at = end + 1) {
            end = std::min(input.find('\n', at), input.size());
            const bool carriage = end > at && input[end - 1] == '\r';
            rows.push_back({"", input.substr(at, end - at - carriage)});
        }
    }
    if (rows.empty()) DIE("%s: no text in it", o.texts == "-" ? "standard input" : o.texts.c_str());
    return rows;
}

// The output for each row. A text that is too long is a fault, before anything is computed.
static std::vector<std::vector<int>> shown_ids(const Options& o, const Tokenizer& tokenizer, const RerankPrompt* prompt,
                                               const std::vector<TextRow>& rows, size_t context) {
    const std::string query = prompt && o.input == "-" ? input_text("-") : o.input;
    if (prompt && query.empty()) DIE("the query is empty");
    std::vector<int> question;
    if (prompt) question = prompt->query_ids(tokenizer, o.instruct.empty() ? RETRIEVAL_TASK : o.instruct, query);
    const size_t most = o.truncate ? context : 0;
    if (prompt && context <= prompt->length())
        DIE("--ctx %zu: the question alone is %zu tokens", context, prompt->length());
    std::vector<std::vector<int>> all;
    for (auto& row : rows) {
        const std::string text = prompt || o.instruct.empty() ? row.text : with_task(o.instruct, row.text);
        all.push_back(prompt ? prompt->ids(tokenizer, question, text, most) : embedding_ids(tokenizer, text, most));
        if (all.back().size() > context)
            DIE("text %zu is %s, the context %zu (-c sets it, --truncate cuts)", all.size(),
                counted(all.back().size(), "token").c_str(), context);
        if (interrupted) DIE("interrupted");
    }
    return all;
}

static std::string text_line(const Options& o, const TextRow& row, size_t index, const std::vector<float>& vector,
                             double score) {
    sj::Writer w;
    w.object().field("index", index);
    if (!row.id.empty()) w.key("id").text += row.id, w.comma = true;
    if (o.rerank) return w.field("relevance_score", score).field("text", row.text).end().text + "\n";
    write_numbers(w.key("embedding").text, vector);
    return w.end().text + "\n";
}

// Calls f(i, hidden) for every text in turn; see Embedder.
using Hidden = std::function<void(size_t, const std::vector<float>&)>;
using EachHidden = std::function<void(const std::vector<std::vector<int>>& texts, const Hidden& f)>;
template <class T> static EachHidden embedder(const Config& c, const Weights<T>& w, int longest, const Context& ctx) {
    const auto model = std::make_shared<Embedder<T>>(c, w, longest, ctx);
    return [model](const std::vector<std::vector<int>>& texts, const Hidden& f) { model->run(texts, &interrupted, f); };
}

int embed_or_rerank(const Options& o, const LoadedModel& model, const Tokenizer& tokenizer) {
    const Config& c = model.file.config;
    if (o.dimensions > c.C) DIE("--dimensions %d: the model's vectors have %d", o.dimensions, c.C);
    const size_t dimensions = (size_t)(o.dimensions ? o.dimensions : c.C);
    std::unique_ptr<RerankPrompt> prompt;
    std::unique_ptr<Relevance> relevance;
    if (o.rerank) prompt = std::make_unique<RerankPrompt>(tokenizer);
    if (o.rerank)
        relevance = with_weights(model, [&](auto& w) { return std::make_unique<Relevance>(o.ctx, w, *prompt); });
    const std::vector<TextRow> rows = read_texts(o);
    const size_t context = (size_t)(o.context ? o.context : std::min(4096, c.max_positions));
    const std::vector<std::vector<int>> ids = shown_ids(o, tokenizer, prompt.get(), rows, context);
    size_t longest = 0, tokens = 0;
    for (auto& text : ids) longest = std::max(longest, text.size()), tokens += text.size();

    std::unique_ptr<OutputFile> out;
    if (!o.output.empty()) out = std::make_unique<OutputFile>(o.output);
    auto write = [&](const std::string& line) { out ? out->write(line) : write_stdout(line); };
    const EachHidden each_hidden = with_weights(model, [&](auto& w) { return embedder(c, w, (int)longest, o.ctx); });
    ThreadPace pace(o, o.ctx);
    std::vector<std::pair<double, size_t>> scores; // score, text
    const double start = seconds();
    {
        Progress progress;
        pace.begin();
        each_hidden(ids, [&](size_t i, const std::vector<float>& hidden) {
            if (!all_finite(hidden)) DIE("text %zu: the model's numbers are not finite", i + 1);
            if (o.rerank) scores.push_back({(*relevance)(hidden), i});
            else write(text_line(o, rows[i], i, unit_vector(hidden, dimensions), 0));
            pace.step();
            progress.show(i + 1, rows.size(), [&](double s) {
                return format("%zu of %zu texts, %.1f a second", i + 1, rows.size(), (double)(i + 1) / s);
            });
        });
        pace.end();
    }
    if (interrupted) return 130;
    std::stable_sort(scores.begin(), scores.end(), [](auto& a, auto& b) { return a.first > b.first; });
    for (auto& [score, i] : scores) write(text_line(o, rows[i], i, {}, score));
    if (out) out->commit();
    const double spent = seconds() - start;
    say(format("%s, %s in %.2f s: %.1f texts/s, %.0f tok/s", counted(rows.size(), "text").c_str(),
               counted(tokens, "token").c_str(), spent, (double)rows.size() / spent, (double)tokens / spent));
    return 0;
}

} // namespace cli
