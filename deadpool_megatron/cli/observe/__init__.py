"""Views of a run for others, fed by events and status alone.

metrics, samples: for Prometheus. traces: for OpenTelemetry. serve: the page.
"""
