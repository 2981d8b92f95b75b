"""How much memory generations may take, take, and would take."""
