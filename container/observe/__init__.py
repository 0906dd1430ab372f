"""What the server tells of itself: metrics, CloudWatch documents, logs."""
