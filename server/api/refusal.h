// refusal.h: client errors, and their report in OpenAI's form.
#pragma once
#include "base/error.h"
#include <string>

namespace server {

// A client error, with its HTTP status.
struct Refusal : Error {
    int status;
    std::string param, code;
    Refusal(int status, const std::string& message, const std::string& param = "", const std::string& code = "")
        : Error(message), status(status), param(param), code(code) {}
};

std::string error_json(int status, const std::string& message, const std::string& param = "",
                       const std::string& code = "");
inline std::string error_json(const Refusal& r) { return error_json(r.status, r.what(), r.param, r.code); }

// Calls f. An error in it (of a grammar, say) is reported as one of this field.
template <class F> auto blame(const char* field, F f) {
    try {
        return f();
    } catch (const Refusal&) {
        throw;
    } catch (const Error& e) {
        throw Refusal(400, format("%s: %s", field, e.what()), field);
    }
}

} // namespace server
