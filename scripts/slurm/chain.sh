#!/usr/bin/env bash
# Submits a chain of jobs, each of which starts after the end of the previous job and continues from
# its state.
#
#   scripts/slurm/chain.sh COUNT SCRIPT [options of sbatch]
#
# When the training is complete or has failed for good, the remaining jobs end at once, each with a
# line (see RUNS/OVER in job.sh). Prints the numbers of the jobs.
set -euo pipefail

if [ $# -lt 2 ] || ! [[ $1 =~ ^[1-9][0-9]*$ ]] || [ ! -f "$2" ]; then
    echo "chain.sh: give COUNT, a number above 0, and SCRIPT, a file that is there, not: $*" >&2
    exit 2
fi
count=$1 script=$2
shift 2

# afterany, not afterok: a job must also continue after a job that was lost or reached its time limit.
before=()
for ((i = 0; i < count; i++)); do
    job=$(sbatch --parsable "${before[@]}" "$@" "$script")
    job=${job%%;*} # with several clusters: number;cluster
    echo "$job"
    before=(--dependency=afterany:"$job")
done
