"""tritonserver's flags in SAGEMAKER_TRITON_ADDITIONAL_ARGS: what they mean, what they change, what is refused."""

from __future__ import annotations

import pytest

from container.settings import PingMode, SettingsError, read_settings
from container.settings.parsers import BatchSize, header_pattern, keepalive, keepalive_rules, latencies, restrictions
from container.settings.triton_flags import TRITON_FLAGS, Ignore, Refuse
from container.steps.restrictions import Restriction
from serve.control import DEFAULT_QUANTILES, Latencies

IGNORED = {flag: meaning.why for flag, meaning in TRITON_FLAGS.items() if isinstance(meaning, Ignore)}
REFUSED = {flag: meaning.instead for flag, meaning in TRITON_FLAGS.items() if isinstance(meaning, Refuse)}
EVERYTHING_OF_METRICS = (
    "--metrics-config=summary_latencies=true --metrics-config 'summary_quantiles=0.5:0.05,0.9:0.01' "
    "--metrics-config counter_latencies=false --metrics-config histogram_latencies=true"
)


def with_flags(flags, **environ):
    """The settings of a server whose tritonserver would be given these flags."""
    return read_settings({"SAGEMAKER_TRITON_ADDITIONAL_ARGS": flags, **environ})


def problems(flags):
    """What refuses to start."""
    with pytest.raises(SettingsError) as raised:
        with_flags(flags)
    return raised.value.problems


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        ("--id=triton", "server_id", "triton"),
        ("--sagemaker-port 9000", "port", 9000),
        ("--http-header-forward-pattern=x-.*", "http_header_pattern", "x-.*"),
        ("--grpc-header-forward-pattern '(?-i)X-.*'", "grpc_header_pattern", "(?-i)X-.*"),
        (
            "--grpc-keepalive-time=10 --grpc-keepalive-permit-without-calls=true --grpc-http2-max-ping-strikes 5",
            "grpc_keepalive",
            ("time=10", "permit-without-calls=1", "max-ping-strikes=5"),
        ),
        ("--strict-readiness=false", "ping_mode", PingMode.LIVE),
        ("--strict-readiness=true", "ping_mode", PingMode.READY),
        ("--model-load-gpu-limit 0:0.5", "gpu_memory_budget", 0.5),
        ("--backend-config=python,shm-default-byte-size=1048576", "shared_memory_bytes", 1 << 20),
        ("--backend-config=python,shm-growth-byte-size=2048", "shared_memory_growth_bytes", 2048),
        ("--backend-config=python,shm-region-prefix-name=p0", "shared_memory_bytes", 65536),
        ("--backend-config=python,thread-pool-size=8", "shared_memory_bytes", 65536),
        ("--backend-config=tensorflow,version=2", "shared_memory_bytes", 65536),
        ("--backend-config=,default-max-batch-size=4", "default_batch_sizes", (BatchSize("", 4),)),
        (
            "--backend-config=default-max-batch-size=8 --backend-config fil,default-max-batch-size=64",
            "default_batch_sizes",
            (BatchSize("", 8), BatchSize("fil", 64)),
        ),
        ("--disable-auto-complete-config", "strict_config", True),
        ("--strict-model-config=false", "strict_config", False),
        (
            "--http-restricted-api=health,trace:a=b --http-restricted-api model-repository:c=d",
            "http_restrictions",
            (Restriction(("health", "trace"), "a", "b"), Restriction(("model-repository",), "c", "d")),
        ),
        ("--grpc-restricted-protocol=logging:a=b=c", "grpc_restrictions", (Restriction(("logging",), "a", "b=c"),)),
        ("--metrics-config summary_latencies=true", "latencies", Latencies(summaries=True)),
        (
            EVERYTHING_OF_METRICS,
            "latencies",
            Latencies(counters=False, summaries=True, histograms=True, quantiles=(0.5, 0.9)),
        ),
    ],
)
def test_a_flag_says_what_a_setting_says(flags, field, value):
    """With and without =, given once or several times."""
    assert getattr(with_flags(flags), field) == value


@pytest.mark.parametrize(("text", "mode"), [("true", PingMode.READY), ("false", PingMode.LIVE)])
def test_strict_readiness_is_of_repositories_too(text, mode, tmp_path):
    """Where /ping means by itself that the server lives."""
    assert with_flags(f"--strict-readiness={text}", MME_MODEL_REPOSITORY=str(tmp_path)).ping_mode is mode


@pytest.mark.parametrize("flag", sorted(IGNORED))
def test_a_flag_without_an_effect_is_accepted_and_said(flag):
    """Archives and variables stay as they are; the log tells why nothing comes of it."""
    (notice,) = with_flags(f"{flag}=1").notices
    assert notice == f"SAGEMAKER_TRITON_ADDITIONAL_ARGS ({flag}) has no effect: {IGNORED[flag]}"


@pytest.mark.parametrize("flag", sorted(REFUSED))
def test_a_flag_that_is_refused_names_what_there_is_instead(flag):
    """It would change something, and does not here."""
    assert problems(f"{flag}=1") == (f"SAGEMAKER_TRITON_ADDITIONAL_ARGS: '{flag}' is not understood; {REFUSED[flag]}",)


@pytest.mark.parametrize("flag", sorted(REFUSED))
def test_the_value_of_a_refused_flag_is_no_flag(flag):
    """Also where it is a word of its own."""
    assert len(problems(f"{flag} 1")) == 1
    assert len(problems(f"{flag} --log-info=true")) == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--strict-readiness=perhaps", "expected true or false"),
        ("--backend-config=onnxruntime,x=1", "a model's config.pbtxt is the place"),
        ("--backend-config=python,other=1", "expected one of python,shm-default-byte-size=N"),
        ("--model-load-gpu-limit=0.5", "expected DEVICE:FRACTION"),
        ("--model-load-gpu-limit=0:5", "expected a fraction"),
        ("--http-restricted-api=health", "expected CATEGORY"),
        ("--http-restricted-api=health:a", "expected CATEGORY"),
        ("--http-restricted-api=healthy:a=b", "expected CATEGORY"),
        ("--http-restricted-api=health,trace:a=b --http-restricted-api=trace:c=d", "one header for each category"),
        ("--http-header-forward-pattern=(", "expected a regular expression"),
        ("--grpc-keepalive-time=soon", "expected NAME=NUMBER"),
        ("--metrics-config=summary_latency=true", "expected counter_latencies=BOOL"),
        ("--metrics-config=summary_quantiles=1.5:0", "expected counter_latencies=BOOL"),
        ("--metrics-config=true", "expected counter_latencies=BOOL"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused(flags, words):
    """By its flag, with what it may be."""
    (sentence,) = problems(flags)
    assert words in sentence
    assert flags.split("=")[0].split()[0] in sentence


def test_what_is_written_reads_as_itself():
    """Every value with a form of its own."""
    for text in ("health,trace:a=b,logging:C=d=e", "metadata:x=y"):
        assert ",".join(map(str, restrictions(text))) == text
    assert keepalive("time=1,max-connection-age=5") == ("time=1", "max-connection-age=5")
    assert keepalive_rules(keepalive("time=1500,max-ping-strikes=5")) == {"time": 1.5, "max_ping_strikes": 5}
    for text in ("summary_latencies=true", 'summary_quantiles="0.25:0.1,0.75:0.1"', "counter_latencies=false"):
        assert latencies(str(latencies(text))) == latencies(text)
    assert latencies("histogram_latencies=true").quantiles == DEFAULT_QUANTILES
    assert header_pattern("(?-i)X-.*") == "(?-i)X-.*"
