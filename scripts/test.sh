#!/usr/bin/env bash
# usage: test.sh PYTHON
# Runs all tests except those marked by_hand and those that need a GPU or a further package: four files at a time.
# A test that hangs fails after seven minutes, with the stacks of its threads. The longest test takes two minutes.
# At the same time, mypy runs with a low priority. The native kernels are compiled before: otherwise the first workers
# that the tests start would wait for the compilation.
set -uo pipefail
cd "$(dirname "$0")/.."
python=$1
types=$(mktemp)
trap 'rm -f "$types"' EXIT
hang=(-o faulthandler_timeout=420 -o faulthandler_exit_on_timeout=true)

"$python" -c "from engine.native.library import native_library; native_library()"
nice -n 10 "$python" -m mypy > "$types" 2>&1 &
mypy=$!
"$python" -m pytest -m "not gpu and not by_hand" --numprocesses 4 --durations=20 "${hang[@]}"
tests=$?
wait "$mypy"
types_failed=$?
cat "$types"
exit $((tests || types_failed))
