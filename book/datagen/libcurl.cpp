// book/datagen/libcurl.cpp: functions of libcurl for generate and grade, loaded at the first call.
// So datagen is built with curl's headers only, and runs where there is no libcurl.
#ifdef HAVE_CURL
#include "base/error.h"
#include "book/datagen/transfer.h"
#include <curl/curl.h>
#include <dlfcn.h>

static void* find(const char* name) {
    static void* library = nullptr;
    for (const char* one : {"libcurl.so.4", "libcurl-gnutls.so.4"})
        if (!library) library = dlopen(one, RTLD_NOW);
    if (!library) DIE("there is no libcurl.so.4 here, which generate and grade need (Debian's package libcurl4)");
    void* found = dlsym(library, name);
    if (!found) DIE("libcurl has no %s: it is too old", name);
    return found;
}

#define LOADED(result, name, parameters, arguments)         \
    result name parameters {                                \
        static const auto f = (decltype(&name))find(#name); \
        return f arguments;                                 \
    }
extern "C" {
LOADED(CURLcode, curl_global_init, (long flags), (flags))
LOADED(CURL*, curl_easy_init, (), ())
LOADED(void, curl_easy_reset, (CURL* easy), (easy))
LOADED(void, curl_easy_cleanup, (CURL* easy), (easy))
LOADED(CURLcode, curl_easy_perform, (CURL* easy), (easy))
LOADED(const char*, curl_easy_strerror, (CURLcode code), (code))
LOADED(curl_slist*, curl_slist_append, (curl_slist* list, const char* text), (list, text))
LOADED(void, curl_slist_free_all, (curl_slist* list), (list))
LOADED(CURLM*, curl_multi_init, (), ())
LOADED(CURLMcode, curl_multi_cleanup, (CURLM* multi), (multi))
LOADED(CURLMcode, curl_multi_add_handle, (CURLM* multi, CURL* easy), (multi, easy))
LOADED(CURLMcode, curl_multi_remove_handle, (CURLM* multi, CURL* easy), (multi, easy))
LOADED(CURLMcode, curl_multi_perform, (CURLM* multi, int* running), (multi, running))
LOADED(CURLMsg*, curl_multi_info_read, (CURLM* multi, int* left), (multi, left))
LOADED(CURLMcode, curl_multi_poll, (CURLM* multi, curl_waitfd* extra, unsigned n, int ms, int* ready),
       (multi, extra, n, ms, ready))
} // extern "C"

namespace book {

CURLcode set_option(CURL* easy, CURLoption option, void* value) {
    static const auto f = (decltype(&curl_easy_setopt))find("curl_easy_setopt");
    return f(easy, option, value);
}
CURLcode get_info(CURL* easy, CURLINFO info, void* to) {
    static const auto f = (decltype(&curl_easy_getinfo))find("curl_easy_getinfo");
    return f(easy, info, to);
}

} // namespace book
#endif
