#!/bin/sh
# For --deadpool-health-command: exit status 0 good, 1 as a spare only, 2 out. Where the program is
# not installed the node is good.
#
# LBNL Node Health Check: what it finds wrong is a reason to leave the node out. It must not mark
# nodes in a scheduler from here: that is the site's own prolog.
command -v nhc >/dev/null || exit 0
nhc -a MARK_OFFLINE=0 && exit 0
exit 2
