// ranks.h: rows dealt, sums in order, what ends all ranks; and train_lora with --gpus N on the CPU, or started as launchers
// do it (TRAIN_LORA, else ./train_lora; DATAGEN too), on the random model in fixtures/tiny. With GPUs the same code goes
// by NCCL where it goes by sockets here: tests/gpu/test_gpu_backward.cpp.
#include "tests/http.h"
#include "tests/process.h"
#include "train/buckets.h"
#include "train/ranks.h"
#include "train/sockets.h"
#include <netinet/in.h>
#include <fstream>
#include <map>
#include <numeric>
#include <set>
#include <sys/inotify.h>
#include <sys/mman.h>

static const std::string TINY = "tests/fixtures/tiny/model.bin", VOCABULARY = "tests/fixtures/tiny/tokenizer.bin";
static std::string trainer() { return getenv("TRAIN_LORA") ? getenv("TRAIN_LORA") : "./train_lora"; }

// ------------------------------------------------------------------------------------------------ by themselves

TEST_CASE("ranks: rows are dealt so that every rank has as many trained tokens as it can, and no more rows than it must") {
    CHECK(deal({5, 1, 1, 1, 1, 1}, 2) == std::vector<std::vector<size_t>>{{0, 4, 5}, {1, 2, 3}}); // three rows each
    CHECK(deal({4, 3, 2, 1}, 2) == std::vector<std::vector<size_t>>{{0, 3}, {1, 2}});
    CHECK(deal({7, 9}, 3) == std::vector<std::vector<size_t>>{{1}, {0}, {}});
    CHECK(deal({3, 1, 2}, 1) == std::vector<std::vector<size_t>>{{0, 1, 2}});
    uint32_t state = 1;
    auto draw = [&](uint32_t n) { return state = state * 1664525 + 1013904223, (state >> 8) % n; };
    for (int trial = 0; trial < 300; trial++) {
        const int ranks = 1 + (int)draw(8);
        std::vector<size_t> tokens(1 + draw(100));
        for (size_t& t : tokens) t = 1 + draw(500);
        const auto hands = deal(tokens, ranks);
        REQUIRE(hands.size() == (size_t)ranks);
        std::set<size_t> seen;
        size_t least = SIZE_MAX, most = 0;
        for (auto& hand : hands) {
            size_t sum = 0;
            for (size_t place : hand) sum += tokens[place], seen.insert(place);
            CHECK(std::is_sorted(hand.begin(), hand.end()));
            CHECK(hand.size() <= (tokens.size() + ranks - 1) / ranks);
            least = std::min(least, sum), most = std::max(most, sum);
        }
        CHECK(seen.size() == tokens.size()); // each once: the sizes add up to it
        CHECK(std::accumulate(hands.begin(), hands.end(), (size_t)0, [](size_t n, auto& h) { return n + h.size(); }) == tokens.size());
        CHECK(most - least <= 500); // no further apart than one row is long
        if (tokens.size() > 64) CHECK(most <= 1.1 * std::accumulate(tokens.begin(), tokens.end(), 0.) / ranks);
    }
}

TEST_CASE("ranks: every number of a divided array has one owner") {
    for (size_t count : {1, 63, 64, 1000, 4096, 100003})
        for (int ranks : {1, 2, 3, 8}) {
            const Buckets b(count, ranks);
            CHECK(b.padded() >= count);
            CHECK(b.n <= Buckets::MOST + 1);
            CHECK(b.piece % Buckets::UNIT == 0);
            std::vector<int> owners(count);
            for (int r = 0; r < ranks; r++) {
                size_t end = 0;
                b.each_piece(r, [&](size_t first, size_t at, size_t n) {
                    CHECK(at >= end);
                    end = at + n;
                    for (size_t i = first; i < first + n; i++) owners[i]++;
                });
                CHECK(end <= b.n * b.piece);
            }
            CHECK(std::count(owners.begin(), owners.end(), 1) == (ptrdiff_t)count);
        }
}

static bool lives(pid_t pid) { // a zombie does not
    std::ifstream file(format("/proc/%d/stat", (int)pid));
    std::string id, name, state;
    return file >> id >> name >> state && state != "Z";
}

// Forks into n ranks; f(rank) returns whether all is well. Returns the status of rank 0, and its output; `until`: a
// text to wait for, if another rank prints it after rank 0 has ended.
static Result with_ranks(int n, const std::function<bool(Ranks&)>& f, double silence = 20, const std::string& until = "", double pulse = 1) {
    const MemoryFile err;
    err.append_only();
    fflush(nullptr);
    const pid_t pid = fork();
    REQUIRE(pid >= 0);
    if (pid == 0) {
        alarm(60);
        dup2(err.fd, 2);
        Ranks ranks("test");
        ranks.silence = silence, ranks.pulse = pulse;
        ranks.fork_here(n);
        double wrong = !f(ranks);
        ranks.sum(&wrong, 1);
        ranks.part();
        _exit(wrong > 0 ? 9 : 0);
    }
    int status;
    REQUIRE(waitpid(pid, &status, 0) == pid);
    for (int i = 0; i < 200 && (err.text().find(until) == std::string::npos || err.text().back() != '\n'); i++)
        if (until.empty()) break;
        else usleep(50000);
    return {WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status), "", err.text()};
}

TEST_CASE("ranks: sums over all ranks are taken in the order of the ranks, whole or in pieces; pieces are gathered") {
    CHECK(with_ranks(3, [](Ranks& ranks) {
        const size_t n = 3 * 70000; // more than is sent at once
        std::vector<float> x(n), own(n / 3), all(n);
        for (size_t i = 0; i < n; i++) x[i] = ranks.rank == 0 ? 1e8f : ranks.rank == 1 ? 1.f : -1e8f;
        x[5] = (float)(1 << ranks.rank);
        std::vector<float> whole = x;
        ranks.add_up(whole.data(), n);
        bool good = whole[5] == 7;
        for (size_t i = 0; i < n; i++) good &= i == 5 || whole[i] == 0; // (1e8 - 1e8) + 1 would be 1
        ranks.add_up_pieces(own.data(), x.data(), n / 3);
        for (size_t i = 0; i < n / 3; i++) good &= own[i] == whole[ranks.rank * n / 3 + i];
        for (float& v : own) v = (float)ranks.rank + 1;
        ranks.gather(all.data(), own.data(), own.size() * sizeof(float));
        for (size_t i = 0; i < n; i++) good &= all[i] == (float)(i / (n / 3) + 1);
        ranks.must_agree("a\tb\n");
        return good && ranks.size == 3 && ranks.local == ranks.rank && ranks.waited > 0;
    }).status == 0);
    CHECK(with_ranks(2, [](Ranks& ranks) { return ranks.rank == 0; }).status == 9); // (a rank's fault reaches us)
}

TEST_CASE("ranks: what one of them says at its end is said once, and ends all; so does one that says nothing") {
    for (int who : {0, 1, 2}) {
        INFO("rank " << who);
        Result r = with_ranks(3, [&](Ranks& ranks) {
            if (ranks.rank == who) ranks.end("no room");
            return ranks.wait_for_the_end(), true;
        });
        CHECK(r.status == 1);
        CHECK(r.err == (who ? format("test: rank %d: no room\n", who) : "test: no room\n"));
        r = with_ranks(3, [&](Ranks& ranks) {
            if (ranks.rank == who) _exit(7);
            double x = 1; // waits for it
            ranks.sum(&x, 1);
            return true;
        });
        CHECK(r.status == (who ? 1 : 7));
        if (who) CHECK(r.err.find(format("test: rank %d (process ", who)) == 0);
        if (who) CHECK(r.err.find("has gone\n") == r.err.size() - 9);
    }
    // A long report is whole, and has no heartbeat in it.
    const std::string much(500000, 'x');
    const Result whole = with_ranks(2, [&](Ranks& ranks) {
        if (ranks.rank == 1) usleep(100000), ranks.end(much);
        return ranks.wait_for_the_end(), true;
    }, 20, "", 1e-4);
    CHECK(whole.status == 1);
    CHECK(whole.err.size() == much.size() + strlen("test: rank 1: \n"));
    CHECK(whole.err == "test: rank 1: " + much + "\n");
    // To a rank 0 that does not hear it: once by the rank itself. (Or its watcher is first to see that rank 0 has gone.)
    for (int round = 0; round < 5; round++) {
        const Result r = with_ranks(2, [](Ranks& ranks) {
            if (ranks.rank == 1) kill(getppid(), SIGKILL), ranks.end("no room");
            return ranks.wait_for_the_end(), true;
        }, 20, "test: rank 1: ");
        CHECK(r.status == 1000 + SIGKILL);
        CHECK((r.err == "test: rank 1: no room\n" || r.err == "test: rank 1: rank 0 has gone\n"));
    }
    const Result r = with_ranks(3, [](Ranks& ranks) { return ranks.must_agree(ranks.rank == 2 ? "a\t1\nb\t2\n" : "a\t1\nb\t3\nc\t4\n"), true; });
    CHECK(r.status == 1);
    CHECK(r.err.find("test: rank 2 (process ") == 0);
    CHECK(r.err.find("): its b is 2, and rank 0's is 3\n") != std::string::npos);
}

TEST_CASE("ranks: one that is stopped ends all within its silence, whatever they do, and stays behind as no process") {
    pid_t* const stopped = (pid_t*)mmap(nullptr, sizeof(pid_t), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(stopped != MAP_FAILED);
    auto stop = [&](double after) { // this process, by a thread of its own
        *stopped = getpid();
        std::thread([after] { usleep((useconds_t)(after * 1e6)), raise(SIGSTOP); }).detach();
    };
    struct Case { const char* name; double silence; std::function<bool(Ranks&)> f; std::string message; };
    const std::vector<Case> cases = {
        {"in a sum", 1, [&](Ranks& ranks) {
            std::vector<float> x(1 << 20);
            if (ranks.rank == 1) stop(0.2);
            for (;;) ranks.sum(x.data(), x.size());
            return true;
        }, "has not been heard of for 1 s\n"},
        {"at the end, while rank 0 still saves", 1, [&](Ranks& ranks) {
            if (ranks.rank == 1) stop(0.2);
            if (ranks.rank == 0) usleep(400'000);
            return ranks.part(), true;
        }, "has not been heard of for 1 s\n"},
        {"and rank 0 has a fault", 20, [&](Ranks& ranks) {
            if (ranks.rank == 1) stop(0);
            usleep(100'000);
            if (ranks.rank == 0) ranks.end("no room");
            return ranks.wait_for_the_end(), true;
        }, "test: no room\n"},
    };
    for (const Case& c : cases) {
        INFO(c.name);
        const double begun = seconds();
        const Result r = with_ranks(3, c.f, c.silence, "", 0.1);
        INFO(r.err);
        CHECK(r.status == 1);
        CHECK(lines(r.err).size() == 1);
        CHECK(r.err.find(c.message) != std::string::npos);
        if (c.silence < 20) CHECK(r.err.find("test: rank 1 (process ") == 0);
        CHECK(seconds() - begun < c.silence + 10);
        for (int i = 0; i < 100 && lives(*stopped); i++) usleep(10'000);
        CHECK(!lives(*stopped));
        kill(*stopped, SIGKILL);
    }
    munmap(stopped, sizeof(pid_t));
}

// ------------------------------------------------------------------------------------------------ train_lora

struct Rows {
    Scratch folder;
    std::string all = folder / "all.bin", other = folder / "other.bin", pairs = folder / "pairs.bin", labelled = folder / "labelled.bin";
    Rows() {
        const std::string text = read_file("tests/fixtures/train/rows.jsonl");
        write_file(folder / "other.jsonl", text.substr(text.find('\n') + 1));
        std::string two, one;
        for (auto& line : lines(text)) {
            const Json j(line);
            sj::Writer w;
            w.object().field("instruction", j["instruction"].str()).field("chosen", j["output"].str()).field("rejected", "no").end();
            two += w.text + "\n";
            for (bool desirable : {true, false}) {
                sj::Writer single;
                single.object().field("instruction", j["instruction"].str()).field("output", desirable ? j["output"].str() : "no").field("kto_tag", desirable).end();
                one += single.text + "\n";
            }
        }
        write_file(folder / "labelled.jsonl", one);
        write_file(folder / "pairs.jsonl", two);
        const char* datagen = getenv("DATAGEN") ? getenv("DATAGEN") : "./datagen";
        for (auto& [from, to] : {std::pair<std::string, std::string>{"tests/fixtures/train/rows.jsonl", all}, {folder / "other.jsonl", other}, {folder / "pairs.jsonl", pairs}, {folder / "labelled.jsonl", labelled}}) {
            const Result r = Process(datagen, {"pack", "-z", VOCABULARY, from, to, "--info", "none"}).wait();
            INFO(r.err);
            REQUIRE(r.status == 0);
        }
    }
};
static const Rows& rows() {
    static Rows once;
    return once;
}

using Environment = std::map<std::string, std::string>;
// file_limit: bytes of the largest file.
static std::unique_ptr<Process> start(const Strings& arguments, const Environment& environment = {}, rlim_t file_limit = RLIM_INFINITY) {
    return std::make_unique<Process>(trainer().c_str(), arguments + Strings{"-z", VOCABULARY, "-j", "1", "-d", "cpu"}, "", [&] {
        const rlimit largest = {file_limit, file_limit};
        setrlimit(RLIMIT_FSIZE, &largest);
        setenv("OMP_WAIT_POLICY", "passive", 1);
        for (auto& [name, value] : environment) setenv(name.c_str(), value.c_str(), 1);
    });
}
static Result train(const Strings& arguments) {
    const Result r = start(arguments)->wait();
    INFO(r.err);
    REQUIRE(r.status == 0);
    return r;
}
static void near(const std::vector<double>& a, const std::vector<double>& b, double most) {
    REQUIRE(a.size() == b.size());
    for (size_t i = 0; i < a.size(); i++) CHECK(a[i] == doctest::Approx(b[i]).epsilon(most));
}
static std::string numbers(const std::string& out) { // the state's tensors: what stands behind its header
    const std::string all = read_file(out + "/state.safetensors");
    uint64_t header;
    memcpy(&header, all.data(), sizeof header);
    return all.substr(8 + header);
}
static const char* KINDS[] = {"--rank", "--full", "--dpo", "--kto"};
static Strings of_kind(const std::string& kind) {
    const Strings how = {TINY, kind == "--dpo" ? rows().pairs : kind == "--kto" ? rows().labelled : rows().all, "--steps", "6", "--dtype", "f32", "--warmup", "0"};
    if (kind == "--full") return how + Strings{"--full", "--lr", "1e-3"};
    return how + Strings{"--rank", "4", "--lr", "1e-2"} + (kind == "--rank" ? Strings{} : Strings{kind});
}

TEST_CASE("ranks: N of them have the curve of one with the same rows a step, whatever is trained; the same N the same bits") {
    for (const std::string kind : KINDS) {
        INFO(kind);
        Scratch out;
        const Strings eval = {"--eval", of_kind(kind)[1], "--allow-leak", "--eval-every", "6"};
        train(of_kind(kind) + eval + Strings{"--batch", "6", "-o", out / "one"});
        const Result r = train(of_kind(kind) + eval + Strings{"--batch", "3", "--gpus", "2", "-o", out / "two"});
        train(of_kind(kind) + eval + Strings{"--batch", "1", "--accum", "2", "--gpus", "3", "-o", out / "three"});
        for (const char* name : {"two", "three"}) {
            INFO(name);
            for (const char* field : {"loss", "eval_loss", "grad_norm"}) near(logged(out / name, field), logged(out / "one", field), 2e-5);
            for (const char* field : {"lr", "total_tokens", "epoch"}) CHECK(logged(out / name, field) == logged(out / "one", field));
            if (kind == "--kto") near(logged(out / name, "kl"), logged(out / "one", "kl"), 2e-3);
            if (kind == "--dpo") near(logged(out / name, "rewards/margins"), logged(out / "one", "rewards/margins"), 2e-3);
            CHECK(logged(out / name, "waited").size() == 6);
        }
        CHECK(logged(out / "one", "loss")[5] < logged(out / "one", "loss")[0] - 0.1); // it learns
        CHECK(logged(out / "one", "waited").empty());
        if (kind == "--dpo" || kind == "--kto") continue;
        // Once more, and not overlapped: the same sums.
        train(of_kind(kind) + eval + Strings{"--batch", "3", "--gpus", "2", "--no-overlap", "-o", out / "again"});
        CHECK(numbers(out / "two") == numbers(out / "again"));
        const char* result = kind == "--full" ? "/model.bin" : "/adapter_model.safetensors";
        CHECK(read_file(out / "two" + result) == read_file(out / "again" + result));
        CHECK(read_file(out / "two/best" + result) == read_file(out / "again/best" + result));
        CHECK(read_file(out / "two" + result).size() == read_file(out / "one" + result).size());
        // Each line once.
        CHECK(r.err.find("2 x ") != std::string::npos);
        size_t told = 0;
        for (auto& line : lines(r.err)) told += line.find("memory: ") == 0;
        CHECK(told == 1);
        CHECK(r.err.find("  waited ") != std::string::npos);
    }
}

TEST_CASE("ranks: fewer rows than ranks") {
    Scratch out;
    train(of_kind("--rank") + Strings{"--batch", "39", "-o", out / "one"}); // 39 rows, then 1
    train(of_kind("--rank") + Strings{"--batch", "13", "--gpus", "3", "-o", out / "three"});
    near(logged(out / "three", "loss"), logged(out / "one", "loss"), 2e-5);
}

// Waits until a run has done some steps; it must not end before.
static void wait_for_steps(const Process& p, const std::string& out, size_t n) {
    for (int ms = 0; logged(out, "loss", true).size() < n; ms++) {
        siginfo_t ended = {};
        REQUIRE(waitid(P_PID, (id_t)p.pid, &ended, WEXITED | WNOHANG | WNOWAIT) == 0);
        INFO(p.err.text());
        REQUIRE(ended.si_pid == 0);
        REQUIRE(ms < 60000);
        usleep(1000);
    }
}
static std::vector<pid_t> children(pid_t pid) {
    std::vector<pid_t> all;
    std::ifstream file(format("/proc/%d/task/%d/children", (int)pid, (int)pid));
    for (pid_t child; file >> child;) all.push_back(child);
    return all;
}
TEST_CASE("ranks: a signal to any of them saves once and leaves; --resume goes on to the bit, and on another number from the same weights") {
    Scratch out;
    for (const std::string kind : {"--rank", "--full"}) {
        INFO(kind);
        const Strings how = of_kind(kind) + Strings{"--steps", "20", "--batch", "6", "--eval", rows().all, "--allow-leak", "--eval-every", "12"};
        train(how + Strings{"--gpus", "2", "-o", out / ("whole" + kind)});
        const std::string parts = out / ("parts" + kind);
        Strings arguments = how + Strings{"--gpus", "2", "-o", parts};
        for (int rank : {1, 0}) {
            const auto p = start(arguments);
            wait_for_steps(*p, parts, rank ? 4 : 10);
            REQUIRE(children(p->pid).size() == 1);
            kill(rank ? children(p->pid)[0] : p->pid, SIGINT);
            const Result r = p->wait();
            INFO(r.err);
            CHECK(r.status == 130);
            CHECK(r.err.find("--resume goes on\n") == r.err.size() - 17);
            CHECK(logged(parts, "loss").size() < 20);
            arguments = how + Strings{"--gpus", "2", "-o", parts, "--resume"};
        }
        fs::copy(parts, out / ("other" + kind), fs::copy_options::recursive);
        train(arguments);
        CHECK(numbers(parts) == numbers(out / ("whole" + kind)));
        for (const char* field : {"loss", "grad_norm", "eval_loss", "current_steps"}) CHECK(logged(parts, field) == logged(out / ("whole" + kind), field));
        // One rank with as many rows a step: the same curve but for rounding.
        const Result r = train(how + Strings{"--accum", "2", "-o", out / ("other" + kind), "--resume"});
        INFO(r.err);
        CHECK(r.err.find("state.safetensors: begun on 2 ranks, goes on with 1 from the same weights at step ") != std::string::npos);
        near(logged(out / ("other" + kind), "loss"), logged(out / ("whole" + kind), "loss"), 1e-4);
    }
    // With fewer rows a step the same share of the steps has been done.
    const Strings epochs = {TINY, rows().all, "--epochs", "2", "--rank", "4", "--batch", "10", "-o", out / "epochs"};
    train(epochs + Strings{"--gpus", "2"}); // 4 steps
    const Result r = train(epochs + Strings{"--resume"});
    CHECK(r.err.find("begun on 2 ranks, goes on with 1 from the same weights at step 8 of 8, not to the bit\n") != std::string::npos);
    check_refusal(start(epochs + Strings{"--resume", "--seed", "7"})->wait(), "train_lora", "begun with seed 42, not 7");
}

TEST_CASE("ranks: one that dies ends all, at once and with a line that names it; files stay whole") {
    for (int rank : {1, 0}) {
        INFO("rank " << rank);
        Scratch out;
        const auto p = start(of_kind("--rank") + Strings{"--steps", "100000", "--gpus", "3", "--save-every", "1", "-o", out / "a"});
        wait_for_steps(*p, out / "a", 3);
        const std::vector<pid_t> others = children(p->pid);
        REQUIRE(others.size() == 2);
        const double start = seconds();
        kill(rank ? others[0] : p->pid, SIGKILL);
        const Result r = p->wait();
        INFO(r.err);
        CHECK(r.status == (rank ? 1 : 1000 + SIGKILL));
        for (pid_t other : others)
            while (lives(other) && seconds() - start < 20) usleep(10000);
        CHECK(seconds() - start < 10);
        if (rank) CHECK(lines(r.err).back().find("train_lora: rank 1 (process " + std::to_string(others[0])) == 0);
        if (rank) CHECK(lines(r.err).back().find("has gone") != std::string::npos);
        if (rank) for (auto& entry : fs::directory_iterator(out / "a")) CHECK(entry.path().string().find(".tmp") == std::string::npos);
        if (!rank) CHECK(p->err.text().find("train_lora: rank 2: rank 0 has gone\n") != std::string::npos);
        if (rank) numbers(out / "a");
    }
    // A fault of rank 0 is reported once: the folder is none.
    check_refusal(start(of_kind("--rank") + Strings{"--gpus", "2", "-o", rows().all})->wait(), "train_lora", "all.bin");
}

// The line with which a run of several ranks failed; the only one.
static std::string fault_of(const std::string& err) {
    Strings faults;
    for (auto& line : lines(err))
        if (line.find("train_lora: ") == 0) faults.push_back(line);
    INFO(err);
    CHECK(faults.size() == 1);
    return faults.empty() ? "" : faults[0];
}
static void check_same_run(const std::string& a, const std::string& b) {
    CHECK(numbers(a) == numbers(b));
    CHECK(read_file(a + "/adapter_model.safetensors") == read_file(b + "/adapter_model.safetensors"));
    for (const char* field : {"loss", "grad_norm", "current_steps"}) CHECK(logged(a, field) == logged(b, field));
}

TEST_CASE("ranks: one that is killed while a file is written leaves a run that --resume ends to the bit") {
    Scratch out;
    const Strings how = of_kind("--rank") + Strings{"--steps", "40", "--batch", "1", "--gpus", "2", "--save-every", "1"};
    train(how + Strings{"-o", out / "whole"});
    const std::string parts = out / "parts";
    fs::create_directory(parts);
    struct Stage { uint32_t event; const char* name; };
    Strings arguments = how + Strings{"-o", parts};
    for (const Stage& stage : {Stage{IN_MODIFY, "trainer_log.jsonl"}, {IN_CREATE, "adapter_model.safetensors.tmp"}, {IN_CREATE, "state.safetensors.tmp"}})
        for (int rank : {0, 1}) {
            INFO("rank " << rank << " at " << stage.name);
            const int watch = inotify_init1(IN_CLOEXEC);
            REQUIRE(inotify_add_watch(watch, parts.c_str(), stage.event) >= 0);
            const auto p = start(arguments);
            for (int seen = 0; seen < 2;) { // the second time a state is there
                alignas(inotify_event) char bytes[4096];
                const ssize_t n = read(watch, bytes, sizeof bytes);
                REQUIRE(n > 0);
                for (ssize_t at = 0; at < n;) {
                    const auto& e = *(const inotify_event*)(bytes + at);
                    seen += std::string(e.name).find(stage.name) == 0;
                    at += (ssize_t)(sizeof e + e.len);
                }
            }
            const std::vector<pid_t> others = children(p->pid);
            REQUIRE(others.size() == 1);
            kill(rank ? others[0] : p->pid, SIGKILL);
            const Result r = p->wait();
            for (int i = 0; i < 1000 && lives(others[0]); i++) usleep(10'000);
            close(watch);
            CHECK(r.status == (rank ? 1 : 1000 + SIGKILL));
            const std::string fault = fault_of(p->err.text());
            if (rank) CHECK(fault.find(format("train_lora: rank 1 (process %d on ", (int)others[0])) == 0);
            if (rank) CHECK(fault.find(") has gone") != std::string::npos);
            else CHECK(fault == "train_lora: rank 1: rank 0 has gone");
            arguments = how + Strings{"-o", parts, "--resume"};
        }
    CHECK(logged(parts, "loss", true).size() < 40);
    train(arguments);
    check_same_run(parts, out / "whole");
    for (auto& entry : fs::directory_iterator(parts)) CHECK(entry.path().string().find(".tmp") == std::string::npos);
}

TEST_CASE("ranks: a disk that is full at rank 0 ends all with one line; the log keeps whole lines, and --resume goes on to the bit") {
    Scratch out;
    const Strings how = of_kind("--rank") + Strings{"--steps", "40", "--batch", "1", "--gpus", "2"};
    train(how + Strings{"-o", out / "whole"});
    const std::string parts = out / "parts", log = parts + "/trainer_log.jsonl";
    const auto p = start(how + Strings{"-o", parts});
    wait_for_steps(*p, parts, 8);
    kill(p->pid, SIGINT);
    REQUIRE(p->wait().status == 130);
    const std::string before = read_file(log);
    const Result full = start(how + Strings{"-o", parts, "--resume"}, {}, before.size() + 20)->wait();
    CHECK(full.status == 1);
    CHECK(fault_of(full.err) == "train_lora: " + log + ": File too large");
    CHECK(read_file(log) == before); // no part of the next line
    const Result no_state = start(how + Strings{"-o", parts, "--resume", "--save-every", "1"}, {}, before.size() + 2000)->wait();
    CHECK(no_state.status == 1);
    CHECK(fault_of(no_state.err).find(": File too large") != std::string::npos);
    train(how + Strings{"-o", parts, "--resume"});
    check_same_run(parts, out / "whole");
}

TEST_CASE("ranks: started as launchers do it; a rank with another file or option is refused, and one that is no rank") {
    Scratch out;
    struct Names { const char *rank, *size, *local; };
    const Strings how = of_kind("--rank") + Strings{"--batch", "6"};
    train(how + Strings{"--gpus", "2", "-o", out / "forked"});
    auto launch = [&](const Names& names, const Strings& first, const Strings& second, const Environment& more = {}) {
        Environment e = more;
        e["MASTER_ADDR"] = "localhost", e["MASTER_PORT"] = std::to_string(free_port()), e[names.size] = "2";
        std::vector<std::unique_ptr<Process>> both;
        for (int rank : {1, 0}) { // (their order does not matter)
            e[names.rank] = e[names.local] = std::to_string(rank);
            both.push_back(start(rank ? second : first, e));
        }
        const Result one = both[0]->wait(), zero = both[1]->wait();
        return std::pair(zero, one);
    };
    const Names torchrun = {"RANK", "WORLD_SIZE", "LOCAL_RANK"};
    int at = 0;
    for (const Names& names : {torchrun, {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"}, {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"}}) {
        const std::string folder = out / std::to_string(at++);
        const auto both = launch(names, how + Strings{"-o", folder}, how + Strings{"-o", folder});
        const Result &zero = both.first, &one = both.second;
        INFO(zero.err << one.err);
        CHECK(zero.status == 0);
        CHECK(one.status == 0);
        CHECK(one.err == ""); // rank 0 tells
        CHECK(numbers(folder) == numbers(out / "forked"));
    }
    auto refused = [&](const Strings& second, const std::string& word, const Environment& more = {}) {
        const auto both = launch(torchrun, how + Strings{"-o", out / "never"}, second, more);
        const Result &zero = both.first, &one = both.second;
        INFO(one.err);
        check_refusal(zero, "train_lora", word);
        CHECK(one.status == 1);
        CHECK(one.err == "");
        CHECK(!fs::exists(out / "never"));
    };
    Strings other = how + Strings{"-o", out / "never"};
    refused(other + Strings{"--lr", "1e-4"}, "): its lr is 0.0001, and rank 0's is 0.01");
    other[1] = rows().other;
    refused(other, "): its dataset is ");
    other = how + Strings{"-o", out / "never"}, other[0] = out / "model.bin";
    std::string model = read_file(TINY);
    model[model.size() - 2] ^= 1; // a bit of the last number
    write_file(other[0], model);
    refused(other, "): its model is ");
    // Several and yet alone.
    Environment e = {{"MASTER_ADDR", "localhost"}, {"RANK", "2"}, {"WORLD_SIZE", "2"}};
    check_refusal(start(how + Strings{"-o", out / "a"}, e)->wait(), "train_lora", "RANK=2 is not a whole number from 0 to 1");
    e["RANK"] = "1";
    check_refusal(start(how + Strings{"-o", out / "a", "--gpus", "2"}, e)->wait(), "train_lora", "--gpus 2: a launcher has started this process");
    e["WORLD_SIZE"] = "1", e["RANK"] = "0";
    CHECK(start(how + Strings{"-o", out / "alone"}, e)->wait().status == 0);
    check_refusal(start({TINY, "--adapter-init", "tests/fixtures/train/adapter", "--merge", out / "m", "--gpus", "2"})->wait(), "train_lora", "--gpus is for training");
}

TEST_CASE("ranks: who never comes, and who is no rank of ours") {
    Scratch out;
    auto alone = [&](int rank, const std::string& port) {
        setenv("MASTER_ADDR", "127.0.0.1", 1), setenv("MASTER_PORT", port.c_str(), 1);
        setenv("WORLD_SIZE", "2", 1), setenv("RANK", rank ? "1" : "0", 1);
        std::string fault;
        try {
            Ranks ranks("test");
            ranks.join_launcher(0.3);
        } catch (const Error& e) {
            fault = e.what();
        }
        for (const char* name : {"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"}) unsetenv(name);
        return fault;
    };
    const std::string port = std::to_string(free_port());
    CHECK(alone(0, port) == "rank 1 of 2 has not come");
    CHECK(alone(1, port).find("rank 1: no rank 0 at 127.0.0.1:" + port) == 0);
    // The listener there sends nothing, or something else.
    const int listener = sockets::open_socket("127.0.0.1", std::stoi(port), true);
    REQUIRE(listener >= 0);
    CHECK(alone(0, port).find("Address already in use") != std::string::npos);
    CHECK(alone(1, port) == "rank 1: what answers at 127.0.0.1:" + port + " is no rank 0");
    close(listener);
    // A connection that is no rank is closed.
    const std::string open = std::to_string(free_port());
    std::thread stranger([&] {
        for (int i = 0; i < 20; i++) {
            const int fd = sockets::open_socket("127.0.0.1", std::stoi(open), false);
            if (fd < 0) { usleep(10000); continue; }
            const std::string text(200, 'x');
            CHECK(send(fd, text.data(), text.size(), MSG_NOSIGNAL) > 0);
            char byte;
            CHECK(recv(fd, &byte, 1, 0) <= 0);
            close(fd);
            break;
        }
    });
    CHECK(alone(0, open) == "rank 1 of 2 has not come");
    stranger.join();
}
