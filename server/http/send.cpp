// send.cpp: whole answers, streams and headers. An answer with nothing to send yet sleeps until reply->wake.
#include "server/http/exchange.h"
#include <algorithm>
#include <cctype>
#include <cstring>
#include <fcntl.h>
#include <iterator>
#include <string_view>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

namespace server {

const char* Exchange::header(const char* name) const {
    const char* value = MHD_lookup_connection_value(connection, MHD_HEADER_KIND, name);
    return value ? value : "";
}

bool Exchange::filed() const {
    auto under = [&](const std::string& root) { return (path + "/").compare(0, root.size(), root) == 0; };
    return server.filing && (under("/v1/files/") || under("/v1/batches/"));
}

MHD_Result Exchange::finish() {
    {
        std::lock_guard lock(reply->mutex);
        const bool failed = server.desk.failed, ends = failed || server.draining;
        const char* dropped = unsent->lost ? "too much waits to be sent"
                            : failed       ? "the engine has failed" : "the server is shutting down";
        if (unsent->lost || (reply->cancelled && ends)) return respond({503, fault({503, dropped})});
        if (reply->cancelled) return MHD_NO;
        if (reply->left) {
            suspended = true;
            MHD_suspend_connection(connection);
            return MHD_YES;
        }
        for (Piece& piece : reply->pieces) answer->add(std::move(piece));
        reply->pieces.clear();
    }
    if (answer->broken()) return respond({500, error_json(500, answer->broken())});
    out = answer->part();
    if (answer->told()) return respond({200, std::exchange(out, {})});
    MHD_Response* r = MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 16384, next_part, this, nullptr);
    return send(r, {200, ""});
}

ssize_t Exchange::next_part(void* self, uint64_t, char* buffer, size_t room) {
    Exchange& e = *(Exchange*)self;
    if (e.sent == e.out.size()) {
        if (e.answer->told()) return MHD_CONTENT_READER_END_OF_STREAM;
        try {
            e.out = e.answer->part(), e.sent = 0;
        } catch (const std::exception&) {
            return MHD_CONTENT_READER_END_WITH_ERROR;
        }
    }
    return e.copy_out(buffer, room);
}

ssize_t Exchange::copy_out(char* buffer, size_t room) {
    const size_t n = std::min(room, out.size() - sent);
    memcpy(buffer, out.data() + sent, n);
    spoke = seconds();
    sent += n;
    return (ssize_t)n;
}

MHD_Result Exchange::begin_stream() {
    MHD_Response* r = MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 16384, next_of_stream, this, nullptr);
    return send(r, {200, "", "text/event-stream; charset=utf-8", {{"Cache-Control", "no-cache"}}});
}

ssize_t Exchange::next_of_stream(void* self, uint64_t, char* buffer, size_t room) {
    Exchange& e = *(Exchange*)self;
    try {
        while (e.sent == e.out.size()) {
            e.out.clear(), e.sent = 0;
            std::vector<Piece> pieces;
            {
                std::lock_guard lock(e.reply->mutex);
                if (e.reply->cancelled) return MHD_CONTENT_READER_END_WITH_ERROR;
                // A part of the pieces: as JSON they are much larger.
                const size_t n = std::min<size_t>(e.reply->pieces.size(), 64);
                const auto end = e.reply->pieces.begin() + (ptrdiff_t)n;
                std::move(e.reply->pieces.begin(), end, std::back_inserter(pieces));
                e.reply->pieces.erase(e.reply->pieces.begin(), end);
                if (pieces.empty() && e.answer->complete()) return MHD_CONTENT_READER_END_OF_STREAM;
                if (pieces.empty() && std::exchange(e.probed, false)) e.out = ":\n\n"; // a comment
                else if (pieces.empty()) {
                    e.suspended = true;
                    MHD_suspend_connection(e.connection);
                    return 0;
                }
            }
            for (const Piece& piece : pieces) {
                e.server.desk.unsent.remove(*e.unsent, bytes_of(piece));
                e.out += e.answer->events(piece);
            }
        }
    } catch (const std::exception&) {
        return MHD_CONTENT_READER_END_WITH_ERROR;
    }
    return e.copy_out(buffer, room);
}

void Exchange::probe_early() const {
    const std::string_view interim = "HTTP/1.1 100 Continue\r\n\r\n";
    (void)!::send(peer.fd, interim.data(), interim.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
}

void Exchange::probe() {
    if (!suspended) return; // something is being sent anyway
    if (!stream) return probe_early();
    probed = true, suspended = false;
    MHD_resume_connection(connection);
}

MHD_Result Exchange::respond(Response&& r) {
    if (!r.file.empty()) { // sent as it is read
        struct stat st;
        const int fd = open(r.file.c_str(), O_RDONLY | O_CLOEXEC);
        if (fd >= 0 && fstat(fd, &st) == 0) return send(MHD_create_response_from_fd64((uint64_t)st.st_size, fd), r);
        if (fd >= 0) close(fd);
        r = {404, fault({404, "the file is gone"})};
    }
    out = std::move(r.body);
    if (out.size() > Answer::PART) charged = true, server.desk.unsent.add(*unsent, out.size());
    return send(MHD_create_response_from_buffer(out.size(), out.data(), MHD_RESPMEM_PERSISTENT), r);
}

MHD_Result Exchange::send(MHD_Response* out, const Response& r) {
    if (!out) return MHD_NO;
    status = r.status;
    peer.since = seconds(), peer.phase = Peer::ANSWERING; // it can be fetched from now on
    if (r.status != 204) MHD_add_response_header(out, "Content-Type", r.type);
    MHD_add_response_header(out, "X-Content-Type-Options", "nosniff");
    MHD_add_response_header(out, "X-Request-Id", request_id.c_str());
    for (auto& [name, value] : r.headers) MHD_add_response_header(out, name, value.c_str());
    if (server.draining) MHD_add_response_header(out, "Connection", "close");
    const std::string origin = header("Origin");
    if (!origin.empty()) MHD_add_response_header(out, "Vary", "Origin");
    for (auto& allowed : server.options.origins)
        if (origin == allowed) {
            MHD_add_response_header(out, "Access-Control-Allow-Origin", allowed.c_str());
            MHD_add_response_header(out, "Access-Control-Allow-Headers", allowed_headers().c_str());
            MHD_add_response_header(out, "Access-Control-Allow-Methods",
                                    server.filing ? "GET, POST, DELETE" : "GET, POST");
            MHD_add_response_header(out, "Access-Control-Max-Age", "600");
            MHD_add_response_header(out, "Access-Control-Expose-Headers", "X-Request-Id");
        }
    const MHD_Result result = MHD_queue_response(connection, (unsigned)r.status, out);
    MHD_destroy_response(out);
    return result;
}

std::string Exchange::allowed_headers() const {
    std::string all = "Authorization, Content-Type";
    const std::string asked = lower(header("Access-Control-Request-Headers"));
    for (size_t at = 0, end; at < asked.size(); at = end + 1) {
        end = std::min(asked.find(',', at), asked.size());
        std::string name = asked.substr(at, end - at);
        name.erase(std::remove(name.begin(), name.end(), ' '), name.end());
        auto plain = [](char c) { return isalnum((unsigned char)c) || c == '-'; };
        const bool known = name.compare(0, 12, "x-stainless-") == 0 || name.compare(0, 7, "openai-") == 0 ||
                           name.compare(0, 10, "anthropic-") == 0 || name == "x-api-key" || name == "x-request-id";
        if (known && std::all_of(name.begin(), name.end(), plain)) all += ", " + name;
    }
    return all;
}

} // namespace server
