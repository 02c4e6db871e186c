# Training rows that ask for definitions, each in many wordings:
#     awk -f json.awk -f define.awk basic_test.jsonl gpu_qa.jsonl ... wordings.txt definitions.jsonl unknown_terms.txt
# wordings.txt is crossed with the names of definitions.jsonl, ASKED[language] rows per term, and with those of
# unknown_terms.txt, UNKNOWN rows per name, whose answer is that the course does not teach them. A question found in a
# file before wordings.txt, ignoring case, blanks and punctuation, is skipped: test questions are never trained, and a
# question of the course keeps its one answer.
BEGIN {
    ASKED["zh"] = 40; ASKED["en"] = 28; UNKNOWN = 5
    not_learnt["zh"] = "这个我还没学过。我是一个只学过 GPU 编程课的小演示模型，课上没有讲到的问题答不了。可以问我：“什么是共享内存？”"
    not_learnt["en"] = "I have not learnt that. I am a small demonstration model that has read one course on GPU " \
        "programming, and nothing else. You can ask me: \\\"What is shared memory?\\\""
}
function plain(question) {
    question = tolower(question)
    gsub(/[][ \t?.!,:;'"()]|？|。|！|，|、|：|；|（|）|“|”/, "", question)
    return question
}
function row(question, answer, id) {
    if (plain(question) in taken) return
    taken[plain(question)]
    print_row(question, answer, id)
}
# Puts a name into a wording. Between a Chinese and a Latin letter every second question has a blank; every fifth is in
# lower case.
function wording(language, i, name, before, after, gap) {
    before = after = wordings[language, i % count[language] + 1]
    sub(/\{\}.*/, "", before)
    sub(/.*\{\}/, "", after)
    gap = i % 2 ? " " : ""
    if (language == "en") gap = ""
    before = before (before ~ /[^ -~]$/ && name ~ /^[ -~]/ ? gap : "")
    after = (after ~ /^[^ -~]/ && name ~ /[ -~]$/ ? gap : "") after
    return i % 5 ? before name after : tolower(before name after)
}
function define(language, names, asks, n, i) {
    n = texts("names_" language, names)
    for (i = 1; i <= ASKED[language]; i++)
        row(wording(language, i * 53 + terms * 37, names[i % n + 1]), text(language), text("id") "-" language i)
    n = texts("ask_" language, asks)
    for (i = 1; i <= n; i++) row(asks[i], text(language), text("id") "-" language "-ask" i)
}
FILENAME ~ /wordings/ { split($0, part, "\t"); wordings[part[1], ++count[part[1]]] = part[2]; next }
FILENAME ~ /definitions/ { terms++; define("zh"); define("en"); next }
FILENAME ~ /unknown_terms/ {
    split($0, part, "\t")
    for (i = 1; i <= UNKNOWN; i++)
        row(wording(part[1], i * 53 + FNR * 37, part[2]), not_learnt[part[1]], "n-" FNR "-" i)
    next
}
{ taken[plain(text("instruction"))] }
