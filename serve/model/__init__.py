"""One model in memory: its queue and instances, what executes, and what it has beside its file."""
