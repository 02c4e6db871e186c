// Whether this program is built with AddressSanitizer: it is slower, and keeps freed memory for a while, which tests that
// bound seconds or bytes allow for. (g++ defines a macro, clang++ answers a question.)
#pragma once

#if defined(__SANITIZE_ADDRESS__)
constexpr bool SANITIZED = true;
#elif defined(__has_feature)
constexpr bool SANITIZED = __has_feature(address_sanitizer);
#else
constexpr bool SANITIZED = false;
#endif
