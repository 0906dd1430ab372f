"""KServe v2 over gRPC, with Triton's extensions: what `tritonclient.grpc` speaks. Needs the extra `grpc`.

`server` listens and closes, `rpc` is one call, `inference` carries requests for models, `methods` everything else;
`codec` is the messages. All of it runs on the event loop. `grpc_service_pb2.py` and `.pyi` are generated from
`grpc_service.proto` by `make proto`.

The server is ours, on the HTTP/2 of `container.http2`: grpcio's server for asyncio takes 170 to 200 µs of processor
time a call before any of our code has run, on a machine where ours takes 10 to 20. Its threaded one takes as long, and
has a thread for every request that waits.
"""
