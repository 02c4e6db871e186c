// disk_prefix.cpp: prompts' pages from the disk and to it.
#include "server/engine/disk_prefix.h"
#include "server/engine/scheduler.h"
#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

namespace server {

void Scheduler::open_disk() {
    if (!options.disk) return;
    const size_t bytes = page_bytes(), n = std::max<size_t>(4, DiskPrefix::BUFFER_BYTES / bytes);
    auto buffers = [&] {
        Bytes memory;
        if constexpr (WITH_GPU) if (ctx.gpu) memory = gpu_host_memory<uint8_t>(n * bytes);
        if (!memory) memory.reset(new uint8_t[n * bytes]);
        return PageBuffers(memory, bytes, n);
    };
    disk.reset(new DiskPrefix{*options.disk, bytes, buffers(), buffers(), {}});
}

void Scheduler::find_keys(Sequence& q) const {
    if (!q.keys.empty()) return;
    Digest key = disk->files.root(q.job.salt, q.job.cache_salt, q.job.adapter ? q.job.adapter->hash : 0);
    for (size_t at = 0; at + PAGE <= q.prompt; at += PAGE)
        q.keys.push_back(key = DiskPages::after(key, &q.ids[at], PAGE));
}

// ---- From the disk

bool Scheduler::awaits_disk(Sequence& q) {
    if (!disk || q.looked == Sequence::DONE || q.telling() || seconds() < disk->no_reads_before) return false;
    if (disk->reading && disk->reading->arrival == q.arrival) return true;
    find_keys(q);
    const std::vector<int> found = cached_pages(q);
    const size_t most = std::min(q.keys.size(), (q.ids.size() - 1) / PAGE);
    if (q.looked == Sequence::NOT && most > found.size()) figures.disk_looked_up += (most - found.size()) * PAGE;
    q.looked = Sequence::COUNTED;
    size_t n = found.size();
    while (n < most && disk->files.has(q.keys[n])) n++;
    if (n <= found.size() || (!disk->reading && disk->read_for == q.arrival) || !disk->pace.pays()) {
        if (disk->read_for == q.arrival) q.read = disk->read_pages * PAGE;
        q.looked = Sequence::DONE;
        return false;
    }
    if (disk->reading) return true;
    for (int p : found) pool.use(p);
    if (pool.available() < q.pages_needed() - found.size() + running.size()) { // admit() waits for pages, too
        for (size_t i = found.size(); i-- > 0;) pool.release(found[i]);
        return false;
    }
    const uint64_t chain = found.empty() ? q.space() : pool.pages[(size_t)found.back()].name;
    disk->reading.reset(new DiskPrefix::Reading{q.ids, q.arrival, q.adapter(), chain,
                                                {q.keys.begin(), q.keys.begin() + (ptrdiff_t)n}, found, found.size(),
                                                found.size(), found.size(), seconds(), seconds()});
    while (disk->reading->pages.size() < n) disk->reading->pages.push_back(pool.take());
    read_pages();
    return true;
}

void Scheduler::read_pages() {
    if (!disk || !disk->reading) return;
    constexpr size_t AT_ONCE = 8; // on a CPU the copies take time from the next step
    DiskPrefix::Reading& r = *disk->reading;
    const size_t end = r.keys.size(), before = r.there;
    Bytes buffer;
    for (; r.asked < end && (buffer = disk->in.take()); r.asked++)
        disk->files.read(r.keys[r.asked], std::move(buffer), disk->bytes, r.asked, r.inbox);
    bool lost = false;
    while (!lost && r.there < end && (ctx.gpu || r.there < before + AT_ONCE) && r.inbox->take(r.there, buffer)) {
        if ((lost = !buffer)) break;
        const int page = r.pages[r.there];
        uint8_t* const from = buffer.get();
        copy_page(page, from, false, [buffer = std::move(buffer)] {});
        r.chain = pool.name(page, r.chain, &r.ids[r.there++ * PAGE], r.adapter);
    }
    const double now = seconds();
    if (r.there > before) r.since = now;
    const double computed = disk->pace.computing * (double)((end - r.found) * PAGE); // s; 0: unknown
    const double most = computed > 0 ? 2 * computed : ctx.gpu ? DiskPrefix::PATIENCE : INFINITY;
    const bool stalled = r.there < end && (now - r.since > DiskPrefix::PATIENCE || now - r.begun > most);
    if (stalled) disk->no_reads_before = now + DiskPrefix::STALLED;
    if (r.there < end && !lost && !stalled) return;
    r.inbox->close();
    for (; !r.pages.empty(); r.pages.pop_back()) pool.release(r.pages.back());
    figures.disk_found += (r.there - r.found) * PAGE;
    disk->pace.learn(disk->pace.reading, (r.there - r.found) * PAGE, now - r.begun);
    disk->read_for = r.arrival, disk->read_pages = r.there - r.found;
    disk->reading.reset();
}

// ---- To the disk

void Scheduler::used_pages(Sequence& q, size_t found) {
    find_keys(q);
    for (size_t i = std::min(found, q.keys.size()); i-- > 0;) // the first page becomes the most recently used
        if (!disk->files.use(q.keys[i])) {
            disk->proven.push_front({q.pages[i], pool.pages[(size_t)q.pages[i]].name, q.keys[i]});
            if (disk->proven.size() > pool.pages.size()) disk->proven.pop_back();
        }
}

void Scheduler::may_save(Sequence& q) {
    if ((q.known + 1) * PAGE > q.prompt) return;
    find_keys(q);
    disk->fresh.push_back({q.pages[q.known], q.chain, q.keys[q.known]});
    if (disk->fresh.size() > pool.pages.size()) disk->fresh.pop_front();
}

double Scheduler::save_pages() {
    constexpr double SOON = 0.001; // until a buffer is free
    if (!disk || (disk->proven.empty() && disk->fresh.empty())) return 0;
    if (!disk->files.may_write()) return DiskPages::TAKE_OVER; // they wait; those that leave the memory are skipped
    size_t left = 8; // on a CPU the copies take time from the next step
    for (auto* line : {&disk->proven, &disk->fresh}) {
        if (line == &disk->fresh && busy()) return SOON;
        while (!line->empty()) {
            const DiskPrefix::Unsaved one = line->front();
            if (pool.pages[(size_t)one.page].name == one.name && disk->files.wants(one.key)) {
                Bytes buffer;
                if (left-- == 0 || !(buffer = disk->out.take())) return SOON;
                uint8_t* const to = buffer.get();
                copy_page(one.page, to, true, [files = &disk->files, one, buffer = std::move(buffer),
                                               bytes = disk->bytes] { files->write(one.key, buffer, bytes); });
            }
            line->pop_front();
        }
    }
    return 0;
}

} // namespace server
