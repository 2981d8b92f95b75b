"""The parts of soak.py: faults, growth, rounds."""
