#!/bin/sh
# For `deadpool check --health-command`, before a run: exit status 0 good, 2 excluded, 3 unknown.
# Without the program the node is good. Not for --deadpool-health-command, which runs each minute:
# NVIDIA DCGM's quick diagnosis (seconds) needs idle GPUs.
command -v dcgmi >/dev/null || exit 0
dcgmi diag -r 1
# The status is DCGM's, modulo 256: a diagnosis failed (-30) or isolates the GPU (-51), a GPU is lost
# (-18) or needs a reset (-19). Any other means that nothing was diagnosed, as without a running host
# engine.
case $? in
0) exit 0 ;;
226 | 205 | 238 | 237) exit 2 ;;
*) exit 3 ;;
esac
