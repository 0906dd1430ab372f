"""`mme local`: the endpoint on a laptop, for boto3; SageMaker's part towards any container.

What SageMaker would refuse is a RuntimeApiError; what `mme local` can't do itself an MmeError, as of every command.
"""
