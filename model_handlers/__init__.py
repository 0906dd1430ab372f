"""Layer 1, frameworks: tensors, model files, devices. Knows no queue, no cache, no HTTP and no S3."""
