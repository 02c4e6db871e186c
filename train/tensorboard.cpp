// train/tensorboard.cpp: records with checksums, events in them.
#include "train/tensorboard.h"
#include "base/error.h"
#include "sj.h"
#include <chrono>

uint32_t crc32c(std::string_view bytes) {
    uint32_t crc = ~0u;
    for (const char byte : bytes) {
        crc ^= (uint8_t)byte;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78 : 0);
    }
    return ~crc;
}

template <class U> static std::string raw(U u) { return {(const char*)&u, sizeof u}; }

std::string event_record(std::string_view data) {
    auto masked = [](std::string_view bytes) { // so that the CRC of data with CRCs in it is as good as of others
        const uint32_t crc = crc32c(bytes);
        return raw((crc >> 15 | crc << 17) + 0xa282ead8);
    };
    const std::string length = raw((uint64_t)data.size());
    return length + masked(length) + std::string(data) + masked(data);
}

// Fields of a protocol buffer: the number times 8 plus the kind of the value.
enum Wire { VARINT = 0, EIGHT_BYTES = 1, LENGTH = 2, FOUR_BYTES = 5 };

static std::string varint(uint64_t n) {
    std::string s;
    for (; n >= 128; n >>= 7) s += (char)(n | 128);
    return s += (char)n;
}
static std::string key(int number, Wire wire) { return varint((uint64_t)number * 8 + wire); }
static std::string text(int number, const std::string& s) { return key(number, LENGTH) + varint(s.size()) + s; }
static std::string event(double time, int64_t step) {
    return key(1, EIGHT_BYTES) + raw(time) + key(2, VARINT) + varint((uint64_t)step);
}

std::string scalar_event(double time, int64_t step, const std::vector<std::pair<std::string, float>>& scalars) {
    std::string summary;
    for (auto& [tag, value] : scalars) summary += text(1, text(1, tag) + key(2, FOUR_BYTES) + raw(value));
    return event(time, step) + text(5, summary);
}

static double now() { // seconds since 1970
    using namespace std::chrono;
    return (double)duration_cast<microseconds>(system_clock::now().time_since_epoch()).count() / 1e6;
}

EventFile::EventFile(const std::string& folder, int64_t steps)
    : file(folder + "/" + NAME + format("%017.6f", now()), true) {
    write(event(now(), 0) + text(3, "brain.Event:2"));
    if (steps) write(event(now(), steps + 1) + text(7, key(1, VARINT) + varint(1)));
}

void EventFile::write(std::string_view event) { file.add(event_record(event)); }

void EventFile::add(const std::string& line) {
    sj::Doc doc;
    if (const std::string fault = sj::parse(doc, line); !fault.empty()) DIE("%s: %s", file.path.c_str(), fault.c_str());
    int64_t step = 0;
    doc.root()["current_steps"].integer(&step);
    std::vector<std::pair<std::string, float>> scalars;
    for (auto [name, value] : doc.root().members()) {
        if (!value.is(sj::Number) || name == "current_steps" || name == "total_steps" || name == "percentage") continue;
        const bool evaluation = name.compare(0, 5, "eval_") == 0;
        scalars.push_back({evaluation ? "eval/" + name.substr(5) : "train/" + name, (float)value.number()});
    }
    write(scalar_event(now(), step, scalars));
}
