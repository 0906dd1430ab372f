"""One inference request under every protocol, from its bytes to its answer."""
