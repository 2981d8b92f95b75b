"""Accounts of a run, in words, tables and pictures: live, afterwards, and compared."""
