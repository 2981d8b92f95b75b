#!/bin/sh
# For `deadpool check --health-command`, before a run: exit status 0 good, 2 out, 3 not known. Where the
# program is not installed the node is good. Not for --deadpool-health-command, which is asked each
# minute: NVIDIA DCGM's quick diagnosis (seconds) needs GPUs that nobody uses.
command -v dcgmi >/dev/null || exit 0
dcgmi diag -r 1
# The status is DCGM's, modulo 256: a diagnosis that failed (-30), one that wants the GPU isolated
# (-51), a GPU that is lost (-18) or wants a reset (-19). Any other says that nothing was diagnosed,
# as without a running host engine.
case $? in
0) exit 0 ;;
226 | 205 | 238 | 237) exit 2 ;;
*) exit 3 ;;
esac
