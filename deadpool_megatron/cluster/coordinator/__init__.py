"""The service that decides for the run."""
