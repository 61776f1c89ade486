#!/usr/bin/env bash
# usage: tests/slow/ray_up.sh [MODEL]
# `ray up` for real, from nothing to an answered request and `ray down`, with cluster/ray_up/on_premises.yaml.
#
# Its three hosts are namespaces of this machine: each has its own network, processes, /dev/shm, /tmp/ray, home folder and
# ssh server, and reaches the others over a bridge. Nothing of it can be seen from outside, no Ray that runs here is
# touched (`ray up`, `ray stop` and `ray down` end every Ray they see), and the kernel ends all of it with this script.
#
#     launcher 10.77.0.1 --- head 10.77.0.10, host1 10.77.0.11 (prefill), host2 10.77.0.12 (decode)
#
# Exit codes: 0 all went as docs/ray.md says, 77 something that it needs is not to be had here (named), else what failed.
# Needs root, and Debian's openssh-server, openssh-client, rsync, iproute2 and make. MODEL is a model's folder; without
# it, a tiny one with random weights is made. In the environment: PYTHON, an interpreter that has Baton's packages (without
# it: .venv's); KEEP=1 leaves the folder with all logs, /tmp/baton-ray-up.*, where it is.
set -euo pipefail

readonly MISSING=77
readonly LIMIT_S=1200
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
SELF=$ROOT/tests/slow/ray_up.sh
PYTHON=${PYTHON:-$ROOT/.venv/bin/python}
HEAD=10.77.0.10 PREFILL=10.77.0.11 DECODE=10.77.0.12
export PATH=$PATH:/usr/sbin:/sbin

say() { echo "[$(date +%T)] $*"; }

fail() {
    say "FAILED: $*"
    exit 1
}

# ---- Outside: checks, and the way in ---------------------------------------------------------------------------------

main() {
    need "$(id -u)" = 0 "it has to run as root, to make namespaces with networks of their own"
    for program in sshd ssh-keygen ssh rsync ip make unshare; do
        command -v "$program" >/dev/null || missing "$program is not installed (Debian: apt install openssh-server rsync iproute2 make)"
    done
    "$PYTHON" -c "import ray" 2>/dev/null || missing "$PYTHON has no ray; set PYTHON to the environment's python"
    unshare --net ip link add type veth 2>/dev/null || missing "this kernel or container allows no new network links (veth)"
    WORK=$(mktemp -d /tmp/baton-ray-up.XXXXXX)
    trap '[ -n "${KEEP:-}" ] || rm -rf "$WORK"' EXIT
    mkdir -p /tmp/ray  # to mount over; what it holds stays as it is
    MODEL=${1:-}
    if [ -z "$MODEL" ]; then
        MODEL=$WORK/model
        (cd "$ROOT" && "$PYTHON" -c "
from pathlib import Path
from tests.factories.models import make_model_dir
make_model_dir(Path('$MODEL'))")
    fi
    MODEL=$(realpath "$MODEL") WORK=$WORK PYTHON=$PYTHON \
        timeout --foreground --kill-after=10 "$LIMIT_S" \
        unshare --net --pid --mount --fork --kill-child --mount-proc "$SELF" --inside
}

need() { [ "$1" "$2" "$3" ] || missing "$4"; }

missing() {
    echo "skipped: $*" >&2
    exit "$MISSING"
}

# ---- Inside: three hosts, and what a person does at the launching machine -------------------------------------------

inside() {
    trap 'exit 130' INT TERM
    make_network
    make_host head "$HEAD"
    make_host host1 "$PREFILL"
    make_host host2 "$DECODE"
    export HOME=$WORK/launcher/home RAY_USAGE_STATS_ENABLED=0 RAY_AUTH_MODE=token
    make_home launcher
    move_into launcher
    mkdir -p "$HOME/.ssh" && cp "$WORK/id" "$HOME/.ssh/id_ed25519"
    for address in "$HEAD" "$PREFILL" "$DECODE"; do
        ssh_to "$address" -o ConnectionAttempts=20 true || fail "no ssh to $address: $(cat "$WORK"/*/sshd.log)"
    done
    fill_in_template
    cd "$ROOT"
    local ray=("$PYTHON" -m ray.scripts.scripts)

    say "ray get-auth-token --generate"
    "${ray[@]}" get-auth-token --generate >/dev/null
    say "a cluster secret"
    (umask 077; mkdir -p ~/.config/baton; openssl rand -hex 32 > ~/.config/baton/cluster.secret)
    say "ray up"
    RAY_UP_enable_autoscaler_v2=0 timeout 300 "${ray[@]}" up -y --no-config-cache \
        "$WORK/cluster.yaml" >"$WORK/up.log" 2>&1 || fail "ray up: $(tail -40 "$WORK/up.log")"
    say "baton serve, on the head"
    serve
    use
    stop_serving
    serve_as_a_job
    say "stop_nodes.sh and ray down"
    timeout 180 "${ray[@]}" exec "$WORK/cluster.yaml" '~/baton/cluster/ray_up/stop_nodes.sh' \
        >"$WORK/stop.log" 2>&1 || fail "stop_nodes.sh: $(tail -40 "$WORK/stop.log")"
    timeout 180 "${ray[@]}" down -y "$WORK/cluster.yaml" >"$WORK/down.log" 2>&1 ||
        fail "ray down: $(tail -40 "$WORK/down.log")"
    nothing_is_left
    say "all well"
}

make_network() {
    mount -t tmpfs tmpfs /run  # named networks live there
    ip link set lo up
    ip link add hosts type bridge
    ip addr add 10.77.0.1/24 dev hosts
    ip link set hosts up
    ssh-keygen -q -t ed25519 -N '' -f "$WORK/id"
    ssh-keygen -q -t ed25519 -N '' -f "$WORK/hostkey"
}

# Folders of its own for root, whose home ssh reads from the list of users.
make_home() {
    local host=$WORK/$1
    mkdir -p "$host/home" "$host/ray"
    cat >"$host/passwd" <<PASSWD
root:x:0:0:root:$host/home:/bin/bash
sshd:x:65533:65534::/run/sshd:/usr/sbin/nologin
nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin
PASSWD
    echo 'root:*:19000:0:99999:7:::' >"$host/shadow"
}

move_into() {
    local host=$WORK/$1
    mount --bind "$host/ray" /tmp/ray
    mount --bind "$host/passwd" /etc/passwd
    mount --bind "$host/shadow" /etc/shadow
}

make_host() {
    local name=$1 address=$2 host=$WORK/$1
    make_home "$name"
    mkdir -p "$host/home/baton-venv/bin"
    cat >"$host/sshd_config" <<CONFIG
ListenAddress $address
HostKey $WORK/hostkey
AuthorizedKeysFile $WORK/id.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
StrictModes no
PidFile none
Subsystem sftp internal-sftp
CONFIG
    # An environment that is installed already: `make setup` finds it complete, and downloads nothing. It runs this
    # checkout's Python, but the code that was copied to the host.
    ln -s "$PYTHON" "$host/home/baton-venv/bin/python"
    for module in ray:ray.scripts.scripts baton:cli.main; do
        printf '#!/bin/sh\nPYTHONPATH=%s${PYTHONPATH:+:$PYTHONPATH} exec "%s" -m %s "$@"\n' "$host/home/baton" "$PYTHON" "${module#*:}" \
            >"$host/home/baton-venv/bin/${module%%:*}"
    done
    chmod +x "$host"/home/baton-venv/bin/{ray,baton}
    touch "$host/home/baton-venv/.installed"
    ip netns add "$name"
    ip link add "$name" type veth peer name eth0 netns "$name"
    ip link set "$name" master hosts up
    ip -n "$name" link set lo up
    ip -n "$name" addr add "$address/24" dev eth0
    ip -n "$name" link set eth0 up
    ip -n "$name" route add default via 10.77.0.1
    ip netns exec "$name" unshare --pid --mount --uts --fork --kill-child --mount-proc \
        "$SELF" --host "$name" </dev/null &
}

# The first process of a host: what only it shall see, then its ssh server.
host() {
    local name=$1 host=$WORK/$1
    hostname "$name"
    mount -t tmpfs tmpfs /dev/shm
    mount -t tmpfs tmpfs /run
    move_into "$name"
    mkdir -p /run/sshd
    exec "$(command -v sshd)" -D -f "$host/sshd_config" -E "$host/sshd.log"
}

ssh_to() {
    local address=$1
    shift
    ssh -q -i "$WORK/id" -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o BatchMode=yes \
        "root@$address" "$@"
}

# Runs a line as a person would who has logged in on the head.
on_head() { ssh_to "$HEAD" "bash -ic $(printf '%q' "cd ~/baton && $1")" 2>>"$WORK/on_head.log"; }

# The five values, and no line besides.
fill_in_template() {
    "$PYTHON" - "$ROOT/cluster/ray_up/on_premises.yaml" "$WORK/cluster.yaml" <<PYTHON
import sys, yaml
config = yaml.safe_load(open(sys.argv[1]))
config["provider"].update(head_ip="$HEAD", worker_ips=["$PREFILL", "$DECODE"])
start = config["worker_start_ray_commands"]
start[-1] = start[-1].split(" ")[0] + " \$RAY_HEAD_IP:6379 $PREFILL=prefill $DECODE=decode"
config["auth"].update(ssh_user="root")
yaml.safe_dump(config, open(sys.argv[2], "w"))
values = yaml.safe_load(open("$ROOT/examples/several_hosts.yaml"))
values["model"]["path"] = "$MODEL"
values["model"]["dtype"] = "float32"
values["engine"] = {"kv_cache_memory_mib": 64}
values["cluster"].update(prefill=1, decode=1)
yaml.safe_dump(values, open("$WORK/serve.yaml", "w"))
PYTHON
}

serve() {
    mkfifo "$WORK/keyboard"
    ssh_to "$HEAD" -tt "bash -ic 'cd ~/baton && stty -echo && baton serve $WORK/serve.yaml --json'" \
        <"$WORK/keyboard" >"$WORK/serve.log" 2>&1 &
    SERVING=$!
    exec 3>"$WORK/keyboard"
    for _ in $(seq 300); do
        grep -q '"target"' "$WORK/serve.log" && return
        kill -0 "$SERVING" 2>/dev/null || fail "baton serve ended: $(cat "$WORK/serve.log")"
        sleep 1
    done
    fail "baton serve is not ready: $(cat "$WORK/serve.log")"
}

use() {
    say "baton generate"
    on_head "baton generate --mode disaggregated --raw --max-tokens 8 --ignore-eos --json 'The quick brown fox'" \
        >"$WORK/answer.json" || fail "baton generate: $(cat "$WORK/on_head.log")"
    cat "$WORK/answer.json"
    say "baton status"
    on_head "baton status --json" >"$WORK/status.json" || fail "baton status: $(cat "$WORK/on_head.log")"
    on_head "baton status"
    "$PYTHON" - "$WORK/answer.json" "$WORK/status.json" <<PYTHON || fail "that is not what was to be seen"
import json, sys
answer, status = (json.load(open(path)) for path in sys.argv[1:])
assert len(answer["token_ids"]) == 8, answer
assert answer["placement"]["prefill"] and answer["placement"]["decode"], answer
assert answer["timing"]["transport"] == "zmq_tcp", answer["timing"]  # nothing else connects two hosts
places = {worker["role"]: worker["node"] for worker in status["workers"]}
assert places == {"prefill": "host1", "decode": "host2"}, places
nodes = {node["address"]: (node["is_head"], node["workers"]) for node in status["nodes"] if node["is_alive"]}
assert nodes == {"$HEAD": (True, []), "$PREFILL": (False, ["w0"]), "$DECODE": (False, ["w1"])}, nodes
PYTHON
}

stop_serving() {
    say "Ctrl-C"
    printf '\003' >&3
    for _ in $(seq 60); do
        kill -0 "$SERVING" 2>/dev/null || break
        sleep 1
    done
    kill -0 "$SERVING" 2>/dev/null && fail "baton serve goes on after Ctrl-C: $(tail -20 "$WORK/serve.log")"
    exec 3>&-
    wait "$SERVING" || fail "baton serve: $(tail -20 "$WORK/serve.log")"
    tail -1 "$WORK/serve.log"
    ! pgrep -a -f 'ray::Worker' || fail "a worker outlives baton serve"
}

serve_as_a_job() {
    if ! "$PYTHON" -c "import aiohttp_cors, opencensus" 2>/dev/null; then
        say "ray job submit is not tried: $PYTHON has a plain ray, not ray[default]"
        return
    fi
    say "ray job submit"
    on_head "ray job submit --no-wait --submission-id baton --runtime-env-json '{\"env_vars\": {\"RAY_JOB_STOP_WAIT_TIME_S\": \"30\"}}' -- baton serve $WORK/serve.yaml" \
        >"$WORK/job.log" || fail "ray job submit: $(cat "$WORK/job.log" "$WORK/on_head.log")"
    for _ in $(seq 90); do
        on_head "baton generate --mode disaggregated --raw --max-tokens 4 --ignore-eos 'The quick brown fox'" && break
        sleep 1
    done || fail "no answer: $(on_head 'ray job logs baton')"
    say "ray job stop"
    on_head "ray job stop baton" >"$WORK/job.log" || fail "ray job stop: $(cat "$WORK/job.log" "$WORK/on_head.log")"
    grep -q "was stopped" "$WORK/job.log" || fail "ray job stop: $(cat "$WORK/job.log")"
    on_head "ray job logs baton" | grep "all processes of this deployment have ended" || fail "$(on_head 'ray job logs baton')"
    ! pgrep -a -f 'ray::Worker' || fail "a worker outlives the job"
}

nothing_is_left() {
    local rays='raylet|gcs_server|ray::|log_monitor|monitor.py'
    for _ in $(seq 20); do
        pgrep -f "$rays" >/dev/null || return 0
        sleep 1
    done
    fail "still running: $(pgrep -a -f "$rays")"
}

case ${1:-} in
    --inside) inside ;;
    --host) host "$2" ;;
    *) main "$@" ;;
esac
