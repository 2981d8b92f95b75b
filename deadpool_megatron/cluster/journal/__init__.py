"""Write-once decisions, and terms of coordinators.

journal        the seam, the journal of files, and which one a run has
etcd           the journal in etcd, loaded where a run has it
terms          who may coordinate, and the sign of life
user_requests  what users have asked for
"""
