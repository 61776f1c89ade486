#!/usr/bin/env bash
# scripts/test.sh PYTHON: every test that needs no GPU, with mypy beside them, since it computes on one core.
#
# Tests of whole clusters keep more processes busy than a small machine has cores, and what takes a second may then take
# a minute. So the few that failed beside others are tried once more, alone; what passes then is named all the same.
# More than a few are no accident.
set -uo pipefail
cd "$(dirname "$0")/.."
python=$1
readonly FEW=5
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
pytest=("$python" -m pytest -m "not gpu and not by_hand" -o "cache_dir=$scratch/cache")

"$python" -m mypy > "$scratch/types" 2>&1 &
mypy=$!
"${pytest[@]}" --numprocesses 3 --durations=20
tests=$?
wait "$mypy"
types_failed=$?
cat "$scratch/types"

if [ "$tests" -eq 1 ]; then
    failed=$("$python" -c 'import json, sys; print(*json.load(sys.stdin), sep="\n")' \
        < "$scratch/cache/v/cache/lastfailed")
    if [ "$(wc -l <<< "$failed")" -le "$FEW" ]; then
        printf 'Once more, alone:\n%s\n' "$failed"
        "${pytest[@]}" --last-failed --last-failed-no-failures none
        tests=$?
        [ "$tests" -ne 0 ] || printf 'FAILED BESIDE OTHERS AND PASSED ALONE:\n%s\n' "$failed"
    fi
fi
exit $((tests || types_failed))
