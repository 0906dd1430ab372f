"""What a request may pass beside inference: keys, restrictions, sessions, shared memory, forwarded headers."""
