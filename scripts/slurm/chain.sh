#!/usr/bin/env bash
# Submits a chain of jobs, each of which starts after the end of the previous job and continues from
# its state.
#
#   scripts/slurm/chain.sh COUNT [options of sbatch] SCRIPT [COMMAND ARGS]
#
# When the training is complete or has failed for good, the remaining jobs end at once, each with a
# line (see RUNS/OVER in job.sh). Prints the numbers of the jobs.
set -euo pipefail

if [ $# -lt 2 ] || ! [[ $1 =~ ^[1-9][0-9]*$ ]]; then
    echo "chain.sh: give COUNT, a number above 0, and what sbatch gets, not: $*" >&2
    exit 2
fi

# afterany, not afterok: a job must also continue after a job that was lost or reached its time limit.
before=()
for ((i = 0; i < $1; i++)); do
    job=$(sbatch --parsable "${before[@]}" "${@:2}")
    job=${job%%;*} # with several clusters: number;cluster
    echo "$job"
    before=(--dependency=afterany:"$job")
done
