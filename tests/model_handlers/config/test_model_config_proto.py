"""The message is the published one, and lives beside a client's copy of it."""

import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from model_handlers.proto import model_config_pb2 as pb

PROTO = "model_handlers/proto/model_config.proto"


def schema(module):
    """A module's schema without what names the file it came from."""
    proto = descriptor_pb2.FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(proto)
    proto.name = ""
    return str(proto).replace(f'"{proto.package}"', '"P"').replace(f".{proto.package}.", ".P.")


def test_every_field_is_the_published_one():
    """Names, numbers and types are those that Triton's own client has, imported into the same process."""
    published = pytest.importorskip("tritonclient.grpc.model_config_pb2")

    assert schema(pb) == schema(published)


def test_a_message_is_the_same_on_the_wire():
    """A client reads what we write, whatever the packages are called."""
    published = pytest.importorskip("tritonclient.grpc.model_config_pb2")
    config = pb.ModelConfig(name="bert", input=[pb.ModelInput(name="I", data_type=pb.TYPE_FP32, dims=[-1, 4])])

    read = published.ModelConfig.FromString(config.SerializeToString())

    assert str(read) == str(config)


def test_the_generated_module_is_the_schema_file(tmp_path):
    """Nobody edited one of the two alone: `make proto` would change nothing."""
    pytest.importorskip("grpc_tools")
    root = Path(__file__).parents[3]
    compiled = tmp_path / "descriptors"

    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I.", f"--descriptor_set_out={compiled}", PROTO],
        cwd=root,
        check=True,
    )

    (described,) = descriptor_pb2.FileDescriptorSet.FromString(compiled.read_bytes()).file
    generated = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(generated)
    assert described.name == generated.name == PROTO
    for message in described.message_type:
        drop_json_names(message)
    assert described == generated


def drop_json_names(message):
    """A compiled set spells out JSON names, which a module's descriptor derives."""
    for field in message.field:
        field.ClearField("json_name")
    for nested in message.nested_type:
        drop_json_names(nested)
