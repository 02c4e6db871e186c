// The prefix cache on disk: its files by themselves, then engines that find them again. (The program: test_serve.)
#include "base/sha256.h"
#include "server/engine/disk_pages.h"
#include "server/engine/pace.h"
#include "tests/adapters.h"
#include "tests/engine.h"
#include "tests/files.h"
#include "tests/process.h"
#include <algorithm>
#include <csignal>
#include <fcntl.h>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>
#include <vector>

TEST_CASE("SHA-256: the standard's examples, and lengths around a block") {
    CHECK(hex(sha256("abc")) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    CHECK(hex(sha256("")) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    CHECK(hex(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")) ==
          "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    const std::pair<size_t, const char*> known[] = { // printf '%*s' N | tr ' ' a | sha256sum
        {55, "9f4390f8d30c2dd92ec9f095b65e2b9ae9b0a925a5258e241c9f1e910f734318"},
        {56, "b35439a4ac6f0948b6d6f9e3c6af0f5f590ce20f1bde7090ef7970686ec6738a"},
        {64, "ffe054fe7ae0cb6dc65c3af9b61d5209f439851db43d0ba5997337df154668eb"},
        {1000, "41edece42d63e8d9bf515a9ba6932e1c20cbc9f5a5d134645adb5db1b9737ea3"}};
    for (auto& [n, want] : known) CHECK(hex(sha256(std::string(n, 'a'))) == want);
}

// ------------------------------------------------------------------------------------------------------ the files

struct Told { // lines of a log
    std::mutex mutex;
    Strings lines;
    std::function<void(const std::string&)> add() {
        return [this](const std::string& line) {
            std::lock_guard lock(mutex);
            lines.push_back(line);
        };
    }
    Strings all() {
        std::lock_guard lock(mutex);
        return lines;
    }
};

static constexpr size_t BYTES = 4096;
static Digest key_of(int n) { return sha256(std::to_string(n)); }
static Bytes page_of(int n) {
    Bytes page(new uint8_t[BYTES]);
    for (size_t i = 0; i < BYTES; i++) page[i] = (uint8_t)(i * 7 + (size_t)n * 31 + i / 256);
    return page;
}
template <class F> static void eventually(F f) {
    bool done = false;
    for (const double end = seconds() + 20; !(done = f()) && seconds() < end;) usleep(1000);
    CHECK(done);
}
static void put(DiskPages& disk, int n) {
    disk.write(key_of(n), page_of(n), BYTES);
    eventually([&] { return disk.has(key_of(n)); });
}
// Whether page n comes back, with its bytes.
static bool comes(DiskPages& disk, int n) {
    auto inbox = std::make_shared<PageInbox>();
    disk.read(key_of(n), Bytes(new uint8_t[BYTES]), BYTES, 5, inbox);
    Bytes page;
    eventually([&] { return inbox->take(5, page); });
    if (page) CHECK(!memcmp(page.get(), page_of(n).get(), BYTES));
    return page != nullptr;
}
static std::string file_of(const Scratch& s, int n) { return s / (hex(key_of(n)) + ".kv"); }
static std::unique_ptr<DiskPages> opened(const Scratch& s, Told& told, size_t limit = 1 << 20, const char* depends = "m",
                                         const Strings& keys = {}) {
    return std::make_unique<DiskPages>(s.path.string(), limit, depends, keys, told.add());
}

TEST_CASE("pages on disk: written, read, found after a restart; nobody else may read the files") {
    Scratch s;
    Told told;
    for (int round = 0; round < 2; round++) {
        auto disk = opened(s, told);
        for (int n = 0; n < 10; n++) {
            CHECK(disk->has(key_of(n)) == (round == 1));
            CHECK(disk->wants(key_of(n)) == (round == 0));
            if (round == 0) put(*disk, n);
            CHECK(comes(*disk, n));
        }
        CHECK(!comes(*disk, 10));
        CHECK(disk->counts().pages == 10);
        CHECK(disk->counts().bytes == 10 * (BYTES + 64));
        CHECK(disk->counts().read == 10 * BYTES);
        CHECK(disk->counts().written == (round == 0) * 10 * BYTES);
    }
    struct stat st;
    REQUIRE(stat(file_of(s, 3).c_str(), &st) == 0);
    CHECK((st.st_mode & 077) == 0);
    CHECK(told.all().empty());
    CHECK(s.count() == 11); // and the lock
}

TEST_CASE("pages on disk: the size is kept by removing what was used least recently, also after a restart") {
    Scratch s;
    Told told;
    const size_t limit = 4 * (BYTES + 64) + 100;
    {
        auto disk = opened(s, told, limit);
        for (int n = 0; n < 4; n++) put(*disk, n);
        CHECK(disk->use(key_of(0)));
        put(*disk, 4);
        CHECK(!disk->has(key_of(1)));
        CHECK(!fs::exists(file_of(s, 1)));
        CHECK(disk->counts().removed == 1);
        CHECK(disk->counts().bytes <= limit);
    }
    for (int n : {0, 3, 2, 4}) { // the order of the last uses
        const timespec times[] = {{0, UTIME_OMIT}, {1'000'000'000 + (n == 2 ? 0 : n == 0 ? 100 : n), 0}};
        REQUIRE(utimensat(AT_FDCWD, file_of(s, n).c_str(), times, 0) == 0);
    }
    {
        auto disk = opened(s, told, limit);
        CHECK(disk->use(key_of(3))); // this file is marked
        eventually([&] { return fs::last_write_time(file_of(s, 3)) > fs::last_write_time(file_of(s, 0)); });
        put(*disk, 5); // 2 is the oldest
        for (auto [n, there] : {std::pair{0, true}, {1, false}, {2, false}, {3, true}, {4, true}, {5, true}})
            CHECK(disk->has(key_of(n)) == there);
        CHECK(!disk->use(key_of(2)));
        put(*disk, 6);
        CHECK(disk->has(key_of(0)));
        CHECK(!disk->has(key_of(4)));
    }
    auto less = opened(s, told, BYTES + 64); // a smaller size holds from the start
    CHECK(less->counts().pages == 1);
    CHECK(less->has(key_of(6)));
    CHECK(s.count() == 2);
    less.reset();
    auto none = opened(s, told, BYTES);
    none->write(key_of(7), page_of(7), BYTES);
    eventually([&] { return told.all().size() == 1; });
    CHECK(told.all()[0].find("larger than --cache-size") != std::string::npos);
}

TEST_CASE("pages on disk: what is damaged is not used and goes, what is not ours stays") {
    Scratch s;
    Told told;
    {
        auto disk = opened(s, told);
        for (int n = 0; n < 8; n++) put(*disk, n);
    }
    const std::string good = read_file(file_of(s, 0));
    REQUIRE(good.size() == BYTES + 64);
    auto with_bit = [&](size_t at) {
        std::string bad = good;
        bad[at] = (char)(bad[at] ^ 4);
        return bad;
    };
    auto disk = opened(s, told); // the files change behind its back
    write_file(file_of(s, 0), with_bit(64 + 1000));
    write_file(file_of(s, 1), read_file(file_of(s, 2)));                // another page's
    write_file(file_of(s, 2), read_file(file_of(s, 2)).substr(0, 3000));
    write_file(file_of(s, 3), read_file(file_of(s, 3)) + "x");
    write_file(file_of(s, 4), "not ours, though the name is");
    write_file(file_of(s, 5), "");
    fs::remove(file_of(s, 6));
    for (int n = 0; n < 7; n++) {
        INFO(n);
        CHECK(disk->has(key_of(n)));
        CHECK(!comes(*disk, n));
        CHECK(!disk->has(key_of(n)));
        CHECK(fs::exists(file_of(s, n)) == (n == 4 || n == 5));
    }
    CHECK(comes(*disk, 7));
    put(*disk, 0); // a page takes its place again
    CHECK(comes(*disk, 0));
    CHECK(disk->counts().pages == 2);
    disk.reset();
    // At the start.
    write_file(file_of(s, 0), with_bit(8));        // another version
    write_file(file_of(s, 1), good.substr(0, 40)); // our magic, no more
    write_file(file_of(s, 2), good);               // the name of another page
    write_file(file_of(s, 3) + ".tmp123", good.substr(0, 700)); // a writer was killed
    write_file(s / "notes.kv", good);
    write_file(s / "notes.txt", "mine");
    fs::create_directory(file_of(s, 6));
    disk = opened(s, told);
    CHECK(disk->counts().pages == 1);
    CHECK(disk->counts().damaged == 3);
    for (int n : {0, 1, 2}) CHECK(!fs::exists(file_of(s, n)));
    CHECK(!fs::exists(file_of(s, 3) + ".tmp123"));
    for (auto& name : {file_of(s, 4), file_of(s, 5), file_of(s, 6), s / "notes.kv", s / "notes.txt"}) CHECK(fs::exists(name));
    CHECK(told.all().empty());
}

TEST_CASE("pages on disk: two servers on one folder: one writes, the other reads, and takes over when that one ends") {
    Scratch s;
    Told one_told, other_told;
    auto one = opened(s, one_told);
    put(*one, 0);
    auto other = opened(s, other_told);
    REQUIRE(other_told.all().size() == 1);
    CHECK(other_told.all()[0] == s.path.string() + ": another server has this cache: no pages are written");
    CHECK(comes(*other, 0));
    CHECK(!other->may_write());
    other->write(key_of(1), page_of(1), BYTES);
    put(*one, 2);
    CHECK(!other->has(key_of(2)));
    CHECK(!fs::exists(file_of(s, 1)));
    one.reset();
    const double left = seconds();
    eventually([&] { return other->has(key_of(1)); }); // it waited
    CHECK(seconds() - left < 5);
    CHECK(other->may_write());
    CHECK(other->has(key_of(2))); // it has looked again
    CHECK(other->counts().pages == 3);
    CHECK(other->counts().bytes == 3 * fs::file_size(file_of(s, 1)));
    CHECK(comes(*other, 2));
    CHECK(one_told.all().empty());
    CHECK(other_told.all().size() == 1);
}

TEST_CASE("pages on disk: no room, no permission, no folder: one line each, and no page") {
    Scratch s;
    Told told;
    const std::string folder = s / "a/b"; // is made
    DiskPages disk(folder, 1 << 20, "m", {}, told.add());
    put(disk, 0);
    fs::remove_all(s / "a");
    for (int n = 0; n < 3; n++) CHECK(!comes(disk, n));
    REQUIRE(told.all().size() == 1);
    CHECK(told.all()[0] == folder + ": No such file or directory: its pages are computed again");
    for (int n = 1; n < 4; n++) disk.write(key_of(n), page_of(n), BYTES);
    eventually([&] { return told.all().size() == 2; });
    CHECK(told.all()[1] == folder + ": No such file or directory: no pages are written");
    CHECK(!disk.may_write());

    fs::create_directories(s / "c/lock"); // cannot be opened for writing
    DiskPages closed(s / "c", 1 << 20, "m", {}, told.add());
    CHECK(!closed.may_write());
    REQUIRE(told.all().size() == 3);
    CHECK(told.all()[2].find("/c: Is a directory: no pages are written") != std::string::npos);

    write_file(s / "file", "x");
    CHECK_THROWS_AS(DiskPages(s / "file", 1, "m", {}, told.add()), Error);

    const Result full = Process::of([&] { // files may have so many bytes only, as on a disk that is full
        signal(SIGXFSZ, SIG_IGN);
        const rlimit most = {1000, 1000};
        setrlimit(RLIMIT_FSIZE, &most);
        Told told;
        DiskPages disk(s / "d", 1 << 20, "m", {}, told.add());
        for (int n = 0; n < 3; n++) disk.write(key_of(n), page_of(n), BYTES);
        for (const double end = seconds() + 10; told.all().empty() && seconds() < end;) usleep(1000);
        usleep(50'000);
        fputs(told.all().empty() ? "nothing" : told.all()[0].c_str(), stderr);
        return (int)told.all().size();
    });
    CHECK(full.status == 1);
    CHECK(full.err.find("/d: ") != std::string::npos);
    CHECK(full.err.find(": no pages are written") != std::string::npos);
    CHECK(fs::exists(s / "d/lock"));
    CHECK(std::distance(fs::directory_iterator(s / "d"), fs::directory_iterator()) == 1); // no half of a file
}

TEST_CASE("pages on disk: keys differ by all that a page depends on") {
    Scratch s;
    Told told;
    std::set<Digest> roots;
    const Strings keys = {"one", "two"};
    for (auto& [depends, with] : {std::pair<const char*, Strings>{"m", {}}, {"n", {}}, {"m", keys}, {"n", keys}}) {
        auto disk = opened(s, told, 1 << 20, depends, with);
        for (uint64_t key = 1; key <= std::max<size_t>(1, with.size()); key++)
            for (const char* salt : {"", "x", "y"})
                for (uint64_t adapter : {0, 7})
                    roots.insert(disk->root(key, *salt ? sha256(salt) : Digest{}, adapter));
    }
    CHECK(roots.size() == 6 * 3 * 2);
    // A key is its text, not its place in the file.
    CHECK(opened(s, told, 1 << 20, "m", {"two", "one"})->root(1, {}, 0) == opened(s, told, 1 << 20, "m", keys)->root(2, {}, 0));
    const std::vector<int> a(PAGE, 1), b(PAGE, 2);
    const Digest root = *roots.begin(), first = DiskPages::after(root, a.data(), PAGE);
    CHECK(first != DiskPages::after(root, b.data(), PAGE));
    CHECK(DiskPages::after(first, b.data(), PAGE) != DiskPages::after(DiskPages::after(root, b.data(), PAGE), b.data(), PAGE));
}

TEST_CASE("buffers of pages come back when nobody has them any more") {
    PageBuffers buffers(Bytes(new uint8_t[30]), 10, 3);
    std::vector<Bytes> all = {buffers.take(), buffers.take(), buffers.take()};
    std::set<uint8_t*> different;
    for (auto& one : all) different.insert(one.get());
    CHECK(different.size() == 3);
    CHECK(!different.count(nullptr));
    CHECK(!buffers.take());
    const Bytes again = all[1];
    all.pop_back(), all.pop_back();
    CHECK(buffers.take());
    CHECK(buffers.take()); // (that one was dropped at once)
    all.push_back(buffers.take());
    CHECK(!buffers.take());
}

TEST_CASE("pages are read while that is faster than computing them, and tried again in time") {
    ReadPace pace;
    CHECK(pace.pays()); // nothing is known
    pace.learn(pace.reading, 8000, 0.4);
    CHECK(pace.pays());
    pace.learn(pace.computing, 255, 0.001); // too short to tell
    CHECK(pace.pays());
    pace.learn(pace.computing, 8000, 0.2);
    int refused = 0;
    while (!pace.pays()) REQUIRE(++refused < 100);
    CHECK(refused == 14); // 0.95^14 is the first below a half
    pace.learn(pace.computing, 512, 5);
    CHECK(pace.pays());
}

// ------------------------------------------------------------------------------------------------------- engines

struct Tokens { // from the cache, and from the disk
    size_t cached, read;
    bool operator==(const Tokens& t) const { return cached == t.cached && read == t.read; }
    friend std::ostream& operator<<(std::ostream& to, const Tokens& t) { return to << t.cached << ", " << t.read; }
};

namespace {

// An engine with a cache on disk.
struct Cached {
    Told told;
    DiskPages disk;
    Bench bench;
    std::string text; // of the last answer
    Cached(const Scratch& s, EngineOptions o, const Strings& keys = {"one", "two"}, const char* depends = "tiny")
        : disk(s.path.string(), 1 << 30, depends, keys, told.add()), bench(with(o, disk)) {}
    static EngineOptions with(EngineOptions o, DiskPages& disk) { return o.disk = &disk, o; }

    Tokens ask(Job job, bool checked = true) {
        job.reply = std::make_shared<Reply>(), job.reply->left = 1;
        REQUIRE(bench.desk.submit({job}));
        for (const double end = seconds() + 60; job.reply->left && seconds() < end;) bench.engine.step();
        REQUIRE(job.reply->left == 0);
        if (checked) check_answer(job, expected(job, bench.engine.options.context));
        text.clear();
        for (auto& piece : job.reply->pieces) text += piece.text;
        const Piece& last = job.reply->pieces.back();
        return {last.cached, last.read};
    }
    void save(size_t pages) { // all that is left to save
        eventually([&] { return bench.engine.step(), disk.counts().pages >= pages; });
        CHECK(disk.counts().pages == pages);
    }
};

} // namespace

static Job job_of(size_t n, uint64_t salt = 1, int first = 1) {
    Job job;
    job.prompt = {first};
    for (size_t i = 1; i < n; i++) job.prompt.push_back((int)(i * i % 300));
    job.max_tokens = 5, job.salt = salt, job.how.seed = 3, job.ignore_eos = true;
    return job;
}
static const EngineOptions USUAL = {512, 4, 64, 64, 0};

TEST_CASE("an engine finds its predecessor's pages, and answers the same to the bit") {
    struct Restore { ~Restore() { where.kv_fp8 = false; } } restore;
    for (bool fp8 : {false, true}) {
        INFO("FP8 " << fp8);
        where.kv_fp8 = fp8;
        Scratch s;
        {
            Cached first(s, USUAL);
            CHECK(first.ask(job_of(200)) == Tokens{0, 0});
            first.save(12); // of 200 / 16; the answer's are not a prompt's
            CHECK(first.ask(job_of(200)) == Tokens{192, 0});
            CHECK(first.ask(job_of(100)) == Tokens{96, 0});
            CHECK(first.bench.desk.figures->disk_found == 0);
        }
        Job longer = job_of(200); // another continuation
        for (int i = 0; i < 90; i++) longer.prompt.push_back(i);
        {
            Cached second(s, USUAL);
            CHECK(second.ask(job_of(200)) == Tokens{192, 192});
            CHECK(second.ask(job_of(200)) == Tokens{192, 0}); // now they are in memory
            CHECK(second.bench.desk.figures->disk_found == 192);
            CHECK(second.bench.desk.figures->disk_looked_up == 192);
            CHECK(second.disk.counts().read == 12 * KVCache<bf16>::bytes(tiny().file.config, 1, fp8));
            CHECK(second.disk.counts().written == 0);
            CHECK(second.ask(longer) == Tokens{192, 0});
            second.save(18);
        }
        Cached third(s, USUAL);
        Job told = job_of(200);
        told.alternatives = 3;
        CHECK(third.ask(told) == Tokens{192, 192});
        CHECK(third.ask(longer) == Tokens{288, 96}); // the rest from the disk, behind pages in memory
        CHECK(third.told.all().empty());
    }
}

TEST_CASE("an engine that takes the folder over saves what it has computed before") {
    Scratch s;
    auto first = std::make_unique<Cached>(s, USUAL);
    Cached second(s, USUAL);
    CHECK(second.ask(job_of(200)) == Tokens{0, 0});
    for (int i = 0; i < 20; i++) second.bench.engine.step();
    CHECK(second.disk.counts().pages == 0);
    first.reset();
    const double left = seconds();
    second.save(12);
    CHECK(seconds() - left < 5);
    CHECK(Cached(s, USUAL).ask(job_of(200)) == Tokens{192, 192});
}

TEST_CASE("pages of whole prompts: the last token is computed") {
    Scratch s;
    {
        Cached first(s, USUAL);
        first.ask(job_of(96));
        first.save(6);
    }
    Cached second(s, USUAL);
    CHECK(second.ask(job_of(96)) == Tokens{80, 80});
}

TEST_CASE("pages on disk are never another key's, another cache_salt's, another adapter's or another model's") {
    Scratch s;
    Job salted = job_of(100);
    salted.use_cache_salt("x");
    {
        Cached first(s, USUAL);
        first.ask(job_of(100));
        first.save(6);
        CHECK(first.ask(salted) == Tokens{0, 0});
        first.save(12);
        CHECK(first.ask(job_of(100, 2)) == Tokens{0, 0});
        first.save(18);
    }
    {
        Cached second(s, USUAL, {"two", "three"}); // the file of keys has changed
        CHECK(second.ask(job_of(100, 2)) == Tokens{0, 0});
        CHECK(second.ask(job_of(100, 1)) == Tokens{96, 96}); // two
        CHECK(second.ask(salted) == Tokens{0, 0});
    }
    {
        Cached third(s, USUAL);
        CHECK(third.ask(salted) == Tokens{96, 96});
        Job other = job_of(100);
        other.use_cache_salt("y");
        CHECK(third.ask(other) == Tokens{0, 0});
        CHECK(third.ask(job_of(100, 1, 2)) == Tokens{0, 0}); // another first token
    }
    CHECK(Cached(s, USUAL, {}).ask(job_of(100)) == Tokens{0, 0}); // no keys at all
    CHECK(Cached(s, USUAL, {"one", "two"}, "another").ask(job_of(100)) == Tokens{0, 0});
    // With an adapter: found again by its contents, whatever its number.
    const std::string folder = s / "adapter";
    std::string text;
    make_adapter(folder, KINDS[0], 8);
    for (size_t found : {0, 96}) {
        Cached engine(s, USUAL);
        const size_t before = engine.disk.counts().pages;
        Job adapted = job_of(100);
        adapted.adapter = engine.bench.engine.attach(AdapterFile(folder, tiny().file.config, true), "a");
        CHECK(engine.ask(adapted, false) == Tokens{found, found});
        engine.save(before + (found ? 0 : 6));
        if (found) CHECK(engine.text == text);
        text = engine.text;
    }
}

TEST_CASE("a damaged page ends the prefix there; the rest is computed, and saved again") {
    Scratch s;
    Digest third_page;
    {
        Cached first(s, USUAL);
        first.ask(job_of(200));
        first.save(12);
        Digest key = first.disk.root(1, {}, 0);
        for (size_t at = 0; at < 3; at++) third_page = key = DiskPages::after(key, &job_of(200).prompt[at * PAGE], PAGE);
    }
    const std::string path = s / (hex(third_page) + ".kv");
    std::string bytes = read_file(path);
    bytes[1000] ^= 1;
    write_file(path, bytes);
    {
        Cached second(s, USUAL);
        CHECK(second.ask(job_of(200)) == Tokens{32, 32});
        CHECK(second.disk.counts().damaged == 1);
        second.save(12);
    }
    CHECK(Cached(s, USUAL).ask(job_of(200)) == Tokens{192, 192});
}

TEST_CASE("a folder that vanishes costs a line, no answer") {
    Scratch s;
    fs::create_directory(s / "x");
    Scratch kept;
    {
        Cached first(kept, USUAL);
        first.ask(job_of(200));
        first.save(12);
    }
    Cached second(kept, USUAL);
    fs::remove_all(kept.path);
    CHECK(second.ask(job_of(200)) == Tokens{0, 0});
    for (int i = 0; i < 3; i++) second.ask(job_of(200, 1, i + 5));
    eventually([&] { return second.bench.engine.step(), second.told.all().size() == 2; });
    for (auto& line : second.told.all()) CHECK(line.find("No such file or directory") != std::string::npos);
}

TEST_CASE("pages only used once wait until nothing else is to do; those used twice do not") {
    Scratch s;
    Cached engine(s, USUAL);
    Job running = job_of(5, 2, 9);
    running.reply = std::make_shared<Reply>(), running.reply->left = 1, running.max_tokens = 450;
    REQUIRE(engine.bench.desk.submit({running}));
    engine.ask(job_of(200));
    for (int i = 0; i < 20; i++) engine.bench.engine.step();
    usleep(100'000);
    CHECK(engine.disk.counts().pages == 0);
    CHECK(engine.ask(job_of(100)) == Tokens{96, 0});
    for (int i = 0; i < 20; i++) engine.bench.engine.step();
    eventually([&] { return engine.disk.counts().pages == 6; });
    REQUIRE(running.reply->left == 1);
    while (running.reply->left) engine.bench.engine.step();
    engine.save(12);
    check_answer(running, expected(running, 512));
}

TEST_CASE("few pages of memory, many prompts: read again and again, and no answer depends on it") {
    Scratch s;
    Random random{29};
    for (auto [max_seqs, chunk, pages] : {std::tuple{4, 7, 20}, {2, 64, 17}, {8, 16, 60}}) {
        const std::string kind = format("at most %d, chunks of %d, %d pages", max_seqs, chunk, pages);
        INFO(kind);
        Cached cached(s, {256, max_seqs, chunk, 2 * chunk, (size_t)pages * Bench::page_bytes()}, {});
        std::vector<Job> jobs;
        for (int i = 0; i < 24; i++) {
            Job job = random_job(random, 256);
            const int start = random.below(4); // of four beginnings
            job.prompt.resize(std::min<size_t>(job.prompt.size(), 40));
            std::vector<int> prompt;
            for (int k = 0; k < 70; k++) prompt.push_back((k * (start + 2) + start) % 300);
            prompt.insert(prompt.end(), job.prompt.begin(), job.prompt.end());
            job.prompt = prompt, job.max_tokens = std::min<size_t>(job.max_tokens, 100);
            if (random.below(3) == 0) job.adapter = nullptr, job.prompt_alternatives = random.below(3);
            jobs.push_back(job);
        }
        size_t next = 0;
        for (const double end = seconds() + 120; seconds() < end;) {
            if (next < jobs.size() && random.below(3) == 0) REQUIRE(cached.bench.desk.submit({jobs[next++]}));
            if (random.below(400) == 0 && next) jobs[(size_t)random.below((int)next)].reply->cancelled = true;
            cached.bench.engine.step();
            if (next == jobs.size() && cached.bench.desk.inside == 0) break;
        }
        CHECK(cached.bench.desk.inside == 0);
        eventually([&] { return cached.bench.engine.step(), cached.bench.desk.figures->pages_used == 0; });
        for (auto& job : jobs)
            if (!job.reply->cancelled) check_answer(job, expected(job, 256));
        MESSAGE(kind << ": " << cached.bench.desk.figures->disk_found << " tokens from the disk, preempted "
                     << cached.bench.desk.figures->preempted);
        CHECK(cached.bench.desk.figures->disk_found >= 64);
        CHECK(cached.told.all().empty());
    }
}
