"""Messages between processes. A frame is a JSON object, optionally followed by raw bytes.

Nothing that arrives is ever unpickled or evaluated.

framing         frames, their size limits, waits for a descriptor
forms           dataclasses as JSON, by the types of their fields
auth            the handshake with the run secret
sealed_records  the messages after the handshake, each with a MAC
listener        accepts connections; few that are not authenticated wait
"""
