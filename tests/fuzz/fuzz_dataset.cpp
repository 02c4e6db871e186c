// Fuzzes the dataset's reader: any bytes are refused with a line, or are a dataset that can be walked, whose rows hold
// what dataset.h promises, and which written again gives the same bytes.
#include "model/dataset.h"

static void require(bool holds) { if (!holds) abort(); }

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const int fd = memfd_create("fuzz", 0);
    static const std::string path = format("/proc/self/fd/%d", fd), again = format("/tmp/fuzz_dataset.%d", (int)getpid());
    require(ftruncate(fd, 0) == 0 && pwrite(fd, data, size, 0) == (ssize_t)size);
    try {
        const Dataset set(path);
        DatasetWriter out(again, set.header.tokenizer, set.header.chat_template);
        uint64_t tokens = 0;
        for (size_t i = 0; i < set.rows(); i++) {
            for (uint32_t word : set.row(i)) require((word & ~TRAIN) < set.id_limit());
            require(!(*set.row(i).begin() & TRAIN) && set.hash(i) == dataset_hash(set.row(i)));
            tokens += set.row(i).size();
            const std::vector<uint32_t> row(set.row(i).begin(), set.row(i).end());
            if (!set.pairs()) out.add(row);
            else if (i % 2) out.add_pair({set.row(i - 1).begin(), set.row(i - 1).end()}, row);
        }
        require(tokens == set.tokens());
        out.commit();
        const MappedFile same(again);
        require(same.text() == set.file.text());
        unlink(again.c_str());
    } catch (const Error& e) {
        require(*e.what());
    }
    return 0;
}
