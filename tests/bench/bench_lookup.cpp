// Prompt lookup: what it gains on texts that repeat, and what it costs on one that does not.
//   make build/bench_lookup
//   build/bench_lookup MODEL [ROUNDS]       from the repository's root
// The model reads a prompt, and then "says" a known answer: after each draw the answer's next token is taken instead of
// the drawn one. So the times are those of the model, and what is right of what is looked up is a fact of the texts:
//   summary   a passage of the course's notes, and a summary in its words
//   answer    a section of the notes, and rows of data/course/dev.jsonl whose evidence lies in it
//   edit      a program of data/course/examples, and the same with a name changed
//   nothing   the rows' answers without the section
// Without and with lookup in turns; medians of ROUNDS (5), and the median of the rounds' own ratios.
#define QWEN3_NO_MAIN
#include "../../qwen3.cu"

static std::string read_all(const std::string& path) { return std::string(MappedFile(path).text()); }
static std::string without(std::string s, const std::string& what, const std::string& instead) {
    for (size_t at = 0; (at = s.find(what, at)) != std::string::npos; at += instead.size())
        s.replace(at, what.size(), instead);
    return s;
}
