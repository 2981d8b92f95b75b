#!/usr/bin/env bash
# One per node, started by srun: runs the agent, and does what nobody else may be left to do.
#
#   node.sh RUN NOTICE_SECONDS COMMAND...
#
# - Slurm's notice of the time limit reaches the batch script only, whose host may be lost. So each
#   node looks at the clock itself (Slurm 23.02 and later tell the job's end; else squeue does).
# - When the batch host is lost, the other nodes train on, but no script is left whose end would be
#   the job's: it would hold its nodes until its time limit. So the nodes end it.
set -uo pipefail

run=$1 notice=$2
shift 2
# shellcheck source=scripts/slurm/job.sh
. "${0%/*}/job.sh"
# A shared file system may show a new file late.
patience=${DEADPOOL_BATCH_HOST_SECONDS:-90}

is_over() { [ -e "$run/final.json" ]; }

# What Slurm says of it now; nothing where it does not say.
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
        # One after the other: the first one's order is enough. The batch script's notice comes first.
        left=$((end - notice + 5 + SLURM_PROCID - $(date +%s)))
        [ "$left" -le 0 ] || sleep "$left"
        is_over && return 0
        # The limit may have been extended meanwhile, and with it the batch script's notice.
        later=$(job_end)
        [ "${later:-0}" -gt "$end" ] || break
        end=$later
    done
    left=$((end - $(date +%s)))
    [ "$left" -gt 0 ] || left=1
    # The first ones repeat the order, should a coordinator be lost that has heard it.
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
# A trap ends the first wait, not the agent.
while kill -0 "$agent" 2>/dev/null; do
    wait "$agent"
    status=$?
done
kill "$clock" 2>/dev/null

if is_over && ! batch_host_lives; then
    echo "node.sh: the batch host does not answer: the run is over, and the job is ended from here"
    prepare_next_job "$run"
    judge "$run"
    sleep "$((SLURM_PROCID % 10))"
    scancel "$SLURM_JOB_ID"
fi
exit "$status"
