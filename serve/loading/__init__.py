"""A target model, from its files to its memory: understood, loaded, measured."""
