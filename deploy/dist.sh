#!/bin/bash
# Programs for other machines: deploy/dist.sh FOLDER [KIND...] writes FOLDER/qwen3-VERSION-KIND.tar.gz, the wheels of
# the C API, and SHA256SUMS. make dist calls it. Kinds:
#   linux-x86_64         any x86-64; the CPU's instruction set is chosen at the start
#   linux-x86_64-cuda    the same, with kernels for sm_80, 86, 89, 90a and 120 in one program (DIST_ARCH: others)
#   linux-aarch64        64-bit Arm, without CUDA
# Without a kind: each for which this machine has the compilers. glibc 2.31 (Debian 11) or later is all that they need.
set -euo pipefail
[ $# -ge 1 ] || { sed -n '2,7p' "$0" >&2; exit 1; }
cd "$(dirname "$0")/.."
mkdir -p "$1"
out=$(cd "$1" && pwd)
shift
have() { command -v "$1" >/dev/null; }
if [ $# -eq 0 ]; then
    set -- linux-x86_64
    ! have "${NVCC:-nvcc}" || set -- "$@" linux-x86_64-cuda
    ! have aarch64-linux-gnu-g++ || set -- "$@" linux-aarch64
fi
version=$(sed -n 's/^#define QWEN3_VERSION //p' qwen3.h)
compilers=$PWD/build/glibc2.31

# No library but glibc's (and $2), and no newer symbol.
check() {
    local others newest
    others=$(readelf -d "$1" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' |
        grep -vE "^(lib(c|m|dl|rt|pthread)\.so|ld-linux${2:+|$2})" || true)
    newest=$(grep -aoh 'GLIBC_2\.[0-9]*' "$1" | sort -t. -k2n -u | tail -n 1)
    [ -z "$others" ] || { echo "dist.sh: $1 needs $others" >&2; exit 1; }
    [ "${newest#GLIBC_2.}" -le 31 ] || { echo "dist.sh: $1 needs $newest" >&2; exit 1; }
}

archive() {
    tar -C "$out" --sort=name --owner=0 --group=0 --numeric-owner --mtime=@0 -czf "$out/$1.tar.gz.tmp" "$1"
    mv "$out/$1.tar.gz.tmp" "$out/$1.tar.gz"
}

for kind in "$@"; do
    machine=x86_64 gpu=(NVCC=none) local=
    case $kind in
    linux-x86_64) ;;
    linux-x86_64-cuda) gpu=("ARCH=${DIST_ARCH:-80 86 89 90a 120}") local=cuda ;;
    linux-aarch64) machine=aarch64 ;;
    *) echo "dist.sh: $kind: linux-x86_64, linux-x86_64-cuda or linux-aarch64" >&2; exit 1 ;;
    esac
    deploy/old_glibc.sh "$compilers/$machine" "$machine"
    root=$compilers/$machine/root
    mode=build/$machine-glibc2.31-g++${local:+-cuda}-portable
    programs="$mode/qwen3 $mode/serve $mode/train_lora $mode/datagen"
    # shellcheck disable=SC2086
    make PORTABLE=1 "${gpu[@]}" CXX="$compilers/$machine/$machine-glibc2.31-g++" info $programs "$mode/libqwen3.so"
    name=qwen3-$version-$kind
    rm -rf "${out:?}/$name"
    # shellcheck disable=SC2086
    deploy/folder.sh "$out/$name" $programs
    for program in "$out/$name"/bin/{qwen3,serve,train_lora,datagen}; do
        "$machine-linux-gnu-strip" "$program"
        check "$program"
    done
    cp deploy/dist.txt "$out/$name/README"
    for package in libmicrohttpd libedit-dev libtinfo6 libbsd-dev libmd-dev libcmark-dev gcc-10-base; do
        cp -L "$root/usr/share/doc/$package/copyright" "$out/$name/LICENSE-${package%-dev}"
    done
    archive "$name"

    # The wheel: the library, and libgomp beside it.
    rm -rf "$out/wheel"
    mkdir "$out/wheel"
    "$machine-linux-gnu-strip" --strip-unneeded -o "$out/wheel/libqwen3.so" "$mode/libqwen3.so"
    cp -L "$root/usr/lib/$machine-linux-gnu/libgomp.so.1" "$out/$name"/LICENSE-{gcc-10-base,libcmark} "$out/wheel/"
    check "$out/wheel/libqwen3.so" libgomp.so
    capi/wheel.py "$out/wheel/libqwen3.so" "$out" $local
    rm -r "${out:?}/$name" "$out/wheel"
done
(cd "$out" && sha256sum -- *.tar.gz *.whl >SHA256SUMS && ls -lh -- *.tar.gz *.whl)
