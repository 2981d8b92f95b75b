"""What tests of every room use: programs as forks, waiting, ports, what a run has told."""
