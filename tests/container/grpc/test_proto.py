"""The messages are the published ones, and live beside a client's copy of them."""

import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from container.grpc import grpc_service_pb2 as pb
from tests.model_handlers.config.test_model_config_proto import drop_json_names

PROTO = "container/grpc/grpc_service.proto"


def messages(module):
    """Name → schema of a module's messages, without the name of its package."""
    proto = descriptor_pb2.FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(proto)
    return {each.name: str(each).replace(f".{proto.package}.", ".P.") for each in proto.message_type}


def test_every_field_is_the_published_one():
    """Names, numbers and types are those that Triton's own client has, of every message that is served."""
    published = messages(pytest.importorskip("tritonclient.grpc.service_pb2"))
    ours = messages(pb)

    assert {name: ours.get(name) for name in published} == published
    assert ours.keys() - published.keys() == {"HealthCheckRequest", "HealthCheckResponse"}


def test_the_generated_module_is_the_schema_file(tmp_path):
    """Nobody edited one of the two alone: `make proto` would change nothing."""
    pytest.importorskip("grpc_tools")
    compiled = tmp_path / "descriptors"

    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I.", f"--descriptor_set_out={compiled}", PROTO],
        cwd=Path(__file__).parents[3],
        check=True,
    )

    (described,) = descriptor_pb2.FileDescriptorSet.FromString(compiled.read_bytes()).file
    generated = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(generated)
    for message in described.message_type:
        drop_json_names(message)
    assert described == generated
