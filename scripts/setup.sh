#!/usr/bin/env bash
# Makes .venv in this checkout with everything the demo and the tests need, or finds it ready.
#
#   ./scripts/setup.sh [--gpu | --cpu]
#
# --gpu takes torch with CUDA, --cpu the build without: as on a login node for the nodes behind it. That
# is kept until the other one is asked for. With neither: by whether this machine has an NVIDIA GPU.
# demo.sh and test.sh call it. It checks the machine first; whatever is missing is named in one
# line with what to do about it (exit status 2). Nothing outside .venv is written.
# PYTHON=/path/to/python3.12 chooses the interpreter.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv
stamp=$venv/.deadpool-stamp
log=$venv/setup.log
cpu_index=https://download.pytorch.org/whl/cpu
locked=$root/scripts/lock.txt
torch_version=$(sed -n 's/^torch==\([^ ]*\).*/\1/p' "$locked")
chosen=$(cat "$venv/.deadpool-build" 2>/dev/null || true)
step_number=0
worker=

fail() {
    printf 'setup: %s\n' "$1" >&2
    exit 2
}

stop_worker() {
    [ -z "$worker" ] || kill "$worker" 2>/dev/null || true
    printf '\nsetup: interrupted\n' >&2
    exit 130
}
trap stop_worker INT TERM

has_gpu() {
    [ "$chosen" = --gpu ] || { [ -z "$chosen" ] && { [ -e /dev/nvidiactl ] || [ -e /dev/nvidia0 ]; }; }
}

# step TITLE COMMAND...: one line with the elapsed time; all output goes to the log.
step() {
    local title=$1 started=$SECONDS status=0
    shift
    step_number=$((step_number + 1))
    printf '  %d. %-44s' "$step_number" "$title"
    printf '\n== %s\n' "$title" >>"$log"
    "$@" >>"$log" 2>&1 &
    worker=$!
    if [ -t 1 ]; then
        while kill -0 "$worker" 2>/dev/null; do
            printf '\r  %d. %-44s %3d s' "$step_number" "$title" $((SECONDS - started))
            sleep 0.5
        done
        printf '\r  %d. %-44s' "$step_number" "$title"
    fi
    wait "$worker" || status=$?
    worker=
    if [ "$status" -eq 0 ]; then
        printf ' %3d s\n' $((SECONDS - started))
    else
        printf ' failed after %d s\n' $((SECONDS - started))
    fi
    return "$status"
}

show_log_and_fail() {
    tail -n 8 "$log" | sed 's/^/     | /' >&2
    fail "$1 (the whole log is in $log)"
}

pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }

# --- checks ---------------------------------------------------------------------------------

check_machine() {
    [ "$(uname -s)" = Linux ] ||
        fail "this is $(uname -s); deadpool needs Linux (pidfd, /dev/shm). Use a Linux machine or container."
    command -v git >/dev/null ||
        fail "git was not found. Run: sudo apt install git"
    local available limit
    available=$(awk '/^MemAvailable:/ {print int($2 / 1024)}' /proc/meminfo)
    limit=$(cat /sys/fs/cgroup/memory.max 2>/dev/null || echo max)
    if [ "$limit" != max ] && [ $((limit / 1048576)) -lt "$available" ]; then
        available=$((limit / 1048576))
    fi
    [ "$available" -ge "$1" ] ||
        fail "$available MB of memory are free; $1 MB are needed. Close other programs or use a larger machine."
    memory_mb=$available
}

check_disk() {
    local free
    free=$(df -Pm "$root" | awk 'NR == 2 {print $4}')
    [ "$free" -ge "$1" ] ||
        fail "$free MB of disk are free in $root; the install needs $1 MB. Free some, or clone to another disk."
}

# Early versions of Python 3.11 pickle the members of an enum as getattr(), which torch.load refuses:
# with them stock Megatron does not load its own checkpoints either.
pickles_enums_by_name() {
    "$1" -c 'import pickle, uuid; assert b"getattr" not in pickle.dumps(uuid.SafeUUID.safe)' 2>/dev/null
}

# Sets $python to the first interpreter from 3.11 to 3.13 that can make virtual environments.
find_python() {
    local candidate version seen="" without_venv="" early=""
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.13 python3; do
        # A pyenv shim may exist and still not run, so ask each one for its version.
        version=$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
            continue
        seen+=" $candidate=$version"
        case $version in 3.1[123]) ;; *) continue ;; esac
        if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
            if pickles_enums_by_name "$candidate"; then
                python=$candidate
                return
            fi
            early=${early:-$candidate}
            continue
        fi
        without_venv=$version
    done
    if [ -n "$early" ]; then
        python=$early
        echo "setup: $("$early" -V) writes checkpoints that torch.load refuses; tests that load one are skipped. A later 3.11, or 3.12, does not (PYTHON=/path/to/python3.12)" >&2
        return
    fi
    [ -z "$without_venv" ] ||
        fail "Python $without_venv has no venv module. Run: sudo apt install python$without_venv-venv"
    fail "Python 3.11 to 3.13 is needed (found:${seen:- none}). Run: sudo apt install python3 python3-venv   (that is one of them in Debian 12 and 13, Ubuntu 24.04), or say where one is: PYTHON=/path/to/python3.12"
}

# --- install --------------------------------------------------------------------------------

# What the environment depends on; when it changes, the environment is brought up to date.
wanted_stamp() {
    { printf '%s\n' "$root" "$chosen$(has_gpu && echo gpu)" && cat "$root/pyproject.toml" \
        "$root/scripts/lock.txt"; } | sha256sum | cut -d' ' -f1
}

is_ready() {
    [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(wanted_stamp)" ] &&
        "$venv/bin/python" -c 'import deadpool_megatron' 2>/dev/null
}

# An environment of another place or Python cannot be mended; ours can be updated in place.
is_usable() {
    grep -qsF "$venv" "$venv/pyvenv.cfg" && "$venv/bin/python" -c \
        'import pip, sys; assert (3, 11) <= sys.version_info[:2] <= (3, 13)' 2>/dev/null
}

installed_torch() {
    "$venv/bin/python" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null ||
        echo none
}

# To pip the CPU build is a version like the one with CUDA.
drop_cpu_torch() {
    [ "$(installed_torch)" != "$torch_version+cpu" ] || pip uninstall -q -y torch
}

# The default index has the CUDA build of torch, gigabytes that a machine without a GPU cannot
# use. So there: the CPU build from wherever pip is set up to look, then from PyTorch's own index. That
# build alone has no hash in the lock: it differs with the index. What it needs none of is left out.
install_cpu_torch() {
    local cpu="torch==$torch_version+cpu" wheel_only=(--only-binary=:all: --no-deps)
    [ "$(installed_torch)" = "$torch_version+cpu" ] ||
        step "torch $torch_version (CPU build)" try_each \
            "pip install ${wheel_only[*]} $cpu" \
            "pip install ${wheel_only[*]} --index-url $cpu_index $cpu" || {
        echo "     The CPU build could not be had; taking the default build, which may be several GB."
        check_disk 12000
        return
    }
    awk '/^[a-z]/ { left_out = /^(torch|triton|nvidia-.*|cuda-.*)==/ } !left_out' "$locked" >"$venv/lock.txt"
    locked=$venv/lock.txt
}

try_each() {
    local line
    for line in "$@"; do
        printf '$ %s\n' "$line"
        # shellcheck disable=SC2086 # the words of the command, none of which has blanks
        $line && return
    done
    return 1
}

# megatron-core without a wheel would compile C++; all packages have wheels for 3.11 to 3.13. The lock is
# whole, so pip takes nothing else, and a package with another hash not at all.
install_packages() {
    local problem="the packages could not be installed; is the package index reachable?"
    local title="megatron-core and its packages"
    [ "$locked" = "$venv/lock.txt" ] || title="torch $torch_version (with CUDA), megatron-core"
    step "$title" pip install --require-hashes --no-deps --only-binary=:all: -r "$locked" ||
        show_log_and_fail "$problem"
    # The build backend was installed just now, so nothing is fetched that is not in the lock.
    step "deadpool-megatron" pip install --no-deps --no-build-isolation -e "$root" ||
        show_log_and_fail "$problem"
}

main() {
    case ${1:-} in
        --gpu | --cpu) chosen=$1 ;;
        ?*) fail "$1 is neither --gpu nor --cpu" ;;
    esac
    check_machine 2500
    # Two callers at once (a demo beside a test run): the second waits and then finds it ready.
    exec 9<"$root/pyproject.toml"
    flock -n 9 || { echo "setup: another setup of this checkout is running, waiting for it" &&
        flock 9; }
    ! is_ready || return 0
    find_python
    if has_gpu; then check_disk 12000; else check_disk 3000; fi
    echo "Setting up .venv: $("$python" -V) ($(command -v "$python")), $memory_mb MB of memory free" \
        "$(has_gpu && echo "and torch with CUDA")"
    if ! is_usable; then
        rm -rf "$venv"
        mkdir "$venv"
        step "virtual environment" "$python" -m venv "$venv" ||
            show_log_and_fail "the virtual environment could not be made"
    fi
    rm -f "$stamp"
    printf '%s' "$chosen" >"$venv/.deadpool-build"
    if has_gpu; then drop_cpu_torch; else install_cpu_torch; fi
    install_packages
    wanted_stamp >"$stamp"
    echo "  Ready after $SECONDS s."
}

main "$@"
