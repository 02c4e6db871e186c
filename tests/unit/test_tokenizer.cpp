// tokenizer.h against what `tokenizers` says (fixtures/tokenizer_vectors.json, by make_tokenizer_fixtures.py) for
// Qwen3's vocabulary and two small ones; broken UTF-8, hostile texts and hostile files.
#include "sj.h"
#include "model/tokenizer.h"
#include "model/tokenizer_json.h"
#include "tests/sanitized.h"
#include <doctest/doctest.h>
#include <functional>
#include <thread>
#include <time.h>

using Ids = std::vector<int>;
static const char* TINY = "tests/fixtures/tiny/tokenizer.bin";

struct Vectors {
    MappedFile file{"tests/fixtures/tokenizer_vectors.json"};
    sj::Doc doc;
    std::vector<std::string> snippets;
    std::vector<std::pair<uint32_t, uint32_t>> ranges;
    Vectors() {
        REQUIRE(sj::parse(doc, file.text()) == "");
        for (sj::Value s : doc.root()["snippets"].items()) snippets.push_back(s.str());
        for (sj::Value r : doc.root()["ranges"].items())
            ranges.push_back({(uint32_t)r[0].number(), (uint32_t)r[1].number()});
    }
};

static const Vectors& vectors() {
    static const Vectors v;
    return v;
}
static const Tokenizer& qwen3() {
    static const Tokenizer t("tokenizer.bin");
    return t;
}
static const Tokenizer& tiny() {
    static const Tokenizer t(TINY);
    return t;
}
// The three tokenizers and what is known about them. "odd" is valid, but breaks what training keeps to.
static void for_all(const std::function<void(const Tokenizer&, sj::Value)>& check) {
    static const Tokenizer odd("tests/fixtures/odd/tokenizer.bin");
    check(qwen3(), vectors().doc.root()["qwen3"]);
    check(tiny(), vectors().doc.root()["tiny"]);
    check(odd, vectors().doc.root()["odd"]);
}

static Ids ids_of(sj::Value list) {
    Ids ids;
    for (sj::Value i : list.items()) ids.push_back((int)i.number());
    return ids;
}

struct SplitMix64 {
    uint64_t state;
    uint64_t next() {
        uint64_t z = state += 0x9E3779B97F4A7C15;
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
        z = (z ^ z >> 27) * 0x94D049BB133111EB;
        return z ^ z >> 31;
    }
    uint32_t below(size_t n) { return (uint32_t)((next() >> 32) % n); }
};

// random_text, long_word, random_ids and random_bytes are those of make_tokenizer_fixtures.py.
static std::string random_text(uint64_t number) {
    const Vectors& v = vectors();
    SplitMix64 random{number};
    std::string out;
    for (uint32_t items = 1 + random.below(24); items > 0; items--) {
        if (random.below(4) == 0) {
            out += v.snippets[random.below(v.snippets.size())];
            continue;
        }
        auto [first, last] = v.ranges[random.below(v.ranges.size())];
        for (uint32_t k = 1 + random.below(3); k > 0; k--)
            utf8_append(out, first + random.below(last - first + 1));
    }
    return out;
}

static std::string long_word(uint64_t number) {
    SplitMix64 random{number};
    std::string out;
    for (uint64_t n = 10 + number % 120; n > 0; n--) {
        uint32_t kind = random.below(4);
        if (kind == 0) utf8_append(out, 0x4E00 + random.below(0x1000));
        else if (kind == 1) utf8_append(out, 0x410 + random.below(64));
        else out += "etaoinshrdlu"[random.below(12)];
    }
    return out;
}

static Ids random_ids(uint64_t number, int size) {
    SplitMix64 random{number};
    Ids ids(1 + number % 8);
    for (int& i : ids) i = (int)random.below((size_t)size + 2);
    return ids;
}

static std::string random_bytes(uint64_t number) {
    SplitMix64 random{number};
    std::string out;
    for (uint64_t n = 1 + number % 12; n > 0; n--) {
        uint32_t r = (uint32_t)(random.next() >> 32), b = r >> 8 & 0xFF;
        out += (char)(r % 4 == 0 ? b : r % 4 == 3 ? 0xE0 | (b & 0x1F) : 0x80 | (b & 0x3F));
    }
    return out;
}

struct Fnv {
    uint64_t h = 0xCBF29CE484222325;
    void add(const void* bytes, size_t n) {
        for (size_t i = 0; i < n; i++) h = (h ^ ((const uint8_t*)bytes)[i]) * 0x100000001B3;
    }
    void add(const std::string& text) { add(text.c_str(), text.size() + 1); }
    std::string hex() const { return format("%016llx", (unsigned long long)h); }
};

// Adds one text's ids and its decoded text to the hashes of a fixture.
static void add_encoding(const Tokenizer& t, const std::string& text, Fnv& ids_hash, Fnv& text_hash) {
    Ids ids = t.encode(text, true);
    text_hash.add(t.decode(ids, false));
    ids.push_back(-1);
    ids_hash.add(ids.data(), ids.size() * sizeof(int));
}

// This thread's own CPU time: other programs on the machine do not count.
template <class F> static double seconds(F f) {
    auto now = [] {
        timespec t;
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
        return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
    };
    double start = now();
    f();
    return now() - start;
}

// ------------------------------------------------------------------------------------------- encode, decode

TEST_CASE("texts have the ids that tokenizers gives them") {
    for_all([](const Tokenizer& t, sj::Value known) {
        size_t n = 0;
        for (sj::Value row : known["encode"].items()) {
            std::string text = row[0].str();
            CAPTURE(text);
            CHECK(t.encode(text, true) == ids_of(row[1]));
            n++;
        }
        CHECK(n > 200);
    });
}

TEST_CASE("random texts: ids and decoded texts") {
    for_all([](const Tokenizer& t, sj::Value known) {
        for (sj::Value row : known["random"].items()) {
            Fnv ids_hash, text_hash;
            uint64_t first = (uint64_t)row[0].number(), count = (uint64_t)row[1].number();
            CAPTURE(first);
            for (uint64_t n = first; n < first + count; n++)
                add_encoding(t, random_text(n), ids_hash, text_hash);
            CHECK(ids_hash.hex() == row[2].str());
            CHECK(text_hash.hex() == row[3].str());
        }
        CHECK(known["random"].size() == 10);
    });
}

TEST_CASE("every assigned code point") {
    for_all([](const Tokenizer& t, sj::Value known) {
        Fnv ids_hash, text_hash;
        for (uint32_t c = 0; c < 0xE1000; c++) {
            if ((c >= 0xD800 && c < 0xE000) || (c >= 0x40000 && c < 0xE0000)) continue;
            std::string s;
            utf8_append(s, c);
            add_encoding(t, "x" + s + "y " + s + "\u0301\n!" + s + "\n", ids_hash, text_hash);
        }
        CHECK(ids_hash.hex() == known["code_points"][0].str());
        CHECK(text_hash.hex() == known["code_points"][1].str());
    });
}

TEST_CASE("decode: every single token, and sequences that no text encodes to") {
    for_all([](const Tokenizer& t, sj::Value known) {
        CHECK(t.size() == known["size"].number());
        Fnv full, plain;
        for (int i = 0; i < t.size(); i++) full.add(t.decode({i}, false)), plain.add(t.decode({i}, true));
        CHECK(full.hex() == known["single"][0].str());
        CHECK(plain.hex() == known["single"][1].str());
        Fnv full2, plain2;
        for (uint64_t n = 0; n < 20000; n++) {
            Ids ids = random_ids(n, t.size());
            full2.add(t.decode(ids, false)), plain2.add(t.decode(ids, true));
        }
        CHECK(full2.hex() == known["sequences"][0].str());
        CHECK(plain2.hex() == known["sequences"][1].str());
    });
    CHECK(qwen3().decode({-1, 1 << 30, INT32_MIN}, false) == "");
    CHECK(qwen3().bytes(-1) == "");
    CHECK(qwen3().bytes(qwen3().size()) == "");
}

TEST_CASE("1448 tokens are not UTF-8 alone") {
    int broken = 0;
    for (int i = 0; i < qwen3().size(); i++) {
        std::string out;
        utf8_repair(out, qwen3().bytes(i), true);
        broken += out != qwen3().bytes(i);
    }
    CHECK(broken == 1448);
}

TEST_CASE("added tokens") {
    for_all([](const Tokenizer& t, sj::Value known) {
        int specials = 0, plain = 0;
        for (sj::Value row : known["added"].items()) {
            int id = (int)row[0].number();
            std::string name = row[1].str();
            CAPTURE(name);
            CHECK(t.id(name) == id);
            CHECK(t.bytes(id) == name);
            CHECK(t.is_special(id) == row[2].boolean());
            (row[2].boolean() ? specials : plain)++;
            CHECK(t.encode(name, true) == Ids{id});
            if (name != "st") { // (which odd has in its vocabulary too)
                Ids text = t.encode("a" + name + "b", false); // it stays text
                CHECK(std::find(text.begin(), text.end(), id) == text.end());
                CHECK(t.decode(text, true) == "a" + name + "b");
            }
            CHECK(t.decode({id}, true) == (row[2].boolean() ? "" : name));
        }
        CHECK(specials == (&t == &qwen3() || &t == &tiny() ? 14 : 4));
        CHECK(plain == (&t == &qwen3() || &t == &tiny() ? 12 : 5));
        CHECK(t.id(" the") == -1); // in the vocabulary, not added
        CHECK(t.id("") == -1);
        CHECK_FALSE(t.is_special(0));
        CHECK_FALSE(t.is_special(-1));
        CHECK_FALSE(t.is_special(t.size()));
    });
    CHECK(qwen3().id("<|im_end|>") == 151645);
    CHECK(qwen3().size() == 151669);
    CHECK(tiny().size() == 1000);
}

TEST_CASE("added tokens that the model has no rows for do not exist") {
    const Tokenizer cut("tokenizer.bin", 151665); // as Qwen3-Embedding-8B has them: none from <tool_response> on
    CHECK(cut.size() == 151665);
    for (const char* name : {"<tool_response>", "</tool_response>", "<think>", "</think>"}) {
        CHECK(cut.id(name) == -1);
        CHECK(cut.encode(name, true) == qwen3().encode(name, false));
        CHECK(cut.bytes(qwen3().id(name)) == "");
    }
    CHECK(cut.encode("<|im_start|>a</tool_call>", true) == qwen3().encode("<|im_start|>a</tool_call>", true));
    CHECK(cut.merges() == qwen3().merges());
    CHECK(Tokenizer("tokenizer.bin", 151936).size() == 151669);
    CHECK(Tokenizer("tokenizer.bin", 151650).id("<|im_end|>") == 151645);
    CHECK(Tokenizer("tokenizer.bin", 1000).size() == 151669); // it is not the model's: merges make more ids than that
}

TEST_CASE("a folder's tokenizer.json: its added tokens are taken, any other difference is told") {
    const std::string path = "/tmp/qwen3_test_tokenizer_" + std::to_string(getpid()) + ".json";
    const std::string json(MappedFile("tests/fixtures/tiny/tokenizer.json").text());
    auto with = [&](const std::string& from, const std::string& to) {
        std::string text = json;
        const size_t at = text.find(from);
        INFO(from);
        REQUIRE(at != text.npos);
        return text.replace(at, from.size(), to);
    };
    auto adopt = [&](Tokenizer& t, const std::string& text) {
        write_text(path, text);
        const std::string how = adopt_tokenizer_json(t, path);
        unlink(path.c_str());
        return how;
    };
    auto difference = [&](const std::string& text) {
        Tokenizer t(TINY);
        return adopt(t, text);
    };
    const size_t list = json.find('[', json.find("\"added_tokens\""));
    auto adding = [&](const std::string& tokens) { return std::string(json).insert(list + 1, tokens + ","); };
    auto token = [](int id, const std::string& text, const char* more) {
        return format(R"({"id": %d, "content": "%s", "single_word": false, "lstrip": false, "rstrip": false, %s})", id, text.c_str(), more);
    };
    const char *plain = R"("normalized": false, "special": false)", *special = R"("normalized": false, "special": true)",
               *normalized = R"("normalized": true, "special": false)";
    CHECK(difference(json) == "");
    Tokenizer t(TINY);
    // In any order; the third begins as the first does.
    CHECK(adopt(t, adding(token(1001, "<mark>", special) + "," + token(1000, "ab\u00e9", plain) + "," + token(1003, "ab\u00e9cd", plain) + "," +
                          token(1002, "\u00fcber", normalized))) == "");
    CHECK((t.size() == 1004 && t.extended() && t.longest() >= 6 && t.vocabulary() == tiny().vocabulary() && t.is_special(1001) && !t.is_special(1000)));
    auto joined = [](std::initializer_list<Ids> parts) {
        Ids all;
        for (auto& part : parts) all.insert(all.end(), part.begin(), part.end());
        return all;
    };
    auto usual = [&](const std::string& text) { return tiny().encode(text, false); };
    CHECK(t.encode("x ab\u00e9 y", false) == joined({usual("x "), {1000}, usual(" y")})); // of a caller's text, too
    CHECK(t.encode("ab\u00e9cdab\u00e9c", false) == joined({{1003, 1000}, usual("c")}));  // the longest
    CHECK(t.encode("<mark>", false) == usual("<mark>"));
    CHECK(t.encode("a<mark><|im_end|>", true) == joined({usual("a"), {1001, tiny().id("<|im_end|>")}}));
    CHECK(t.encode("<think>", false) == usual("<think>")); // as ever
    CHECK(t.encode("abe\u0301", false) == usual("ab\u00e9"));  // is looked for before NFC,
    CHECK(t.encode("a u\u0308ber \u00fcber", false) == joined({usual("a "), {1002}, usual(" "), {1002}})); // this one after it
    CHECK(t.decode({1000, 1001, 1002}, true) == "ab\u00e9\u00fcber");
    CHECK(t.id("<mark>") == 1001);
    Tokenizer moved = std::move(t);
    CHECK(moved.encode("ab\u00e9", false) == Ids{1000});
    {
        Tokenizer few(TINY, 1001); // a model of 1,001 rows
        CHECK(adopt(few, adding(token(1000, "x1", plain) + "," + token(1001, "x2", plain))) == "");
        CHECK((few.size() == 1001 && few.id("x1") == 1000 && few.id("x2") == -1));
        Tokenizer fewer(TINY, 996);
        CHECK(adopt(fewer, json) == "");
        CHECK((fewer.size() == 996 && !fewer.extended()));
    }
    CHECK(difference(adding(token(1000, "x1", R"("lstrip": true, "normalized": false, "special": false)"))) == "its token 1000 \"x1\" has lstrip");
    CHECK(difference(adding(token(1001, "x1", plain))) == "no token 1000");
    CHECK(difference(adding(token(1000, "!", plain))).find("is there twice") != std::string::npos);
    CHECK(difference(adding(token(1000, "x1", plain) + "," + token(1000, "x2", plain))).find("is there twice") != std::string::npos);
    CHECK(difference(adding(token(999, "x1", plain))) == "its token 999 \"x1\" is \"</think>\" there");
    CHECK(difference(adding(token(1000, "u\u0308", normalized))).find("is not in NFC") != std::string::npos);
    CHECK(difference(adding(token(-1, "x1", plain))).find("is none") != std::string::npos);
    CHECK(difference(with("\"NFC\"", "\"NFKC\"")) == "its normalizer is not NFC");
    CHECK(difference(with("\\\\p{N}|", "\\\\p{N}{1,3}|")) == "it splits texts by another rule");
    CHECK(difference(with("\"BPE\"", "\"Unigram\"")) == "it is of the kind Unigram");
    CHECK(difference(with("\"vocab\": {", "\"vocab\": {\"zz\": 5, ")).find("its token 5 is \"zz\"") == 0);
    CHECK(difference(with("\"merges\": [", "\"merges\": [\"a b\", ")).find("its merge 0 is \"a b\"") == 0);
    CHECK_THROWS_WITH_AS(difference("{}"), (path + ": not a tokenizer.json: it has no model").c_str(), Error);
    CHECK_THROWS_AS(difference("{"), Error);
}

TEST_CASE("decode(encode(text)) is the text in NFC") {
    int changed = 0;
    for (uint64_t n = 0; n < 5000; n++) {
        std::string text = random_text(n), composed = qwen3().nfc(text);
        changed += composed != text;
        CHECK(qwen3().decode(qwen3().encode(text, false), false) == composed);
        CHECK(qwen3().nfc(composed) == composed);
    }
    CHECK(changed > 500);
    CHECK(qwen3().nfc("A\u030A\u0301 \u1112\u1161\u11AB \u212B\u0323") == "\u01FA \uD55C \u1EA0\u030A");
}

TEST_CASE("encode appends, and many threads share one tokenizer") {
    Ids out{7};
    qwen3().encode(out, "Hello", true);
    CHECK(out == Ids{7, 9707});
    std::vector<std::string> found(4);
    std::vector<std::thread> threads;
    for (std::string& hash : found)
        threads.emplace_back([&hash] {
            Fnv ids_hash, text_hash;
            for (uint64_t n = 0; n < 2000; n++) add_encoding(tiny(), random_text(n), ids_hash, text_hash);
            hash = ids_hash.hex();
        });
    for (std::thread& thread : threads) thread.join();
    std::string known = vectors().doc.root()["tiny"]["random"][(size_t)0][2].str();
    for (const std::string& hash : found) CHECK(hash == known);
}

// -------------------------------------------------------------------------------------------------------- UTF-8

TEST_CASE("broken UTF-8 becomes U+FFFD as in Python") {
    for_all([](const Tokenizer& t, sj::Value known) {
        for (sj::Value row : known["broken"].items()) {
            std::string hex = row[0].str(), bytes, repaired;
            for (size_t i = 0; i < hex.size(); i += 2)
                bytes += (char)std::stoi(hex.substr(i, 2), nullptr, 16);
            CAPTURE(hex);
            CHECK(utf8_repair(repaired, bytes, true) == bytes.size());
            CHECK(repaired == row[1].str());
            CHECK(t.encode(bytes, true) == ids_of(row[2]));
        }
        CHECK(known["broken"].size() > 25);
    });
    Fnv h;
    for (uint64_t n = 0; n < 50000; n++) {
        std::string out;
        utf8_repair(out, random_bytes(n), true);
        h.add(out);
    }
    CHECK(h.hex() == vectors().doc.root()["random_bytes"].str());
}

TEST_CASE("streamed bytes are the whole decode, and only an incomplete end is held back") {
    for (uint64_t n = 0; n < 20000; n++) {
        std::string bytes = random_bytes(n) + (n % 3 ? random_text(n) : "") + random_bytes(n + 1);
        std::string whole, parts;
        utf8_repair(whole, bytes, true);
        Utf8Stream stream;
        SplitMix64 random{n};
        for (size_t at = 0, k; at < bytes.size(); at += k) {
            k = 1 + random.below(4);
            parts += stream.feed(std::string_view(bytes).substr(at, k));
            if (!stream.held.empty()) {
                CHECK(stream.held.size() <= 3);
                CHECK(utf8_length(stream.held.data(), stream.held.size()) == 0);
            }
        }
        parts += stream.flush();
        CHECK(parts == whole);
        CHECK(stream.flush() == "");
    }
    for (uint64_t n = 0; n < 20000; n++) { // token by token
        Ids ids = random_ids(n, qwen3().size());
        Utf8Stream stream;
        std::string parts;
        for (int i : ids) parts += stream.feed(qwen3().bytes(i));
        CHECK(parts + stream.flush() == qwen3().decode(ids, false));
    }
    Utf8Stream stream;
    CHECK(stream.feed("a\xF0\x9F\x98") == "a");
    CHECK(stream.feed("\x80!") == "😀!");
    CHECK(stream.feed("\xE4\xBD") == "");
    CHECK(stream.flush() == "\uFFFD");
}

// -------------------------------------------------------------------------------------------- hostile texts

TEST_CASE("a megabyte of one thing takes less than a second") {
    const double limit = SANITIZED ? 20 : 1;
    auto many = [](std::string unit) {
        std::string text;
        while (text.size() < 1000000) text += unit;
        return text;
    };
    for (const char* unit :
         {"a", "z", "中", " ", "\n", " \n", "\t ", "!", "'", "'s", "1", "\u0301", "\u0323\u0301", "😀", "é",
          "a\u0301", "ab", "aaaab", "\u1112\u1161\u11AB", "한", "<", "<|im_end|", "<|im_start|>", "\xFF", "\xF0\x9F",
          "\u0F73", "\uFDFA", "\u0345\u0301\u0323\u0334", "    x", "x\r\n", "\u3000"}) {
        std::string text = many(unit), repaired;
        CAPTURE(unit);
        Ids ids;
        for (const Tokenizer* t : {&qwen3(), &tiny()}) {
            CHECK(seconds([&] { ids = t->encode(text, true); }) < limit);
            utf8_repair(repaired = "", text, true);
            CHECK(t->decode(ids, false) == t->nfc(repaired));
        }
    }
}

TEST_CASE("eight megabytes of white space, which is one piece, take about as long as eight of text") {
    const double limit = SANITIZED ? 30 : 2;
    for (char c : {' ', '\n'}) {
        Ids ids;
        CHECK(seconds([&] { ids = qwen3().encode(std::string(8'000'000, c), true); }) < limit);
        const int longest = ids[0];
        CHECK(qwen3().bytes(longest).size() == (c == ' ' ? 128 : 32));
        CHECK(std::count(ids.begin(), ids.end(), longest) == (ptrdiff_t)ids.size());
    }
}

TEST_CASE("pieces of any length, around the one where the lists take over") {
    for_all([](const Tokenizer& t, sj::Value known) {
        Fnv ids_hash, text_hash;
        for (uint64_t n = 0; n < 3000; n++) add_encoding(t, long_word(n), ids_hash, text_hash);
        CHECK(ids_hash.hex() == known["long_words"][0].str());
        CHECK(text_hash.hex() == known["long_words"][1].str());
    });
}

// -------------------------------------------------------------------------------------------- hostile files

static std::string load_error(const std::string& bytes) {
    char path[] = "/tmp/test_tokenizer_XXXXXX";
    int fd = mkstemp(path);
    REQUIRE(fd >= 0);
    REQUIRE(write(fd, bytes.data(), bytes.size()) == (ssize_t)bytes.size());
    close(fd);
    std::string fault;
    try {
        Tokenizer t(path);
        Ids ids = t.encode("Hello, wörld: 你好 e\u0301 <think>", true); // what loads must also work
        t.decode(ids, true);
    } catch (const Error& e) {
        fault = e.what();
        CHECK(fault.substr(0, strlen(path)) == path);
        fault.erase(0, strlen(path) + 2);
    }
    unlink(path);
    return fault;
}

TEST_CASE("a file that breaks a rule is refused by name") {
    const std::string good(MappedFile(TINY).text());
    CHECK(load_error(good) == "");
    uint32_t head[9];
    memcpy(head, good.data(), sizeof head); // magic (2), version, T, M, B, R, D, C
    const size_t T = head[3], M = head[4], R = head[6], D = head[7], C = head[8];
    const size_t offset = 9, merge = offset + T + 1, range = merge + 3 * M; // places, in words of 4 bytes
    const size_t decompose = range + 3 * R, compose = decompose + 5 * D;
    const size_t flags = 4 * (compose + 3 * C), text = flags + T; // in bytes
    auto word = [&](size_t at, uint32_t value) {
        std::string bad = good;
        memcpy(&bad[4 * at], &value, 4);
        return load_error(bad);
    };
    auto byte = [&](size_t at, int value) {
        std::string bad = good;
        bad[at] = (char)value;
        return load_error(bad);
    };
    auto at = [&](size_t w) {
        uint32_t value;
        memcpy(&value, &good[4 * w], 4);
        return value;
    };
    CHECK(byte(0, 'Q') == "not a tokenizer file");
    CHECK(word(2, 2) == "version 2 of the format, not 1");
    for (size_t i = 3; i < 9; i++)
        for (uint32_t value : {0u, head[i] - 1, head[i] + 1, 0x7FFFFFFFu, 0x80000000u, 0xFFFFFFFFu})
            CHECK(word(i, value) == "its size is not what its header says");
    CHECK(load_error(good + " ") == "its size is not what its header says");

    CHECK(word(offset, 1) == "bad token offsets");
    CHECK(word(offset + 5, at(offset + 4)) == "bad token offsets"); // an empty token
    CHECK(word(offset + 5, 0xFFFFFFFF) == "bad token offsets");
    CHECK(word(offset + T, at(offset + T) + 1) == "bad token offsets");
    CHECK(byte(flags + 3, 0) == "bad token flags");
    CHECK(byte(flags + 3, 16 | good[flags + 3]) == "bad token flags");
    CHECK(byte(flags + 3, 1 | 4) == "bad token flags"); // special, not added
    CHECK(byte(flags + T - 1, 2 | 8) == "bad token flags");
    CHECK(byte(flags + 3, 2) == "a byte without a token");
    CHECK(byte(text, good[text + 1]) == "two tokens with the same text"); // the first tokens are single bytes
    CHECK(byte(text + at(offset + T - 1) + 1, 0xFF) == "an added token that is not valid UTF-8");
    CHECK(word(merge, (uint32_t)T) == "a merge of a token that is not there");
    CHECK(word(merge + 1, 0xFFFFFFFF) == "a merge of a token that is not there");
    CHECK(word(merge + 2, (uint32_t)T - 1) == "a merge of a token that is not there"); // added only
    CHECK(word(merge + 2, at(merge)) == "a merge that is not its two parts");
    CHECK(word(merge, at(merge + 1)) == "a merge that is not its two parts");
    std::string twice = good;
    memcpy(&twice[4 * (merge + 3)], &good[4 * merge], 12);
    CHECK(load_error(twice) == "two merges of the same tokens");
    CHECK(word(range + 1, 0x110000) == "bad Unicode ranges");
    CHECK(word(range + 3, at(range + 1)) == "bad Unicode ranges"); // they overlap
    CHECK(word(range + 3, at(range + 4) + 1) == "bad Unicode ranges");
    CHECK(word(range + 2, 256) == "bad Unicode ranges");
    CHECK(word(decompose, at(decompose + 5)) == "bad Unicode decompositions"); // not sorted
    CHECK(word(decompose + 1, 0) == "bad Unicode decompositions");
    CHECK(word(decompose + 2, 0x110000) == "bad Unicode decompositions");
    CHECK(word(decompose + 2, 0xD800) == "bad Unicode decompositions");
    CHECK(word(compose, 0xFFFFFFFF) == "bad Unicode compositions");
    CHECK(word(compose + 2, 0xDFFF) == "bad Unicode compositions");
}

TEST_CASE("a truncated file is refused, wherever it ends") {
    const std::string good(MappedFile(TINY).text());
    for (size_t n = 0; n < good.size(); n += n < 200 || n + 200 > good.size() ? 1 : 499)
        CHECK(load_error(good.substr(0, n)) != "");
    CHECK(load_error("") == "the file is empty");
    CHECK_THROWS_AS(Tokenizer("tests/no such file"), Error);
    CHECK_THROWS_AS(Tokenizer("tests"), Error);
}

TEST_CASE("random damage: refused, or it works") {
    const std::string good(MappedFile(TINY).text());
    int refused = 0;
    for (uint64_t n = 0; n < 400; n++) {
        SplitMix64 random{n};
        std::string bad = good;
        for (uint32_t k = 1 + random.below(4); k > 0; k--)
            bad[random.below(bad.size())] ^= (char)(1 << random.below(8));
        refused += load_error(bad) != "";
    }
    CHECK(refused > 100);
}

TEST_CASE("hash names the file") {
    Fnv h;
    std::string_view text = qwen3().bytes(0);
    MappedFile file("tokenizer.bin");
    h.add(file.data, file.size);
    CHECK(qwen3().hash() == h.h);
    CHECK(tiny().hash() != h.h);
    CHECK(text == "!");
}

TEST_CASE("it loads in well under 50 ms") {
    double best = 1;
    for (int run = 0; run < 10; run++) best = std::min(best, seconds([] { Tokenizer t("tokenizer.bin"); }));
    CHECK(best < (SANITIZED ? 1 : 0.05));
}
