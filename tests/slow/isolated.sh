#!/usr/bin/env bash
# usage: tests/slow/isolated.sh COMMAND...
# Runs a command in namespaces of its own: processes, network (loopback only), and an empty /tmp/ray. What it starts ends
# with it, and it can neither see nor end anything else: some of Ray's tools end every Ray process that they see.
# Exits with 77, and says why on stderr, where that is not allowed.
set -euo pipefail

isolate=(unshare --user --map-root-user --net --pid --mount --fork --kill-child --mount-proc)
if ! reason=$("${isolate[@]}" true 2>&1); then
    echo "skipped: namespaces of one's own are not allowed here: $reason" >&2
    exit 77
fi
mkdir -p /tmp/ray  # to mount over; what it holds stays as it is
# The shell in between stays, and reaps what Ray's daemons leave.
exec "${isolate[@]}" bash -c 'ip link set lo up && mount -t tmpfs none /tmp/ray && "$@"; exit $?' isolated "$@"
