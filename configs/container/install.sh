#!/usr/bin/env bash
# Installs this checkout into the Python of an image. Build tools and missing requirements come from
# the lock, each package with its hash; packages of the image stay unchanged.
#
#   PYTHON=python3.12 configs/container/install.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python=${PYTHON:-python}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

# locked NAMES: their part of the lock; NAMES is a file with one name per line.
locked() {
    awk 'NR == FNR { names[$1]; next }
        /^[a-z]/ { taken = substr($1, 1, index($1, "==") - 1) in names } taken' "$1" scripts/lock.txt
}

echo setuptools >"$work/names"
locked "$work/names" >"$work/lock"
"$python" -m pip install --require-hashes --no-deps --only-binary=:all: --target "$work/built-with" \
    -r "$work/lock"
export PYTHONPATH=$work/built-with
"$python" -m pip install -q --dry-run --no-build-isolation --report "$work/report" ".[all]"
"$python" - "$work/report" >"$work/names" <<'PROGRAM'
import json, re, sys

for each in json.load(open(sys.argv[1]))["install"]:
    print(re.sub("[-_.]+", "-", each["metadata"]["name"]).lower())
PROGRAM
locked "$work/names" >"$work/lock"
"$python" -m pip install --require-hashes --no-deps --only-binary=:all: -r "$work/lock"
"$python" -m pip install --no-index --no-build-isolation ".[all]"
