"""Recovery: the pure planning of a decision, and the linear sequence every member runs after it."""
