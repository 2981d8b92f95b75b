"""What agent and coordinator say to each other, both ends."""
