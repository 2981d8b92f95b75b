"""Messages between processes. A frame is a JSON object, optionally followed by raw bytes announced
in its header; nothing that arrives is ever unpickled or evaluated.

framing         frames, their size limits, waits for a descriptor
forms           dataclasses as JSON, by the types of their fields
auth            the handshake with the run secret
sealed_records  what passes behind it, each piece under a MAC
listener        where connections come in; few that are not authenticated wait
"""
