#!/usr/bin/env bash
# Runs the tests on a newer torch, Python and megatron-core than those of scripts/setup.sh.
#
#   sudo ./scripts/compat.sh [--torch 2.15] [--megatron 0.19] [--root DIR] [-- COMMAND...]
#   ./scripts/compat.sh --python PATH [the same]
#
# Makes a root of Debian trixie (Python 3.13) in DIR, by default in ~/.cache/deadpool-megatron/compat,
# and installs torch and megatron-core from the package index there; finds them ready the next time.
# The first time takes four minutes and 6 GB. With --python it makes a virtual environment of that
# interpreter in DIR instead, which needs neither root nor debootstrap. Then runs, in this order, and
# says what each came to:
#
#   groups   tests/comms, with torch's own suite of torch.distributed over our groups
#   fast     what scripts/test.sh --fast runs, but the groups and what is there for the source alone
#   demo     deadpool demo: a node of a training run is killed, and the rest goes on bit-identical
#   megatron tests/megatron_lm, but for the other tags: pretrain_gpt.py of the newest supported one
#   faults   tests/faults, whole: a quarter of an hour, as the tests before it
#
# With a COMMAND nothing but that runs there, in the checkout.
#
# Without --python it needs root, debootstrap and a connection to a Debian mirror; all mounts are in a
# mount namespace of their own and end with it. Exit status: 0 when all passed, 1 when not, 2 when
# something is missing.
set -euo pipefail

checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
torch=2.15
megatron=0.19
base=${XDG_CACHE_HOME:-$HOME/.cache}/deadpool-megatron/compat
python=

fail() {
    printf 'compat: %s\n' "$1" >&2
    exit 2
}

while [ $# -gt 0 ]; do
    case $1 in
        --) break ;;
        --torch) torch=${2:?} ;;
        --megatron) megatron=${2:?} ;;
        --root) base=${2:?} ;;
        --python) python=${2:?} ;;
        *)
            sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"
            [ "$1" = -h ] || [ "$1" = --help ] || exit 2
            exit 0
            ;;
    esac
    shift 2
done

root=$base/trixie
venv=/venv-torch$torch-megatron$megatron
here=/checkout

make_root() {
    command -v debootstrap >/dev/null || fail "debootstrap was not found. Run: apt install debootstrap"
    mkdir -p "$base"
    rm -rf "$root.new"
    debootstrap --variant=minbase --include=python3,python3-venv,python3-pip,git,ca-certificates \
        trixie "$root.new" >"$base/debootstrap.log" 2>&1 ||
        fail "debootstrap failed; its log is $base/debootstrap.log"
    mv "$root.new" "$root"
}

# What runs in the namespace: mounts, then the new root. $1: its path; $2: the checkout; the rest: a
# command.
in_root='
set -e
root=$1 checkout=$2
shift 2
for part in proc dev sys; do mount --rbind "/$part" "$root/$part"; done
for file in /etc/resolv.conf /etc/hosts /etc/ssl/certs/ca-certificates.crt; do
    [ ! -e "$file" ] || cp -L "$file" "$root$file"
done
home=/root
trees=$root$home/.cache/deadpool-megatron
mkdir -p "$root/checkout" "$trees"
mount --bind "$checkout" "$root/checkout"
mount -t tmpfs tmpfs "$root/tmp"
for tree in "$HOME"/.cache/deadpool-megatron/Megatron-LM-*; do
    [ -d "$tree" ] || continue
    mkdir -p "$trees/${tree##*/}"
    mount --bind "$tree" "$trees/${tree##*/}"
done
exec chroot "$root" env -i HOME="$home" PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 \
    PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=/checkout PIP_CERT=/etc/ssl/certs/ca-certificates.crt "$@"
'
# inside COMMAND...: where the packages are.
if [ -n "$python" ]; then
    version=$("$python" -c 'import platform; print(platform.python_version())') ||
        fail "$python is no Python that runs"
    venv=$base/python$version$venv
    here=$checkout
    inside() { env LANG=C.UTF-8 PYTHONDONTWRITEBYTECODE=1 "PYTHONPATH=$checkout" "$@"; }
else
    [ "$(id -u)" = 0 ] || fail "mounts and chroot need root; --python PATH needs none"
    [ -d "$root" ] || make_root
    python=python3
    inside() { unshare --mount bash -c "$in_root" compat "$root" "$checkout" "$@"; }
fi

# Lower bounds of the package decide nothing here: what is to be tried is named.
inside bash -euc "
[ ! -e '$venv/ready' ] || exit 0
rm -rf '$venv'
'$python' -m venv '$venv'
'$venv/bin/python' -m pip install -q 'torch==$torch.*' 'megatron-core==$megatron.*'
'$venv/bin/python' -m pip install -q numpy xxhash einops PyYAML zfec expecttest hypothesis \
    cryptography pytest pytest-timeout fastjsonschema psutil pydantic regex six tensorboard matplotlib mkdocs \
    prometheus-client
touch '$venv/ready'
" || fail "torch $torch or megatron-core $megatron could not be installed"

inside "$venv/bin/python" -c '
import platform, torch
from importlib.metadata import version
core, python, glibc = version("megatron-core"), platform.python_version(), platform.libc_ver()[1]
print(f"Python {python}, torch {torch.__version__}, megatron-core {core}, glibc {glibc}")
'

if [ "${1:-}" = -- ]; then
    shift
    inside env "PATH=$venv/bin:/usr/bin:/bin" bash -c 'cd "$0" && exec "$@"' "$here" "$@"
    exit
fi

passed=0
# part NAME COMMAND...: the last lines of what it printed, and whether it passed.
part() {
    local name=$1 started=$SECONDS status=0 output
    shift
    output=$(inside env "PATH=$venv/bin:/usr/bin:/bin" bash -c "cd '$here' && $*" 2>&1) || status=$?
    if [ "$status" = 0 ]; then
        printf '== %s: passed in %d s\n' "$name" $((SECONDS - started))
        printf '%s\n' "$output" | tail -n 3
    else
        passed=1
        printf '== %s: FAILED in %d s (status %d)\n' "$name" $((SECONDS - started)) "$status"
        printf '%s\n' "$output" | tail -n 40
    fi
}

pytest="python -m pytest -p no:cacheprovider -W ignore -o addopts=-q"
part groups "$pytest --timeout 300 tests/comms"
part fast "$pytest --timeout 120 -m \"not slow and not matrix and not megatron_lm\" --ignore tests/comms \
    --deselect tests/test_structure.py::test_the_lock_has_everything_that_is_needed tests"
part demo "python -m deadpool_megatron demo"
part megatron "$pytest --timeout 300 tests/megatron_lm --full --deselect tests/megatron_lm/test_tags.py"
part faults "$pytest --timeout 300 tests/faults --full"
exit "$passed"
