"""The configuration of a model: its values, the text and the JSON of it, and the rules it must meet."""
