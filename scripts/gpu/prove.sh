#!/usr/bin/env bash
# Shows on this machine what the GPU path does: one GPU or more, no network needed.
#
#   scripts/gpu/prove.sh [--out DIR] [--part NAME] [--again] [--megatron-lm DIR] [--device cpu]
#
# Results are JSON files under --out (default: runs/proof); a part that has one of this commit is
# not run again. --device cpu rehearses all of it on the CPU, small. Packages that are missing are
# taken from WHEELS (default: wheels beside this script; see pack.sh), torch never. PYTHON chooses
# the interpreter that has torch.
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
wheels=${WHEELS:-$here/wheels}
site=$root/runs/proof-site

if ls "$wheels"/*.whl >/dev/null 2>&1; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
        --target "$site" "$wheels"/*.whl
    # Behind the machine's own packages would be too late for what it has in another version.
    export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
fi
export PYTHONPATH=$root:$here${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
exec "$python" -m proof "$@"
