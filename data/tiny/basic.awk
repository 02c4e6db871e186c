# The test of 60 basic questions (basic_test.jsonl: the right definition; none if the course does not teach the term).
#     awk -f json.awk -f basic.awk definitions.jsonl basic_test.jsonl > rows.jsonl     rows for `qwen3 --eval`
#     awk -f json.awk -f basic.awk definitions.jsonl basic_test.jsonl answers.jsonl    counts, and answers to read
# An answer is right if it is the definition word for word, in either language; or, if there is none, if it says that
# the model does not know. Otherwise it is wrong.
FILENAME ~ /definitions/ { zh[text("id")] = text("zh"); en[text("id")] = text("en"); next }
FILENAME ~ /basic_test/ {
    term[text("id")] = text("term")
    if (ARGC > 3) next
    answer = text("instruction") ~ /[^ -~]/ ? zh[text("term")] : en[text("term")]
    print_row(text("instruction"), answer, text("id"))
    next
}
{
    said = text("answer")
    id = text("id")
    ignorant = said ~ /^(这个我还没学过|这个我不知道|I have not learnt that|I do not know that)/
    right = term[id] == "" ? ignorant : said == zh[term[id]] || said == en[term[id]]
    n++
    rights += right
    unknown += !right && ignorant
    if (!right) print "# " id ": " text("question") " -> " said
}
END {
    if (n) printf "%d questions: %d right, %d wrong, %d not known\n", n, rights, n - rights - unknown, unknown
}
