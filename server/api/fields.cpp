// fields.cpp: ranges and refusals.
#include "model/chat_template.h"
#include "server/api/fields.h"
#include <algorithm>
#include <cmath>

namespace server {

sj::Value parse_body(sj::Doc& doc, std::string_view body) {
    const std::string fault = sj::parse(doc, body);
    if (!fault.empty()) throw Refusal(400, "the body is not valid JSON: " + fault);
    return doc.root();
}

Fields::Fields(sj::Value object, const char* what) {
    if (!object.is(sj::Object)) throw Refusal(400, format("%s is not a JSON object", what));
    if (object.size() > 1000) throw Refusal(400, format("%s has more than 1,000 members", what));
    for (auto [key, value] : object.members()) all[key] = value;
}

sj::Value Fields::operator[](const std::string& name) const {
    const auto it = all.find(name);
    return it == all.end() || it->second.is(sj::Null) ? sj::Value{} : it->second;
}

double Fields::number(const char* name, double low, double high, double otherwise) const {
    const sj::Value v = (*this)[name];
    if (!v) return otherwise;
    const double x = v.number(NAN);
    if (!(x >= low && x <= high))
        throw Refusal(400, format("%s must be a number from %g to %g", name, low, high), name);
    return x;
}

int64_t Fields::integer(const char* name, int64_t low, int64_t high, int64_t otherwise) const {
    const sj::Value v = (*this)[name];
    int64_t x = otherwise;
    if (v && (!v.integer(&x) || x < low || x > high))
        throw Refusal(400, format("%s must be an integer from %lld to %lld", name, (long long)low, (long long)high),
                      name);
    return x;
}

bool Fields::boolean(const char* name, bool otherwise) const {
    const sj::Value v = (*this)[name];
    if (v && !v.is_bool()) throw Refusal(400, format("%s must be true or false", name), name);
    return v.boolean(otherwise);
}

std::string Fields::text(const char* name) const {
    const sj::Value v = (*this)[name];
    if (v && !v.is(sj::String)) throw Refusal(400, format("%s must be a string", name), name);
    return v.str();
}

void refuse_name(const std::string& name) {
    throw Refusal(400, format("%s is not supported", in_quotes(name).c_str()), name.size() > 64 ? "" : name);
}

void refuse_others(const Fields& f, FieldList known) {
    for (auto& [name, value] : f.all)
        if (!value.is(sj::Null) && std::find(known.begin(), known.end(), name) == known.end()) refuse_name(name);
}

void refuse_value(const char* name, sj::Value v, const Values& values) {
    const std::string given = sj::dump(v);
    if (std::any_of(values.begin(), values.end(), [&](const char* value) { return given == value; })) return;
    std::string known;
    for (const char* value : values) known += (known.empty() ? "" : " or ") + std::string(value);
    if (values.empty()) throw Refusal(400, format("%s is not supported", name), name);
    throw Refusal(400, format("%s: only %s is supported", name, known.c_str()), name);
}

void refuse_values(const Fields& f, const std::vector<std::pair<const char*, Values>>& only) {
    for (auto& [name, values] : only) {
        const sj::Value v = f[name];
        const bool empty = (v.is(sj::Array) && v.size() == 0) || (v.is(sj::String) && v.str().empty());
        if (v && !empty) refuse_value(name, v, values);
    }
}

} // namespace server
