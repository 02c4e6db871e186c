#!/bin/sh
# Runs suites, JOBS at a time (default 1), and closes with one line that counts their test cases.
# Usage: tests/run.sh PROGRAM[:SUITE]...   from the repository's root; SUITE is the file of those of its test cases that
# are meant. NO_GPU=N: N test cases need a GPU and there is none. RUNNER: what programs of another CPU run under.
# CASES: doctest's option for some of the test cases.
if [ "$1" = --one ]; then # a suite; what it says comes at once, when it has ended
    program=${3%%:*} suite=${3#"$program"}
    start=$(date +%s)
    name=$(basename "${suite:-$program}" | tr -d :) result=$2/$(echo "$3" | tr / _)
    filter="${suite:+--source-file=*/$name.cpp} $CASES"
    out=$($RUNNER "$program" --no-intro=true --no-colors=true $filter 2>&1)
    code=$?
    times >"$result.times"
    cpu=$(awk 'NR == 2 {for (i = 1; i <= 2; i++) {split($i, t, "m"); all += 60 * t[1] + t[2]} printf "%d", all}' "$result.times")
    cases=$($RUNNER "$program" --count --no-skip=true $filter | sed -n 's/.*filters: *//p')
    # [doctest] test cases:  5 |  4 passed | 1 failed | 0 skipped
    line=$(printf '%s\n' "$out" | grep '^\[doctest\] test cases:' | tail -n 1)
    set -- $(printf '%s\n' "$line" | sed 's/[^0-9]\{1,\}/ /g')
    passed=${2:-0} failed=${3:-0}
    skipped=$((${cases:-0} - passed - failed)) # (what doctest says includes the other suites' cases)
    {
        if [ $code -ne 0 ]; then
            printf '%s\n' "$out"
            [ "$failed" -gt 0 ] || failed=1 skipped=0 # it died without a word
        elif [ "${cases:-0}" -eq 0 ]; then
            echo "$name ran no test"
            failed=1 skipped=0
        fi
        echo "$name: $passed passed, $failed failed, $skipped skipped ($(($(date +%s) - start)) s, $cpu of a core)"
    } >"$result.log"
    cat "$result.log"
    [ "$failed" -eq 0 ] || mv "$result.log" "$result.failed"
    printf '%s\n' "$out" | grep '^skipped:' >"$result.skipped"
    echo "$passed $failed $skipped" >"$result.count"
    exit 0
fi

# Threads that spin while they wait starve each other where programs share the cores.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"
skipped=${NO_GPU:-0}
[ "$skipped" -eq 0 ] || echo "GPU suites: $skipped skipped, there is no GPU here"
# LLVM's OpenMP registers a process by its number in a file in memory, which one that is killed leaves there; a later process
# of the same number reads it, and dies of SIGBUS if it is empty.
for file in /dev/shm/__KMP_REGISTERED_LIB_*; do
    process=${file#*LIB_}
    [ -d "/proc/${process%_*}" ] || rm -f "$file" 2>/dev/null
done
results=$(mktemp -d) || exit 1
trap 'rm -rf "$results"' EXIT
printf '%s\n' "$@" | xargs -P "${JOBS:-1}" -n 1 "$0" --one "$results"
[ "$(ls "$results"/*.count 2>/dev/null | wc -l)" -eq $# ] || { echo "not every suite came to its end"; exit 1; }
sort -u "$results"/*.skipped
for log in "$results"/*.failed; do # once more, where a log's reader looks first
    [ ! -f "$log" ] || { echo && cat "$log"; }
done
set -- $(cat "$results"/*.count | awk '{p += $1; f += $2; s += $3} END {print p, f, s}')
echo "$1 passed, $2 failed, $(($3 + skipped)) skipped"
[ "$2" -eq 0 ]
