#!/bin/sh
# This machine's speeds beside its own ceilings, for docs/cards.md: `make report`, at most ten minutes.
#     tests/bench/report.sh FOLDER MODEL.bin
# Decoding, prompts, serve's two presets and LoRA, on the 0.6B's shape with random weights. FOLDER gets report.md and
# report.json (by report.awk beside this script), and keeps each step's output and log. A step that fails is one line on
# stderr and in the report; the others go on. PROGRAMS names the folder of the programs (default: this one), ROWS the
# program that makes rows to train (tests/bench/rows.cpp), SECONDS_MOST the time for all (600).
set -u
# Numbers have points, and the programs count GPUs as nvidia-smi does.
export LC_ALL=C CUDA_DEVICE_ORDER=PCI_BUS_ID
[ $# -eq 2 ] || { sed -n '2,3s/^# \{0,1\}//p' "$0" >&2; exit 1; }
work=$1 model=$2 bin=${PROGRAMS:-.} rows=${ROWS:-build/g++/bench/rows} most=${SECONDS_MOST:-600}
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
begun=$(date +%s)
trap 'exit 130' INT TERM
mkdir -p "$work" || exit 1
parts="bench.json serve-nano.jsonl serve-exam.jsonl lora-16x512.jsonl lora-64x512.jsonl lora-1x128.jsonl"
for old in machine.tsv $parts; do rm -f "$work/$old"; done # (of a run before)
tell() { printf 'report: %3d s  %s\n' $(($(date +%s) - begun)) "$*" >&2; }
fact() { printf '%s\t%s\n' "$1" "$2" >>"$work/machine.tsv"; }
failed() { # failed NAME STATUS: one line
    why=$(tr '\r' '\n' <"$work/$1.log" | grep . | tail -n 1 | cut -c 1-300)
    case $2 in 124 | 137) why="no end within $limit s" ;; esac
    tell "$1 failed: ${why:-status $2}"
    fact failed "$1: ${why:-status $2}"
}
# run NAME SECONDS COMMAND...: no longer than that, nor than what is left of the time for all; stdout and stderr go to
# NAME.out and NAME.log.
run() {
    name=$1 limit=$((most - 8 - $(date +%s) + begun))
    [ "$limit" -lt "$2" ] || limit=$2
    shift 2
    [ "$limit" -ge 1 ] || { echo "no time was left" >"$work/$name.log"; return 1; }
    tell "$name, at most $limit s"
    timeout --foreground -k 3 "$limit" "$@" >"$work/$name.out" 2>"$work/$name.log" </dev/null
}

tell "machine"
fact date "$(date -u +%Y-%m-%dT%H:%MZ)"
commit=$(git rev-parse --short=12 HEAD 2>/dev/null) && { git diff --quiet HEAD || commit="$commit, changed"; }
fact commit "${commit:-}"
fact system "$(uname -srm)"
fact cpu "$(sed -n 's/^model name[^:]*: *//p' /proc/cpuinfo 2>/dev/null | head -n 1)"
fact cores "$(getconf _NPROCESSORS_ONLN)"
fact compiler "$(${CXX:-g++} --version 2>/dev/null | head -n 1)"
fact nvcc "$(${NVCC:-nvcc} --version 2>/dev/null | sed -n 's/.*release [^V]*V//p')"
which=${CUDA_VISIBLE_DEVICES:-0}
nvidia-smi -i "${which%%,*}" --format=csv,noheader,nounits 2>/dev/null \
    --query-gpu=name,driver_version,power.limit,clocks.max.sm,clocks.max.memory,memory.total >"$work/gpu.csv" &&
    awk -F ', *' '{n = split("gpu driver power_limit_W clock_MHz memory_clock_MHz memory_MiB", name, " ")
                   for (i = 1; i <= n; i++) print name[i] "\t" $i; exit}' "$work/gpu.csv" >>"$work/machine.tsv"

if [ ! -f "$model" ]; then
    run synthesize 90 "$bin/qwen3" --synthesize 0.6B "$model" || { failed synthesize $?; exit 1; }
fi

if run bench 300 "$bin/qwen3" "$model" --bench --json; then mv "$work/bench.out" "$work/bench.json"
else failed bench $?; fi
device=$(sed -n 's/.*"device": "\([^"]*\)".*/\1/p' "$work/bench.json" 2>/dev/null)
[ -n "$device" ] || device=$(grep -q '^gpu' "$work/machine.tsv" && echo gpu || echo cpu)
fact device "$device"

# serve PRESET: all of its requests; on a CPU the first 4, of 128 tokens (nano), with answers of 32.
serve() {
    if [ ! -x "$bin/serve" ]; then
        echo "serve was not built: it needs libmicrohttpd" >"$work/serve-$1.log"
        failed "serve-$1" 1
        return
    fi
    run "serve-$1" 20 "$bin/bench_serve" --preset "$1" --write "$work/all.jsonl" || { failed "serve-$1" $?; return; }
    if [ "$device" = cpu ]; then
        head -n 4 "$work/all.jsonl" | sed 's/\("prompt": \[\([0-9]*, \)\{127\}[0-9]*\)[^]]*/\1/
                                           s/"max_tokens": [0-9]*/"max_tokens": 32/'
    else cat "$work/all.jsonl"; fi >"$work/requests.jsonl"
    rm -f "$work/answers.jsonl"*
    run "serve-$1" 110 "$bin/serve" "$model" --batch "$work/requests.jsonl" -o "$work/answers.jsonl" ||
        { failed "serve-$1" $?; return; }
    { cat "$work/answers.jsonl"; tr '\r' '\n' <"$work/serve-$1.log" | tail -n 1; } >"$work/serve-$1.new"
    mv "$work/serve-$1.new" "$work/serve-$1.jsonl"
}
serve nano
serve exam

# train ROWS TOKENS STEPS: in the first of three ways that fits into memory. If the time ends before the steps do, those
# that were logged count.
train() {
    run "lora-$1x$2" 20 "$rows" tokenizer.bin "$work/rows.bin" 1280 $(($2 + 1)) || { failed "lora-$1x$2" $?; return; }
    for how in "--batch $1" "--batch $1 --recompute" "--batch $((($1 + 3) / 4)) --accum 4 --recompute"; do
        rm -rf "$work/lora"
        # shellcheck disable=SC2086
        run "lora-$1x$2" 110 "$bin/train_lora" "$model" "$work/rows.bin" -o "$work/lora" --max-len 513 --steps "$3" \
            --save-every 100000 -z tokenizer.bin $how
        status=$?
        grep -q 'training needs' "$work/lora-$1x$2.log" || break
    done
    fact "lora-$1x$2" "$how"
    logged=$(grep -c . "$work/lora/trainer_log.jsonl" 2>/dev/null)
    if [ "${logged:-0}" -ge 2 ]; then
        mv "$work/lora/trainer_log.jsonl" "$work/lora-$1x$2.jsonl"
    else failed "lora-$1x$2" "$status"; fi
    rm -rf "$work/lora"
}
if [ "$device" = cpu ]; then train 1 128 4; else train 16 512 60; train 64 512 20; fi

fact seconds $(($(date +%s) - begun))
for form in md json; do
    set -- "$work/machine.tsv"
    for file in $parts; do
        [ ! -s "$work/$file" ] || set -- "$@" "$work/$file"
    done
    awk -v form=$form -f "$here/report.awk" "$@" >"$work/report.$form.new" || exit 1
    mv "$work/report.$form.new" "$work/report.$form"
done
cat "$work/report.md"
tell "$work/report.md and $work/report.json; docs/cards.md says how to send them"
! grep -q '^failed' "$work/machine.tsv"
