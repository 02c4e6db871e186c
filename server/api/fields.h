// fields.h: the members of a JSON object, each asked for in its range; what is not supported is refused by name.
#pragma once
#include "server/api/refusal.h"
#include "sj.h"
#include <cstdint>
#include <initializer_list>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace server {

// The root of a body, whose nodes `doc` keeps. Refuses what is not JSON.
sj::Value parse_body(sj::Doc& doc, std::string_view body);

// The members of a JSON object, each to be asked for in its range.
struct Fields {
    std::map<std::string, sj::Value> all;
    Fields() = default;
    explicit Fields(sj::Value object, const char* what = "the body");
    sj::Value operator[](const std::string& name) const; // null is as good as absent
    double number(const char* name, double low, double high, double otherwise) const;
    int64_t integer(const char* name, int64_t low, int64_t high, int64_t otherwise) const;
    bool boolean(const char* name, bool otherwise) const;
    std::string text(const char* name) const;
};

// Of a field that is in no document. (A long name is not repeated as the fault's param.)
[[noreturn]] void refuse_name(const std::string& name);

// Refuses fields that are not among these. Null is as good as absent.
using FieldList = std::initializer_list<const char*>;
void refuse_others(const Fields& f, FieldList known);

// Refuses a field that has another value than those named here (with none: any).
using Values = std::vector<const char*>;
void refuse_value(const char* name, sj::Value v, const Values& values);
// The same of many. Empty lists and strings are as good as absent.
void refuse_values(const Fields& f, const std::vector<std::pair<const char*, Values>>& only);

// OpenAI's service_tier: all are one here.
inline const Values SERVICE_TIERS = {"\"auto\"", "\"default\"", "\"flex\"", "\"scale\"", "\"priority\"", "\"fast\"",
                                     "\"ultrafast\""};

} // namespace server
