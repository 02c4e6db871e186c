#!/bin/sh
# Fine-tuning, shown on the default model: english_train.jsonl teaches it to answer Chinese questions in English, and
# english_test.jsonl, other questions, measures how well. Prints two tables and draws one picture:
#     make -C data sweep        (or: data/tiny/sweep.sh; DEVICE="-d cpu" names a device)
# SHORT=1 takes one step a run and no time: it tries the commands, not the model.
set -e
cd "$(dirname "$0")/../.."
B=build/sweep model=data/tiny/model.bin z="-z data/tiny/tokenizer.bin"
mkdir -p $B
for part in train test; do
    ./datagen pack data/course/english_$part.jsonl $B/$part.bin $z --info none
done

# train NAME OPTIONS...: a run in $B/NAME
train() {
    name=$1
    shift
    ./train_lora $model $B/train.bin -o $B/$name --overwrite $z --eval $B/test.bin $DEVICE -s 1 \
        --save-every 1000000 "$@" ${SHORT:+--epochs 1e-3} >&2
}
measure() { # LABEL NAME MODEL...
    label=$1 name=$2
    shift 2
    data/tiny/measure.sh "$label" data/course/english_test.jsonl $B/$name.answers.jsonl "$@" $z $DEVICE ${SHORT:+-n 4}
}
columns='ended | loss | ROUGE-1 | ROUGE-2 | ROUGE-L | BLEU-4 |'

echo "| 40 held-out questions, answered in English | rows | $columns"
echo '|---|---|---|---|---|---|---|---|'
measure 'as it was' base $model
train r8 --rank 8 --alpha 16 --lr 1e-3 --epochs 30
measure 'LoRA r = 8' r8 $model --adapter $B/r8
train r32 --rank 32 --alpha 64 --lr 1e-3 --epochs 30
measure 'LoRA r = 32' r32 $model --adapter $B/r32
train full --full --lr 3e-4 --epochs 30
measure 'all parameters' full $B/full/model.bin

# The course's eight: its recipe, with the learning rate and the epochs that so small a model needs, then a change each.
echo
echo "| rank | alpha | lr | epochs | dropout | weight decay | rows | $columns"
echo '|---|---|---|---|---|---|---|---|---|---|---|---|---|'
while read -r rank alpha lr epochs dropout decay; do
    name=r$rank-a$alpha-lr$lr-e$epochs-d$dropout-w$decay
    train $name --rank $rank --alpha $alpha --lr $lr --epochs $epochs --dropout $dropout --weight-decay $decay </dev/null
    measure "$rank | $alpha | $lr | $epochs | $dropout | $decay" $name $model --adapter $B/$name </dev/null
done <<END
32  64 1e-3   20 0.1 0.01
 8  16 1e-3   20 0.1 0.01
64 128 1e-3   20 0.1 0.01
32  64 3e-4   20 0.1 0.01
32  64 3e-3   20 0.1 0.01
32  64 1e-3   60 0.1 0.01
32  64 1e-3   20 0   0.01
32  64 1e-3   20 0.1 0.1
END

# The losses of the first three runs, smoothed over ten steps, in one picture; dots are the held-out loss.
awk -v B=$B '
function number(line, key) {
    if (!match(line, "\"" key "\": [-+.0-9e]+")) return -1
    return substr(line, RSTART + length(key) + 4, RLENGTH - length(key) - 4) + 0
}
function across(step) { return 60 + 720 * step / total }
function up(loss) { return 360 - 340 * loss / high }
BEGIN {
    split("r8 r32 full", run, " "); split("#05a #292 #c30", colour, " "); split("LoRA r = 8,LoRA r = 32,all parameters", label, ",")
    for (r = 1; r <= 3; r++)
        for (file = B "/" run[r] "/trainer_log.jsonl"; (getline line < file) > 0; n++) {
            of[n] = r; step[n] = number(line, "current_steps"); total = number(line, "total_steps")
            held[n] = (loss[n] = number(line, "eval_loss")) >= 0
            if (!held[n]) loss[n] = number(line, "loss")
            if (loss[n] > high) high = int(loss[n]) + 1
        }
    print "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 800 400\" font-family=\"sans-serif\" font-size=\"12\">"
    print "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>"
    for (y = 0; y <= high; y++)
        printf "<path d=\"M60 %gH780\" stroke=\"#ddd\"/><text x=\"54\" y=\"%g\" text-anchor=\"end\">%d</text>\n", up(y), up(y) + 4, y
    for (r = 1; r <= 3; r++) {
        points = ""; mean = -1
        for (i = 0; i < n; i++) {
            if (of[i] != r) continue
            if (held[i]) printf "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3\" fill=\"%s\"/>\n", across(step[i]), up(loss[i]), colour[r]
            else {
                mean = mean < 0 ? loss[i] : mean + (loss[i] - mean) * 0.1
                points = points sprintf("%.1f,%.1f ", across(step[i]), up(mean))
            }
        }
        printf "<polyline points=\"%s\" fill=\"none\" stroke=\"%s\" stroke-width=\"2\"/>\n", points, colour[r]
        printf "<text x=\"770\" y=\"%d\" text-anchor=\"end\" fill=\"%s\">%s</text>\n", 20 + 16 * r, colour[r], label[r]
    }
    printf "<text x=\"420\" y=\"390\" text-anchor=\"middle\">%d steps; line: training loss, dots: held-out loss</text>\n</svg>\n", total
}' > $B/sweep.svg
