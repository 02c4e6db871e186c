// How long masks take, on Qwen3's vocabulary: for each form an answer is followed token by token, the first time (every
// state and mask is made) and again. `make build/bench_grammar && build/bench_grammar`
#include "form/gbnf.h"
#include "form/matcher.h"
#include "form/schema.h"
#include "model/tokenizer.h"
#include <algorithm>
#include <cstdio>

struct Case {
    const char *name, *form, *answer;
};
static const Case CASES[] = {
    {"any object", "", R"({"name": "Alice in Wonderland", "age": 42, "tags": ["a", "bcd", {"deep": [1, 2.5, null]}], "中文": "线程束是GPU调度的基本单位。"})"},
    {"person", R"({"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 150}, "email":
        {"type": "string", "format": "email"}, "roles": {"type": "array", "items": {"enum": ["admin", "user", "guest"]}}}, "required": ["name", "age"]})",
     R"({"name": "Dr. Margarethe von Hohenstein-Ölsnitz", "age": 57, "email": "margarethe@example.org", "roles": ["admin", "guest"]})"},
    {"bounded strings", R"({"type": "array", "items": {"type": "object", "properties": {"title": {"type": "string", "maxLength": 60}, "text": {"type": "string",
        "minLength": 10, "maxLength": 2000}}, "required": ["title", "text"]}, "maxItems": 5})",
     R"([{"title": "What is a warp?", "text": "A warp is a group of 32 threads that a streaming multiprocessor schedules together."}, {"title": "占用率", "text": "占用率是活动线程束与最大线程束之比，它受寄存器和共享内存的限制。"}])"},
    {"dates and patterns", R"({"properties": {"when": {"format": "date-time"}, "id": {"format": "uuid"}, "code": {"pattern": "^[A-Z]{2}-[0-9]{4}$"},
        "host": {"format": "ipv4"}, "price": {"type": "number", "minimum": 0, "maximum": 999.99}}, "required": ["when", "id", "code", "host", "price"]})",
     R"({"when": "2026-11-22T12:34:56.789Z", "id": "123e4567-e89b-12d3-a456-426614174000", "code": "AB-1234", "host": "192.168.17.254", "price": 123.45})"},
    {"tree", R"({"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "properties": {"name": {"type": "string"}, "children": {"type": "array",
        "items": {"$ref": "#/$defs/node"}}}, "required": ["name"]}}})",
     R"({"name": "root", "children": [{"name": "left", "children": [{"name": "leaf one"}, {"name": "leaf two"}]}, {"name": "right", "children": []}]})"},
    {"arithmetic", "root ::= sum \" = \" [0-9]+\nsum ::= product ((\" + \" | \" - \") product)*\nproduct ::= factor ((\" * \" | \" / \") factor)*\nfactor ::= [0-9]+ | \"(\" sum \")\"",
     "(12 + 3) * (4 - (5 / 6)) + 7890 = 1234567"},
};

static double quantile(std::vector<double> times, double q) {
    std::sort(times.begin(), times.end());
    return times[std::min(times.size() - 1, (size_t)(q * (double)times.size()))] * 1e6;
}
static void show(const char* name, const std::vector<double>& times) {
    printf("%-24s %5zu tokens   median %7.1f   90%% %7.1f   99%% %7.1f   longest %7.1f us\n", name, times.size(),
           quantile(times, 0.5), quantile(times, 0.9), quantile(times, 0.99), quantile(times, 1));
}

int main() {
    const Tokenizer tokenizer("tokenizer.bin");
    double start = seconds();
    const auto vocabulary = std::make_shared<const Vocabulary>(tokenizer);
    printf("%d tokens: the tries take %.0f ms, once\n", tokenizer.size(), (seconds() - start) * 1e3);
    std::vector<uint32_t> bits(vocabulary->words());
    std::vector<double> first, again;
    for (auto& c : CASES) {
        start = seconds();
        sj::Doc doc;
        const bool schema = c.form[0] == '{';
        sj::parse(doc, schema ? c.form : "{}");
        auto a = std::make_shared<Automaton>(!*c.form ? grammar_of_json_object() : schema ? grammar_of_schema(doc.root()) : grammar_of_gbnf(c.form), vocabulary);
        const double compiled = seconds() - start;
        for (bool fresh : {true, false}) {
            Matcher m(a);
            std::vector<double> times;
            for (int id : tokenizer.encode(c.answer, false)) {
                start = seconds();
                m.mask(bits.data());
                const bool good = (bits[(size_t)id / 32] >> id % 32 & 1) && m.advance(id);
                times.push_back(seconds() - start);
                if (!good) DIE("%s: %s is not allowed", c.name, std::string(tokenizer.bytes(id)).c_str());
            }
            if (!m.may_end()) DIE("%s: not at its end", c.name);
            if (fresh) printf("%-24s %zu positions in %.2f ms\n", c.name, a->grammar.at.size(), compiled * 1e3);
            show(fresh ? "  first" : "  again", times);
            (fresh ? first : again).insert((fresh ? first : again).end(), times.begin(), times.end());
        }
    }
    show("all, first", first), show("all, again", again);
}
