"""What a run tells: events, results, ``final.json`` and the status."""
