#!/usr/bin/env bash
# Sets up (first time only), then runs the checks and the tests.
#
#   ./scripts/test.sh [--fast | --full | --all] [--slurm] [arguments of pytest]
#
#   (nothing)   checks of the source, unit tests, whole runs with real kills, a covering array of
#               faults
#   --fast      checks of the source and the tests that need neither a whole training run, or other
#               processes for long, nor the source of Megatron-LM
#   --full      in addition pretrain_gpt.py of Megatron-LM, every layout, the arrays of faults of all
#               schemes, and all else that takes minutes
#   --all       in addition every cell of the full fault matrix
#   --slurm     in addition runs under a real Slurm and over network namespaces (as root; installs
#               Debian packages). CI runs --full --slurm for 36 minutes
#
# Exit status: 0 when everything passed and nothing was left running or in /dev/shm.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root"

selection=()
system_packages=
while true; do
    case ${1:-} in
        --fast) selection=(-m "not slow and not matrix and not megatron_lm") ;;
        --full) selection=(--full) ;;
        --all) selection=(--all) ;;
        --slurm) system_packages=yes ;;
        -h | --help)
            sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"
            exit 0
            ;;
        *) break ;;
    esac
    shift
done

"$root/scripts/setup.sh"
if [ -n "$system_packages" ]; then
    "$root/scripts/system-packages.sh" || true # it has said what is missing
    export DEADPOOL_TEST_SLURM=1 DEADPOOL_TEST_NETNS=1
fi
export PATH=$root/.venv/bin:$PATH

# check TITLE COMMAND...: one line when it passes, its whole output when it does not.
check() {
    local title=$1 output
    shift
    if output=$("$@" 2>&1); then
        printf 'ok    %s\n' "$title"
    else
        printf '%s\n' "$output"
        printf 'FAIL  %s: %s\n' "$title" "$*"
        exit 1
    fi
}

check "lint" ruff check
check "format" ruff format --check
check "types" mypy
check "imports point one way" lint-imports

exec python -m pytest "${selection[@]}" "$@"
