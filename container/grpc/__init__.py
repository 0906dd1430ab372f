"""KServe v2 over gRPC, with Triton's extensions: what `tritonclient.grpc` speaks. Needs the extra `grpc`.

`server` listens and closes, `rpc` is one call, `infer` and `stream` carry inference, `methods` and `regions` everything
else; `decode` and `encode` are the messages' side of the codec. All of it runs on the event loop. `grpc_service_pb2.py`
and `grpc_service_pb2.pyi` are generated from `grpc_service.proto`; from the repository root, with what
`model_handlers/proto` says:

    python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. container/grpc/grpc_service.proto

The server is ours, on the HTTP/2 of `container.http2`: grpcio's server for asyncio takes 170 to 200 µs of processor
time a call before any of our code has run, on a machine where ours takes 10 to 20. Its threaded one takes as long, and
has a thread for every request that waits.
"""
