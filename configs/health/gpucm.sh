#!/bin/sh
# For --deadpool-health-command: exit status 0 good, 1 as a spare only, 2 out, 3 not known. Where the program is
# not installed the node is good.
#
# Meta's GPU cluster monitoring (gpucm 0.0.2): 0 good, 1 a warning, 2 critical, as here. CLUSTER: the
# name in its reports; CHECKS: the checks, one a line.
command -v health_checks >/dev/null || exit 0
cluster=${CLUSTER:-deadpool}
checks="check-nvidia-smi $cluster app -c row_remap_failed -c row_remap_pending -c ecc_uncorrected_volatile_total
check-syslogs xid $cluster app"
# Without InfiniBand there is nothing to check.
[ ! -d /sys/class/infiniband ] || checks="$checks
check-ib check-ibstat $cluster app"
# It writes logs into the current directory.
logs=$(mktemp -d) && cd "$logs" || exit 1
trap 'rm -rf "$logs"' EXIT
status=0
IFS='
'
for check in ${CHECKS:-$checks}; do
    IFS=' '
    # shellcheck disable=SC2086 # a check is several words
    output=$(health_checks $check 2>&1)
    found=$?
    printf '%s\n' "$output"
    # Another release with other checks also ends with 2, which tells nothing about the node.
    case $output in Usage:* | *"
Usage:"*) found=3 ;; esac
    [ "$found" -le 2 ] || { [ "$status" -ne 0 ] || unknown=3 worst=$output; continue; }
    if [ "$found" -gt "$status" ]; then
        status=$found
        worst=$output
    fi
done
# Its last line is shown as the reason.
[ "$status" -ne 0 ] || status=${unknown:-0}
[ "$status" -eq 0 ] || printf '%s\n' "$worst"
exit "$status"
