"""Knowledge of the machine, as small frozen objects; nothing else decides what it does."""
