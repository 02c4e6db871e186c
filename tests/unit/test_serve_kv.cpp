// An engine with FP8 keys and values: each answer is that of a session with them, whatever runs beside it.
#include "tests/engine.h"
#include "tests/process.h"

TEST_CASE("--kv-dtype fp8: answers do not depend on what runs beside them, on chunks, pages or preemptions") {
    struct Restore { ~Restore() { where.kv_fp8 = false; } } restore;
    where.kv_fp8 = true;
    const size_t page = KVCache<bf16>::bytes(tiny().file.config, 1, true);
    CHECK(page < 0.52 * (double)Bench::page_bytes());
    Random random{17};
    for (auto [max_seqs, chunk, pages] : {std::tuple{4, 7, 60}, {8, 5, 17}}) {
        const std::string kind = format("at most %d, chunks of %d, %d pages", max_seqs, chunk, pages);
        INFO(kind);
        Bench bench({256, max_seqs, chunk, 2 * chunk, (size_t)pages * page});
        CHECK(bench.desk.figures->pages == (size_t)pages);
        std::vector<Job> jobs;
        for (int i = 0; i < 10; i++) jobs.push_back(random_job(random, 256));
        run_all(bench, random, jobs);
        for (auto& job : jobs) check_answer(job, expected(job, 256));
    }
}
