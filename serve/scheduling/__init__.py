"""How requests become batches: pure values in, values out; no thread, clock or socket in this package."""
