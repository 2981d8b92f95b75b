"""The decisions of a run: pure, without clocks, files or sockets."""
