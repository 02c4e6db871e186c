# exercise.awk: the skeleton of an exercise, from the laboratory that has it (docs/lab.md, "Exercises").
#
#     awk -v name=matmul-3 -f lab/exercise.awk lab/*.cu         the file that has it, with a TODO where its lines stand
#     awk -v list=1 -f lab/exercise.awk lab/*.cu                the names of all
#
# A laboratory marks the lines that a student writes:
#     // exercise matmul-3: what is to do, and hints, in one comment or several
#     // instead: float sum = 0;                                a line of code that the skeleton has in their place
#     a solution that does not begin with a comment
#     // end of exercise
function bad(text) { printf "%s\n", text | "cat >&2"; failed = 1; exit 1 }
FNR == 1 {
    if (found) exit
    if (inside != "") bad(before ": exercise " inside " has no end")
    lines = 0; before = FILENAME
}
/^ *\/\/ exercise [a-z_]+-[0-9]+: / {
    if (inside != "") bad(FILENAME ":" FNR ": exercise " inside " has no end")
    inside = $3; sub(/:$/, "", inside); hints = 1; mine = inside == name
    if (!(inside in seen)) { seen[inside] = 1; all = all " " inside; if (list) print inside }
    if (mine) { found = 1; sub(/exercise/, "TODO"); text[++lines] = $0 }
    next
}
/^ *\/\/ end of exercise$/ {
    if (inside == "") bad(FILENAME ":" FNR ": no exercise ends here")
    if (mine) { sub(/end of exercise/, "end of TODO"); text[++lines] = $0 }
    inside = ""; next
}
inside != "" && hints && /^ *\/\// {
    if (mine) { sub(/\/\/ instead: /, ""); text[++lines] = $0 }
    next
}
{ hints = 0; if (inside == "" || !mine) text[++lines] = $0 }
END {
    if (failed) exit 1
    if (inside != "") bad(before ": exercise " inside " has no end")
    if (list) exit
    if (!found) bad("there is no exercise " name "; there are:" all)
    for (i = 1; i <= lines; i++) print text[i]
}
