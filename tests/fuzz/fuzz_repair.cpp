// Fuzzes sj.h's repair: of any bytes comes an array that sj::parse accepts, and that is not repaired again; a list or
// object that is JSON comes out as it is.
#include "sj.h"
#include <cstdlib>

static void require(bool holds) {
    if (!holds) abort();
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    const std::string_view text((const char*)data, size);
    const sj::Repaired once = sj::repair(text);
    sj::Doc doc;
    require(sj::parse(doc, once.text).empty() && doc.root().is(sj::Array));
    for (sj::Value value : doc.root().items()) require(value.is_container());
    const sj::Repaired twice = sj::repair(once.text);
    require(twice.text == "[" + once.text + "]" && twice.repairs.empty() && !twice.cut);
    if (sj::parse(doc, text).empty() && doc.root().is_container())
        require(once.text == "[" + std::string(doc.root().raw()) + "]" && once.repairs.empty() && !once.cut);
    return 0;
}
