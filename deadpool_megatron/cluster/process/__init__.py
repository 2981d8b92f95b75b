"""Local processes: start, name, watch, end.

fork_server  imports once and forks members, reaps and reports them; parked processes
member_main  a new member process before the user's command
children     children of a process with a loop: start, end
logs         logs in memory, last words, and files of the run directory, by a thread
posix        what Python's library lacks
"""
