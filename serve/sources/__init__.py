"""Where models come from: folders, archives in S3, what is unpacked on disk, names for all of it."""
