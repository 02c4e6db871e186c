// fields.h: reads the members of a JSON object with range checks; unsupported fields are refused by name.
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

// Parses a body; `doc` owns its nodes. Refuses invalid JSON.
sj::Value parse_body(sj::Doc& doc, std::string_view body);

// The members of a JSON object, read with range checks.
struct Fields {
    std::map<std::string, sj::Value> all;
    Fields() = default;
    explicit Fields(sj::Value object, const char* what = "the body");
    sj::Value operator[](const std::string& name) const; // null counts as absent
    double number(const char* name, double low, double high, double otherwise) const;
    int64_t integer(const char* name, int64_t low, int64_t high, int64_t otherwise) const;
    bool boolean(const char* name, bool otherwise) const;
    std::string text(const char* name) const;
};

// Refuses an unknown field. (A long name is not repeated as the error's param.)
[[noreturn]] void refuse_name(const std::string& name);

// Refuses all fields but these. Null counts as absent.
using FieldList = std::initializer_list<const char*>;
void refuse_others(const Fields& f, FieldList known);

// Refuses a field whose value is not in this list (empty list: any value).
using Values = std::vector<const char*>;
void refuse_value(const char* name, sj::Value v, const Values& values);
// The same for several fields. Empty lists and strings count as absent.
void refuse_values(const Fields& f, const std::vector<std::pair<const char*, Values>>& only);

// OpenAI's service_tier: all tiers are the same here.
inline const Values SERVICE_TIERS = {"\"auto\"", "\"default\"", "\"flex\"", "\"scale\"", "\"priority\"", "\"fast\"",
                                     "\"ultrafast\""};

} // namespace server
