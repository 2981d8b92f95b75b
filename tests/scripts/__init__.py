"""The scripts of maintainers: soak, bench, setup, slips."""
