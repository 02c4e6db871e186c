// book/datagen/transfer.h: an HTTP exchange by libcurl, set up. Only for builds with libcurl.
#pragma once
#ifdef HAVE_CURL
#include "base/error.h"
#include "book/rows.h"
#include <curl/curl.h>
#include <string>

namespace book {

// curl_easy_setopt and curl_easy_getinfo, of the loaded library (book/datagen/libcurl.cpp).
CURLcode set_option(CURL* easy, CURLoption option, void* value);
CURLcode get_info(CURL* easy, CURLINFO info, void* to);

// One connection. A reply is limited to 32 MB; curl aborts a longer one.
struct Transfer {
    CURL* easy = curl_easy_init();
    std::string reply;

    Transfer() = default;
    Transfer(const Transfer&) = delete;
    ~Transfer() { curl_easy_cleanup(easy); }

    template <class T> void set(CURLoption option, T value) {
        static_assert(sizeof value == sizeof(void*)); // pointers, long and curl_off_t are passed alike
        if (set_option(easy, option, (void*)value) != CURLE_OK) DIE("libcurl refuses option %d", (int)option);
    }

    // Prepares an exchange: GET, or POST of a body, which must outlive it. The limit is in milliseconds.
    void prepare(const std::string& url, curl_slist* headers, const std::string* body, long milliseconds) {
        reply.clear();
        curl_easy_reset(easy);
        set(CURLOPT_URL, url.c_str());
#if LIBCURL_VERSION_NUM >= 0x075500 // redirects are not followed: the key goes nowhere else
        set(CURLOPT_PROTOCOLS_STR, "http,https");
#else
        set(CURLOPT_PROTOCOLS, (long)(CURLPROTO_HTTP | CURLPROTO_HTTPS));
#endif
        set(CURLOPT_HTTPHEADER, headers);
        if (body) {
            set(CURLOPT_POSTFIELDS, body->c_str());
            set(CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)body->size());
        }
        set(CURLOPT_WRITEFUNCTION, receive);
        set(CURLOPT_WRITEDATA, (void*)this);
        set(CURLOPT_NOSIGNAL, 1L);
        set(CURLOPT_CONNECTTIMEOUT, 20L);
        set(CURLOPT_TIMEOUT_MS, milliseconds);
    }

  private:
    static size_t receive(char* bytes, size_t, size_t n, void* transfer) {
        std::string& reply = ((Transfer*)transfer)->reply;
        if (reply.size() + n > Reader::LONGEST / 2) return 0; // aborts the transfer
        reply.append(bytes, n);
        return n;
    }
};

// Headers common to all requests; the caller may append more and frees them.
inline curl_slist* json_headers() {
    curl_slist* headers = curl_slist_append(nullptr, "Content-Type: application/json");
    return curl_slist_append(headers, "Expect:"); // no extra round trip before the body
}

inline void check_url(const std::string& url) {
    if (url.compare(0, 7, "http://") && url.compare(0, 8, "https://"))
        DIE("--url %s: expected http:// or https://", url.c_str());
}

} // namespace book
#endif
