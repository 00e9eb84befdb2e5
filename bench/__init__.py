"""Benchmarks: what is timed or counted on a machine. Never tests; each writes a JSON record."""
