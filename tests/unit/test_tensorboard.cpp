// train_lora --tensorboard: event files, whose records, checksums and numbers are read back here; one record is beside
// TensorBoard's own. (tests/reference/check_tensorboard.py reads a run with TensorBoard itself.)
#include <doctest/doctest.h>
#include "tests/trainer.h"
#include "train/tensorboard.h"

static const std::string TINY = "tests/fixtures/tiny/model.bin", VOCABULARY = "tests/fixtures/tiny/tokenizer.bin";

TEST_CASE("event files: CRC-32C of the check string, and a record as TensorBoard's RecordWriter writes it") {
    CHECK(crc32c("123456789") == 0xe3069283);
    CHECK(crc32c("") == 0);
    // Event(wall_time=1700000000.25, step=300, summary=Summary(value=[..])), by tensorboard 2.21's RecordWriter
    const std::string theirs = "33000000000000000ca720560900001040fc54d94110ac022a250a110a0a747261696e2f6c6f737315000020400a100a0965"
                               "76616c2f6c6f737315000000bef0d05828";
    std::string ours;
    for (const char c : event_record(scalar_event(1700000000.25, 300, {{"train/loss", 2.5f}, {"eval/loss", -0.125f}}))) ours += format("%02x", (uint8_t)c);
    CHECK(ours == theirs);
}

// An event as a reader of the format finds it.
struct ReadEvent {
    double time = 0;
    uint64_t step = 0, status = 0; // of a session
    std::string version;
    std::map<std::string, float> scalars;
};
struct Fields { // of a protocol buffer
    std::string_view rest;
    uint64_t varint() {
        for (uint64_t n = 0, shift = 0;; shift += 7) {
            REQUIRE(!rest.empty());
            const uint64_t byte = (uint8_t)rest[0];
            rest.remove_prefix(1), n |= (byte & 127) << shift;
            if (byte < 128) return n;
        }
    }
    std::string_view bytes(uint64_t n) {
        REQUIRE(n <= rest.size());
        const std::string_view found = rest.substr(0, n);
        return rest.remove_prefix(n), found;
    }
    // Calls f(number, value) for each field; a varint as its 8 bytes.
    template <class F> void each(F f) {
        while (!rest.empty()) {
            const uint64_t key = varint(), kind = key & 7;
            uint64_t n = kind == 1 ? 8 : 4;
            if (kind == 2) n = varint();
            if (kind == 0) n = varint(), f(key >> 3, std::string_view((const char*)&n, 8));
            else f(key >> 3, bytes(n));
        }
    }
};
static std::vector<ReadEvent> read_events(const std::string& path) {
    const std::string all = read_file(path);
    const auto masked = [](std::string_view s) { return (crc32c(s) >> 15 | crc32c(s) << 17) + 0xa282ead8; };
    std::vector<ReadEvent> events;
    for (size_t at = 0; at < all.size();) {
        REQUIRE(all.size() - at >= 16);
        const uint64_t n = load_as<uint64_t>(&all[at]);
        REQUIRE(n <= all.size() - at - 16);
        const std::string_view data(&all[at + 12], n);
        CHECK(load_as<uint32_t>(&all[at + 8]) == masked({&all[at], 8}));
        CHECK(load_as<uint32_t>(data.data() + n) == masked(data));
        at += 16 + n;
        ReadEvent e;
        Fields{data}.each([&](uint64_t number, std::string_view value) {
            if (number == 1) e.time = load_as<double>(value.data());
            if (number == 2) e.step = load_as<uint64_t>(value.data());
            if (number == 3) e.version = value;
            if (number == 7) Fields{value}.each([&](uint64_t, std::string_view v) { e.status = load_as<uint64_t>(v.data()); });
            if (number == 5)
                Fields{value}.each([&](uint64_t, std::string_view one) {
                    std::string tag;
                    Fields{one}.each([&](uint64_t field, std::string_view v) {
                        if (field == 1) tag = v;
                        if (field == 2) e.scalars[tag] = load_as<float>(v.data());
                    });
                });
        });
        events.push_back(e);
    }
    return events;
}

static Strings event_files(const std::string& folder) { // in the order of their names, which is that of time
    Strings found;
    for (auto& entry : fs::directory_iterator(folder))
        if (entry.path().filename().string().find(EventFile::NAME) == 0) found.push_back(entry.path().string());
    return std::sort(found.begin(), found.end()), found;
}

TEST_CASE("train_lora --tensorboard: the numbers of trainer_log.jsonl; --resume adds a file, --overwrite begins anew") {
    Scratch out;
    const std::string rows = out / "rows.bin", run = out / "run";
    const auto start = [&](const Strings& more) {
        return Process(program("TRAIN_LORA", "./train_lora"), Strings{TINY, rows, "-o", run, "--batch", "4", "--rank", "2", "--eval", rows, "--allow-leak", "--steps", "60",
                                                                      "--eval-every", "30", "--schedule", "constant", "-z", VOCABULARY, "-j", "1"} + more);
    };
    const auto ends = [](Process&& p, int status) {
        const Result r = p.wait();
        INFO(r.err);
        REQUIRE(r.status == status);
    };
    // The event file must have a scalar for each number of each line.
    const auto check_file = [&](const std::string& path, const Strings& log) {
        const std::vector<ReadEvent> events = read_events(path);
        REQUIRE(!events.empty());
        CHECK(events[0].version == "brain.Event:2");
        CHECK(events[0].time > 1.7e9);
        size_t at = 1;
        if (at < events.size() && events[at].status) at++;
        REQUIRE(events.size() == at + log.size());
        for (auto& line : log) {
            const Json j(line);
            const ReadEvent& e = events[at++];
            CHECK((double)e.step == j["current_steps"].number());
            if (j["eval_loss"]) {
                CHECK(e.scalars.size() == 2);
                CHECK(e.scalars.at("eval/loss") == (float)j["eval_loss"].number());
                CHECK(e.scalars.at("train/epoch") == (float)j["epoch"].number());
                continue;
            }
            CHECK(e.scalars.size() == 6);
            for (const char* name : {"loss", "lr", "grad_norm", "throughput", "total_tokens", "epoch"})
                CHECK(e.scalars.at(std::string("train/") + name) == (float)j[name].number());
        }
    };
    const auto log = [&] { return lines(read_file(run + "/trainer_log.jsonl")); };
    ends(Process(program("DATAGEN", "./datagen"), {"pack", "-z", VOCABULARY, "tests/fixtures/train/rows.jsonl", rows, "--info", "none"}), 0);
    // Stopped by Ctrl-C after some steps, then resumed.
    Process p = start({"--tensorboard"});
    while (read_file_if(run + "/trainer_log.jsonl").find("\"current_steps\": 2,") == std::string::npos) usleep(1000);
    kill(p.pid, SIGINT);
    ends(std::move(p), 130);
    Strings files = event_files(run);
    REQUIRE(files.size() == 1);
    const Strings before = log();
    check_file(files[0], before);
    ends(start({"--tensorboard", "--resume"}), 0);
    files = event_files(run);
    REQUIRE(files.size() == 2);
    check_file(files[0], before);
    const Strings after = log();
    REQUIRE(after.size() == 62);
    check_file(files[1], Strings(after.begin() + (std::ptrdiff_t)before.size(), after.end()));
    const ReadEvent begin = read_events(files[1])[1]; // hides later steps of the first file
    CHECK(begin.status == 1);
    CHECK((double)begin.step == Json(before.back())["current_steps"].number() + 1);
    // Without the option: no file; those of the run that is replaced are removed.
    ends(start({"--overwrite"}), 0);
    CHECK(event_files(run).empty());
}
