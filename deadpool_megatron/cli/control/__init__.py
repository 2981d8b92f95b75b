"""What is asked of a run that goes on: its status, and requests that change it."""
