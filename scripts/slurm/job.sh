# shellcheck shell=bash
# Common functions of the batch scripts in this directory, which set these variables, source it and call
# train with the command and its arguments:
#
#   SPARES                       number of nodes of the allocation that wait; the others train
#   SMALLER                      other numbers of nodes that can train, the largest first; exported, as
#                                SPARES is. The job after a loss of nodes starts with the remaining
#                                nodes: the largest possible number trains, the others are spares
#   RUNS                         directory on the shared file system; each job makes RUNS/<job id>
#   SETTINGS                     array: --deadpool-* settings, may be empty
#   PLAN, COMMUNICATOR           for train(): a file of `deadpool plan`; nccl unless gloo is given
#   SRUN_OPTIONS                 array: further options of srun (container, binding), may be empty
#   CHECKOUT                     this repository
#   BAD_NODE_HOURS               hours for which the next job excludes a quarantined node (72)
#
# Their #SBATCH lines give NODES (--nodes without the spares), NOTICE_SECONDS (--signal: the time
# before the limit at which the state is saved) and GPUS_PER_NODE, unless it is set.
#
# A job continues from the newest state in RUNS, if an earlier job has left any. RUNS/OVER stops a
# chain: the training is complete, or has failed in a way that another job would only repeat.
# Exit status: that of the run; 75 means that the next job of a chain continues.

# bash runs a trap at once only during `wait`, so every pause here is a wait.
nap() {
    sleep "$1" &
    wait $!
}

say() { printf '%(%F %T)T  %s\n' -1 "$*"; }

# Files in RUNS with guessable names count only if they belong to this user.
is_ours() { [ -O "$1" ] && [ ! -L "$1" ]; }

# The value of an option in the batch script's own #SBATCH line.
option() { sed -n "s/^#SBATCH --$1//p" "$0"; }

# train COMMAND ARGS: trains with the arguments of the batch script. Facts and clocks of all nodes are
# checked first: unfit nodes get no role. Without a spare left, fewer model replicas continue; with too
# few nodes for that, the run saves its state and ends the job.
train() {
    # Megatron-LM requires the first for tensor parallelism on GPUs before Blackwell. The nodes inherit it.
    export CUDA_DEVICE_MAX_CONNECTIONS=1 RUNS=${RUNS:-$SLURM_SUBMIT_DIR/runs/$SLURM_JOB_NAME}
    SETTINGS=(--deadpool-communicator "${COMMUNICATOR:-nccl}" --deadpool-spare-timeout 900
        ${PLAN:+--plan "$PLAN"} --deadpool-persist-directory "$RUNS/exports" "${SETTINGS[@]}")
    TRAINING=("${@:?give the command that trains after the name of the batch script}")
    run_training
}

newest_state() {
    local latest newest=
    # Compare times, not numbers: job numbers start again, and a job may be started twice.
    for latest in "$RUNS"/*/latest.json; do
        if is_ours "$latest" && { [ -z "$newest" ] || [ "$latest" -nt "$newest" ]; }; then
            newest=$latest
        fi
    done
    [ -z "$newest" ] || dirname "$newest"
}

# The largest number of nodes that can train if $1 nodes are left.
fitting() {
    local size
    for size in $NODES ${SMALLER:-}; do [ "$size" -gt "$1" ] || break; done
    echo "$size"
}

run_training() {
    local run step old over since patience status=0 verdict=0 nodes all
    export NODES=${NODES:-$(($(option nodes=) - SPARES))} NOTICE_SECONDS=${NOTICE_SECONDS:-$(option 'signal=.*@')}
    nodes=$NODES all=$((NODES + SPARES)) GPUS_PER_NODE=${GPUS_PER_NODE:-$(option gpus-per-node=)}
    [ -z "${SMALLER:-}" ] || all=$SLURM_JOB_NUM_NODES nodes=$(fitting "$SLURM_JOB_NUM_NODES")
    mkdir -p "$RUNS"
    if is_ours "$RUNS/OVER"; then
        over=$(<"$RUNS/OVER")
        say "nothing to do: $over (remove $RUNS/OVER to continue nevertheless)"
        # A job that depends on this one (afterok) gets the status of the chain.
        [[ $over =~ status\ ([0-9]+)$ ]]
        return "${BASH_REMATCH[1]:-0}"
    fi
    run=$RUNS/$SLURM_JOB_ID${SLURM_RESTART_COUNT:+-$SLURM_RESTART_COUNT}
    old=$(newest_state)
    # A training whose state is lost starts again at iteration 0 only with FROM_SCRATCH=1.
    if [ -z "$old${FROM_SCRATCH:-}" ] && grep -qs '"kind": *"step"' "$RUNS"/*/events*.jsonl; then
        stop_chain "an earlier job has finished iterations, none has left a state to continue from"
        return 2
    fi
    say "run directory $run${old:+, continues from $old}"

    # Create the folder here, and not by many nodes at once on a slow file system.
    (umask 077 && mkdir -p "$run.logs") && is_ours "$run.logs" || {
        say "$run.logs is not of this user: have its owner remove it"
        return 2
    }

    on_all_nodes "$all" --output="$run.logs/%N.log" --open-mode=append \
        "$CHECKOUT/scripts/slurm/node.sh" "$run" "$NOTICE_SECONDS" \
        deadpool agent --from-slurm --run-dir "$run" ${old:+--resume "$old"} \
        --nodes "$nodes" --spares "$((all - nodes))" --nproc-per-node "$GPUS_PER_NODE" \
        "${SETTINGS[@]}" -- "${TRAINING[@]}" &
    step=$!
    # A node that hangs, but answers Slurm, would keep srun running until the time limit.
    patience=${DEADPOOL_STEP_SECONDS:-300}
    trap 'time_is_nearly_over "$run"' USR1
    trap 'say "TERM: the step ends"; kill -TERM "$step"' TERM

    while kill -0 "$step" 2>/dev/null; do
        answer_nodes "$run"
        prepare_next_job "$run"
        if [ -e "$run/final.json" ] && [ $((SECONDS - ${since:=$SECONDS})) -ge "$patience" ]; then
            say "the run has been over for $patience s, some node does not end: the job does"
            kill -KILL "$step"
        fi
        nap 1
    done
    wait "$step" || status=$?
    # srun may be killed while the agents continue; only the run's own verdict counts.
    while [ "$status" -ge 128 ] && [ ! -e "$run/final.json" ] && nodes_are_there; do
        nap 5
    done
    answer_nodes "$run"
    prepare_next_job "$run"
    if [ "$status" = 2 ] && ! [ -e "$run/run.json" ]; then
        stop_chain "job ${run##*/} was refused, see $run.logs"
    fi
    judge "$run" || verdict=$?
    say "status of the run: $verdict (of srun: $status)"
    return "$verdict"
}

stop_chain() {
    say "the chain stops: $1"
    echo "$1: status 2" >"$RUNS/OVER"
}

# One task per node. When a node is lost, sbatch's --no-kill keeps the job, and this --no-kill keeps
# the step. No task's end may end the others: a fenced or finished agent is no failure. Replaces the
# calling (sub)shell, so that signals reach srun.
on_all_nodes() {
    exec srun --no-kill --kill-on-bad-exit=0 --wait=0 --unbuffered --cpu-bind=none \
        --nodes="$1" --ntasks="$1" --ntasks-per-node=1 "${SRUN_OPTIONS[@]}" "${@:2}"
}

# Tell the nodes that this script still runs and will end the job (node.sh).
answer_nodes() {
    [ ! -e "$1/final.json" ] || [ -e "$1.logs/batch-host-knows" ] || touch "$1.logs/batch-host-knows"
}

# Change the waiting next job of the chain, so that it excludes the quarantined nodes, keeps its own
# --exclude, and starts with as many nodes as this job has left. This is done whenever the file of bad
# nodes changes, as this job may end at any time, and at the end of the run.
prepare_next_job() {
    local noted=${1%/*}/bad-nodes.json over=$1/final.json seen=$1.logs/next-job-prepared
    local bad left job after given name
    { [ -e "$noted" ] && ! [ "$seen" -nt "$noted" ]; } ||
        { [ -e "$over" ] && ! [ "$seen" -nt "$over" ]; } || return 0
    touch "$seen"
    bad=$(deadpool bad-nodes --names --hours "${BAD_NODE_HOURS:-72}" "${1%/*}") || return 0
    bad=$(sed 's/\.[^,]*//g' <<<"$bad") # Slurm's node names have no domain
    left=$(squeue -h -j "$SLURM_JOB_ID" -o %N) && [ -n "$left" ] || return 0
    left=$(scontrol show hostnames "$left" | grep -vcxFf <(tr , '\n' <<<"$bad"))
    while IFS="|" read -r job after given; do
        [[ $after =~ :$SLURM_JOB_ID([^0-9]|$) ]] || continue
        [ "$given" != "(null)" ] || given=
        say "job $job, the next one, excludes ${bad:-no node}; $left nodes are left of this one"
        # Add each name alone, as Slurm refuses a whole list with an unknown name.
        for name in ${bad//,/ }; do
            ! scontrol update "JobId=$job" "ExcNodeList=${given:+$given,}$name" ||
                given=${given:+$given,}$name
        done
        [ -z "${SMALLER:-}" ] || ((left >= NODES + SPARES || left < $(fitting "$left"))) ||
            scontrol update "JobId=$job" "NumNodes=$left" "NumTasks=$left"
    done < <(squeue -h -t PD -o "%i|%E|%x")
}

# Succeeds if a task of the step may be alive, also while Slurm does not answer.
nodes_are_there() {
    local steps
    steps=$(squeue -h -s -j "$SLURM_JOB_ID" -o %i) || return 0
    grep -q '\.[0-9]' <<<"$steps"
}

time_is_nearly_over() {
    say "the time limit is near: the state is saved, and the run ends"
    deadpool stop --dump --within "$NOTICE_SECONDS" --wait "$NOTICE_SECONDS" "$1" || true
}

# Return the run's own status, and end the chain if another job would only repeat it.
judge() {
    local run=$1 status line
    line=$(deadpool status --verdict "$run") && status=0 || status=$?
    echo "${line:-no verdict can be read}"
    # Without a verdict, the status is that of the command.
    if [[ $line == over,* && $status =~ ^([0-4]|76)$ ]]; then
        rm -f "${run%/*}/OVER" # if it is a link, do not follow it
        (set -C && echo "run ${run##*/} ended with status $status" >"${run%/*}/OVER")
    fi
    return "$status"
}
