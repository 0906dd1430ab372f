"""Layer 3, the contract: HTTP, gunicorn, Flask, SageMaker, the environment. The only place that knows them."""
