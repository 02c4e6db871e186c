// refusal.cpp: errors in OpenAI's form.
#include "model/utf8.h"
#include "server/api/refusal.h"
#include "sj.h"

namespace server {

std::string error_json(int status, const std::string& message, const std::string& param, const std::string& code) {
    std::string valid;
    utf8_repair(valid, message, true); // the message may quote input that was cut anywhere
    sj::Writer w;
    w.object().key("error").object().field("message", valid);
    w.field("type", status == 401 ? "authentication_error" : status == 429 ? "rate_limit_error"
                    : status < 500 ? "invalid_request_error" : "server_error");
    if (param.empty()) w.field("param", nullptr);
    else w.field("param", param);
    if (code.empty()) w.field("code", nullptr);
    else w.field("code", code);
    return w.end().end().text;
}

} // namespace server
