#!/usr/bin/env bash
# usage: install_test_parts.sh PYTHON
# Installs packages that only some tests need: NIXL, LangChain and OpenAI's Agents SDK, 90 MB. If pip cannot install them, says
# so, and ends with exit code 1. Then pytest names the tests that it skips.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
echo "Installing NIXL, LangChain and the Agents SDK, so that no test is skipped: 90 MB, once."
if ! PIP_DISABLE_PIP_VERSION_CHECK=1 "$python" -m pip install --quiet --no-compile --no-deps --requirement requirements/test_all.lock; then
    echo "install_test_parts.sh: pip cannot install requirements/test_all.lock; tests of NIXL, LangChain and the Agents SDK are skipped" >&2
    exit 1
fi
