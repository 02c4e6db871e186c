// accesses.cpp: records accesses by place in the source, thread and round, and judges them by warp (accesses.h).
#include "tests/emulate/accesses.h"
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <set>
#include <unistd.h>
#include <unordered_map>

extern "C" char __data_start[], _end[]; // of the linker: static variables

namespace accesses {
namespace {
using Address = uintptr_t;
constexpr size_t THREADS = 2048;

struct Warp { uint32_t lanes = 0; Address at[32]; };
struct Site {
    std::vector<Address> frames; // return addresses, the innermost last
    bool shared, store, told; // told: by touch()
    int bytes;
    uint32_t seen[THREADS] = {};
    std::vector<std::map<uint32_t, Warp>> warps; // of this block: by warp, then by how often its lanes came here
    Count count;
};
struct Stack { // of calls, of a thread
    std::vector<Address> frames;
    std::vector<uint64_t> hashes{0};
};

const size_t* running; // null: nothing is counted
Address main_stack;
std::map<Address, size_t> arrays, others; // of global memory; static variables that are no shared memory
std::unordered_map<uint64_t, Site> sites;
Stack stacks[THREADS];

// Kernels run on stacks of their own; the main stack is the host's.
bool on_host() {
    const Address here = (Address)__builtin_frame_address(0);
    return !running || (here < main_stack + (8 << 20) && here + (8 << 20) > main_stack);
}
uint64_t mixed(uint64_t hash, Address with) { return (hash ^ with) * 0x9e3779b97f4a7c15 + (hash >> 29); }

bool in(const std::map<Address, size_t>& ranges, Address& at) { // `at` becomes the place in the range
    auto range = ranges.upper_bound(at);
    if (range == ranges.begin() || at >= (--range)->first + range->second) return false;
    return at -= range->first, true;
}
void access(const void* p, size_t bytes, bool store, void* from, bool told = false) {
    if (on_host()) return;
    Address at = (Address)p, place = at;
    const bool shared = at >= (Address)__data_start && at < (Address)_end;
    if (shared ? in(others, place) : !in(arrays, at)) return; // the emulator's, or a local variable
    if (!shared) at += ((Address)p - at) << 16;               // as on a GPU, arrays begin at a whole sector
    const size_t thread = *running;
    Stack& stack = stacks[thread];
    Site& site = sites[mixed(stack.hashes.back() + shared, (Address)from * 2 + store)];
    if (site.frames.empty()) {
        site.frames = stack.frames, site.frames.push_back((Address)from);
        site.shared = shared, site.store = store, site.told = told, site.bytes = (int)bytes;
    }
    site.warps.resize(THREADS / 32);
    Warp& warp = site.warps[thread / 32][site.seen[thread]++];
    warp.lanes |= 1u << thread % 32, warp.at[thread % 32] = at;
}
void judge(Site& site, const Warp& warp) {
    std::set<Address> distinct;
    long turns = 0, least = 0, most = 0;
    if (!site.shared) {
        std::set<Address> sectors;
        for (int lane = 0; lane < 32; lane++)
            if (warp.lanes >> lane & 1)
                for (Address b = warp.at[lane]; b < warp.at[lane] + site.bytes; b++)
                    sectors.insert(b / 32), distinct.insert(b);
        turns = most = (long)sectors.size(), least = ((long)distinct.size() + 31) / 32;
        site.count.bad += turns > least + 1 && 2 * turns > 3 * least;
    } else {
        const int together = site.bytes > 8 ? 8 : site.bytes > 4 ? 16 : 32; // lanes: 128 bytes a wavefront
        for (int first = 0; first < 32; first += together) {
            std::set<Address> words[32];
            for (int lane = first; lane < first + together; lane++)
                if (warp.lanes >> lane & 1)
                    for (Address w = warp.at[lane] / 4; w <= (warp.at[lane] + site.bytes - 1) / 4; w++)
                        words[w % 32].insert(w);
            long ways = 0;
            for (auto& bank : words) ways = std::max(ways, (long)bank.size());
            turns += ways, least += ways > 0, most = std::max(most, ways);
        }
        site.count.bad += turns > least;
    }
    (site.store ? site.count.stores : site.count.loads)++;
    site.count.turns += turns, site.count.least += least, site.count.most = std::max(site.count.most, (int)most);
}
void add(Count& to, const Count& c) {
    to.loads += c.loads, to.stores += c.stores, to.turns += c.turns, to.least += c.least, to.bad += c.bad;
    to.most = std::max(to.most, c.most);
}
// Function, and "FILE:LINE", of each address.
struct Place { std::string function, line; };
std::map<Address, Place> places_of(const std::set<Address>& all) {
    char self[4096];
    const ssize_t length = readlink("/proc/self/exe", self, sizeof self);
    std::string command = "addr2line -f -e '" + std::string(self, std::max<ssize_t>(length, 0)) + "'";
    for (Address a : all) { // (of the call, not of what follows it)
        char text[32];
        snprintf(text, sizeof text, " %zx", (size_t)a - 1);
        command += text;
    }
    std::map<Address, Place> places;
    FILE* out = all.empty() ? nullptr : popen((command + " 2>/dev/null").c_str(), "r");
    char line[4096];
    for (Address a : all)
        for (std::string Place::*part : {&Place::function, &Place::line})
            if (out && fgets(line, sizeof line, out)) places[a].*part = std::string(line, strcspn(line, " \n"));
    if (out) pclose(out);
    return places;
}
} // namespace

void begin(const size_t* thread) { running = thread, main_stack = (Address)__builtin_frame_address(0); }
void not_shared(const void* p, size_t bytes) { others[(Address)p] = bytes; }
void array(void* p, size_t bytes) {
    if (bytes) arrays[(Address)p] = bytes;
    else arrays.erase((Address)p);
}
void touch(const void* p, size_t bytes, bool store) { access(p, bytes, store, __builtin_return_address(0), true); }
void block_ends() {
    for (auto& [key, site] : sites) {
        for (auto& warp : site.warps)
            for (auto& [k, one] : warp) judge(site, one);
        site.warps.clear(), std::fill(site.seen, site.seen + THREADS, 0);
    }
}
Report end(const std::string& source) {
    block_ends();
    running = nullptr;
    std::set<Address> addresses;
    for (auto& [key, site] : sites) addresses.insert(site.frames.begin(), site.frames.end());
    auto places = places_of(addresses);
    Report all;
    all.complete = places.size() == addresses.size();
    std::map<std::pair<std::string, int>, Line> lines;
    for (auto& [key, site] : sites) {
        const Place& inner = places[site.frames.back()]; // accesses of the emulator are not the kernel's
        const auto is = [](const std::string& text, const char* part) { return text.find(part) != std::string::npos; };
        if (!site.told && is(inner.line, "tests/emulate/") && !is(inner.function, "atomic")) continue;
        const bool of_source = is(inner.function, "3max") || is(inner.function, "3min");
        if (site.shared && is(inner.line, "/include/c++/") && !of_source) continue; // (a list of launches, by kernels)
        add(site.shared ? all.shared : all.global, site.count);
        if (!site.count.bad) continue;
        std::string place = source;
        for (Address a : site.frames) { // the innermost that is of the source
            const size_t at = places[a].line.find(source + ":");
            if (at != std::string::npos) place = places[a].line.substr(at);
        }
        Line& line = lines[{place, site.shared * 2 + site.store}];
        line.place = place, line.shared = site.shared, line.store = site.store, add(line.count, site.count);
    }
    for (auto& [key, line] : lines) all.bad.push_back(line);
    std::stable_sort(all.bad.begin(), all.bad.end(), [](const Line& a, const Line& b) {
        return a.count.turns - a.count.least > b.count.turns - b.count.least;
    });
    sites.clear();
    return all;
}
} // namespace accesses

// ---- What code compiled with -fsanitize=thread calls
#define FROM __builtin_return_address(0)
#define SIZED(n)                                                                                                       \
    void __tsan_read##n(void* p) { accesses::access(p, n, false, FROM); }                                              \
    void __tsan_write##n(void* p) { accesses::access(p, n, true, FROM); }                                              \
    void __tsan_unaligned_read##n(void* p) { accesses::access(p, n, false, FROM); }                                    \
    void __tsan_unaligned_write##n(void* p) { accesses::access(p, n, true, FROM); }
extern "C" {
SIZED(1) SIZED(2) SIZED(4) SIZED(8) SIZED(16)
void __tsan_read_range(void* p, size_t bytes) { accesses::access(p, bytes, false, FROM); }
void __tsan_write_range(void* p, size_t bytes) { accesses::access(p, bytes, true, FROM); }
// (Of the standard library: guards of statics, shared_ptr.)
unsigned char __tsan_atomic8_load(const volatile unsigned char* p, int) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }
unsigned __tsan_atomic32_fetch_add(volatile unsigned* p, unsigned n, int) {
    return __atomic_fetch_add(p, n, __ATOMIC_SEQ_CST);
}
void __tsan_vptr_update(void**, void*) {}
void __tsan_init() {}
void __tsan_func_entry(void* from) {
    if (accesses::on_host()) return;
    auto& stack = accesses::stacks[*accesses::running];
    stack.frames.push_back((accesses::Address)from);
    stack.hashes.push_back(accesses::mixed(stack.hashes.back(), (accesses::Address)from));
}
void __tsan_func_exit() {
    if (accesses::on_host()) return;
    auto& stack = accesses::stacks[*accesses::running];
    if (!stack.frames.empty()) stack.frames.pop_back(), stack.hashes.pop_back();
}
}
