// Fuzzes the loader of tokenizer.bin: any bytes are an Error, or a tokenizer that works. As a chat template they are
// anything.
#include "model/tokenizer.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const int fd = memfd_create("tokenizer", 0);
    static const std::string path = format("/proc/self/fd/%d", fd);
    if (ftruncate(fd, 0) != 0 || pwrite(fd, data, size, 0) != (ssize_t)size) abort();
    const ChatStyle style = ChatStyle::of({(const char*)data, size});
    if (style.opens && !style.thinks) abort();
    try {
        Tokenizer t(path);
        std::vector<int> ids =
            t.encode("I'm <think> the e\u0301,  \u2126\u0308:\r\n你好 \u1100\u1161\u11A8 \u0345 😀\xFF 12", true);
        for (int i : ids)
            if (i < 0 || i >= t.size()) abort();
        t.decode(ids, true);
        for (int i = 0; i < t.size(); i += 37) t.id(t.bytes(i)), t.is_special(i);
    } catch (const Error& e) {
        if (std::string_view(e.what()).substr(0, path.size()) != path) abort(); // an error names its file
    }
    return 0;
}
