#!/usr/bin/env bash
# usage, on the head of a local provider: stop_nodes.sh
# Ends Ray on the head and on every other host of the cluster, over ssh, all at once. `ray down` ends Ray on the head only:
# on the other hosts, Ray would then wait a minute for the head, and leave its log monitor behind for good.
set -euo pipefail

# `ray up` left these files here; with them, the autoscaler reaches the other hosts.
config=$HOME/ray_bootstrap_config.yaml key=$HOME/ray_bootstrap_key.pem
ray=$HOME/baton-venv/bin/ray
read -r user hosts < <("$HOME/baton-venv/bin/python" -c '
import json, sys
config = json.load(open(sys.argv[1]))
print(config["auth"]["ssh_user"], *config["provider"]["worker_ips"])' "$config")

# First the head, whose autoscaler would start the others again.
failed=""
"$ray" stop || failed+=" the head"
declare -A stopping
for host in $hosts; do
    ssh -i "$key" -o BatchMode=yes -o ConnectTimeout=10 -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null \
        -o LogLevel=ERROR "$user@$host" "~/baton-venv/bin/ray stop" </dev/null &
    stopping[$host]=$!
done
for host in $hosts; do
    wait "${stopping[$host]}" || failed+=" $host"
done
[ -z "$failed" ] || { echo "stop_nodes.sh: Ray may still run on$failed; log in there and run 'ray stop'" >&2; exit 1; }
