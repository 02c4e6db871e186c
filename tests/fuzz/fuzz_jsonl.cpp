// Fuzzes the readers of datagen: any bytes as a file of rows, each row as a conversation, each conversation as training
// rows. Every row's text is where it says it is, rows do not overlap, and no byte of a file of lines is lost.
#include "base/error.h"
#include "book/conversations.h"
#include "book/datagen/training_rows.h"
#include "book/rows.h"
#include "book/text.h"
#include "model/dataset.h"
#include "model/tokenizer.h"
#include "sj.h"
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <unistd.h>

using namespace book;

static void require(bool holds) { if (!holds) abort(); }

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const Tokenizer tokenizer("tests/fixtures/tiny/tokenizer.bin");
    static const int fd = memfd_create("fuzz", 0);
    static const std::string path = format("/proc/self/fd/%d", fd);
    require(ftruncate(fd, 0) == 0 && pwrite(fd, data, size, 0) == (ssize_t)size);
    const std::string_view file((const char*)data, size);
    try {
        Reader in(path);
        size_t end = 0, number = 0;
        while (in.next()) {
            require(in.offset >= end && in.offset + in.text.size() <= size && in.number > number);
            require(file.substr(in.offset, in.text.size()) == in.text && in.again(in.place())->text == in.text);
            require(in.fault.empty() == (bool)in.row());
            // what lies between two rows: blanks, and in an array a comma; at its beginning the mark and the bracket
            for (char c : file.substr(end, in.offset - end)) require(strchr(" \t\r\n,[\xEF\xBB\xBF", c) || number == 0);
            end = in.offset + in.text.size(), number = in.number;
            if (!in.fault.empty()) continue;
            sj::Doc again;
            require(sj::parse(again, one_line(in.text)).empty() && sj::dump(again.root()) == sj::dump(in.row()));
            try {
                const book::Conversation c = read_conversation(in.row());
                require(!c.question.empty() && c.messages.back().role == "assistant");
                for (auto& row : render_rows(tokenizer, c)) {
                    require(!dataset_fault({row.data(), row.data() + row.size()}));
                    for (uint32_t word : row) require((int)(word & ~TRAIN) < tokenizer.size());
                }
            } catch (const Error& e) {
                require(*e.what());
            }
        }
    } catch (const Error& e) {
        require(*e.what());
    }
    return 0;
}
