// random_bits.cpp: one device for all threads.
#include "server/engine/random_bits.h"
#include <mutex>
#include <random>

namespace server {

uint64_t random_bits() {
    static std::mutex mutex; // some random_devices are files
    std::lock_guard lock(mutex);
    static std::random_device device;
    return (uint64_t)device() << 32 | device();
}

} // namespace server
