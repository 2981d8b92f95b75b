#!/usr/bin/env bash
# Installs the Debian packages that tests/slurm, tests/netns and the tests of metrics need: a
# real Slurm, network tools, Prometheus, Chromium. test.sh --slurm calls it.
#
# As root, with apt-get, on Debian or Ubuntu. No service is started: the tests start their own.
# Exit status: 0 when everything is there; 1 when not, with one line that says why; the tests that
# need what is missing are then skipped.
set -euo pipefail

packages=(slurmctld slurmd slurm-client munge nftables iproute2 util-linux openssl prometheus chromium)
policy=/usr/sbin/policy-rc.d

missing() {
    local package
    for package in "${packages[@]}"; do
        [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] ||
            echo "$package"
    done
}

give_up() {
    printf 'system packages: %s; the tests that need them are skipped\n' "$1" >&2
    exit 1
}

command -v dpkg-query >/dev/null || give_up "this is no Debian or Ubuntu"
mapfile -t wanted < <(missing)
[ ${#wanted[@]} -gt 0 ] || exit 0
[ "$(id -u)" -eq 0 ] || give_up "${wanted[*]} are missing, and only root can install them"

# Packages of services start them when they are installed; this file forbids it meanwhile.
own_policy=
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
    own_policy=yes
fi
log=$(mktemp)
trap 'rm -f "$log"; [ -z "$own_policy" ] || rm -f "$policy"' EXIT

printf 'Installing %s\n' "${wanted[*]}"
export DEBIAN_FRONTEND=noninteractive
for _ in once again; do # the lists of packages may be missing or old
    if apt-get install -y --no-install-recommends "${wanted[@]}" >"$log" 2>&1; then
        exit 0
    fi
    apt-get update >>"$log" 2>&1 || break
done
tail -n 5 "$log" | sed 's/^/     | /' >&2
give_up "${wanted[*]} could not be installed"
