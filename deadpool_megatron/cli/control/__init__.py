"""Commands to a run that continues. status: its state. client: requests that change it."""
