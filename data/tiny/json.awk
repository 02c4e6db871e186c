# Reads fields of a line of JSON and writes training rows, for define.awk and basic.awk.
# The text of a field, as escaped in the JSON.
function text(key) {
    if (!match($0, "\"" key "\": \"([^\"\\\\]|\\\\.)*\"")) return ""
    return substr($0, RSTART + length(key) + 5, RLENGTH - length(key) - 6)
}
# Writes the texts of a list to into[1 ...]; returns their number.
function texts(key, into, n, rest) {
    if (!match($0, "\"" key "\": \\[(\"([^\"\\\\]|\\\\.)*\"(, )?)*\\]")) return 0
    rest = substr($0, RSTART + length(key) + 5, RLENGTH - length(key) - 6)
    for (n = 0; match(rest, /"([^"\\]|\\.)*"/); rest = substr(rest, RSTART + RLENGTH))
        into[++n] = substr(rest, RSTART + 1, RLENGTH - 2)
    return n
}
function print_row(question, answer, id) {
    printf "{\"instruction\": \"%s\", \"input\": \"\", \"output\": \"%s\", \"id\": \"%s\"}\n", question, answer, id
}
