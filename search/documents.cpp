// search/documents.cpp: opens a folder and searches it; see documents.h.
#include "search/documents.h"
#include "base/error.h"
#include "base/file.h"
#include "base/options.h" // counted
#include "model/utf8.h"
#include "search/index_update.h"
#include "search/vector_update.h"
#include "search/words.h"
#include <algorithm>
#include <cmath>
#include <utility>

std::string name_of(const Source& s) {
    return format("%s:%u%s%s", s.file.c_str(), s.line, s.heading.empty() ? "" : ", ", s.heading.c_str());
}

static std::string beside_its_folder(const std::string& path) { // a real path, whether the file exists or not
    const size_t slash = path.rfind('/');
    return real_path(slash == path.npos ? "." : path.substr(0, slash + 1)) + "/" + path.substr(slash + 1);
}

Documents::Documents(const DocumentOptions& o, const Tell& tell, const DocumentModels& with)
    : options{o.docs, o.index, o.passages ? o.passages : 4, o.embed, o.rerank}, models(with), jieba(find_jieba()) {
    const double start = seconds();
    const std::string root = real_path(o.docs);
    const uint64_t sizes[] = {RULES, PASSAGES.most, PASSAGES.least, PASSAGES.overlap, PASSAGES.title};
    const MappedFile dictionary(find_jieba());
    const std::string path = o.index.empty() ? default_index(root) : beside_its_folder(o.index);
    IndexUpdate update{root, path, jieba, tell, fnv1a(sizes, sizeof sizes, fnv1a(dictionary.text()))};
    index = update.run();
    const std::string left_out = update.left_out.text();
    const DocumentIndex::Header& h = index->header();
    if (h.passages == 0)
        DIE("%s: no text in it%s%s", o.docs.c_str(), left_out.empty() ? "" : "; ", left_out.c_str());
    if (!left_out.empty()) tell(o.docs + ": " + left_out);
    const std::string all = counted(h.passages, "passage") + " of " + counted(h.files, "file");
    tell(format("%s: %s (%.1f MB), %zu read and %zu unchanged; index %s%s, %.3f s", o.docs.c_str(), all.c_str(),
                (double)h.text_bytes / 1e6, update.read, update.unchanged, path.c_str(),
                update.written ? " written" : "", seconds() - start));
    if (models.vectors) open_vectors(tell);
}

Documents::Documents(const std::vector<Text>& texts)
    : options{"", "", 4}, of_conversation(true), jieba(find_jieba()) {
    std::vector<DocumentText> read(texts.size());
    std::vector<std::string> names;
    for (size_t i = 0; i < texts.size(); i++) read[i].text = texts[i].text, names.push_back(texts[i].title);
    index = index_of(std::move(read), names, jieba);
}

std::vector<Source> Documents::beginning() const {
    std::vector<Source> found;
    if (!of_conversation) return found;
    for (uint64_t i = 0; i < index->header().passages && i < options.passages; i++)
        found.push_back(source_of({(uint32_t)i, 0}));
    return found;
}

std::vector<Source> Documents::find(std::string_view question, std::string_view before) const {
    using Hit = DocumentIndex::Hit;
    WordCounts words;
    std::string text; // the text to search for
    for (std::string_view asked : {question, before}) {
        if (!words.empty()) break;
        text.clear();
        utf8_repair(text, asked.substr(0, MOST_ASKED), true);
        words = question_words(jieba, text);
    }
    if (words.empty()) return beginning();
    const size_t most = models.ranks ? std::max(RANKED, options.passages) : options.passages;
    std::vector<Hit> hits = index->search(words, vectors ? DEPTH : most);
    if (!vectors && (hits.empty() || !index->is_about(jieba, words, hits[0]))) return beginning();
    if (vectors) {
        const std::vector<float> products = vectors->products(models.vectors->question(text));
        hits = index->joined({hits, index->best(products, DEPTH, -INFINITY)}, most);
    }
    if (models.ranks && !hits.empty()) {
        std::vector<std::string> shown;
        for (const Hit& hit : hits) shown.push_back(shown_passage(*index, hit.passage));
        const std::vector<double> scores = models.ranks->scores(text, shown);
        for (size_t i = 0; i < hits.size(); i++) hits[i].score = (float)scores[i];
        std::stable_sort(hits.begin(), hits.end(), [](auto& a, auto& b) { return a.score > b.score; });
        hits.resize(std::min(hits.size(), options.passages));
    }
    std::vector<Source> found;
    for (const Hit& hit : hits) found.push_back(source_of(hit));
    return found;
}

uint64_t Documents::hash() const {
    uint64_t sum = index->header().made_by + options.passages;
    if (models.vectors) sum += models.vectors->hash();
    if (models.ranks) sum += 3 * models.ranks->hash(); // (one model may serve as both)
    for (uint64_t i = 0; i < index->header().files; i++) {
        const DocumentIndex::File& f = index->file_at(i);
        if (f.fault == DocumentIndex::FINE) sum += fnv1a(index->name_of(f), f.hash);
    }
    return sum;
}

void Documents::open_vectors(const Tell& tell) {
    const double start = seconds();
    VectorUpdate update(*index, *models.vectors, tell);
    vectors = update.run();
    tell(format("%s: %s of %s (%.1f MB), %zu made; %s, %.3f s", options.docs.c_str(),
                counted(vectors->size(), "vector").c_str(),
                counted((size_t)vectors->header().dimensions, "number").c_str(),
                (double)(vectors->size() * vectors->stride()) / 1e6, update.made, update.path.c_str(),
                seconds() - start));
}

Source Documents::source_of(const DocumentIndex::Hit& hit) const {
    const DocumentIndex::Passage& p = index->passage_at(hit.passage);
    Source s = {"", "", "", p.line, hit.score};
    utf8_repair(s.file, index->name_of(index->file_at(p.file)), true);
    utf8_repair(s.heading, index->heading_of(p), true);
    utf8_repair(s.text, index->text_of(p), true);
    s.text.resize(s.text.find_last_not_of(" \t\r\n") + 1);
    return s;
}
