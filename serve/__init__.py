"""Layer 2, the engine: time, memory, disk, S3. Knows no web framework, no ML framework and no environment."""
