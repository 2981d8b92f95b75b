# shellcheck shell=bash
# What every batch script of this directory does; they source it after they have set:
#
#   SPARES                       how many nodes of the allocation wait; the others train
#   SMALLER                      other numbers of nodes that can train, the largest first; exported, as
#                                SPARES is. The job after one that has lost nodes begins
#                                with as many as were left: so many of them train, others are spares
#   RUNS                         directory on the shared file system; each job makes RUNS/<job id>
#   TRAINING                     array: what stands behind the "--" of `deadpool agent`
#   SETTINGS                     array: --deadpool-* settings, may be empty
#   SRUN_OPTIONS                 array: further options of srun (container, binding), may be empty
#   CHECKOUT                     this repository
#   BAD_NODE_HOURS               how long a node that was put aside is left out of the next job (72)
#
# What stands in their #SBATCH lines is read there: NODES (--nodes but the spares), NOTICE_SECONDS
# (--signal: how long before the time limit the state is saved) and GPUS_PER_NODE, unless it is set.
#
# A job that finds an earlier one in RUNS continues from the newest state there. RUNS/OVER stops a
# chain: the training is complete, or has failed in a way that another job would only repeat.
# Exit status: that of the run; 75 means that the next job of a chain goes on.

# A trap runs when `wait` is interrupted, so every wait here is one that can be.
nap() {
    sleep "$1" &
    wait $!
}

say() { printf '%(%F %T)T  %s\n' -1 "$*"; }

# What lies in RUNS under a name that anybody can guess is believed only if this user has put it there.
is_ours() { [ -O "$1" ] && [ ! -L "$1" ]; }

# What the batch script's own line of that option has.
option() { sed -n "s/^#SBATCH --$1//p" "$0"; }

# pretrain MODEL: with the arguments and the plan of that name in configs/. Facts, links and clocks of
# all nodes are looked at first: bad ones get no role, slow ones wait as spares. When all spares are
# used up, it is waited for another one, then the state is saved and the job ends.
pretrain() {
    # Megatron-LM wants it of tensor parallelism on GPUs before Blackwell: its argument check ends the
    # job without. The nodes inherit it.
    export CUDA_DEVICE_MAX_CONNECTIONS=1
    RUNS=${RUNS:-$SLURM_SUBMIT_DIR/runs/pretrain-$1}
    SETTINGS=(--deadpool-communicator nccl --deadpool-spare-timeout 900
        --plan "$CHECKOUT/configs/$1.yaml" --deadpool-persist-directory "$RUNS/exports")
    # shellcheck disable=SC2206 # a flag per line, and no blanks in values
    TRAINING=("$MEGATRON/pretrain_gpt.py" $(<"$CHECKOUT/configs/megatron-lm/gpt-$1.args") --data-path
        "$DATA" --tokenizer-model "$TOKENIZER" --save "$RUNS/checkpoints" --load "$RUNS/checkpoints")
    run_training
}

newest_state() {
    local latest newest=
    # By time, not by number: numbers of jobs start again, and a job may be started twice.
    for latest in "$RUNS"/*/latest.json; do
        if is_ours "$latest" && { [ -z "$newest" ] || [ "$latest" -nt "$newest" ]; }; then
            newest=$latest
        fi
    done
    [ -z "$newest" ] || dirname "$newest"
}

# The most nodes that $1 nodes can train on.
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
        say "nothing to do: $over (remove $RUNS/OVER to go on all the same)"
        # Who waits for the end of the chain (afterok) is told how it has ended.
        [[ $over =~ status\ ([0-9]+)$ ]]
        return "${BASH_REMATCH[1]:-0}"
    fi
    run=$RUNS/$SLURM_JOB_ID${SLURM_RESTART_COUNT:+-$SLURM_RESTART_COUNT}
    old=$(newest_state)
    # Nothing starts from nothing by itself. FROM_SCRATCH=1 has it.
    if [ -z "$old${FROM_SCRATCH:-}" ] && grep -qs '"kind": *"step"' "$RUNS"/*/events*.jsonl; then
        stop_chain "an earlier job has finished iterations, none has left a state to go on from"
        return 2
    fi
    say "run directory $run${old:+, continues from $old}"

    # On the node's side of a slow file system these must not be made by many at once.
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
    # A node that hangs, but answers Slurm, keeps srun until the time limit.
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
    # srun may be killed while the agents live on; the run's own verdict is what counts.
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

# One task per node. Both --no-kill are needed: sbatch's keeps the job, this one keeps the step, when
# a node is lost. And no task's end may end the others: a fenced or finished agent is no failure.
# Takes the place of the (sub)shell that calls it, so that signals reach srun.
on_all_nodes() {
    exec srun --no-kill --kill-on-bad-exit=0 --wait=0 --unbuffered --cpu-bind=none \
        --nodes="$1" --ntasks="$1" --ntasks-per-node=1 "${SRUN_OPTIONS[@]}" "${@:2}"
}

# The nodes ask whether anybody is left on this host to end the job (node.sh).
answer_nodes() {
    [ ! -e "$1/final.json" ] || [ -e "$1.logs/batch-host-knows" ] || touch "$1.logs/batch-host-knows"
}

# The next job of the chain does without the nodes that were put aside, and begins with as
# many as this one has left. It waits already, so that its lists are changed; what it was
# submitted with (--exclude) stays in it. Done whenever the file of bad nodes is new, as nobody knows
# how this job will end, and when it has.
prepare_next_job() {
    local noted=${1%/*}/bad-nodes.json over=$1/final.json seen=$1.logs/next-job-prepared
    local bad left job after given name
    { [ -e "$noted" ] && ! [ "$seen" -nt "$noted" ]; } ||
        { [ -e "$over" ] && ! [ "$seen" -nt "$over" ]; } || return 0
    touch "$seen"
    bad=$(deadpool bad-nodes --names --hours "${BAD_NODE_HOURS:-72}" "${1%/*}") || return 0
    bad=$(sed 's/\.[^,]*//g' <<<"$bad") # Slurm names nodes without their domain
    left=$(squeue -h -j "$SLURM_JOB_ID" -o %N) && [ -n "$left" ] || return 0
    left=$(scontrol show hostnames "$left" | grep -vcxFf <(tr , '\n' <<<"$bad"))
    while IFS="|" read -r job after given; do
        [[ $after =~ :$SLURM_JOB_ID([^0-9]|$) ]] || continue
        [ "$given" != "(null)" ] || given=
        say "job $job, the next one, leaves out ${bad:-no node}; $left nodes are left of this one"
        # One by one: with a name in it that Slurm does not know it takes none of a list.
        for name in ${bad//,/ }; do
            ! scontrol update "JobId=$job" "ExcNodeList=${given:+$given,}$name" ||
                given=${given:+$given,}$name
        done
        [ -z "${SMALLER:-}" ] || ((left >= NODES + SPARES || left < $(fitting "$left"))) ||
            scontrol update "JobId=$job" "NumNodes=$left" "NumTasks=$left"
    done < <(squeue -h -t PD -o "%i|%E|%x")
}

# Whether any task of the step is alive, as far as is known: Slurm may not answer for a while.
nodes_are_there() {
    local steps
    steps=$(squeue -h -s -j "$SLURM_JOB_ID" -o %i) || return 0
    grep -q '\.[0-9]' <<<"$steps"
}

time_is_nearly_over() {
    say "the time limit is near: the state is saved, and the run ends"
    deadpool stop --dump --within "$NOTICE_SECONDS" --wait "$NOTICE_SECONDS" "$1" || true
}

# Exits with the run's own status, and ends the chain where another job would only repeat it.
judge() {
    local run=$1 status line
    line=$(deadpool status --verdict "$run") && status=0 || status=$?
    echo "${line:-no verdict can be read}"
    # Where none can be read, the status is that of the command.
    if [[ $line == over,* && $status =~ ^([0-4]|76)$ ]]; then
        rm -f "${run%/*}/OVER" # a link of that name leads elsewhere
        (set -C && echo "run ${run##*/} ended with status $status" >"${run%/*}/OVER")
    fi
    return "$status"
}
