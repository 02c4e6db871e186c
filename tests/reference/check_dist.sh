#!/bin/sh
# make dist's archives and wheel on a bare Debian 11, as root:
#   debootstrap --variant=minbase bullseye /tmp/root http://deb.debian.org/debian
#   make dist && tests/reference/check_dist.sh /tmp/root build/dist
# 1. SHA256SUMS holds. 2. In a root with libc6 and its libgcc-s1 alone, and in ROOT, every program starts: qwen3
# gives the default model's answers; serve answers by HTTP; train_lora trains and qwen3 loads its adapter; datagen cuts a
# page into chunks. 3. aarch64 programs start and answer under qemu-user, in such a first root. 4. pip installs the wheel into a virtual environment; the
# package answers, streams and refuses; its types hold (mypy --strict).
set -eu
root=$1
dist=$(cd "$2" && pwd)
here=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
server=
mounted=
finish() {
    [ -z "$server" ] || kill -9 "$server" 2>/dev/null || true
    [ -z "$mounted" ] || umount "$mounted"
    rm -rf "$work"
}
trap finish EXIT
(cd "$dist" && sha256sum --quiet -c SHA256SUMS)
echo "checksums: all $(wc -l <"$dist/SHA256SUMS") hold"

# A root with nothing but the C library and libgcc_s (glibc loads it where a thread ends), and one of Debian's minimal
# variant.
bare() { # FOLDER MACHINE
    mkdir -p "$1/tmp" "$1/dev" "$1/proc"
    for package in libc6 libgcc-s1; do dpkg-deb -x "$here/build/glibc2.31/$2/packages/$package"_*.deb "$1"; done
}

ask() { python3 - "$here" "$@" <<'END'
import json, pathlib, subprocess, sys
here, *command = sys.argv[1:]
rows = [json.loads(line) for line in pathlib.Path(here, "tests/fixtures/default/answers.jsonl").read_text().splitlines()]
for row in rows[:3]:
    said = subprocess.run([*command, "-t", "0", "-i", row["question"]], capture_output=True, text=True)
    assert said.stdout == row["answer"] + "\n", (said.stdout, said.stderr, row)
print(f"{len(rows[:3])} answers are those of tests/fixtures/default")
END
}
for archive in "$dist"/qwen3-*-linux-x86_64.tar.gz "$dist"/qwen3-*-linux-x86_64-cuda.tar.gz; do
    [ -e "$archive" ] || continue
    [ -e "$work/libc" ] || bare "$work/libc" x86_64
    name=$(basename "$archive" .tar.gz)
    for where in "$work/libc" "$root"; do
        rm -rf "${where:?}/$name"
        tar -C "$where" -xzf "$archive"
        mounted=$where/proc
        mount -t proc proc "$mounted" # a program finds its folder by it
        printf '%s in %s: ' "$name" "$where"
        for program in serve train_lora; do chroot "$where" "/$name/bin/$program" --version >/dev/null; done
        ask chroot "$where" "/$name/bin/qwen3" "/$name/tiny/model.bin"
        printf '# Warps\n\nA warp has 32 threads, which run the same instruction.\n' >"$where/tmp/page.md"
        chroot "$where" "/$name/bin/datagen" chunk /tmp/page.md -o /tmp/chunks.jsonl >"$where/tmp/log" 2>&1
        grep -q '32 threads' "$where/tmp/chunks.jsonl"
        head -n 8 "$here/data/course/gpu_qa.jsonl" >"$where/tmp/rows.jsonl"
        chroot "$where" "/$name/bin/datagen" pack /tmp/rows.jsonl /tmp/rows.bin -z "/$name/tiny/tokenizer.bin" >"$where/tmp/log" 2>&1
        chroot "$where" "/$name/bin/train_lora" "/$name/tiny/model.bin" /tmp/rows.bin -o /tmp/adapter --steps 2 \
            >"$where/tmp/log" 2>&1 || { cat "$where/tmp/log"; exit 1; }
        chroot "$where" "/$name/bin/qwen3" "/$name/tiny/model.bin" --adapter /tmp/adapter -i "What is a warp?" -t 0 >"$where/tmp/log" 2>&1
        chroot "$where" "/$name/bin/serve" "/$name/tiny/model.bin" --port 8765 --name tiny >"$where/tmp/serve" 2>&1 &
        server=$!
        until curl -sf http://127.0.0.1:8765/health >/dev/null; do kill -0 $server || { cat "$where/tmp/serve"; exit 1; }; sleep 0.2; done
        curl -sf http://127.0.0.1:8765/v1/chat/completions -H 'Content-Type: application/json' \
            -d '{"messages": [{"role": "user", "content": "What is a warp?"}], "temperature": 0}' | grep -q '"finish_reason": *"stop"'
        kill -TERM $server && wait $server
        server=
        if chroot "$where" "/$name/bin/datagen" grade /tmp/rows.jsonl --url http://127.0.0.1:1 \
            -z "/$name/tiny/tokenizer.bin" >/dev/null 2>"$where/tmp/err"; then exit 1; fi
        grep -q 'there is no libcurl.so.4 here' "$where/tmp/err" || { cat "$where/tmp/err"; exit 1; }
        echo "    serve answers and ends; train_lora, datagen, an adapter: well; without libcurl grade says so"
        umount "$mounted"
        mounted=
        rm -r "${where:?}/$name"
    done
done
for archive in "$dist"/qwen3-*-linux-aarch64.tar.gz; do
    [ -e "$archive" ] || continue
    arm=$work/arm name=$(basename "$archive" .tar.gz)
    bare "$arm" aarch64
    cp "$(command -v qemu-aarch64-static)" "$arm/qemu"
    mknod -m 666 "$arm/dev/urandom" c 1 9 # (a seed; x86-64 has an instruction for it)
    tar -C "$arm" -xzf "$archive"
    mounted=$arm/proc
    mount -t proc proc "$mounted"
    for program in serve train_lora datagen; do chroot "$arm" /qemu "/$name/bin/$program" --version >/dev/null; done
    printf '%s under qemu-user: ' "$name"
    ask chroot "$arm" /qemu "/$name/bin/qwen3" "/$name/tiny/model.bin"
    umount "$mounted"
    mounted=
done

wheel=$(find "$dist" -name 'qwen3-*_x86_64.whl' | sort | tail -n 1) # without CUDA, if both are there
[ "$wheel" ] || exit 0
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q "$wheel" mypy
cat >"$work/use.py" <<'END'
import json
import sys
from qwen3 import Model, Qwen3Error, version

here = sys.argv[1]
row = json.loads(open(here + "/tests/fixtures/default/answers.jsonl").readline())
model = Model(here + "/data/tiny/model.bin", device="cpu")
assert version() >= 1
assert model.ask(row["question"], temperature=0) == row["answer"]
assert "".join(model.context(512).stream(row["question"], temperature=0)) == row["answer"]
text: str = model.detokenize(model.tokenize("什么是 warp？"))
assert text == "什么是 warp？"
try:
    Model("/nonexistent")  # (with the package's own tokenizer)
    raise SystemExit("no error")
except Qwen3Error as error:
    assert "/nonexistent" in str(error)
print("wheel: the package answers, streams, tokenizes and refuses")
END
(cd "$work" && venv/bin/mypy --strict use.py && venv/bin/python use.py "$here")
