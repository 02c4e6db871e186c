// Fuzzes sj.h: parse anything; of what is accepted, ask every value everything; dump it, and parse and dump
// that again: the second dump must be the first.
#include "sj.h"
#include <cstdlib>

static void require(bool holds) {
    if (!holds) abort();
}

// Returns how many values v holds, itself included.
static size_t walk(sj::Value v) {
    size_t count = 1, children = 0;
    int64_t n = 0;
    require(v.type() != sj::Missing && v.after() > v.node);
    require(v.integer(&n) ? v.is(sj::Number) && double(n) == v.number() : n == 0);
    require(v.is(sj::String) || v.str("otherwise") == "otherwise");
    require(v.boolean() == (v.raw() == "true"));
    for (sj::Value item : v.items()) {
        if (children < 8) require(v[children].node == item.node);       // linear, hence not for all
        count += walk(item);
        children++;
    }
    for (auto [key, value] : v.members()) {
        std::string quoted;
        sj::quote(quoted, key);
        sj::Doc again;
        require(sj::parse(again, quoted).empty() && again.root().str() == key);
        if (children < 8) require(v[key].node >= value.node);           // the last of that name
        count += 1 + walk(value);
        children++;
    }
    require(children == v.size());
    require(!v[children] && !v[children]["x"][7]);
    return count + v.is_container();                                    // its closing node
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    std::string_view text((const char*)data, size);
    sj::Doc doc, again;
    std::string fault = sj::parse(doc, text);
    require(bool(doc.root()) == fault.empty());
    if (!fault.empty()) return 0;
    require(walk(doc.root()) == doc.nodes.size());

    std::string once = sj::dump(doc.root());
    fault = sj::parse(again, once);
    if (fault.empty()) require(sj::dump(again.root()) == once);
    else require(once.find("Infinity") != std::string::npos);   // 1e999, the one thing that is not JSON
    return 0;
}
