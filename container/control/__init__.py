"""Operations beside inference: the routes of the protocols, and the way from their threads to the event loop."""
