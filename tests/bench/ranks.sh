#!/bin/bash
# Two GPUs beside one of the same machine, in one run: training, its start, serving. From the repository's root:
#     tests/bench/ranks.sh MODEL.bin ROWS.bin [WORKLOAD.jsonl]     ROWS: rows of 513 tokens; bench_serve --write WORKLOAD
# BIN=. has the programs, GPUS=2, DEVICE="-d cpu". A line a row: what one GPU does, what all do, the ratio; and what as
# many programs do that know nothing of each other, one on each GPU at the same time: more cannot be had on that machine.
set -u
model=$1 rows=$2 workload=${3:-} bin=${BIN:-.} gpus=${GPUS:-2}
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
work=$(mktemp -d) begun=$SECONDS
trap 'rm -rf "$work"' EXIT

# train NAME LINES OPTION... trains until the log has so many lines, and ends it there: writing all parameters and the
# state takes longer than the steps. Its first line is the seconds to the first step.
train() {
    local name=$1 lines=$2 start end pid
    shift 2
    rm -rf "${work:?}/$name" "$work/$name.first"
    start=$(date +%s.%N)
    "$bin/train_lora" "$model" "$rows" -o "$work/$name" --max-len 513 --steps 100000 --save-every 100000 ${DEVICE:-} "$@" 2>"$work/$name.err" &
    pid=$!
    while kill -0 $pid 2>/dev/null; do
        end=$(cat "$work/$name/trainer_log.jsonl" 2>/dev/null | wc -l)
        [ "$end" -lt 1 ] || [ -f "$work/$name.first" ] ||
            awk -v a="$start" -v b="$(date +%s.%N)" 'BEGIN {printf "%.2f\n", b - a}' >"$work/$name.first"
        [ "$end" -lt "$lines" ] || break
        sleep 0.02
    done
    kill -KILL $pid 2>/dev/null || { echo "$name: ended too early:"; tail -n 3 "$work/$name.err"; }
    wait $pid 2>/dev/null
    sleep 1 # the other ranks notice
}
field() { sed -n "s/.*\"$1\": \([-0-9.e+]*\).*/\1/p" "$work/$2/trainer_log.jsonl"; }
# Tokens a second from the fifth step to the last; what the log calls throughput is from the first on.
speed() {
    paste <(field total_tokens "$1") <(field throughput "$1") |
        awk 'NR == 5 {n = $1; t = $1 / $2} {last = $1; at = $1 / $2} END {if (at > t) printf "%.0f", (last - n) / (at - t)}'
}
waited() { # share of the time, by the last line
    paste <(field waited "$1") <(field total_tokens "$1") <(field throughput "$1") | tail -n 1 | awk '{printf "%.1f%%", 100 * $1 / ($2 / $3)}'
}
row() { # row WHAT ONE MANY REST
    awk -v w="$1" -v a="${2:-0}" -v b="${3:-0}" -v r="$4" 'BEGIN {printf "%-34s %10.0f %10.0f   %.3f x   %s\n", w, a, b, (a > 0 ? b / a : 0), r}'
}

echo "$gpus GPUs beside one                 tokens/s 1   tokens/s $gpus"
pair() { # pair WHAT LINES OPTION...
    local what=$1 lines=$2
    shift 2
    train one "$lines" "$@"
    train many "$lines" "$@" --gpus "$gpus"
    train late "$lines" "$@" --gpus "$gpus" --no-overlap
    for g in $(seq 0 $((gpus - 1))); do CUDA_VISIBLE_DEVICES=$g train "apart.$g" "$lines" "$@" & done
    wait
    row "$what" "$(speed one)" "$(speed many)" "waited $(waited many); --no-overlap $(speed late), $(waited late)"
    row "    apart" "$(speed one)" "$(for g in $(seq 0 $((gpus - 1))); do speed "apart.$g"; echo; done | awk '{n += $1} END {print n}')" ""
    echo "    seconds to the first step: $(cat "$work/one.first") and $(cat "$work/many.first")"
    # The same sums whether overlapped or not, so the same losses.
    for log in many late; do paste <(field loss $log) <(field grad_norm $log) | head -n 10 >"$work/$log.losses"; done
    cmp -s "$work/many.losses" "$work/late.losses" && echo "    the same N: the same bits" || echo "    the same N: OTHER BITS"
}
pair "LoRA, 16 x 512 a GPU" 60 --batch 16
pair "LoRA, 64 x 512 a GPU" 20 --batch 64
pair "all parameters, 64 x 512 a GPU" 16 --full --batch 64

# The curve: as many rows a step on one GPU.
train one 30 --batch $((8 * gpus)) --warmup 0
train many 30 --batch 8 --warmup 0 --gpus "$gpus"
paste <(field loss one) <(field loss many) | head -n 30 |
    awk '{d = ($1 - $2) / $1; if (d < 0) d = -d; if (d > m) m = d} END {printf "curve of %d steps: losses differ by %.1e at most\n", NR, m}'

if [ -n "$workload" ] && "$bin/serve" --help | grep -q -- --gpus; then
    { cat "$workload" && sed 's/"custom_id": "/&again-/' "$workload"; } >"$work/twice.jsonl"
    for n in 1 "$gpus"; do
        "$bin/serve" "$model" --batch "$work/twice.jsonl" -o "$work/answers.$n" --gpus "$n" 2>&1 | tr '\r' '\n' | tail -n 1 | sed "s/^/serve --gpus $n: /"
    done
    for g in $(seq 0 $((gpus - 1))); do
        awk -v n="$gpus" -v g="$g" 'NR % n == g' "$work/twice.jsonl" >"$work/half.$g.jsonl"
        CUDA_VISIBLE_DEVICES=$g "$bin/serve" "$model" --batch "$work/half.$g.jsonl" -o "$work/answers.half.$g" 2>&1 | tr '\r' '\n' | tail -n 1 | sed "s/^/serve, apart: /" &
    done
    wait
fi
echo "in $((SECONDS - begun)) s"
