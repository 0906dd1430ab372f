"""What the server tells of itself: metrics, CloudWatch documents, logs, traces, and the page at /dashboard."""
