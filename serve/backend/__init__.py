"""What runs inside Triton's Python stub: requests in, one engine thread, responses and metrics out."""
