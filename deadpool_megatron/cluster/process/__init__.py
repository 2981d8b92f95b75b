"""Local processes: start, name, watch, end.

fork_server  imports once, forks, reaps and reports members; parked processes
member_main  a new member process before the user's command
children     children of a process with a loop: start, end
logs         logs in memory and their last lines; files of the run directory, by a thread
posix        system calls that Python's library lacks
"""
