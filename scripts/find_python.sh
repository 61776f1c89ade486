#!/usr/bin/env bash
# Prints a Python interpreter that can build the environment: 3.11 or newer, with venv and pip. If there is none, says what to do.
set -euo pipefail

is_suitable() {
    "$1" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

candidates=(python3.13 python3.12 python3.11 python3)
if [ -n "${PYTHON:-}" ]; then
    candidates=("$PYTHON")
fi
for candidate in "${candidates[@]}"; do
    if command -v "$candidate" >/dev/null && is_suitable "$candidate"; then
        command -v "$candidate"
        exit 0
    fi
done

{
    echo "No suitable Python: 3.11 or newer with the venv module is needed."
    last=${candidates[-1]}
    found=$("$last" --version 2>/dev/null || echo "no $last at all")
    echo "Found: $found."
    echo "On Debian or Ubuntu: apt install python3-venv    Elsewhere: make PYTHON=/path/to/python3.11 ..."
} >&2
exit 1
