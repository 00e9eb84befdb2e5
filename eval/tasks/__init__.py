"""Offline tasks: YAML in lm-evaluation-harness form, JSONL data of our own, and the script that made it."""
