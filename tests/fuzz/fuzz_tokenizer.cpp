// Fuzzes encode and decode: what must hold for any bytes. The first byte chooses the tokenizer.
#include "model/tokenizer.h"

static void need(bool condition) {
    if (!condition) abort();
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const Tokenizer qwen3("tokenizer.bin"), tiny("tests/fixtures/tiny/tokenizer.bin");
    if (size == 0) return 0;
    const Tokenizer& t = data[0] & 1 ? qwen3 : tiny;
    std::string_view text((const char*)data + 1, size - 1);

    std::string valid, again;
    need(utf8_repair(valid, text, true) == text.size());
    need(utf8_repair(again, valid, false) == valid.size() && again == valid); // valid UTF-8 stays as it is
    Utf8Stream stream;
    std::string parts;
    for (size_t at = 0, k = 1; at < text.size(); at += k, k = 1 + (k + data[0]) % 5)
        parts += stream.feed(text.substr(at, k));
    need(parts + stream.flush() == valid);

    std::string composed = t.nfc(valid);
    need(t.nfc(composed) == composed);
    std::vector<int> ids = t.encode(text, false);
    need(ids == t.encode(valid, false) && ids == t.encode(composed, false));
    need(t.decode(ids, true) == composed); // every byte is in some token, and none is special
    need(ids.size() <= composed.size());

    ids = t.encode(text, true);
    std::string expected; // the text between added tokens is composed on its own
    size_t begin = 0;
    std::vector<int> by_parts;
    for (size_t at = 0; at <= valid.size(); at++) {
        int found = -1;
        for (size_t n = 1; n <= 24 && at + n <= valid.size(); n++)
            if (int id = t.id(std::string_view(valid).substr(at, n)); id >= 0) found = id;
        if (found < 0 && at < valid.size()) continue;
        std::string_view part = std::string_view(valid).substr(begin, at - begin);
        expected += t.nfc(part);
        t.encode(by_parts, part, false);
        if (found < 0) break;
        expected += t.bytes(found);
        by_parts.push_back(found);
        begin = at + t.bytes(found).size();
        at = begin - 1;
    }
    need(ids == by_parts && t.decode(ids, false) == expected);

    for (size_t i = 0; i + 1 < text.size(); i += 2) // any ids at all decode
        ids.push_back((int)data[1 + i] * 611 + data[2 + i] - 100);
    valid = t.decode(ids, data[0] & 2);
    need(utf8_repair(again = "", valid, false) == valid.size() && again == valid);
    return 0;
}
