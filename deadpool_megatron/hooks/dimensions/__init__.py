"""The dimensions of parallelism: groups, what peers can rebuild and must agree on.

dimension  the seam, and comparing with peers
tensor     parameters that are replicated over the group
pipeline   tied embeddings
data       parameters derived from the peers' shards
"""
