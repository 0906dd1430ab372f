"""Where a server listens that nobody has told."""

import pytest

from container.settings.reader import listening_address

DOCKER, PODMAN = "/.dockerenv", "/run/.containerenv"


@pytest.mark.parametrize(
    ("environ", "files", "pid", "host", "why"),
    [
        ({}, (), 4711, "127.0.0.1", "nothing tells of a container"),
        ({"PATH": "/bin", "MME_PORT": "9"}, ("/etc/passwd",), 2, "127.0.0.1", "nothing tells of a container"),
        ({}, (DOCKER,), 4711, "0.0.0.0", DOCKER),
        ({}, (PODMAN,), 4711, "0.0.0.0", PODMAN),
        ({}, (), 1, "0.0.0.0", "process 1"),
        ({"SAGEMAKER_MULTI_MODEL": "true"}, (), 4711, "0.0.0.0", "SAGEMAKER_MULTI_MODEL is set"),
        ({"SAGEMAKER_TRITON_LOG_INFO": "1"}, (), 4711, "0.0.0.0", "SAGEMAKER_TRITON_LOG_INFO is set"),
        ({"AZUREML_MODEL_DIR": "/m"}, (), 4711, "0.0.0.0", "AZUREML_MODEL_DIR is set"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, (), 4711, "0.0.0.0", "KUBERNETES_SERVICE_HOST is set"),
        ({"SAGEMAKER": "1", "AZUREML_MODEL": "m"}, (), 4711, "127.0.0.1", "nothing"),
        ({"MME_HOST": "127.0.0.1", "SAGEMAKER_MULTI_MODEL": "true"}, (DOCKER,), 1, "127.0.0.1", "--host/MME_HOST"),
        ({"MME_HOST": "10.1.2.3"}, (), 4711, "10.1.2.3", "--host/MME_HOST"),
        ({"MME_HOST": " "}, (), 4711, "127.0.0.1", "nothing"),
    ],
)
def test_where_it_listens_and_why(environ, files, pid, host, why):
    """Everywhere in a container or on a platform, else on its own machine alone; what is said wins."""
    address = listening_address(environ, files.__contains__, pid)

    assert address.host == host
    assert why in address.reason
