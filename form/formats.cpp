// form/formats.cpp: the texts of JSON Schema's `format`, each as defined by its RFC.
#include "base/error.h"
#include "form/regex.h"
#include "form/schema_reader.h"
#include "model/chat_template.h" // in_quotes
#include <cstring>
#include <initializer_list>
#include <map>
#include <string>

static std::string either(std::initializer_list<std::string> ways) {
    std::string all;
    for (auto& way : ways) all += (all.empty() ? "(?:" : "|") + way;
    return all + ")";
}

// RFC 3339: years from 0001 (Python's minimum); without leap seconds, which most clocks lack.
static std::string full_date() {
    const std::string year = either({"[0-9]{3}[1-9]", "[0-9]{2}[1-9]0", "[0-9][1-9]00", "[1-9]000"});
    const std::string fours = either({"0[48]", "[2468][048]", "[13579][26]"}); // multiples of 4, except 00
    const std::string leap = either({"[0-9]{2}" + fours, fours + "00"});
    const std::string day = either({"(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])", "(?:0[13-9]|1[0-2])-(?:29|30)",
                                    "(?:0[13578]|1[02])-31"});
    return either({year + "-" + day, leap + "-02-29"});
}
static std::string full_time() {
    return "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]+)?(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])";
}

static std::string duration() { // RFC 3339, appendix A
    const std::string n = "[0-9]+", days = n + "D", months = n + "M(?:" + days + ")?", seconds = n + "S";
    const std::string minutes = n + "M(?:" + seconds + ")?", hours = n + "H(?:" + minutes + ")?";
    const std::string clock = "T" + either({hours, minutes, seconds}), years = n + "Y(?:" + months + ")?";
    return "P" + either({n + "W", either({days, months, years}) + "(?:" + clock + ")?", clock});
}

static std::string ipv4() { // RFC 2673
    const std::string byte = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])";
    return byte + "(?:\\." + byte + "){3}";
}

// RFC 4291, 2.2: eight groups; "::" replaces one or more groups of zeros; the last two may be an IPv4 address.
static std::string ipv6() {
    const std::string group = "[0-9a-fA-F]{1,4}", one = group + ":";
    std::string all = "(?:" + one + "){7}" + group + "|(?:" + one + "){6}" + ipv4();
    for (int before = 0; before <= 7; before++) {
        all += "|" + (before ? format("(?:%s){%d}", one.c_str(), before) : ":") + ":";
        if (before <= 6) all += "(?:" + format("(?:%s){0,%d}", one.c_str(), 6 - before) + group;
        if (before <= 5) all += "|" + format("(?:%s){0,%d}", one.c_str(), 5 - before) + ipv4();
        if (before <= 6) all += ")?";
    }
    return "(?:" + all + ")";
}

// RFC 1123: labels of 63 characters at most, 253 in total. Here: three of any length, or twelve of 20.
static std::string hostname() {
    auto labels = [](int longest, int more) {
        const std::string label = format("[A-Za-z0-9](?:[A-Za-z0-9-]{0,%d}[A-Za-z0-9])?", longest - 2);
        return label + format("(?:\\.%s){0,%d}", label.c_str(), more);
    };
    return either({labels(63, 2), labels(20, 11)});
}

// RFC 5321, 4.1.2: atoms with dots between them, or a quoted string, of 64 characters at most; a host, or an address.
static std::string domain() { return either({hostname(), "\\[" + either({ipv4(), "IPv6:" + ipv6()}) + "\\]"}); }
static int local_part(Grammar& g, int next) {
    ByteSet atom;
    for (int c = '!'; c < 127; c++)
        if (!strchr("\"(),.:;<>@[\\]", c)) atom.set((size_t)c);
    int after[64] = {next}; // the position behind a character of an atom, by the number of further ones allowed
    for (int more = 1; more < 64; more++) {
        after[more] = g.split(next, g.bytes(atom, after[more - 1]));
        if (more > 1) after[more] = g.split(after[more], g.literal(".", g.bytes(atom, after[more - 2])));
    }
    const std::string quoted = "\"(?:[ !#-\\[\\]-~]|\\\\[ -~]){0,31}\"";
    return g.split(g.bytes(atom, after[63]), g.emit(regex_whole(g, quoted), next, IN_STRING));
}

int SchemaReader::formatted(const std::string& name, int next) {
    static const std::map<std::string, std::string> all = {
        {"date", full_date()}, {"time", full_time()}, {"date-time", full_date() + "[Tt]" + full_time()},
        {"duration", duration()}, {"hostname", hostname()}, {"ipv4", ipv4()}, {"ipv6", ipv6()}, {"email", domain()},
        {"uuid", "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"}};
    const auto found = all.find(name);
    if (found == all.end()) DIE("format: %s is not supported", in_quotes(name).c_str());
    const int end = g.emit(regex_whole(g, found->second), g.literal("\"", next), IN_STRING);
    return g.literal("\"", name == "email" ? local_part(g, g.literal("@", end)) : end);
}
