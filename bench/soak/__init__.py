"""A soak of the served model: bounded load and faults on loopback, every answer checked."""
