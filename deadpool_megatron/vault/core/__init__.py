"""What all threads of a vault share: the gate, what is owed and committed, pace, room."""
