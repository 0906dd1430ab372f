"""HTTP/2 for gRPC: what a server needs of RFC 9113, and of RFC 7541 through the library hpack."""
