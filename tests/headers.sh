#!/bin/sh
# Compiles every header by itself, and Book I without cpu/ and gpu/, and holds the include lines to the order of the
# rooms: none goes up, or to a room beside. One line for each header or include that does not; then the exit status is 1.
# Usage: CXX=g++ JOBS=2 tests/headers.sh   from the repository's root. Headers of kernels are nvcc's, and left out where
# there is none (NVCC=none).
CXX=${CXX:-g++} NVCC=${NVCC:-nvcc} JOBS=${JOBS:-$(nproc)}
WARNINGS="-Wall -Wextra -Werror"
HOST="-std=c++17 -march=native -I. $WARNINGS -Wno-unknown-pragmas"

if [ "$1" = --one ]; then # a header: by nvcc, or after $2, which it includes and which is compiled already ("": nothing)
    case $2 in
    nvcc) said=$(printf '#include "%s"\n' "$3" | $NVCC -x cu -std=c++17 -I. -DQWEN3_GPU --ptx -Werror all-warnings \
                 -gencode arch=compute_90a,code=compute_90a -o /dev/null - 2>&1);;
    *) said=$(printf '#include "%s"\n' "$3" | $CXX $HOST ${2:+-include "$2"} -fsyntax-only -x c++ - 2>&1);;
    esac || echo "$3: does not compile by itself: $(echo "$said" | grep -E 'error|fatal' | head -n 1)"
    exit 0
fi

# ---- The order. A file's place: it may include its own room, and what is below.
place() {
    case $1 in
    build/* | sj.h | qwen3.h | base/*) place=0 room=base;;
    qwen3.cu | model/*) place=1 room=model;;
    book/datagen/*) place=3 room=datagen;;
    cpu/* | gpu/* | form/* | book/*) place=2 room=${1%%/*};;
    search/*) place=3 room=search;;
    train/* | cli/*) place=4 room=${1%%/*};;
    server/engine/*) place=4 room=server;;
    server/api/*) place=5 room=server;;
    server/http/*) place=6 room=server;;
    server/*) place=7 room=server;;
    capi/* | *.cu | *.cpp) place=8 room=programs;;
    *) place=9 room=others;; # tests/, lab/, data/: nothing includes them
    esac
}
# The study text calls the ops of cpu/ by name, asks gpu/ for optional kernels, and ends with its program.
may() {
    case "$1 $3" in
    "qwen3.cu cpu/ops.h" | "qwen3.cu gpu/optional.h" | "model/cpu.h cpu/"*) return 0;;
    "qwen3.cu cli/"*) [ "$2" -gt "$program" ]; return;;
    esac
    return 1
}
check_order() {
    program=$(grep -n '^#if __INCLUDE_LEVEL__ == 0' qwen3.cu | cut -d: -f1)
    files=$(find . -path ./build -prune -o \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) -print |
            grep -vE '^\./(tests|lab|data)/')
    grep -nE '^ *# *include *"' $files /dev/null |
        sed -E 's|^\./([^:]*):([0-9]*): *# *include *"([^"]*)".*|\1 \2 \3|' |
        while read -r file line included; do
            place "$file"
            from=$place its=$room
            place "$included"
            [ "$place" -lt "$from" ] && continue
            [ "$place" = "$from" ] && [ "$room" = "$its" ] && continue
            may "$file" "$line" "$included" || echo "$file:$line: includes $included, which is not below it"
        done
}

# ---- The headers. These, and all that include one of them.
including() {
    all=$1 more=$1
    while [ "$more" ]; do
        more=$(grep -lE "^ *# *include *\"($(echo "$more" | tr '\n' '|' | sed 's/|$//'))\"" $headers | only_not "$all")
        all=$(printf '%s\n%s\n' "$all" "$more" | sed '/^$/d')
    done
    echo "$all"
}
having() { including "$(grep -lE "^ *# *include *[\"<]$1[\">]" $headers)"; } # that include a file
only_not() { [ "$1" ] && grep -vxF "$1" || cat; } # lines that are none of $1's
compile() { sed '/^$/d' | xargs -r -P "$JOBS" -n 1 "$0" --one "$1"; } # the headers on standard input

# Much of the time is taken by what many headers include. It is compiled once, and those that include it begin with it:
# so each still has only what it includes. The first of these that a header includes is its own.
FIRST="server/engine/job.h model/model_file.h qwen3.cu form/grammar.h sj.h base/error.h functional string"
compile_after() {
    ours=$(echo "$left" | grep -xF "$(having "$1")")
    left=$(echo "$left" | only_not "$ours")
    [ "$ours" ] || return 0
    first=$temporary/$(echo "$1" | tr / _).first.h
    printf '#include "%s"\n' "$1" >"$first"
    $CXX $HOST -x c++-header "$first" -o "$first.$kind" >/dev/null 2>&1
    echo "$ours" | compile "$first"
}

temporary=$(mktemp -d)
trap 'rm -rf "$temporary"' EXIT
export CXX NVCC
case $($CXX --version) in *clang*) kind=pch;; *) kind=gch;; esac
headers=$(find base model cpu gpu form book search train server cli capi -name '*.h' -o -name '*.cuh' | sort)
count=$(echo "$headers" | wc -l)
kernels=$(including "$(grep -lE '__device__|__global__|<<<|Gpu& gpu;|cudaGraphExec_t|uint4' $headers)" | grep -v '^cpu/')
left=$(echo "$headers" | only_not "$kernels")
left_out=
if ! command -v "$NVCC" >/dev/null 2>&1; then
    left_out="; $(echo "$kernels" | wc -l) of kernels left out: no nvcc"
    kernels=
fi
if ! echo '#include <microhttpd.h>' | $CXX -fsyntax-only -x c++ - 2>/dev/null; then
    left_out="$left_out; what needs libmicrohttpd left out"
    left=$(echo "$left" | only_not "$(having microhttpd.h)")
fi
{
    check_order
    $CXX $HOST -DQWEN3_PLAIN -DQWEN3_LIBRARY -fsyntax-only -x c++ qwen3.cu || echo "qwen3.cu: Book I does not compile by itself"
    for name in $FIRST; do compile_after "$name"; done
    echo "$left" | compile ""
    echo "$kernels" | compile nvcc
} | tee "$temporary/faults"
[ -s "$temporary/faults" ] && exit 1
echo "$count headers compile by themselves, and Book I without cpu/ and gpu/, and no include goes up$left_out"
