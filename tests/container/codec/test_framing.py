"""How long the JSON header of a request is, by content type and by KServe's header."""

import pytest

from container.codec.request import BINARY_TYPE, accepts_binary, header_length

BINARY = BINARY_TYPE.decode()
KSERVE = "inference-header-content-length"


def length(headers, body_length=100, *, kserve=False):
    """As the routes ask."""
    return header_length(headers, body_length, kserve=kserve)


@pytest.mark.parametrize("kserve", [True, False])
@pytest.mark.parametrize("content_type", [None, "application/json", "application/octet-stream", "text/csv", ""])
def test_without_a_length_the_whole_body_is_json(content_type, kserve):
    """Any other content type, or none, means JSON, answered in the route's own binary form."""
    headers = {} if content_type is None else {"content-type": content_type}
    assert length(headers, kserve=kserve) == (None, kserve)


@pytest.mark.parametrize("kserve", [True, False])
def test_the_media_type_carries_the_length(kserve):
    """SageMaker's media type says the length; the route decides the form of the answer."""
    assert length({"content-type": BINARY + "42"}, kserve=kserve) == (42, kserve)


@pytest.mark.parametrize("more", [";charset=UTF-8", "; q=1", ";"])
def test_what_follows_the_length_in_the_media_type_does_not_matter(more, refusal):
    """Clients add a charset of their own accord; in KServe's header it is no number."""
    assert length({"content-type": f"{BINARY}42{more}"}) == (42, False)
    assert refusal(length, {KSERVE: f"42{more}"}).startswith("Unable to parse Inference-Header-Content-Length")


def test_kserves_header_wins_and_is_answered_in_kind():
    """A client that sends KServe's header reads it in the answer too, on any route."""
    assert length({KSERVE: "7", "content-type": BINARY + "42"}) == (7, True)


@pytest.mark.parametrize(("text", "expected"), [("0", 0), (" 12 ", 12), ("100", 100), ("007", 7), ("-0", 0)])
def test_a_length_up_to_the_whole_body_is_taken(text, expected):
    """From 0, which is a raw request, to all of the body; spaces around it do not matter."""
    assert length({"content-type": BINARY + text})[0] == expected
    assert length({KSERVE: text})[0] == expected


@pytest.mark.parametrize(
    "text", ["", " ", "x", "1x", "1.0", "1e2", "0x10", "+5", "--5", "-", "1 2", "٣", "5,1", "None"]
)
def test_a_length_that_is_no_number_is_refused(text, refusal):
    """Both headers refuse what is no decimal integer, quoting it."""
    for headers in ({"content-type": BINARY + text}, {KSERVE: text}):
        assert refusal(length, headers).startswith("Unable to parse ")
        assert refusal(length, headers).endswith(f"got: {text}")


@pytest.mark.parametrize("text", ["2147483648", "-2147483649", "9" * 20, "-" + "9" * 5000, "0" * 5000 + "1"])
def test_a_length_out_of_range_is_refused(text, refusal):
    """Numbers beyond 32 bits are refused without being converted, in a short sentence."""
    for headers in ({"content-type": BINARY + text}, {KSERVE: text}):
        sentence = refusal(length, headers)
        assert "value is out of range [ -2147483648, 2147483647 ]" in sentence
        assert len(sentence) < 250


@pytest.mark.parametrize("text", ["-1", "101", "2147483647", "-2147483648"])
def test_a_length_that_does_not_fit_the_body_is_refused(text, refusal):
    """Negative lengths and those beyond the body are refused with the allowed range."""
    expected = f"inference header size should be in range (0, 100), got: {int(text)}"
    assert refusal(length, {"content-type": BINARY + text}) == expected
    assert refusal(length, {KSERVE: text}) == expected


@pytest.mark.parametrize(
    "content_type",
    [
        "application/vnd.sagemaker-triton.binary+json",
        "application/vnd.sagemaker-triton.binary+json; json-header-size=5",
        "application/vnd.sagemaker-triton.binary+json;charset=utf-8;json-header-size=5",
        f" {BINARY}5",
        f"application/json, {BINARY}5",
    ],
)
def test_the_media_type_must_stand_first_and_whole(content_type, refusal):
    """The binary media type anywhere but at position 0, or without its size, is refused with what was expected."""
    assert refusal(length, {"content-type": content_type}) == (
        "expect MIME type for binary data starts with 'application/vnd.sagemaker-triton.binary+json;"
        f"json-header-size=', got: {content_type}"
    )


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("application/vnd.sagemaker-triton.binary+json", True),
        ("Application/vnd.SageMaker-Triton.binary+json;json-header-size=0", True),
        ("application/vnd.sagemaker-triton.binary+json, application/json;q=0.5", True),
        ("application/json", False),
        ("application/json, application/vnd.sagemaker-triton.binary+json;q=0.5", False),
        ("*/*", False),
        ("", False),
    ],
)
def test_accept_asks_for_binary_when_it_names_it_first(accept, expected):
    """Only a client that names the binary media type before all others gets it."""
    assert accepts_binary(accept) is expected
