"""The control plane: coordinator, journal, agents, liveness. No torch here."""
