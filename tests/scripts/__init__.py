"""The scripts that are not for the user of a run: soak, bench."""
