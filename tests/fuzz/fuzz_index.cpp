// Fuzzes the index of documents and its vectors: whatever bytes a file has, it is opened, searched and taken over into
// another index, or refused in one line that names it; and any text becomes words, passages that are it without a gap, and a prompt.
#include "base/file.h"
#include "model/utf8.h"
#include "search/document_files.h"
#include "search/grounding.h"
#include "search/index.h"
#include "search/index_builder.h"
#include "search/vector_file.h"
#include "search/words.h"
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

static void need(bool condition) {
    if (!condition) abort();
}
static const Jieba& jieba() {
    static const Jieba j("data/datagen/jieba.bin");
    return j;
}

// A file of these bytes.
static const std::string& file_of(const uint8_t* data, size_t size) {
    static const int fd = memfd_create("index", 0);
    static const std::string path = format("/proc/self/fd/%d", fd);
    need(ftruncate(fd, 0) == 0 && pwrite(fd, data, size, 0) == (ssize_t)size);
    return path;
}

static void load_vectors(const uint8_t* data, size_t size) {
    const std::string& path = file_of(data, size);
    try {
        const VectorFile file(path);
        const size_t n = file.size(), dimensions = (size_t)file.header().dimensions;
        need(n * file.stride() <= size && file.count_good() <= n);
        if (n > 0) need(file.products(std::vector<float>(dimensions, 1)).size() == n);
        for (size_t i = 0; i < n; i++) // what is written again is good
            need(!file.is_good(i) || VectorFile::record_of(file.key(i), file.vector(i), dimensions) ==
                                         std::string((const char*)file.record(i), file.stride()));
        (void)file.has_all();
    } catch (const IndexFault& e) {
        need(std::string_view(e.what()).find(path) == 0);
    }
}

static void load(const uint8_t* data, size_t size) {
    const std::string& path = file_of(data, size);
    static const std::string copy = format("/dev/shm/fuzz_index.%d", (int)getpid());
    try {
        const DocumentIndex index(path);
        for (const char* question : {"warp memory", "什么是线程束", "a"})
            for (auto hit : index.search(question_words(jieba(), question), 3)) {
                need(hit.passage < index.header().passages && hit.score > 0);
                const DocumentIndex::Passage& p = index.passage_at(hit.passage);
                need(index.text_of(p).size() + index.heading_of(p).size() <= 2 * size);
                need(index.name_of(index.file_at(p.file)).size() <= size);
            }
        IndexBuilder builder(copy, 1);
        builder.take_over(index, std::vector<std::optional<int64_t>>(index.header().files, 1));
        need(builder.text_bytes() <= size);
        builder.finish();
        DocumentIndex(copy).search(question_words(jieba(), "warp memory"), 3);
        unlink(copy.c_str());
    } catch (const Error& e) {
        need(std::string_view(e.what()).find(path) == 0); // an error names its file
    }
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (size >= 8 && memcmp(data, "qwen3idx", 8) == 0) return load(data, size), 0;
    if (size >= 8 && memcmp(data, "qwen3vec", 8) == 0) return load_vectors(data, size), 0;
    std::string valid;
    utf8_repair(valid, {(const char*)data, size}, true);
    size_t bytes = 0;
    index_words(jieba(), valid, [&](std::string_view w) {
        std::string again;
        utf8_repair(again, w, true);
        need(!w.empty() && again == w);
        bytes += w.size();
    });
    need(bytes <= 4 * valid.size());

    DocumentText text;
    text.text = valid;
    text.cut();
    size_t at = valid.compare(0, 3, "\xef\xbb\xbf") == 0 ? 3 : 0; // a byte order mark is no text
    for (const Chunk& c : text.chunks) {                           // between them are blank lines only
        need(c.begin >= at && c.end > c.begin && c.end <= valid.size());
        need(is_blank_line(std::string_view(valid).substr(at, c.begin - at)));
        need(count_characters(std::string_view(valid).substr(c.begin, c.end - c.begin)) <= PASSAGES.most);
        at = c.end;
    }
    need(is_blank_line(std::string_view(valid).substr(at)));

    const size_t room = size ? data[0] * 4 : 0;
    const std::string line = valid.substr(0, valid.find('\n'));
    std::vector<Source> sources = {{"a.md", line, valid, 1, 1}, {"b.md", "", valid, 2, 0.5f}};
    std::vector<Source> none;
    auto measure = [](std::string_view s) { return s.size(); };
    const size_t least = grounded(valid, none, 0, measure).size();
    const std::string prompt = grounded(valid, sources, room, measure);
    need(prompt.size() <= std::max(room, least) && prompt.size() >= valid.size());
    std::string again;
    utf8_repair(again, prompt, true);
    need(again == prompt);
    return 0;
}
