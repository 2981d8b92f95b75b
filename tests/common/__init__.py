"""Helpers of all tests: programs as forks, waits, ports, results of runs."""
