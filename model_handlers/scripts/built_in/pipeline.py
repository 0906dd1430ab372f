"""A model as Hugging Face's libraries save it, for which every function is the default one."""
