"""`mme local`: a SageMaker endpoint on a laptop, which plays the platform towards a container and the API to boto3."""
