"""The server's processes: gunicorn's master and worker, sockets, limits, and the engine's start."""
