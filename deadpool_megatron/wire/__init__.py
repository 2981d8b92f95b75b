"""Messages between processes: framing, size limits and mutual authentication.

A frame is a JSON object, optionally followed by raw bytes announced in its header. Nothing that
arrives is ever unpickled or evaluated.
"""
