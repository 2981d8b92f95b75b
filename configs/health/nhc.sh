#!/bin/sh
# For --deadpool-health-command: exit status 0 good, 1 as a spare only, 2 excluded. Without the
# program the node is good.
#
# LBNL Node Health Check: its failures exclude the node. Only the site's own prolog, not this script,
# may mark nodes in a scheduler.
command -v nhc >/dev/null || exit 0
nhc -a MARK_OFFLINE=0 && exit 0
exit 2
