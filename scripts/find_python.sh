#!/usr/bin/env bash
# Prints a Python interpreter that can build the environment: one with venv and pip, for which every package of the lock has a
# wheel. If PYTHON is set, only this one is tried. If there is none, says what was found, and what to do.
set -euo pipefail
versions=(3.11 3.12 3.13 3.14) # the best tested first; nothing was tested on 3.14

# Prints why a Python cannot be used, or nothing.
defect() {
    "$1" -c '
import sys, sysconfig
version = sys.version.split()[0]
if sys.implementation.name != "cpython":
    print(f"is {sys.implementation.name}")
elif "{}.{}".format(*sys.version_info) not in sys.argv[1:]:
    print(f"is version {version}")
elif sysconfig.get_config_var("Py_GIL_DISABLED"):
    print(f"is version {version}, free-threaded")
else:
    try:
        import ensurepip, venv
    except ImportError as error:
        print(f"is version {version} without the module {error.name}")
' "${versions[@]}" 2>/dev/null || echo "does not run, or is older than 3.6"
}

if [ -n "${PYTHON:-}" ]; then
    candidates=("$PYTHON")
else
    candidates=("${versions[@]/#/python}" python3)
fi
found= newline=$'\n'
for candidate in "${candidates[@]}"; do
    if python=$(command -v "$candidate"); then
        reason=$(defect "$python")
        if [ -z "$reason" ]; then
            echo "$python"
            exit 0
        fi
        found+="${found:+$newline}    $python $reason"
    fi
done

{
    echo "No suitable Python. Baton needs CPython 3.11, 3.12, 3.13 or 3.14 with the module venv. Found:"
    printf "%s\n" "${found:-    no ${PYTHON:-python3} at all}"
    echo "On Debian or Ubuntu: apt install python3-venv    Elsewhere: make PYTHON=/path/to/python3.13 ..."
} >&2
exit 1
