# qwen3.cu, its headers and the sources of its rooms as one file. Each file that is named, or included by one in
# quotes, is written once, where it is met first. cpu/ and gpu/ are left out: the file is the portable build.
#   awk -f capi/single.awk qwen3.cu base/*.cpp ... > build/qwen3_single.cu
function write(file, line, name) {
    if (file in written || file ~ /^(cpu|gpu)\//) return
    written[file] = 1
    printf "// ---- %s\n", file
    while ((getline line < file) > 0) {
        if (line ~ /^#pragma once/) continue
        if (line ~ /^ *# *include *"/) {
            name = line
            gsub(/^[^"]*"|".*$/, "", name)
            write(name)
        } else print line
    }
    close(file)
}
BEGIN {
    print "// qwen3 in one file: Book I, Book II and the program around them, made by `make single`."
    print "//   g++ -x c++ -std=c++17 -O3 -march=native -ffp-contract=off -fopenmp qwen3_single.cu -o qwen3"
    print "//   nvcc -x cu -std=c++17 -O3 -arch=native -Xcompiler -fopenmp qwen3_single.cu -o qwen3"
    print "#define QWEN3_PORTABLE\n#define QWEN3_LIBRARY\n#define QWEN3_SINGLE\n#ifdef __CUDACC__\n#define QWEN3_GPU\n#endif"
    for (i = 1; i < ARGC; i++) write(ARGV[i])
    exit
}
