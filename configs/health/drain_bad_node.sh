#!/bin/sh
# For --deadpool-bad-node-command: has Slurm drain the node, with a reason that `sinfo -R` shows. What
# runs there goes on to its end; no new job starts there until an operator says state=resume.
#
# It wants an operator's rights (sacctmgr modify user NAME set adminlevel=operator, or a sudo rule).
set -eu
node=${DEADPOOL_BAD_NODE%%.*} # Slurm names nodes without their domain
exec scontrol update "NodeName=$node" State=DRAIN \
    "Reason=deadpool: $DEADPOOL_BAD_NODE_KIND: $(printf %.200s "$DEADPOOL_BAD_NODE_TEXT")"
