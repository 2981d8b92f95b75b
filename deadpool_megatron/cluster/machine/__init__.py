"""What is decided: pure, without clocks, files or sockets."""
