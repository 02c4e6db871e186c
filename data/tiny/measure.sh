#!/bin/sh
# One row of a Markdown table: what a model answers to questions, beside the answers that stand there.
#     data/tiny/measure.sh LABEL QUESTIONS.jsonl ANSWERS.jsonl MODEL [qwen3's options]
# Its columns: label, rows, answers that ended by themselves, loss, ROUGE-1, ROUGE-2, ROUGE-L, BLEU-4 (0 to 100).
set -e
root=$(dirname "$0")/../..
label=$1 questions=$2 answers=$3
shift 3
rm -f "$answers" "$answers.partial"
said=$("$root/qwen3" "$@" --eval "$questions" -o "$answers" 2>&1)
scores=$("$root/datagen" score "$answers" "$questions")
echo "$said" | awk -v label="$label" '/^rows / {printf "| %s | %d | %d | %.4f |", label, $2, $6, $8}'
echo "$scores" | awk '/^(rouge|bleu)-/ {printf " %.2f |", $2} END {print ""}'
