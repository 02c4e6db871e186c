// cli/run.cpp: executes the options of qwen3.
#include "cli/cli.h"
#include "base/options.h"
#include "cli/ask.h"
#include "cli/bench.h"
#include "cli/commands.h"
#include "cli/embed.h"
#include "cli/evaluate.h"
#include "cli/make.h"
#include "cli/options.h"
#include "cli/perplexity.h"
#include "cli/prompt_cache.h"
#include "cli/quantize.h"
#include "cli/screen.h"
#include "model/adapters.h"
#include "model/device.h"
#include "model/loaded.h"
#include "model/model_file.h"
#include "model/tokenizer.h"
#include "search/document_options.h"
#include "search/documents.h"
#include "search/hybrid.h"
#include "search/quote.h"
#include <memory>
#include <string>
#include <vector>

namespace cli {

// Quantised matrices stay as they are stored.
static bool keeps(const Options& o, const ModelFile& file) { return !wide(o, file) && keeps_packed<bf16>(o, o.ctx); }

static std::unique_ptr<LoadedModel> load(const Options& o, const ModelFile& file) {
    return load_model(file, o.ctx, wide(o, file), made_format(o), keeps(o, file));
}

// The tokenizer named by the options, or the one found. Null if none exists or fits, and none is needed.
static std::unique_ptr<Tokenizer> fitting_tokenizer(const Options& o, const ModelFile& file) {
    if (o.has_ids && find_tokenizer(o.tokenizer, o.model).empty()) return nullptr;
    const std::string path = tokenizer_path(o);
    const bool by_chance = o.has_ids && o.tokenizer.empty();
    if (by_chance && !fits(path, file)) return nullptr;
    return std::make_unique<Tokenizer>(tokenizer_of(path, file));
}

// --think, if the model's chat template leaves it open.
static void settle_thinking(Options& o, const ModelFile& file, const ChatStyle& style) {
    const bool thinks = style.thinking(o.think == 1);
    if (o.think >= 0 && thinks != (o.think == 1))
        DIE("--think %d: %s %s thinks, by its chat template", o.think, file.path.c_str(), thinks ? "always" : "never");
    o.think = thinks;
}

// One prompt, a chat, --ppl, --eval, --embed or --rerank.
static int use_model(Options& o, const ModelFile& file, double start) {
    const Config& c = file.config;
    o.variant = o.dtype == "int8" ? 1 : file.is_quantized() && keeps(o, file) ? 2 : o.dtype == "fp8" ? 3 : 0;
    if (o.ctx.kv_fp8) o.variant |= 4;
    if (o.ctx.fp8_activations) o.variant |= 8;
    if (o.ctx.int8_activations) o.variant |= 16;
    o.starters = file.starters;
    std::unique_ptr<AdapterFile> adapter;
    if (!o.adapter.empty()) {
        adapter = std::make_unique<AdapterFile>(o.adapter, c);
        o.variant = adapter_hash(*adapter, o.variant);
        if (!adapter->starters.empty()) o.starters = adapter->starters;
    }
    const std::unique_ptr<Tokenizer> tokenizer = fitting_tokenizer(o, file);
    settle_thinking(o, file, tokenizer ? tokenizer->chat : ChatStyle());
    const std::string note = tokenizer ? template_note(file, *tokenizer) : "";
    if (!note.empty() && !o.raw && !o.has_ids && !o.embed && !o.rerank) say(note);
    if (o.context > c.max_positions)
        DIE("--ctx %d: the model's limit is %d (--rope-scaling raises it)", o.context, c.max_positions);
    std::unique_ptr<ModelFile> other;
    if (!o.against.empty()) other = std::make_unique<ModelFile>(o.against);
    if (other && !same_ids(tokenizer_path(o), file, *other))
        DIE("%s: another vocabulary than that of %s", o.against.c_str(), o.model.c_str());
    o.quotes = quotes(o.documents, c, say);
    if (!o.documents.docs.empty())
        o.library = std::make_shared<Documents>(o.documents, say, open_document_models(o, o.documents));
    PromptCache::check(o.prompt_cache);
    const std::unique_ptr<LoadedModel> loaded = load(o, file); // all files of options are open
    LoadedModel& model = *loaded;
    if (adapter) model.attach(*adapter);
    if (o.embed || o.rerank) return embed_or_rerank(o, model, *tokenizer);
    if (other) return compare(o, model, *other, *tokenizer);
    if (!o.ppl.empty()) return perplexity(o, model, *tokenizer);
    if (o.eval.empty()) return ask(o, model, tokenizer.get(), start);
    model.decode_for_long(); // (many answers)
    return evaluate(o, model, *tokenizer);
}

// Requirements and conflicts of --embed, --rerank and their options.
static void check_retrieval(const Options& o) {
    const bool retrieves = o.embed || o.rerank;
    if (!retrieves && (!o.texts.empty() || !o.instruct.empty() || o.truncate))
        DIE("--texts, --instruct and --truncate are for --embed and --rerank");
    if (!o.embed && o.dimensions) DIE("--dimensions is for --embed");
    if (o.embed && o.has_input != o.texts.empty()) DIE("--embed takes -i TEXT or --texts FILE");
    if (o.rerank && (!o.has_input || o.texts.empty())) DIE("--rerank takes the query, -i TEXT, and --texts FILE");
    if (o.rerank && o.input == "-" && o.texts == "-") DIE("standard input cannot be both the query and the texts");
    if (retrieves && o.has_ids) DIE("--ids is not for --embed and --rerank");
}

// Executes the options; see run_program.
int run(int argc, char** argv) {
    const double start = seconds();
    if (told_version("qwen3", argc, argv)) return 0;
    Options o = parse_options(argc, argv);
    if (o.help) return 0;
    o.use_threads();
    if (o.has_tokenize) {
        const std::string text = o.tokenize == "-" ? read_stdin() : o.tokenize;
        std::string line;
        for (int id : Tokenizer(tokenizer_path(o)).encode(text, true)) line += format(line.empty() ? "%d" : " %d", id);
        return write_stdout(line + "\n"), 0;
    }
    if (o.has_detokenize) {
        const std::vector<int> ids = parse_ids("--detokenize", o.detokenize == "-" ? read_stdin() : o.detokenize);
        return write_stdout(Tokenizer(tokenizer_path(o)).decode(ids, false)), 0;
    }
    const bool makes = !o.synthesize.empty() || !o.convert.empty() || !o.convert_adapter.empty() || !o.quantize.empty();
    if (o.overwrite && !makes) DIE("--overwrite is for --convert, --convert-adapter, --quantize and --synthesize");
    if (!o.synthesize.empty()) return synthesize(o.synthesize, o.synthesize_to, o.seed, o.overwrite), 0;
    if (o.model.empty()) DIE("no model named (--help lists the options)");
    const bool asks = o.has_input || o.has_ids, measures = !o.ppl.empty() || !o.eval.empty() || o.bench;
    const bool retrieves = o.embed || o.rerank;
    if ((asks && !retrieves) + !o.ppl.empty() + !o.eval.empty() + o.bench + o.embed + o.rerank > 1)
        DIE("one thing at a time: -i or --ids, --ppl, --eval, --bench, --embed, --rerank");
    check_retrieval(o);
    if (!o.eval.empty() && o.output.empty()) DIE("--eval needs -o FILE, where the answers go");
    if (!o.eval.empty()) must_not_exist(o.output);
    if (!o.tools.empty()) read_commands(o.tools);
    if (o.eval.empty() && !retrieves && !o.output.empty()) DIE("-o is for --eval, --embed and --rerank");
    if (o.stride && o.ppl.empty()) DIE("--stride is for --ppl");
    if (!o.against.empty() && (o.ppl.empty() || o.stride)) DIE("--against is for --ppl, without --stride");
    const bool in_words = !o.has_ids && !o.raw && o.ppl.empty() && !o.bench && !retrieves;
    if (!o.documents.docs.empty() && !in_words)
        DIE("--docs is for questions: not with --raw, --ids, --ppl, --bench or --embed");
    check_document_options(o.documents);
    if (!o.tools.empty() && (asks || measures || retrieves))
        DIE("--tools is for a chat: not with a question, --ppl, --eval, --bench, --embed or --rerank");
    if ((!asks || retrieves) && (o.raw || (o.json && !measures) || o.logits_hash || !o.logits_file.empty()))
        DIE("no question: -i TEXT gives one (a chat has no --raw, --json or --logits)");
    if (!o.convert.empty()) return convert(o, asks || measures || retrieves), 0;
    if (!o.convert_adapter.empty()) return open_adapter(o), convert_adapter(o, asks || measures || retrieves), 0;
    if (!o.quantize.empty()) return quantize(o, asks || measures || retrieves);
    if (o.group || !o.calibrate.empty() || !o.embedding.empty())
        DIE("--group, --calibrate and --embedding are for --quantize");
    open_adapter(o);
    ModelFile file = open_model(o);
    file.logits = !retrieves;
    o.ctx = choose_device(o, file);
    if (o.bench && !o.adapter.empty()) DIE("--adapter changes no figure of --bench");
    if (o.bench) return bench(o, *load(o, file)), 0;
    return use_model(o, file, start);
}

} // namespace cli
