#!/usr/bin/env bash
# srun starts this script on each node. It runs the agent, and acts for the batch script if the host of
# that script is lost.
#
#   node.sh RUN NOTICE_SECONDS COMMAND...
#
# - Slurm's notice of the time limit reaches only the batch script, whose host may be lost. So each
#   node watches the clock itself (Slurm 23.02 and later give the job's end; otherwise squeue).
# - When the batch host is lost, the other nodes continue to train, but the job would hold its nodes
#   until its time limit. So the nodes end the job after the run.
set -uo pipefail

run=$1 notice=$2
shift 2
# shellcheck source=scripts/slurm/job.sh
. "${0%/*}/job.sh"
# A shared file system may show a new file late.
patience=${DEADPOOL_BATCH_HOST_SECONDS:-90}

is_over() { [ -e "$run/final.json" ]; }

# The job's end as Slurm knows it now; empty without an answer.
job_end() {
    local text
    text=$(timeout 30 squeue -h -j "$SLURM_JOB_ID" -o %e 2>/dev/null) && [ -n "$text" ] &&
        date -d "$text" +%s 2>/dev/null
}

save_in_time() {
    local end left later repeated=()
    end=${SLURM_JOB_END_TIME:-$(job_end)}
    [ -n "$end" ] || return 0
    while true; do
        # The nodes act in turn, after the batch script's notice: the first request suffices.
        left=$((end - notice + 5 + SLURM_PROCID - $(date +%s)))
        [ "$left" -le 0 ] || sleep "$left"
        is_over && return 0
        # The time limit may have been extended, which also delays the batch script's notice.
        later=$(job_end)
        [ "${later:-0}" -gt "$end" ] || break
        end=$later
    done
    left=$((end - $(date +%s)))
    [ "$left" -gt 0 ] || left=1
    # The first nodes repeat the request, in case the coordinator that received it is lost.
    [ "${SLURM_PROCID:-0}" -ge 4 ] || repeated=(--wait "$left")
    deadpool stop --dump --within "$left" "${repeated[@]}" "$run"
}

batch_host_lives() {
    local limit=$((SECONDS + patience))
    until [ -e "$run.logs/batch-host-knows" ]; do
        [ "$SECONDS" -lt "$limit" ] || return 1
        sleep 1
    done
}

save_in_time &
clock=$!
"$@" &
agent=$!
trap 'kill -TERM "$agent" 2>/dev/null' TERM
wait "$agent"
status=$?
# A signal ends the wait, but not the agent.
while kill -0 "$agent" 2>/dev/null; do
    wait "$agent"
    status=$?
done
kill "$clock" 2>/dev/null

if is_over && ! batch_host_lives; then
    echo "node.sh: the batch host does not answer: the run is over, this node ends the job"
    prepare_next_job "$run"
    judge "$run"
    sleep "$((SLURM_PROCID % 10))"
    scancel "$SLURM_JOB_ID"
fi
exit "$status"
