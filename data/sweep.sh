#!/bin/sh
# Trains a model with each configuration of a grid and measures every one: a table, a picture of the losses, the best.
#     data/sweep.sh MODEL TRAIN.jsonl TEST.jsonl [GRID [OUT [train_lora's options]]]
# GRID (default: data/sweep.txt, the course's eight) is a table of words: its first line names options of train_lora
# without their dashes, each other line is a run; `-` leaves an option out, `yes` gives one that takes no value (full).
# OUT (default: sweep) gets table.md, loss.svg and a folder for each run. What is finished is not trained again: the
# same command goes on where it stopped.
# DEVICE="-d cpu" is given to train_lora and to qwen3; PROGRAMS names their folder, where it is not the repository's.
set -eu
export LC_ALL=C
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
bin=${PROGRAMS:-$root}
die() { printf 'sweep.sh: %s\n' "$*" >&2; exit 1; }
trap '[ $? -ne 130 ] || echo "sweep.sh: stopped; the same command goes on" >&2' EXIT
trap 'exit 130' INT TERM

[ $# -ge 3 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 1; }
model=$1 train=$2 test=$3 grid=${4:-$root/data/sweep.txt} out=${5:-sweep}
shift "$(($# < 5 ? $# : 5))"
for p in qwen3 train_lora datagen; do [ -x "$bin/$p" ] || die "$bin/$p: not there; run make first"; done
[ -e "$model" ] || die "$model: no such model"
for f in "$train" "$test" "$grid"; do [ -f "$f" ] || die "$f: no such file"; done
beside=$model
[ -d "$model" ] || beside=$(dirname -- "$model")
z=$beside/tokenizer.bin
[ -f "$z" ] || z=$root/tokenizer.bin

# The grid without comments and blank lines; every row has as many words as the header, and no two are the same.
rows=$(awk '{sub(/#.*/, ""); sub(/\r$/, "")} NF {$1 = $1; print}' "$grid")
fault=$(printf '%s\n' "$rows" | awk '
NR == 1 {n = NF}
NF != n {print "the row \"" $0 "\" has " NF " words, the header " n; exit}
/[^-+.,A-Za-z0-9_ ]/ {print "the row \"" $0 "\" has a character that no option needs"; exit}
seen[$0]++ {print "the row \"" $0 "\" is there twice"; exit}
END {if (NR < 2) print "a header and rows are expected"}')
[ -z "$fault" ] || die "$grid: $fault"
header=$(printf '%s\n' "$rows" | head -n 1)
rows=$(printf '%s\n' "$rows" | tail -n +2)

mkdir -p "$out"
common=$(ls -lL "$model"; cksum <"$train"; cksum <"$test"; printf '%s\n' "${DEVICE:-}" "$@")
if [ "$(cat "$out/common" 2>/dev/null)" != "$common" ]; then # other data or another model: nothing here can be used
    [ ! -e "$out/common" ] || die "$out: holds a sweep of another model, of other data or options; name another folder"
    [ -z "$(ls -A "$out")" ] || die "$out: is not empty and holds no sweep; name another folder"
    printf '%s\n' "$common" >"$out/common.new" && mv "$out/common.new" "$out/common"
fi
pack() {
    [ -f "$out/$2.bin" ] || "$bin/datagen" pack "$1" "$out/$2.bin" -z "$z" --info none --dropped "$out/$2.dropped"
}
pack "$train" train
pack "$test" test

# measure NAME LABEL [MODEL...]: a row of the table, kept in the run's folder and not measured again
measure() {
    name=$1 label=$2
    shift 2
    if [ ! -f "$out/$name/row" ]; then
        # shellcheck disable=SC2086 # (DEVICE is several words)
        "$root/data/measure.sh" "$label" "$test" "$out/${name%/echo}/answers.jsonl" "$@" ${1:+-z "$z" ${DEVICE:-}} \
            >"$out/$name/row.new"
        mv "$out/$name/row.new" "$out/$name/row"
    fi
    cat "$out/$name/row" >>"$out/table.new"
}
columns=$(printf '%s\n' "$header" | sed 's/ / | /g; s/-/ /g')
rest=$(printf '%s\n' "$header" | awk '{for (i = 2; i <= NF; i++) printf " | -"}') # for a row without options
mkdir -p "$out/as-it-was/echo"
"$root/data/measure.sh" --header "$columns" >"$out/table.new"
measure as-it-was "as it was$rest" "$model"
measure as-it-was/echo "the question as answer$rest"

number=0
: >"$out/curves.new"
while IFS= read -r line; do
    run=$(printf '%s\n' "$line" | tr ' ' '_') number=$((number + 1))
    options=$(printf '%s\n%s\n' "$header" "$line" | awk '
        NR == 1 {split($0, name)}
        NR == 2 {for (i = 1; i <= NF; i++) if ($i != "-") printf "--%s %s ", name[i], $i == "yes" ? "" : $i}')
    if [ ! -f "$out/$run/trained" ]; then
        printf 'sweep.sh: run %d of %d: %s\n' "$number" "$(printf '%s\n' "$rows" | grep -c .)" "$options" >&2
        again=--overwrite
        [ ! -f "$out/$run/state.safetensors" ] || again=--resume
        # shellcheck disable=SC2086 # (the grid has no character that the shell would interpret)
        "$bin/train_lora" "$model" "$out/train.bin" -o "$out/$run" --eval "$out/test.bin" -z "$z" $again ${DEVICE:-} \
            $options "$@" </dev/null
        : >"$out/$run/trained"
        rm -f "$out/$run/state.safetensors"
    fi
    label=$(printf '%s\n' "$line" | sed 's/ / | /g')
    if [ -f "$out/$run/model.bin" ]; then measure "$run" "$label" "$out/$run/model.bin" </dev/null
    else measure "$run" "$label" "$model" --adapter "$out/$run" </dev/null; fi
    printf '%s\t%s\n' "$out/$run/trainer_log.jsonl" "$line" >>"$out/curves.new"
done <<END
$rows
END
awk -v header="$header" -f "$root/data/losses.awk" "$out/curves.new" >"$out/loss.svg.new"
mv "$out/loss.svg.new" "$out/loss.svg"
rm "$out/curves.new"

# The best run by ROUGE-L, and how many other intervals overlap with its own.
awk -v header="$header" -F ' *[|] *' '
BEGIN {n = split(header, name, " ")}
NR > 4 {
    split($(NF - 5), x, /[][ ,]+/)
    low[NR] = x[2]; high[NR] = x[3]; runs++
    if (best && x[1] <= top) next
    best = NR; top = x[1]; run = ""
    for (i = 1; i <= n; i++) run = run name[i] " " $(i + 1) ", "
}
END {
    for (r in low) if (r != best && high[r] >= low[best]) overlap++
    printf "\nBest by ROUGE-L: %sat %.2f [%.2f, %.2f]. ", run, top, low[best], high[best]
    if (overlap) printf "The intervals of %d of %d other runs overlap with it: ", overlap, runs - 1
    if (overlap) print "a difference to them is not shown."
    else if (runs > 1) print "No interval of another run overlaps with it."
    else print "There is no other run."
}' "$out/table.new" >"$out/table.best"
cat "$out/table.best" >>"$out/table.new"
rm "$out/table.best"
mv "$out/table.new" "$out/table.md"
cat "$out/table.md"
printf 'sweep.sh: %s/table.md, %s/loss.svg\n' "$out" "$out" >&2
