"""State that all threads of a vault share: the gate, what is committed, room."""
