"""Commands to a live run: ``status`` shows its state, ``client`` sends requests that change it."""
