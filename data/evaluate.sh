#!/bin/sh
# The evaluation table of the course for a model, in one command: as it is, with LoRA, with all parameters trained, with
# QLoRA; each with and without the notes at hand; beside the question as answer and the nearest training answer. All
# 23 chapters: exam, hard exam, development split, rephrased questions, choices.
#     data/evaluate.sh MODEL [OUT [train_lora's options]]
# MODEL is a model.bin or a Hugging Face folder with weights. OUT (default: evaluation) gets table.md and all that it is
# made of; what is there is not made again: the same command goes on where it stopped. A row that cannot be filled says
# why, and so does the whole table where there are no weights.
# SEEDS="1 2 3" trains with each of them (default: 1). METHODS="lora full" makes these rows only (default: as-it-is lora
# full qlora), SETS="dev mc_exam" these tables only. ROWS=N measures with the first N questions of each set only.
# EMBED=MODEL, a Qwen3-Embedding: one more row each, with passages found by its vectors, too. FULL="--full --lr 1e-5" is
# how all parameters are trained. DEVICE="-d cpu" is given to train_lora and to qwen3; PROGRAMS names their folder, where
# it is not the repository's.
set -eu
export LC_ALL=C
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
bin=${PROGRAMS:-$root}
die() { printf 'evaluate.sh: %s\n' "$*" >&2; exit 1; }
trap '[ $? -ne 130 ] || echo "evaluate.sh: stopped; the same command goes on" >&2' EXIT
trap 'exit 130' INT TERM
[ $# -ge 1 ] || { sed -n '2,14s/^# \{0,1\}//p' "$0" >&2; exit 1; }
model=$1 out=${2:-evaluation}
shift "$(($# < 2 ? $# : 2))"
course=$root/data/course
programs='qwen3 datagen'
for method in ${METHODS:=as-it-is lora full qlora}; do
    case $method in
    as-it-is) ;;
    lora | full | qlora) programs='qwen3 datagen train_lora' ;;
    *) die "METHODS: $method is none of as-it-is, lora, full, qlora" ;;
    esac
done
for p in $programs; do [ -x "$bin/$p" ] || die "$bin/$p: not there; run make first"; done
case ${ROWS:-1} in *[!0-9]* | 0*) die "ROWS=$ROWS: a whole number from 1 is expected" ;; esac
for seed in ${SEEDS:-1}; do case $seed in *[!0-9]*) die "SEEDS: $seed is no whole number" ;; esac; done

all='exam_qa chapters_exam exam_hard chapters_hard dev chapters_dev rephrased'
all="$all extra_dev mc_exam mc_chapters mc_chapters_hard mc_seen mc_chapters_seen mc_more_seen mc_extra_dev"
all="$all mc_extra_seen"
sets=${SETS:-$all}
for set in $sets; do
    case " $all " in *" $set "*) ;; *) die "SETS: $set is none of $all" ;; esac
done

weights= # the model's files, if it has weights
if [ -d "$model" ]; then
    for f in "$model"/*.safetensors "$model"/model.bin; do [ ! -f "$f" ] || weights="$weights $f"; done
elif [ -f "$model" ]; then weights=$model; fi
beside=$model
[ -d "$model" ] || beside=$(dirname -- "$model")
z=$beside/tokenizer.bin
[ -f "$z" ] || z=$root/tokenizer.bin

mkdir -p "$out"
common=$(ls -lL "$model" 2>/dev/null || echo none; cat "$course"/*.jsonl | cksum
    printf '%s\n' "${ROWS:-}" "${FULL:-}" "${DEVICE:-}" "${EMBED:-}" "$@")
if [ "$(cat "$out/common" 2>/dev/null)" != "$common" ]; then # other data or another model: nothing here can be used
    [ ! -e "$out/common" ] || die "$out: holds an evaluation of another model, data or options; name another folder"
    [ -z "$(ls -A "$out")" ] || die "$out: is not empty and holds no evaluation; name another folder"
    printf '%s\n' "$common" >"$out/common.new" && mv "$out/common.new" "$out/common"
fi

# Training data and questions.
cat "$course/gpu_qa.jsonl" "$course/train_hard.jsonl" "$course/chapters_train.jsonl" "$course/extra_train.jsonl" \
    >"$out/nearest.jsonl"
awk -f "$course/paraphrase.awk" "$course/paraphrases.jsonl" "$course/gpu_qa.jsonl" | cat "$out/nearest.jsonl" - >"$out/train.jsonl"
cat "$course/rephrased_qa.jsonl" "$course/rephrased_more_qa.jsonl" >"$out/rephrased.all"
for set in $sets; do [ "$set" = rephrased ] || cp "$course/$set.jsonl" "$out/$set.all"; done
for set in $sets; do head -n "${ROWS:-1000000}" "$out/$set.all" >"$out/$set.jsonl"; done

has() { "$bin/$1" --help 2>/dev/null | grep -q -e "$2"; } # PROGRAM OPTION
# train NAME OPTIONS...: OUT/NAME holds a model.bin or an adapter
train() {
    name=$1
    shift
    [ ! -f "$out/$name/trained" ] || return 0
    [ -f "$out/train.bin" ] ||
        "$bin/datagen" pack "$out/train.jsonl" "$out/train.bin" -z "$z" --max-len 1024 --info none --dropped "$out/dropped"
    again=--overwrite
    [ ! -f "$out/$name/state.safetensors" ] || again=--resume
    printf 'evaluate.sh: training %s\n' "$name" >&2
    # shellcheck disable=SC2086 # (DEVICE is several words)
    "$bin/train_lora" "$model" "$out/train.bin" -o "$out/$name" -z "$z" --max-len 1024 $again ${DEVICE:-} "$@" </dev/null
    : >"$out/$name/trained"
}
# measure SET NAME LABEL MODEL...: a row of the set's table, which is kept
measure() {
    set_=$1 row_=$2 label_=$3 # (all functions share their variables)
    shift 3
    mkdir -p "$out/answers"
    if [ ! -f "$out/answers/$set_.$row_.row" ]; then
        # shellcheck disable=SC2086
        "$root/data/measure.sh" "$label_" "$out/$set_.jsonl" "$out/answers/$set_.$row_.jsonl" "$@" -z "$z" ${DEVICE:-} \
            >"$out/answers/row.new"
        mv "$out/answers/row.new" "$out/answers/$set_.$row_.row"
    fi
    cat "$out/answers/$set_.$row_.row" >>"$out/$set_.rows"
}
# both NAME LABEL MODEL...: rows of every set, without the notes and with them
both() {
    name=$1 label=$2
    shift 2
    for set in $sets; do
        measure "$set" "$name" "$label" "$@"
        measure "$set" "$name.docs" "$label, with the notes" "$@" --docs "$course/notes" --index "$out/notes.index"
        [ -z "${EMBED:-}" ] || measure "$set" "$name.hybrid" "$label, with the notes, by vectors, too" "$@" \
            --docs "$course/notes" --index "$out/notes.index" --docs-embed "$EMBED"
    done
}
asked() { case " $METHODS " in *" $1 "*) ;; *) return 1 ;; esac } # METHOD
empty() { printf '| %s | %s | | | | | | | | | |\n' "$2" "$3" >>"$out/$1.rows"; } # SET LABEL REASON
trained() { # NAME: the model options for qwen3
    if [ -f "$out/$1/model.bin" ]; then both "$1" "$2" "$out/$1/model.bin"
    else both "$1" "$2" "$model" --adapter "$out/$1"; fi
}

for set in $sets; do
    : >"$out/$set.rows"
    # (the references serve as answers: these two rows use questions and training rows only)
    "$root/data/measure.sh" 'the question as answer' "$out/$set.jsonl" "$out/$set.jsonl" >>"$out/$set.rows"
    "$root/data/measure.sh" 'nearest training answer' "$out/$set.jsonl" "$out/$set.jsonl" --nearest "$out/nearest.jsonl" \
        >>"$out/$set.rows"
done
# row METHOD LABEL: writes why a row is missing, or succeeds
row() {
    why=
    asked "$1" || return 1
    if [ -z "$weights" ]; then why='not run here: no weights'
    elif [ "$1" = qlora ] && ! has train_lora --qlora; then why='not run here: train_lora has no --qlora'; fi
    [ -n "$why" ] || return 0
    for set in $sets; do empty "$set" "$2" "$why" && empty "$set" "$2, with the notes" "$why"; done
    return 1
}
if row as-it-is 'as it is'; then both as-it-is 'as it is' "$model"; fi
for seed in ${SEEDS:-1}; do
    if row lora "LoRA, seed $seed"; then
        train "lora-$seed" -s "$seed" "$@"
        trained "lora-$seed" "LoRA, seed $seed"
    fi
    if row full "all parameters, seed $seed"; then
        # shellcheck disable=SC2086
        train "full-$seed" ${FULL:---full --lr 1e-5} -s "$seed" "$@"
        trained "full-$seed" "all parameters, seed $seed"
    fi
    if row qlora "QLoRA, seed $seed"; then
        train "qlora-$seed" --qlora -s "$seed" "$@"
        trained "qlora-$seed" "QLoRA, seed $seed"
    fi
done

{
    printf 'Model: `%s`. %s\n' "$model" "${ROWS:+The first $ROWS questions of each set only.}"
    # shellcheck disable=SC3013 # (all common shells have -ef)
    [ ! "$model" -ef "$root/data/tiny/model.bin" ] || printf '\n%s\n' 'This is the default model. As it is it has read chapters 1 to 15 and questions on them: nothing of chapters 16 to 23, no
hard question, no question with choices, no passage in a prompt.'
    for set in $sets; do
        case $set in
        exam_qa) title='Exam, chapters 1 to 15: facts of no training row' ;;
        chapters_exam) title='Exam, chapters 16 to 23' ;;
        exam_hard) title='Hard exam, chapters 1 to 15: code, arithmetic, comparisons' ;;
        chapters_hard) title='Hard exam, chapters 16 to 23' ;;
        dev) title='Development split, chapters 1 to 15' ;;
        chapters_dev) title='Development split, chapters 16 to 23' ;;
        extra_dev) title='Development split, more rows of all chapters' ;;
        rephrased) title='Training questions of chapters 1 to 15 in other words' ;;
        mc_exam) title='Choices on the exam'\''s facts, chapters 1 to 15 (chance: 25)' ;;
        mc_chapters) title='Choices on the exam'\''s facts, chapters 16 to 23 (chance: 25)' ;;
        mc_chapters_hard) title='Choices on the hard exam'\''s facts, chapters 16 to 23 (chance: 25)' ;;
        mc_seen) title='Choices on facts of training rows, chapters 1 to 15 (chance: 25)' ;;
        mc_chapters_seen) title='Choices on facts of training rows, chapters 16 to 23 (chance: 25)' ;;
        mc_more_seen) title='More choices on facts of training rows, all chapters (chance: 25)' ;;
        mc_extra_dev) title='Choices on facts of extra_dev, all chapters (chance: 25)' ;;
        mc_extra_seen) title='Choices on facts of extra_train, all chapters (chance: 25)' ;;
        esac
        printf '\n### %s\n\n' "$title"
        "$root/data/measure.sh" --header answers
        cat "$out/$set.rows"
    done
    printf '\nMeans in percent with 95%% intervals over the questions; two rows whose intervals overlap are not shown to differ.\n'
} >"$out/table.new"
mv "$out/table.new" "$out/table.md"
cat "$out/table.md"
