// Tokenizer speed on one core, in MB (10^6 bytes) of text a second of CPU time; the best of five runs.
//   make build/bench_tokenizer
//   build/bench_tokenizer [--write DIR] [TEXT_FILE...]       from the repository's root
// Without files it makes three texts of 8 MB; --write stores them. The same texts through `tokenizers`:
//   python tests/reference/peer_tokenizers.py tokenizer.json DIR/*.txt
#include "model/tokenizer.h"
#include "tests/bench/zipf.h"
#include <time.h>

struct Text {
    std::string name, bytes;
};

// Words of the vocabulary drawn by Zipf's law; every eighth is made of two, so that it is no token.
static std::string make_text(const Tokenizer& t, bool chinese, size_t size) {
    std::vector<std::string_view> words;
    for (int i = 256; i < t.size(); i++) {
        std::string_view w = t.bytes(i);
        bool fits = !chinese && w.size() > 1 && w[0] == ' ';
        for (size_t k = 1; fits && k < w.size(); k++) fits = w[k] >= 'a' && w[k] <= 'z';
        for (size_t k = 0, n; chinese && k < w.size(); k += n) {
            int length = utf8_length(w.data() + k, w.size() - k);
            const char* p = w.data() + k;
            uint32_t c = length > 0 ? utf8_read(p) : 0;
            fits = c >= 0x4E00 && c < 0xA000;
            if (!fits) break;
            n = (size_t)length;
        }
        if (fits) words.push_back(w);
    }
    ZipfWords random;
    auto word = [&] { return random.of(words); };
    std::string out;
    while (out.size() < size) {
        int length = 4 + (int)(random.uniform() * 8);
        for (int i = 0; i < length; i++) {
            out += word();
            if (!chinese && random.uniform() < 0.125) out += word().substr(1);
        }
        out += chinese ? (random.uniform() < 0.7 ? "，" : "。\n") : (random.uniform() < 0.7 ? "," : ".\n");
    }
    return out;
}

static std::string read_all(const std::string& path) { return std::string(MappedFile(path).text()); }

int main(int argc, char** argv) {
    try {
        auto seconds = [] { // of this program's own time
            timespec t;
            clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
            return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
        };
        double start = seconds();
        Tokenizer t("tokenizer.bin");
        printf("load: %.1f ms\n", 1e3 * (seconds() - start));
        std::vector<Text> texts;
        std::string folder;
        for (int i = 1; i < argc; i++) {
            if (!strcmp(argv[i], "--write") && i + 1 < argc) folder = argv[++i];
            else texts.push_back({argv[i], read_all(argv[i])});
        }
        if (texts.empty()) {
            texts = {{"english.txt", make_text(t, false, 8 << 20)},
                     {"chinese.txt", make_text(t, true, 8 << 20)},
                     {"code.txt", ""}};
            std::string code;
            for (const char* path : {"model/tokenizer.cpp", "base/file.cpp", "export.py"}) code += read_all(path);
            while (texts[2].bytes.size() < 8 << 20) texts[2].bytes += code;
        }
        for (const Text& text : texts) {
            if (!folder.empty()) {
                OutputFile f(folder + "/" + text.name);
                f.write(text.bytes);
                f.commit();
            }
            double best_encode = 1e9, best_decode = 1e9;
            std::vector<int> ids;
            for (int run = 0; run < 5; run++) {
                ids.clear();
                start = seconds();
                t.encode(ids, text.bytes, true);
                best_encode = std::min(best_encode, seconds() - start);
                start = seconds();
                if (t.decode(ids, false).empty()) DIE("%s: decodes to nothing", text.name.c_str());
                best_decode = std::min(best_decode, seconds() - start);
            }
            double mb = (double)text.bytes.size() / 1e6;
            printf("%-14s %6.1f MB  %5.2f bytes a token  encode %6.1f MB/s  decode %6.0f MB/s\n",
                   text.name.c_str(), mb, 1e6 * mb / (double)ids.size(), mb / best_encode, mb / best_decode);
        }
    } catch (const Error& e) {
        fprintf(stderr, "%s\n", e.what());
        return 1;
    }
}
