"""What happened in a run, in words, tables and pictures: live, afterwards, and compared."""
