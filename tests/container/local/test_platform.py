"""SageMaker's part: downloads, loads, evictions, and what boto3 sees of them."""

from __future__ import annotations

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from botocore.exceptions import ClientError

from container.local.platform import Resident, Stage, least_used, may_give_way
from tests.waiting import PATIENCE, eventually


def ask(client, target, body=b"x", **options):
    """What a model says."""
    answer = client.invoke_endpoint(EndpointName="any", TargetModel=target, Body=body, **options)
    return json.loads(answer["Body"].read())["says"]


def refusal(client, target, body=b"x"):
    """The error of an invocation, as boto3 raises it."""
    with pytest.raises(ClientError) as caught:
        ask(client, target, body)
    return caught.value.response


def test_a_model_is_downloaded_unpacked_and_loaded_when_it_is_asked_for(start, contract, tmp_path):
    """By a name that tells nothing, from a folder for it, once; the target model goes along as a header."""
    client = start()

    assert [ask(client, "a.tar.gz"), ask(client, "a.tar.gz")] == ["a", "a"]
    assert contract.load_orders == ["a.tar.gz"]
    ((name, _),) = contract.loaded.items()
    assert (tmp_path / "instance" / name / "model" / "says").read_text() == "a"
    assert {headers["X-Amzn-SageMaker-Target-Model"] for _, headers in contract.seen} == {"a.tar.gz"}


def test_a_target_model_may_have_any_letters(start, contract, archives):
    """Its name reaches the container in UTF-8, as boto3 has sent it."""
    shutil.copy(archives / "a.tar.gz", archives / "日本é.tar.gz")

    assert ask(start(), "日本é.tar.gz") == "a"
    sent = {headers["X-Amzn-SageMaker-Target-Model"].encode("latin-1") for _, headers in contract.seen}
    assert sent == {"日本é.tar.gz".encode()}


def test_a_507_at_a_load_unloads_the_least_used_and_tries_again(start, contract):
    """Clients never see it; what was unloaded is loaded again from the disk, without a download."""
    client = start()
    for target in ("a", "b", "a", "c"):
        assert ask(client, f"{target}.tar.gz") == target

    assert sorted(contract.loaded.values()) == ["a", "c"]
    assert client.platform.resident() == ["c.tar.gz", "a.tar.gz"]
    assert ask(client, "b.tar.gz") == "b"
    assert sorted(contract.loaded.values()) == ["b", "c"]


def test_a_507_at_an_invocation_unloads_others_and_tries_again(start, contract):
    """As on GPU instances, until the model is alone."""
    client = start()
    ask(client, "a.tar.gz")

    assert ask(client, "b.tar.gz", b"hungry") == "b"
    assert list(contract.loaded.values()) == ["b"]


def test_room_is_waited_for_while_models_are_busy(start, contract):
    """Nobody is told of a full memory because others are in the middle of an answer."""
    contract.room = 1
    client = start()
    ask(client, "a.tar.gz")
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(ask, client, "b.tar.gz", b"nap")
        while "b" not in contract.loaded.values():
            refusal(client, "none.tar.gz")
        assert ask(client, "c.tar.gz") == "c"
        assert slow.result(PATIENCE) == "b"


def test_a_model_stays_until_the_request_that_waited_for_it_is_answered(start, contract):
    """Clients of more models than there is room for: each load answers a request at least."""
    contract.room = 1
    client = start()
    rounds = 6

    def asked(target):
        return [ask(client, f"{target}.tar.gz") for _ in range(rounds)]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(asked, "abcd")) == [[target] * rounds for target in "abcd"]
    assert len(contract.admitted) <= 4 * rounds


def test_of_two_that_want_room_neither_waits_for_the_other(start, contract):
    """Two models that can never be loaded are both told so."""
    contract.gates["never.tar.gz"] = threading.Event()
    contract.slow["never.tar.gz"] = PATIENCE
    client = start()
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(refusal, client, target) for target in ("never.tar.gz", "never-2.tar.gz")]
        while len(contract.load_orders) < 2:
            refusal(client, "none.tar.gz")
        contract.gates["never.tar.gz"].set()
        assert [each.result(PATIENCE)["OriginalStatusCode"] for each in both] == [507, 507]


def test_a_507_when_nobody_is_left_is_a_model_error(start, contract):
    """With the container's own sentence; and everybody else had to leave for it, as on SageMaker."""
    client = start()
    ask(client, "a.tar.gz")
    response = refusal(client, "never.tar.gz")

    assert (response["Error"]["Code"], response["OriginalStatusCode"]) == ("ModelError", 507)
    assert "no memory for this one" in response["OriginalMessage"]
    assert contract.loaded == {}


@pytest.mark.parametrize(
    ("target", "body", "code", "status", "sentence"),
    [
        ("broken.tar.gz", b"x", "ModelError", 400, "this model is broken"),
        ("a.tar.gz", b"fail", "ModelError", 400, "input X is missing"),
        ("none.tar.gz", b"x", "ValidationError", None, "Failed to download model data"),
        ("../a.tar.gz", b"x", "ValidationError", None, "Failed to download model data"),
        ("text.tar.gz", b"x", "ValidationError", None, "Failed to extract model data"),
    ],
)
def test_what_goes_wrong_is_an_error_of_boto3s(start, target, body, code, status, sentence):
    """Each in the shape that SageMaker's has, its original inside."""
    response = refusal(start(), target, body)

    assert response["Error"]["Code"] == code
    assert response.get("OriginalStatusCode") == status
    assert sentence in str(response)


def test_a_load_that_failed_is_tried_again_by_the_next_request(start, contract, archives):
    """Nothing remembers a failure."""
    client = start()
    refusal(client, "never.tar.gz")
    refusal(client, "never.tar.gz")

    assert contract.load_orders == ["never.tar.gz"] * 2


def test_a_slow_load_is_not_ready_and_goes_on(start, contract):
    """The request is told so when its time is over; the load is the same one for all who come later."""
    contract.gates["a.tar.gz"], contract.slow["a.tar.gz"] = threading.Event(), PATIENCE
    client = start(invocation=0.2)

    assert refusal(client, "a.tar.gz")["Error"]["Code"] == "ModelNotReadyException"
    contract.gates["a.tar.gz"].set()
    while not contract.loaded:
        refusal(client, "none.tar.gz")
    assert ask(start(invocation=PATIENCE), "a.tar.gz") == "a"


def test_an_answer_tells_whether_its_model_was_in_memory(start):
    """In a header, which SageMaker does not have."""
    client = start()
    answers = [client.invoke_endpoint(EndpointName="any", TargetModel="a.tar.gz", Body=b"x") for _ in range(2)]

    timings = [answer["ResponseMetadata"]["HTTPHeaders"]["server-timing"] for answer in answers]
    assert timings[0].startswith("cache;desc=miss, load;dur=")
    assert timings[1] == "cache;desc=hit"
    for answer in answers:
        answer["Body"].read()


def test_all_who_ask_at_once_wait_for_one_load(start, contract):
    """However many they are."""
    client = start()
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda _: ask(client, "a.tar.gz"), range(6))) == ["a"] * 6

    assert contract.load_orders == ["a.tar.gz"]


def test_many_models_in_turn_are_each_answered(start, contract):
    """Loads, evictions and invocations at once leave nobody without his answer."""
    client = start()
    targets = [name for name in "abcd" for _ in range(4)] * 2
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda name: ask(client, f"{name}.tar.gz"), targets)) == targets


def test_a_model_that_the_container_has_lost_is_loaded_again(start, contract):
    """As after a restart of the container; the client sees nothing of it."""
    client = start()
    ask(client, "a.tar.gz")
    contract.loaded.clear()

    assert ask(client, "a.tar.gz") == "a"
    assert contract.load_orders == ["a.tar.gz"] * 2


def test_without_a_model_cache_models_leave_when_they_were_used(start, contract, tmp_path):
    """Memory and disk; the next request loads them anew."""
    client = start(keep=False)
    for count in (1, 2):
        assert ask(client, "a.tar.gz") == "a"
        eventually(
            lambda: not (contract.loaded or client.platform.resident() or list((tmp_path / "instance").iterdir())),
            "it to leave",
        )
        assert contract.load_orders == ["a.tar.gz"] * count


@pytest.mark.parametrize("body", [b"sleep", b"trickle"])
def test_an_invocation_that_takes_too_long_is_a_model_error_of_status_0(start, body):
    """As SageMaker words it; also where something comes all the time, but not all of it."""
    client = start(invocation=PATIENCE)
    ask(client, "a.tar.gz")
    response = refusal(start(invocation=0.3), "a.tar.gz", body)

    assert (response["Error"]["Code"], response["OriginalStatusCode"]) == ("ModelError", 0)
    assert "timed out" in response["OriginalMessage"]


@pytest.mark.parametrize(
    ("residents", "victim"),
    [
        ([], None),
        ([("a", Stage.LOADED, 0, 2.0), ("b", Stage.LOADED, 0, 1.0)], "b"),
        ([("a", Stage.LOADED, 0, 2.0), ("b", Stage.LOADED, 1, 1.0)], "a"),
        ([("a", Stage.LOADING, 0, 1.0), ("b", Stage.LEAVING, 0, 1.0)], None),
        ([("self", Stage.LOADED, 0, 1.0)], None),
    ],
)
def test_who_leaves(residents, victim):
    """The loaded model that answers nobody and was used longest ago, never the one that asks."""
    made = [Resident(name, name, state, in_flight, used) for name, state, in_flight, used in residents]
    spare = next((each for each in made if each.name == "self"), Resident("self", "self"))

    chosen = least_used(made, spare)
    assert (chosen.name if chosen else None) == victim


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([], False),
        ([(Stage.LOADED, False)], True),
        ([(Stage.LEAVING, False)], True),
        ([(Stage.LOADING, False)], True),
        ([(Stage.QUEUED, False)], False),
        ([(Stage.LOADED, True), (Stage.LOADING, True)], False),
    ],
)
def test_for_whom_it_is_worth_to_wait(others, expected):
    """For anybody who has come so far that he may leave, and does not wait himself."""
    spare = Resident("self", "self", Stage.LOADING, wants_room=True)
    residents = [Resident("x", "x", state, wants_room=wants) for state, wants in others]

    assert may_give_way([*residents, spare], spare) is expected
