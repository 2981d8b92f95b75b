#!/bin/sh
# For --deadpool-health-command: exit status 0 good, 1 as a spare only, 2 out. Where the program is
# not installed the node is good.
#
# NVIDIA DCGM, the quick diagnosis (seconds; needs GPUs that nobody uses, so never while training).
command -v dcgmi >/dev/null || exit 0
dcgmi diag -r 1 && exit 0
exit 2
