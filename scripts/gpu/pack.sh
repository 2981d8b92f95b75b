#!/usr/bin/env bash
# Fetches what prove.sh needs beside torch as wheels, for a machine without network.
#
#   scripts/gpu/pack.sh [FOLDER] [PYTHON_VERSION]        (default: wheels beside this script, 3.12)
#
# Neither torch nor numpy is fetched: the machine has its own. The folder must be smaller than 64 MiB.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
root=$(cd "$here/../.." && pwd -P)
case ${1:-} in
    -h | --help)
        sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"
        exit 0
        ;;
esac
folder=${1:-$here/wheels}
version=${2:-3.12}
most_kib=$((64 * 1024))
python=${PYTHON:-python3}
[ -n "${PYTHON:-}" ] || [ ! -x "$root/.venv/bin/python" ] || python=$root/.venv/bin/python

pinned() { sed -n "s/^\($1==[^ ;]*\).*/\1/p" "$root/constraints.txt"; }

mkdir -p "$folder"
platforms=()
for glibc in 2_28 2_27 2_24 2_17 2_12 2_5; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
for name in megatron-core xxhash immutables zfec PyYAML einops packaging; do
    requirement=$(pinned "$name")
    "$python" -m pip download -q --no-deps --only-binary=:all: --python-version "$version" \
        --implementation cp "${platforms[@]}" -d "$folder" "${requirement:-$name}"
done
size_kib=$(du -sk "$folder" | cut -f1)
if [ "$size_kib" -ge "$most_kib" ]; then
    printf 'pack: %s has %s KiB, more than 64 MiB\n' "$folder" "$size_kib" >&2
    exit 1
fi
printf 'packed: %s, %s KiB\n' "$folder" "$size_kib"
