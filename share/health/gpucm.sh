#!/bin/sh
# For --deadpool-health-command: exit status 0 good, 1 as a spare only, 2 out. Where the program is
# not installed the node is good.
#
# Meta's GPU cluster monitoring: 0 good, 1 a warning, 2 critical, as they are here. CHECKS: which.
command -v health_checks >/dev/null || exit 0
status=0
for check in ${CHECKS:-check-nvidia-smi check-dmesg check-ib}; do
    health_checks "$check"
    found=$?
    [ "$found" -le 2 ] || found=1
    [ "$found" -le "$status" ] || status=$found
done
exit "$status"
