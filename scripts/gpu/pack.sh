#!/usr/bin/env bash
# Packs what a machine with a GPU and no network lacks: this tree without its history, and the
# packages that it needs beside torch and numpy, compiled for the Python of that machine.
#
#   scripts/gpu/pack.sh [FILE] [PYTHON_VERSION]        (default: deadpool-proof.tgz, 3.12)
#
# There:  tar xzf deadpool-proof.tgz && deadpool-proof/scripts/gpu/prove.sh
# The file is smaller than 64 MiB. PYTHON chooses the interpreter whose pip fetches the packages; if
# a Python of PYTHON_VERSION is found (python3.12, or PROOF_PYTHON), it compiles what is packed.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)
case ${1:-} in
    -h | --help)
        sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"
        exit 0
        ;;
esac
file=${1:-deadpool-proof.tgz}
version=${2:-3.12}
most_kib=$((64 * 1024))
python=${PYTHON:-python3}
[ -n "${PYTHON:-}" ] || [ ! -x "$root/.venv/bin/python" ] || python=$root/.venv/bin/python

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tree=$work/deadpool-proof
mkdir "$tree"
git -C "$root" ls-files -z --cached --others --exclude-standard -- \
    ':!tests/[!fg]*' ':!tests/faults' ':!docs/*.png' ':!scripts/bench/results' ':!*.tgz' |
    (cd "$root" && xargs -0 ls -d 2>/dev/null | tar cf - -T -) | tar xf - -C "$tree"
changes=$(git -C "$root" status --porcelain --untracked-files=all -- ':!*.tgz')
printf '%s%s\n' "$(git -C "$root" rev-parse HEAD)" "${changes:+ with changes}" \
    >"$tree/PROOF_COMMIT"

platforms=()
for glibc in 2_28 2_27 2_24 2_17 2_12 2_5; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
"$python" -m pip install -q --disable-pip-version-check --no-deps --only-binary=:all: --no-compile \
    --python-version "$version" --implementation cp "${platforms[@]}" \
    --target "$tree/scripts/gpu/site" -c <(grep -o '^[a-z][^ ]*==[^ ]*' "$root/scripts/lock.txt") \
    megatron-core xxhash zfec PyYAML einops packaging
compiler=$(command -v "${PROOF_PYTHON:-python$version}" || true)
[ -z "$compiler" ] ||
    "$compiler" -m compileall -q -j 0 "$tree/deadpool_megatron" "$tree/scripts/gpu" || true
tar czf "$work/packed" -C "$work" deadpool-proof
size_kib=$(du -sk "$work/packed" | cut -f1)
if [ "$size_kib" -ge "$most_kib" ]; then
    printf 'pack: %s would have %s KiB, more than 64 MiB\n' "$file" "$size_kib" >&2
    exit 1
fi
mkdir -p "$(dirname "$file")"
mv "$work/packed" "$file"
printf 'packed: %s, %s KiB, of %s\n' "$file" "$size_kib" "$(cat "$tree/PROOF_COMMIT")"
