#include "base/error.h"
#include "base/lost_file.h"
#include "base/unfinished.h"

void keep_descriptors() {
    for (int fd; (fd = open("/dev/null", O_RDONLY)) >= 0;)
        if (fd > 2) { close(fd); break; }
}

void print_error(const char* program, std::string line) {
    for (char& c : line)
        if ((unsigned char)c < 0x20 || c == 0x7f) c = ' ';
    fprintf(stderr, "%s: %s\n", program, line.c_str());
}

int run_program(const char* program, int (*run)(int, char**), int argc, char** argv) {
    keep_descriptors();
    name_lost_files(program);
    end_on_signals();
    try {
        return run(argc, argv);
    } catch (const std::bad_alloc&) {
        print_error(program, "out of memory");
    } catch (const std::exception& e) {
        print_error(program, e.what());
    }
    return 1;
}

int thread_count() {
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}
