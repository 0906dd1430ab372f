"""What lies in S3: archives under a prefix, and models of repositories, which are directories there."""
