"""Event stream frames, read by botocore: by its decoder, and by boto3 from a socket."""

import queue

import boto3
import pytest
from botocore.config import Config
from botocore.eventstream import EventStreamBuffer, ParserError
from botocore.exceptions import EventStreamError
from hypothesis import given, settings
from hypothesis import strategies as st

from container.codec import bodies as module
from container.codec.bodies import exception, payload_part
from tests.http_server import Handler, answering
from tests.waiting import PATIENCE


def decoded(stream):
    """The headers and payload of each frame, as botocore reads them; nothing may be left over."""
    buffer = EventStreamBuffer()
    buffer.add_data(stream)
    messages = list(buffer)
    assert sum(message.prelude.total_length for message in messages) == len(stream)
    return [(message.headers, message.payload) for message in messages]


def test_a_part_is_an_event_with_the_bytes_themselves():
    """The headers are those of SageMaker's PayloadPart."""
    headers = {":message-type": "event", ":event-type": "PayloadPart", ":content-type": "application/octet-stream"}
    assert decoded(payload_part(b"\x00\xffdata")) == [(headers, b"\x00\xffdata")]


def test_an_exception_is_a_frame_with_json():
    """Its type is a header; message and code are the payload."""
    ((headers, payload),) = decoded(exception('it "broke" é'))
    assert headers == {
        ":message-type": "exception",
        ":exception-type": "ModelStreamError",
        ":content-type": "application/json",
    }
    assert payload == '{"Message":"it \\"broke\\" é","ErrorCode":"StreamBroken"}'.encode()


@settings(deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=5))
def test_any_parts_arrive_as_they_were_written(parts):
    """Frames one behind the other are read back one by one, from bytes and from views."""
    stream = b"".join(payload_part(part) for part in parts)
    assert [payload for _, payload in decoded(stream)] == parts
    assert b"".join(payload_part(memoryview(part)) for part in parts) == stream


@pytest.mark.parametrize("frame", [payload_part(b"data"), exception("broke")])
def test_a_bit_that_flips_is_noticed(frame):
    """Both checksums are there: no byte of a frame can change without the reader's noticing."""
    for position in range(len(frame)):
        broken = bytearray(frame)
        broken[position] ^= 1
        with pytest.raises((ParserError, AssertionError)):
            decoded(bytes(broken))


def test_a_part_larger_than_a_frame_is_several(monkeypatch):
    """No frame is larger than clients take, and nothing is lost between two of them."""
    assert len(payload_part(bytes(module._MAX_PAYLOAD))) == 16 << 20
    two = decoded(payload_part(bytes(module._MAX_PAYLOAD + 1)))
    assert [len(payload) for _, payload in two] == [module._MAX_PAYLOAD, 1]

    monkeypatch.setattr(module, "_MAX_PAYLOAD", 3)
    assert [payload for _, payload in decoded(payload_part(b"1234567"))] == [b"123", b"456", b"7"]
    assert [payload for _, payload in decoded(payload_part(b""))] == [b""]


# -- boto3 -----------------------------------------------------------------------------------------------------------


class Endpoint(Handler):
    """Answers with the frames of the server's queue, each a chunk, as soon as it is there; None ends the answer."""

    def do_POST(self):
        """The one operation."""
        self.body()
        self.send_response(200)
        self.send_header("Content-Type", "application/vnd.amazon.eventstream")
        self.send_header("X-Amzn-SageMaker-Content-Type", "application/jsonlines")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while frame := self.server.frames.get(timeout=PATIENCE):
            self.wfile.write(b"%x\r\n%b\r\n" % (len(frame), frame))
        self.wfile.write(b"0\r\n\r\n")


@pytest.fixture
def endpoint():
    """The queue of frames that an endpoint answers with, and the answer as boto3 hands it out."""
    with answering(Endpoint, frames=queue.Queue()) as server:
        client = boto3.session.Session().client(
            "sagemaker-runtime",
            endpoint_url=server.url,
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",
            config=Config(retries={"total_max_attempts": 1}, read_timeout=PATIENCE),
        )
        answer = client.invoke_endpoint_with_response_stream(EndpointName="e", Body=b"{}")
        yield server.frames, answer
        server.frames.put(None)
        answer["Body"].close()
        client.close()


def test_boto3_reads_each_part_as_it_comes(endpoint):
    """Each part is handed out before the next one is written, and the last one ends the stream."""
    frames, answer = endpoint
    events = iter(answer["Body"])
    for part in (b'{"token": 1}\n', bytes(range(256)), b"x" * 100_000):
        frames.put(payload_part(part))
        assert next(events) == {"PayloadPart": {"Bytes": part}}
    frames.put(None)
    assert list(events) == []
    assert answer["ContentType"] == "application/jsonlines"


def test_boto3_raises_an_exception_after_the_parts_before_it(endpoint):
    """What came before is handed out; the error has the exception's name as its code, and the message."""
    frames, answer = endpoint
    frames.put(payload_part(b"first") + exception("the model's process died"))
    frames.put(None)
    events = iter(answer["Body"])

    assert next(events) == {"PayloadPart": {"Bytes": b"first"}}
    with pytest.raises(EventStreamError) as caught:
        next(events)

    assert caught.value.response["Error"] == {"Code": "ModelStreamError", "Message": "the model's process died"}
