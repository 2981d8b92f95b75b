"""Helpers of the tests of exports: programs held at iterations, a run without processes."""
