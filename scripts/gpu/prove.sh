#!/usr/bin/env bash
# Shows on this machine what the GPU path does: one GPU or more, no network needed.
#
#   scripts/gpu/prove.sh [--minutes N] [--out DIR] [--part NAME] [--megatron-lm DIR] [--device cpu]
#
# All parts together take N minutes at most (default: 8), and leave one archive in DIR (default:
# proof-results), whenever and however they are ended. --device cpu rehearses all of it on the CPU,
# small. Exit status 2, at once, where something is missing. PYTHON chooses the interpreter that has
# torch; the packages of pack.sh go before its own.
set -euo pipefail

case ${1:-} in
    -h | --help)
        sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"
        exit 0
        ;;
esac
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
root=$(cd "$here/../.." && pwd -P)
python=${PYTHON:-python3}
[ -n "${PYTHON:-}" ] || [ ! -x "$root/.venv/bin/python" ] || python=$root/.venv/bin/python
site=
[ ! -d "$here/site" ] || site=$here/site:
export PYTHONPATH=$site$root:$here:$root/tests/fakes:$root/tests/gpu${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
exec "$python" -m proof "$@"
