#!/bin/sh
# For --deadpool-health-command: exit status 0 good, 1 as a spare only, 2 out. Where the program is
# not installed the node is good.
#
# NVIDIA DCGM, the quick diagnosis (seconds; needs GPUs that nobody uses, so never while training).
command -v dcgmi >/dev/null || exit 0
dcgmi diag -r 1
# The status is DCGM's, modulo 256: a diagnosis that failed (-30), one that wants the GPU isolated
# (-51), a GPU that is lost (-18) or wants a reset (-19). Any other says that nothing was diagnosed,
# as without a running host engine.
case $? in
0) exit 0 ;;
226 | 205 | 238 | 237) exit 2 ;;
*) exit 1 ;;
esac
