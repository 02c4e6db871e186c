#!/bin/sh
# Makes the folder that a student hands in: deploy/course/pack.sh FOLDER SERVE [ADAPTER]
#   SERVE    the program (make course builds it for sm_89, sm_90a, sm_120 and any x86-64)
#   ADAPTER  what train_lora made; without it the base model answers
set -eu
here=$(cd "$(dirname "$0")" && pwd)
fail() { echo "pack.sh: $*" >&2; exit 1; }
[ $# -eq 2 ] || [ $# -eq 3 ] || { sed -n '2,4p' "$0" >&2; exit 1; }
folder=$1 serve=$2 adapter=${3:-}
[ -x "$serve" ] || fail "$serve: no such program"
[ ! -e "$folder" ] || fail "$folder: exists; remove it or name another folder"
parts="adapter_config.json adapter_model.safetensors"
for part in ${adapter:+$parts}; do
    [ -f "$adapter/$part" ] || fail "$adapter: no adapter, $part is missing"
done
new=$folder.tmp$$
trap 'rm -rf "$new"' EXIT
mkdir -p "$new/bin" "$new/lib"
cp "$here/Dockerfile" "$here/serve.py" "$here/README.md" "$here/../../get" "$new/"
cp "$serve" "$new/bin/serve"
cp "$here/../../tokenizer.bin" "$new/bin/"
# Its libraries, except those of the C library, which the image has.
ldd "$serve" | awk '$3 ~ "^/" {print $3}' | grep -vE '/(libc|libm|libdl|librt|libpthread)\.so' | while read -r library; do
    cp -L "$library" "$new/lib/"
done
for part in ${adapter:+$parts}; do
    mkdir -p "$new/adapter" && cp "$adapter/$part" "$new/adapter/"
done
mv "$new" "$folder"
newest=$(grep -aoh 'GLIBC_2\.[0-9]*' "$folder/bin/serve" "$folder"/lib/* | sort -t. -k2n -u | tail -n 1)
echo "$folder: $(du -sh "$folder" | cut -f1); it needs a C library of ${newest#GLIBC_} or later in the image (vllm-openai: 2.35)"
