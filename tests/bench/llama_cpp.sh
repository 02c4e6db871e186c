#!/bin/bash
# llama.cpp's programs for tests/bench/turns.sh, with a CPU backend for each of our instruction sets:
#     tests/bench/llama_cpp.sh FOLDER       10 CPU minutes, 1 GB; cmake, ninja, pip
# The source is that of llama-cpp-python's package. A program loads the best backend beside it: each set has a folder.
# (g++ 12 drops all but eight bytes of the tiles' shapes, since its _tile_loadconfig declares no more as read: the first
# tile is an illegal instruction. So the source is given a barrier.)
set -eu
mkdir -p "$1" && cd "$1"
[ -d source ] || {
    pip download -q --no-deps --no-binary :all: llama-cpp-python
    tar xzf llama_cpp_python-*.tar.gz && mv llama_cpp_python-*/vendor/llama.cpp source && rm -r llama_cpp_python-*
    find source -name .git -delete
    find source -type f -exec touch {} + # (dates to come would configure it for ever)
    sed -i 's/^ *_tile_loadconfig(\(&[a-z]*\));/asm volatile("" :: "r"(\1) : "memory");&/' \
        source/ggml/src/ggml-cpu/amx/mmq.cpp
    sed -i -E '/_variant\((haswell|cooperlake|sapphirerapids) /!{/^ *ggml_add_cpu_backend_variant\(/d}' \
        source/ggml/src/CMakeLists.txt
}
cmake -S source -B build -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_BUILD_RPATH_USE_ORIGIN=ON -DGGML_NATIVE=OFF \
    -DGGML_BACKEND_DL=ON -DGGML_CPU_ALL_VARIANTS=ON -DGGML_OPENMP=ON -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF \
    -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_UI=OFF >/dev/null
nice -n 5 ninja -C build -j "${JOBS:-$(nproc)}" llama-bench llama-batched-bench llama-quantize \
    ggml-cpu-haswell ggml-cpu-cooperlake ggml-cpu-sapphirerapids
for pair in avx2:haswell avx512bf16:cooperlake amx:sapphirerapids; do
    mkdir -p "${pair%:*}"
    cp -a build/bin/. "${pair%:*}"
    find "${pair%:*}" -name 'libggml-cpu-*' ! -name "*${pair#*:}*" -delete
done
