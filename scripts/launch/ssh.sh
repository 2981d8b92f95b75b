#!/usr/bin/env bash
# Starts, awaits and stops a run on hosts that are reached by ssh, without any scheduler.
#
#   ssh.sh start HOSTS RUN_DIR [options of deadpool agent] -- COMMAND
#   ssh.sh wait  HOSTS RUN_DIR      until the run is over; exits with the run's own exit status,
#                                   or where no run came of it with that of the first failed agent
#   ssh.sh stop  HOSTS RUN_DIR      ends the run in order, then what is left of it on any host
#
# HOSTS is a file with one line "HOST [ADDRESS]" per node, spares last: the name for ssh and, where
# it is another, the address that the other nodes reach it by. RUN_DIR is on a shared file system.
#
#   printf '%s\n' gpu01 gpu02 gpu03 > hosts
#   ssh.sh start hosts /shared/run1 --nodes 2 --spares 1 --nproc-per-node 8 -- train.py --lr 1e-4
#
# Nothing ends with this script or its host. RUN_DIR.agents/I.log and I.status are the output and
# exit status of the agent of node I. SSH is the command that reaches a host (default: ssh -o
# BatchMode=yes); directory and PATH there are those of here.
set -euo pipefail

usage() {
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" >&2
    exit 2
}

[ $# -ge 3 ] || usage
order=$1 hosts=$2 run=$3
shift 3
agents=$run.agents
read -ra ssh <<<"${SSH:-ssh -o BatchMode=yes}"
[ -r "$hosts" ] || { echo "ssh.sh: there is no file of hosts $hosts" >&2; exit 2; }
[[ $run = /* ]] || { echo "ssh.sh: RUN_DIR must be absolute, as it has to be the same on all hosts" >&2; exit 2; }

# on HOST COMMAND: run a shell command there, in this directory.
on() {
    "${ssh[@]}" "$1" "cd $(printf %q "$PWD") && export PATH=$(printf %q "$PATH") && $2"
}

# each FUNCTION: call it with (node id, host, address) for every line.
each() {
    local node=0 host address
    # The last line may lack its newline.
    while read -r host address <&3 || [ -n "$host" ]; do
        if [ -z "$host" ] || [[ $host = \#* ]]; then continue; fi
        "$1" "$node" "$host" "$address"
        node=$((node + 1))
    done 3<"$hosts"
}

address_of() {
    local found
    found=$(getent ahostsv4 "$1") || { echo "ssh.sh: host $1 cannot be resolved" >&2; exit 2; }
    awk 'NR == 1 {print $1}' <<<"$found"
}

start_one() {
    local node=$1 host=$2 address=$3 words
    address=${address:-$(address_of "$host")}
    printf -v words '%q ' deadpool agent --run-dir "$run" --node-id "$node" --host "$address" \
        "${options[@]}"
    printf -v words '%q' "$words; echo \$? >$(printf %q "$agents/$node.status")"
    # No remaining process may hold the connection's output, or ssh would wait for it.
    on "$host" "{ setsid nohup bash -c $words >$(printf %q "$agents/$node.log") 2>&1 </dev/null & }"
    touch "$agents/$node.log"  # "wait" counts the agent from now on, before its shell opens the log
    echo "node $node on $host ($address)"
}

clean_one() {
    on "$2" "deadpool clean --force --yes $(printf %q "$run")" || true
}

# Whether all started agents have ended without a result: an agent that ended with 0 has read
# final.json, which may appear late here.
all_failed() {
    local log
    for log in "$agents"/*.log; do
        [ -s "${log%.log}.status" ] || return 1
    done
    ! grep -qx 0 "$agents"/*.status
}

report_one() {
    [ -s "$agents/$1.status" ] || return 0
    local status
    status=$(<"$agents/$1.status")
    echo "node $1 on $2: exit status $status: $(tail -n 1 "$agents/$1.log")" >&2
    [ "$failed" -ne 0 ] || failed=$status
}

case $order in
    start)
        [ $# -gt 0 ] || usage
        [ ! -e "$agents" ] || { echo "ssh.sh: $agents is there already: choose another RUN_DIR" >&2; exit 2; }
        mkdir -p "${agents%/*}"
        (umask 077 && mkdir "$agents") # fails if another user has just created it
        options=("$@")
        each start_one
        ;;
    wait)
        until [ -e "$run/final.json" ]; do
            if all_failed && [ ! -e "$run/final.json" ]; then
                failed=0
                each report_one
                exit "$failed"
            fi
            sleep 1
        done
        exec deadpool status --verdict "$run"
        ;;
    stop)
        deadpool stop --wait 60 "$run" || true
        each clean_one
        ;;
    *) usage ;;
esac
