"""What starts a run, a node of it, or a standby: `deadpool run`, `agent`, `standby`."""
