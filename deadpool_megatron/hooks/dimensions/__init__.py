"""The dimensions of parallelism: groups, in-flight state, what peers can rebuild.

dimension  the seam, and comparing with peers
tensor     parameters that are replicated over the group
pipeline   the schedule's functions, and tied embeddings
data       bucket groups in flight, and parameters derived from the peers' shards
"""
