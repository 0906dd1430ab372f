"""KServe v2 over gRPC, with Triton's extensions: what `tritonclient.grpc` speaks. Needs the extra `grpc`.

`server` listens and closes, `infer` and `stream` carry inference, `methods` and `regions` everything else; `decode` and
`encode` are the messages' side of the codec. All of it runs on the event loop. `grpc_service_pb2.py` and
`grpc_service_pb2.pyi` are generated from `grpc_service.proto`; from the repository root, with what
`model_handlers/proto` says:

    python -m grpc_tools.protoc -I. --python_out=. --mypy_out=. container/grpc/grpc_service.proto

The server is grpcio's asynchronous one, on the loop of the engine (uvloop). grpcio's threaded server, whose threads
hand each request over to the loop and wait, took as long or longer a request (172 and 186 µs of processor time against
173 and 229 with a model that does nothing), has a thread for every request that waits, and hears late of clients that
leave.
"""
