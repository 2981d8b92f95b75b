"""Write-once decisions, and terms of coordinators.

journal        the files of decisions and terms
terms          the right to coordinate, and the coordinator's heartbeat
user_requests  requests of users
"""
