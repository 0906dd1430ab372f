"""Who is let in: headers of requests in, a refusal or nothing out."""

import pytest

from container.steps.access import Access, host_of, is_local

LOAD = b"/v2/repository/models/m/load"
EVIL = "http://evil.example"
HERE = "http://localhost:8080"


@pytest.mark.parametrize(
    ("authority", "host"),
    [
        ("localhost:8080", "localhost"),
        ("LOCALHOST", "localhost"),
        ("localhost.:80", "localhost"),
        ("127.0.0.1:8080", "127.0.0.1"),
        ("[::1]:8080", "[::1]"),
        ("[::1]", "[::1]"),
        ("mme.example.com:443", "mme.example.com"),
        ("", ""),
        ("::1", ""),
        ("localhost@evil.example", ""),
        ("localhost:8080@evil.example", ""),
        ("localhost:80:80", ""),
        ("localhost/evil.example", ""),
        ("[::1]evil.example", ""),
        ("localhost, evil.example", ""),
    ],
)
def test_the_host_of_an_authority(authority, host):
    """Without its port, and nothing of what is no authority at all."""
    assert host_of(authority) == host


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.1", True),
        ("127.8.9.10", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("mme.internal", False),
        ("", False),
    ],
)
def test_which_addresses_are_local(address, local):
    """Those that only the machine itself reaches."""
    assert is_local(address) is local


@pytest.mark.parametrize(
    "host", ["localhost", "LocalHost:8080", "127.0.0.1:1", "127.9.9.9", "[::1]:8080", "localhost."]
)
def test_a_server_on_loopback_answers_to_local_names(host):
    """With any port, as tunnels have another one."""
    assert Access(local=True).unknown_host(host) == ""


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8080",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "xlocalhost",
        "10.0.0.1",
        "",
        "[::2]",
        "localhost@evil.example",
        "128.0.0.1",
        "0.0.0.0",
        "169.254.169.254",
        "127.0.0.1, evil.example",
    ],
)
def test_a_server_on_loopback_answers_to_no_other_name(host):
    """A page whose name leads to 127.0.0.1 says its own name; the sentence says which setting lists more."""
    refusal = Access(local=True).refusal("GET", b"/ping", {}, host)

    assert refusal.status == 403
    assert "MME_ALLOWED_HOSTS" in str(refusal)
    assert Access(local=False).refusal("GET", b"/ping", {}, host) is None


def test_hosts_that_are_listed_are_answered_to():
    """By name, or all below a domain, which is not one of them itself."""
    access = Access(("mme.example.com", "*.internal", "[fe80::1]"), local=True)

    for host in ("mme.example.com", "MME.example.com:8080", "a.internal", "b.a.internal:1", "[fe80::1]:8080"):
        assert access.unknown_host(host) == ""
    for host in ("example.com", "a.mme.example.com", "internal", ".internal", "evilinternal", "internal.evil.example"):
        assert access.unknown_host(host) != ""


def test_a_request_without_a_host_is_let_in():
    """HTTP/1.0 may leave it out, which no browser does."""
    assert Access(local=True).refusal("POST", LOAD, {}, None) is None


FOREIGN = [
    {"origin": EVIL},
    {"origin": "null"},
    {"origin": ""},
    {"origin": "http://localhost:3000"},
    {"origin": "http://localhost"},
    {"origin": f"{HERE}.evil.example"},
    {"origin": "http://evil.example@localhost:8080"},
    {"origin": f"{HERE}, {EVIL}"},
    {"origin": EVIL, "content-type": "text/plain"},
    {"origin": EVIL, "content-type": "application/json"},
    {"origin": EVIL, "sec-fetch-site": "same-origin"},
    {"origin": HERE, "sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
]
CHANGES = [
    ("POST", LOAD),
    ("POST", b"/v2/repository/models/m/unload"),
    ("POST", b"/v2/repository/index"),
    ("POST", b"/models"),
    ("DELETE", b"/models/m"),
    ("POST", b"/v2/trace/setting"),
    ("POST", b"/v2/models/m/trace/setting"),
    ("POST", b"/v2/logging"),
    ("POST", b"/v2/systemsharedmemory/region/x/register"),
    ("POST", b"/v2/cudasharedmemory/unregister"),
    ("POST", b"/v2/models/m/infer"),
    ("POST", b"/invocations"),
    ("POST", b"/models/m/invoke"),
    ("POST", b"/endpoints/e/invocations"),
    ("POST", b"/endpoints/e/async-invocations"),
    ("POST", b"//v2//logging"),
    ("PUT", b"/v2/logging"),
    ("OPTIONS", LOAD),
    ("GET", b"/v2/models/m"),  # which loads it
    ("GET", b"/v2/models/m/config"),
    ("GET", b"/v2/models/m/ready"),  # which asks its code
]


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("headers", FOREIGN, ids=str)
def test_a_page_of_another_site_changes_nothing(headers, local):
    """Whatever the type of its body, on every route that may change something."""
    for method, target in CHANGES:
        refusal = Access(local=local).refusal(method, target, headers, "localhost:8080")
        assert refusal is not None, target
        assert refusal.status == 403
        assert "MME_ALLOWED_HOSTS" in str(refusal)


@pytest.mark.parametrize("target", [b"/ping", b"/v2", b"/metrics", b"/dashboard", b"/models", b"/v2/models/stats"])
def test_what_changes_nothing_is_told_to_any_page(target):
    """Its browser keeps the answer from it."""
    assert (
        Access(local=True).refusal("GET", target, {"origin": EVIL, "sec-fetch-site": "cross-site"}, "localhost") is None
    )


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},  # as curl -d has it
        {"sec-fetch-site": "none"},
        {"origin": HERE, "sec-fetch-site": "same-origin", "content-type": "application/json"},
        {"origin": "http://LOCALHOST:8080"},
    ],
    ids=str,
)
def test_other_clients_and_own_pages_are_let_in(headers):
    """No header of a browser's, or those of a page of the server's own."""
    for method, target in CHANGES:
        assert Access(local=True).refusal(method, target, headers, "localhost:8080") is None


def test_pages_of_hosts_that_are_listed_are_own_ones():
    """At any port, also where a browser calls them another site."""
    access = Access(("app.example.com",), local=False)

    for headers in (
        {"origin": "https://app.example.com:8443", "sec-fetch-site": "cross-site"},
        {"origin": "http://app.example.com"},
    ):
        assert access.refusal("POST", LOAD, headers, "mme.example.com") is None
    assert (
        access.refusal("POST", LOAD, {"origin": "https://app.example.com.evil.example"}, "mme.example.com").status
        == 403
    )


@pytest.mark.parametrize(
    "kind",
    ["text/plain", "Text/Plain; charset=utf-8", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"],
)
def test_bodies_that_a_form_can_send_are_not_read_from_browsers(kind):
    """Not even of an own page; what the body of an inference is, its model says."""
    access, headers = Access(local=True), {"origin": HERE, "content-type": kind}

    assert access.refusal("POST", LOAD, headers, "localhost:8080").status == 415
    assert access.refusal("POST", b"/models", headers, "localhost:8080").status == 415
    assert access.refusal("POST", b"/invocations", headers, "localhost:8080") is None
