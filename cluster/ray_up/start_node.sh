#!/usr/bin/env bash
# usage: start_node.sh HEAD:PORT HOST=ROLE[:WORKERS][,ROLE[:WORKERS]]...
# Starts Ray on this host, as a node of the head at that address.
#
# The head runs the same command on every host of a local provider, which knows no node types. So the command names all
# hosts with their roles, and each one looks itself up: under the address by which it was reached over ssh. The node then
# offers the custom resources `prefill` and `decode`, one for each WORKERS (without it: 1), and has the label `role`.
set -euo pipefail

fail() {
    echo "start_node.sh: $*" >&2
    exit 1
}

# The third word of SSH_CONNECTION, which is: client's address, client's port, server's address, server's port.
own_address() {
    [ -n "${SSH_CONNECTION:-}" ] || fail "SSH_CONNECTION is not set; it has to be run over ssh, as ray up does"
    cut --delimiter=' ' --fields=3 <<<"$SSH_CONNECTION"
}

# prefill:2,decode -> {"prefill": 2, "decode": 1}
resources_of() {
    local part role workers separator="" resources=""
    for part in ${1//,/ }; do
        role=${part%%:*} workers=1
        [ "$part" = "$role" ] || workers=${part#*:}
        [[ $role =~ ^(prefill|decode)$ ]] || fail "got role '$role'; there are prefill and decode"
        [[ $workers =~ ^[1-9][0-9]*$ ]] || fail "got '$part'; after the colon comes how many workers fit, 1 or more"
        resources+="$separator\"$role\": $workers" separator=", "
    done
    echo "{$resources}"
}

roles_of() {
    local own=$1 entry
    shift
    for entry in "$@"; do
        [[ $entry == *=?* ]] || fail "got '$entry'; expected HOST=ROLE"
        if [ "${entry%%=*}" = "$own" ]; then
            echo "${entry#*=}"
            return
        fi
    done
    fail "no role is given for this host, $own; the command names $*"
}

[ $# -ge 2 ] || fail "expected the head's address and the roles of all hosts, got '$*'"
address=$(own_address)
head=$1
shift
roles=$(roles_of "$address" "$@")
resources=$(resources_of "$roles")
label=$(sed 's/:[0-9]*//g; s/,/-/g' <<<"$roles")
# `ray up` sets these for its own commands; workers would inherit them, and compute with one thread each.
unset OMP_NUM_THREADS PYTHONWARNINGS
ulimit -n 65536 2>/dev/null || echo "start_node.sh: continues with $(ulimit -n) open files at most" >&2
exec ray start --address="$head" --node-ip-address="$address" --resources="$resources" --labels="role=$label"
