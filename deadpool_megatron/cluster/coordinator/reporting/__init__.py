"""Reports of a run: events, results, ``final.json`` and the status."""
