"""Triton's published ModelConfig message: the schema of config.pbtxt. Only `pbtxt` imports it.

`model_config_pb2.py` and `model_config_pb2.pyi` are generated from `model_config.proto`; from the repository root:

    python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. model_handlers/proto/model_config.proto

with grpcio-tools (no newer than the protobuf runtime: generated code refuses an older one).
"""
