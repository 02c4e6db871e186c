#!/bin/sh
# Runs doctest programs one after another and closes with one line that counts their test cases.
# Usage: tests/run.sh PROGRAM...   from the repository's root. NO_GPU=N: N test cases need a GPU and there is none.
passed=0 failed=0 skipped=${NO_GPU:-0}
[ "$skipped" -eq 0 ] || echo "GPU suites: $skipped skipped, there is no GPU here"
for program in "$@"; do
    start=$(date +%s)
    out=$("$program" --no-intro=true --no-colors=true 2>&1)
    code=$?
    line=$(printf '%s\n' "$out" | grep '^\[doctest\] test cases:' | tail -n 1)
    # [doctest] test cases:  5 |  4 passed | 1 failed | 0 skipped
    set -- $(printf '%s\n' "$line" | sed 's/[^0-9]\{1,\}/ /g')
    ok=${2:-0} bad=${3:-0} left=${4:-0}
    if [ $code -ne 0 ]; then
        printf '%s\n' "$out"
        [ "$bad" -gt 0 ] || bad=1   # it died without a word
    elif [ "$ok" -eq 0 ] && [ "$left" -eq 0 ]; then
        echo "$program ran no test"
        bad=1
    fi
    printf '%s\n' "$out" | grep '^skipped:'
    echo "$(basename "$program"): $ok passed, $bad failed, $left skipped ($(($(date +%s) - start)) s)"
    passed=$((passed + ok)) failed=$((failed + bad)) skipped=$((skipped + left))
done
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ]
