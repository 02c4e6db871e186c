// base/stop_flag.h: work that holds a pointer to a flag gives up soon after a signal's handler or another thread has
// set it.
#pragma once
#include <atomic>

using StopFlag = std::atomic<int>;
static_assert(StopFlag::is_always_lock_free, "a handler of signals may only set atomics without locks");
