// dataset.h: a written dataset is read back unchanged, and any other file is refused in one line.
#include "model/dataset.h"
#include "tests/files.h"

using Words = std::vector<uint32_t>;
constexpr uint64_t TOKENIZER = 0x1234567890ABCDEF, TEMPLATE = 42;

static const std::vector<Words> ROWS = {{1, 2, 3 | TRAIN}, {7, 8 | TRAIN, 9, 10 | TRAIN}, {0, 0 | TRAIN}, {1, 2, 3 | TRAIN, 151668 | TRAIN}};

static std::string written(const Scratch& scratch, const std::vector<Words>& rows = ROWS) {
    const std::string path = scratch / "x.bin";
    DatasetWriter out(path, TOKENIZER, TEMPLATE);
    for (auto& row : rows) out.add(row);
    out.commit();
    return path;
}
static std::string fault_of(const std::string& path) {
    try {
        Dataset data(path);
    } catch (const Error& e) {
        return e.what();
    }
    return "";
}

TEST_CASE("what is written is read, for odd and even numbers of tokens") {
    for (size_t n = 1; n <= ROWS.size(); n++) {
        Scratch scratch;
        const std::string path = written(scratch, {ROWS.begin(), ROWS.begin() + (ptrdiff_t)n});
        CHECK(scratch.count() == 1);
        const Dataset data(path);
        REQUIRE(data.rows() == n);
        uint64_t tokens = 0, trained = 0;
        for (size_t i = 0; i < n; i++) {
            CHECK(Words(data.row(i).begin(), data.row(i).end()) == ROWS[i]);
            tokens += ROWS[i].size();
            for (uint32_t w : ROWS[i]) trained += w >= TRAIN;
        }
        CHECK(data.tokens() == tokens);
        CHECK(data.trained() == trained);
        CHECK(data.id_limit() == (n == 4 ? 151669 : n == 1 ? 4 : 11));
        CHECK(data.header.tokenizer == TOKENIZER);
        CHECK(data.header.chat_template == TEMPLATE);
    }
}

TEST_CASE("a row's hash is FNV-1a 64 of its ids, whatever of them is trained") {
    Scratch scratch;
    const Dataset data(written(scratch, {{97, 98 | TRAIN}, {97, 98, 98 | TRAIN}, {97, 98 | TRAIN, 98}}));
    CHECK(data.hash(0) == 0xA71BED7B7BA66346); // of the bytes "a\0\0\0b\0\0\0"
    CHECK(data.hash(1) == data.hash(2));
    CHECK(data.hash(0) != data.hash(1));
}

TEST_CASE("another tokenizer or template is refused") {
    Scratch scratch;
    const Dataset data(written(scratch));
    data.must_match(TOKENIZER, TEMPLATE);
    CHECK_THROWS_WITH_AS(data.must_match(TOKENIZER + 1, TEMPLATE), doctest::Contains("tokenizer"), Error);
    CHECK_THROWS_WITH_AS(data.must_match(TOKENIZER, TEMPLATE + 1), doctest::Contains("template"), Error);
}

TEST_CASE("rows that cannot be trained are not written, and nothing is left behind") {
    for (const Words& bad : {Words{}, Words{1}, Words{1, 2}, Words{1 | TRAIN}, Words{1 | TRAIN, 2 | TRAIN}}) {
        Scratch scratch;
        CHECK_THROWS_AS(written(scratch, {ROWS[0], bad}), Error);
        CHECK(scratch.count() == 0);
    }
    Scratch scratch;
    CHECK_THROWS_WITH_AS(written(scratch, {}), doctest::Contains("without rows"), Error);
    CHECK(scratch.count() == 0);
    CHECK_THROWS_AS(DatasetWriter("/dev/null", 0, 0), Error);
}

TEST_CASE("every truncation and every damaged byte that matters is refused") {
    Scratch scratch;
    const std::string path = written(scratch), good = read_file(path), bad = scratch / "bad.bin";
    for (size_t n = 0; n <= good.size() + 4; n++) {
        if (n == good.size()) continue;
        write_file(bad, (good + std::string(4, '\0')).substr(0, n));
        INFO(n);
        CHECK(fault_of(bad).find(bad) == 0);
    }
    size_t accepted = 0;
    for (size_t i = 0; i < good.size(); i++) {
        for (int bit = 0; bit < 8; bit++) {
            std::string s = good;
            s[i] = (char)(s[i] ^ 1 << bit);
            write_file(bad, s);
            const std::string fault = fault_of(bad);
            CHECK(fault.find('\n') == std::string::npos);
            // The names of tokenizer and template (bytes 16..31) may be any; a top bit of a token is no part of its
            // row's hash, and the row stays good unless it is the first or the only one trained.
            const bool named = i >= 16 && i < 32, top = i >= 48 && i < 48 + 4 * 13 && i % 4 == 3 && bit == 7;
            INFO(i << ", bit " << bit << ": " << fault);
            if (!named && !top) CHECK(!fault.empty());
            accepted += fault.empty();
        }
    }
    CHECK(accepted == 16 * 8 + 7); // of 13 top bits, 4 are of first tokens and 2 of the only trained ones
}

TEST_CASE("hostile counts and indexes") {
    Scratch scratch;
    const std::string path = written(scratch), good = read_file(path), bad = scratch / "bad.bin";
    auto with = [&](size_t at, uint64_t value) {
        std::string s = good;
        memcpy(&s[at], &value, 8);
        write_file(bad, s);
        return fault_of(bad);
    };
    const size_t index = 48 + 4 * 14;
    for (uint64_t huge : {UINT64_MAX, UINT64_MAX / 8, (uint64_t)1 << 61, (uint64_t)1 << 40, (uint64_t)1 << 32}) {
        CHECK(with(32, huge) != ""); // rows
        CHECK(with(40, huge) != ""); // tokens
        for (size_t i = 0; i < 5; i++) CHECK(with(index + 8 * i, huge).find("index") != std::string::npos);
    }
    CHECK(with(32, 0).find("without rows") != std::string::npos);
    CHECK(with(0, 0).find("not a dataset") != std::string::npos);
    CHECK(with(8, 5).find("version 5") != std::string::npos);
    CHECK(with(8, 2).find("rows 0 and 1: chosen and rejected answer different prompts") != std::string::npos);
    CHECK(with(index + 8, 4).find("row 0") != std::string::npos); // another cut between two rows
    CHECK(fault_of(scratch / "none").find("none") != std::string::npos);
}

TEST_CASE("pairs: what is written is read; what is no pair is neither written nor read") {
    const Words chosen = {1, 2, 3 | TRAIN, 4 | TRAIN}, rejected = {1, 2, 3 | TRAIN};
    auto pairs = [](const Scratch& scratch, const Words& a, const Words& b) {
        DatasetWriter out(scratch / "x.bin", TOKENIZER, TEMPLATE);
        out.add_pair(a, b), out.add_pair(b, a);
        out.commit();
        return scratch / "x.bin";
    };
    Scratch scratch;
    const std::string path = pairs(scratch, chosen, rejected), good = read_file(path);
    const Dataset data(path);
    CHECK(data.pairs());
    CHECK(data.group() == 2);
    REQUIRE(data.rows() == 4);
    CHECK(Words(data.row(0).begin(), data.row(0).end()) == chosen);
    CHECK(Words(data.row(1).begin(), data.row(1).end()) == rejected);
    CHECK(!Dataset(written(scratch)).pairs());
    for (auto& [other, fault] : std::vector<std::pair<Words, const char*>>{{{1, 3 | TRAIN}, "different prompts"}, {{1, 2 | TRAIN}, "different prompts"}, {{1, 2, 5, 3 | TRAIN}, "different prompts"},
             {{1, 2, 3 | TRAIN, 4, 5 | TRAIN}, "not trained"}, {{1, 2, 3 | TRAIN, 4}, "not trained"}, {chosen, "are the same"}}) {
        Scratch empty;
        CHECK_THROWS_WITH_AS(pairs(empty, chosen, other), doctest::Contains(fault), Error);
        CHECK(empty.count() == 0);
        // As rows they are written; called pairs afterwards they are refused.
        std::string bytes = read_file(written(scratch, {chosen, other}));
        bytes[8] = 2;
        write_file(scratch / "bad.bin", bytes);
        CHECK(fault_of(scratch / "bad.bin").find(fault) != std::string::npos);
    }
    std::string odd = read_file(written(scratch, {chosen, rejected, chosen}));
    odd[8] = 2;
    write_file(scratch / "bad.bin", odd);
    CHECK(fault_of(scratch / "bad.bin").find("a row without its pair") != std::string::npos);
}
