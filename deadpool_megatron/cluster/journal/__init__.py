"""Write-once decisions, and terms of coordinators.

journal        the files that hold them
terms          who may coordinate, and the sign of life
user_requests  what users have asked for
"""
