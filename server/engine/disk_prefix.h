// disk_prefix.h: an engine's side of the prefix cache on disk: pages on their way from it and to it.
#pragma once
#include "base/sha256.h"
#include "server/engine/disk_pages.h"
#include "server/engine/pace.h"
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

namespace server {

struct DiskPrefix {
    static constexpr size_t BUFFER_BYTES = 64 << 20; // for each direction
    // Seconds without a page (on a GPU: of the whole reading, while the time of computing is unknown) before the prompt
    // is computed instead; then nothing is read for a while.
    static constexpr double PATIENCE = 2, STALLED = 30;

    // The pages of a prompt that are being read. The engine holds them until the last has come: all together become
    // idle, the first as the most recently used.
    struct Reading {
        std::vector<int> ids;      // the prompt
        uint64_t arrival, adapter; // of the job that waits
        uint64_t chain;            // the name of the last page that is there
        std::vector<Digest> keys;  // of all its pages up to the last that is on disk
        std::vector<int> pages;
        size_t found, asked, there; // pages that were in memory; also asked for; also there
        double begun, since;       // ... when the last page came
        std::shared_ptr<PageInbox> inbox = std::make_shared<PageInbox>();
    };
    struct Unsaved { int page; uint64_t name; Digest key; };

    DiskPages& files;
    const size_t bytes;            // of a page
    PageBuffers in, out;
    std::unique_ptr<Reading> reading;
    uint64_t read_for = 0;         // arrival of the last job that pages were read for,
    size_t read_pages = 0;         // ... and their number
    double no_reads_before = 0;
    ReadPace pace{};
    std::deque<Unsaved> proven{}, fresh{}; // pages that two prompts began with, those of one; the latest last

    void wait() { reading->inbox->wait(reading->there, 0.002); } // (new jobs are seen that soon)
};

} // namespace server
