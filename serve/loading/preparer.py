"""What is done before a target is loaded: it is fetched and understood, and equipped with what it needs around it.

All of it runs on load threads, and takes no memory worth counting.
"""

from __future__ import annotations

import functools
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from model_handlers.base import CPU, Footprint, Handler, Placement
from model_handlers.config.model_config import InstanceGroup, warn_once
from model_handlers.mapped import MappedHandler
from model_handlers.registry import find_backend, handler_for
from model_handlers.system import devices
from model_handlers.worker.parameters import placement_of
from serve.loading.asked import asked_checks, is_pinned, unheard_of
from serve.loading.environments import Brought, look, make
from serve.loading.prepared import PreparedTarget, still_there
from serve.sources.gathering import Gathering
from serve.sources.override import digest_of
from serve.sources.repositories import print_of
from serve.sources.repository import ModelDirectory, made_of_parts, open_model, open_target
from serve.sources.source import Archived, InBucket, InRepository, Overridden, Source, Unpacked
from serve.weights.forms import TargetForms
from serve.weights.mode import Weights, weights_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from model_handlers.base import Device
    from model_handlers.cancel_token import CancelToken
    from model_handlers.environments.cache import Environments
    from serve.cache.footprints import Footprints
    from serve.loading.measuring import Scales
    from serve.sources.override import OverrideFolder
    from serve.sources.scripts import Scripts
    from serve.weights.store import WeightStore


class Preparer:
    """Fetches and opens. All methods run on load threads.

    Args:
        footprints: what models took before.
        require_gpu: whether KIND_GPU without a GPU is an error.
        scripts: tells what is the same for all inference scripts.
        environments: those that models bring; may only be left out where none does.
        store: keeps the forms of models that can be mapped; None for no forms at all.
        weights: how models hold their weights whose configuration does not say.
        scales: measures what the models of a handler share in this process.
        host: bytes of the host that all models together may take; 0 for no such bound.
    """

    def __init__(
        self,
        footprints: Footprints,
        *,
        require_gpu: bool,
        scripts: Callable[[], Scripts],
        environments: Environments | None,
        store: WeightStore | None,
        weights: Weights,
        scales: Scales,
        host: int,
    ) -> None:
        self._footprints = footprints
        self._require_gpu = require_gpu
        self._scripts = scripts
        self._environments = environments
        self._store = store
        self._weights = weights
        self._scales = scales
        self._host = host
        self._shared: set[type[Handler]] = set()  # whose models share by now what they can

    def prepare(self, name: str, source: Source, token: CancelToken) -> PreparedTarget:
        """Fetch what has to be downloaded, and understand what is in it."""
        override, sent = "", None
        if isinstance(source, Overridden):
            override, sent = source.config, source.folder
            source = source.base if sent is None else InRepository(sent.path)
        if isinstance(source, InBucket):
            return self._gathered(name, source, override, token)
        if not isinstance(source, Archived):
            with still_there(name, [source.path]):
                return self._found(name, source, override, sent, token)
        return self._fetched(name, source, override, token)

    def _found(
        self,
        name: str,
        source: Unpacked | InRepository,
        override: str,
        sent: OverrideFolder | None,
        token: CancelToken,
    ) -> PreparedTarget:
        """What is in a folder, or was sent by a client, and the models beside it that it consists of."""
        # First: what is written while the rest is read is a change.
        prints = [print_of(source.path) if sent is None else sent.contents]
        directory = _opened(source, name, self._scripts(), override)
        beside = [member.path for member in directory.members if not member.path.is_relative_to(source.path)]
        prints += [print_of(path) for path in beside]
        prepared = self._prepared(directory, name, directory.fingerprint() + digest_of(override), token)
        return replace(prepared, content=(*prints, override))

    def _fetched(self, name: str, source: Archived, override: str, token: CancelToken) -> PreparedTarget:
        """What is in an archive."""
        began = time.perf_counter_ns()
        artifact = source.artifacts.fetch(source.name, token)
        download_ns = time.perf_counter_ns() - began if artifact.downloaded else 0
        try:
            directory = open_target(artifact.path, name, self._scripts(), override=override)
            prepared = self._prepared(directory, name, artifact.identity + digest_of(override), token)
        except BaseException:
            artifact.hold.release()
            raise
        return replace(prepared, download_ns=download_ns, hold=artifact.hold, content=(artifact.identity, override))

    def _gathered(self, name: str, source: InBucket, override: str, token: CancelToken) -> PreparedTarget:
        """A model of a repository in S3, and the models that it consists of."""
        models = Gathering(source.artifacts, token)
        if override:
            source.artifacts.want_whole(source.name)
        try:
            path = models.fetch(source.name)
            directory = open_model(path, name, self._scripts(), override=override, fetch=models.fetch_known)
            prepared = self._prepared(directory, name, models.identity + digest_of(override), token)
        except BaseException:
            models.release()
            raise
        return replace(
            prepared, download_ns=int(models.seconds * 1e9), hold=models, content=(models.identity, override)
        )

    def _prepared(self, directory: ModelDirectory, name: str, content: str, token: CancelToken) -> PreparedTarget:
        """The model of a target and its members."""
        prepared = self._understood(directory, name, content, token)
        with made_of_parts(directory.config):
            members = tuple(self._understood(m, name, f"{content}/{m.path.name}", token) for m in directory.members)
        estimate = sum((member.estimate for member in members), prepared.estimate)
        return replace(prepared, members=members, estimate=estimate)

    def equip(self, prepared: PreparedTarget, token: CancelToken) -> PreparedTarget:
        """Make the environments that its models bring and that are not there yet, which may take minutes."""
        environments = self._environments
        assert environments is not None  # noqa: S101 - an engine has them
        return replace(
            prepared,
            brought=make(environments, prepared.brought, prepared.directory, token),
            members=tuple(self.equip(member, token) for member in prepared.members),
        )

    def _understood(self, directory: ModelDirectory, target: str, content: str, token: CancelToken) -> PreparedTarget:
        """One model of a target, and how it is to be loaded."""
        name = directory.name
        for _, sentence in unheard_of(directory.config):
            warn_once("mme.load", sentence, name)
        if directory.config.ensemble:
            none, pinned = Footprint(), is_pinned(directory.config)
            return PreparedTarget(
                target, directory, None, [], Placement.INLINE, Brought(), content, none, none, pinned=pinned
            )
        backend = find_backend(directory.config.backend, directory.config.platform, name, directory.first)
        handler = handler_for(backend)
        for _, check in asked_checks(directory.config, handler):
            check()
        placement = placement_of(directory.config, handler)
        if placement is Placement.INLINE:
            self._share(directory, handler, token)
        directory, lanes = self._placed(directory, handler)
        brought = look(self._environments, directory, handler, placement, token)
        size = directory.size() - brought.size_in(directory)
        on_disk = devices.size_on(directory.config.instance_group, lanes, size)
        where = f"{','.join(str(device) for _, device in lanes)}{_of_how_many(lanes)}"
        identity = f"{content} {placement.value} {where}{brought.mark}"
        watched = placement is Placement.PROCESS
        estimate = self._footprints.expected(
            identity, handler.backend, on_disk, handler.estimate_factor, watched=watched
        )
        pinned = is_pinned(directory.config)
        forms = self._forms(directory, handler, placement, lanes)
        if forms is not None and forms.known:
            estimate = forms.expected(forms.tier)
        return PreparedTarget(
            target,
            directory,
            handler,
            lanes,
            placement,
            brought,
            identity,
            on_disk,
            estimate,
            pinned,
            forms,
        )

    def _share(self, directory: ModelDirectory, handler: type[Handler], token: CancelToken) -> None:
        """Have in this process what the handler's models share there, as their framework, which is no model's own."""
        prepare = functools.partial(handler.prepare, directory.config, directory.model_file(max(directory.versions)))
        if handler in self._shared:
            prepare()
            return
        _, taken = self._scales.weigh(prepare, token)
        self._scales.common += taken.host
        if self._host:
            handler.share(self._host)
        self._shared.add(handler)

    def _placed(
        self, directory: ModelDirectory, handler: type[Handler]
    ) -> tuple[ModelDirectory, list[tuple[str, Device]]]:
        """The model with its instance groups as they are on this machine, and their lanes."""
        name, gpu_capable = directory.name, handler.gpu_capable()
        groups = directory.config.instance_group or (InstanceGroup(name),)
        lanes = devices.place(groups, name, gpu_capable=gpu_capable, require_gpu=self._require_gpu)
        groups = devices.settled(groups, name, gpu_capable=gpu_capable)
        return replace(directory, config=replace(directory.config, instance_group=groups)), lanes

    def _forms(
        self, directory: ModelDirectory, handler: type[Handler], placement: Placement, lanes: list[tuple[str, Device]]
    ) -> TargetForms | None:
        """The forms of a model that executes in this process, on the CPU, and can be mapped."""
        weights = weights_of(directory.config, self._weights)
        here = placement is Placement.INLINE and all(device == CPU for _, device in lanes)
        here = here and not directory.config.cpu_accelerators and not directory.config.op_libraries
        if self._store is None or weights is Weights.PLAIN or not here or not issubclass(handler, MappedHandler):
            return None
        files = {version: directory.model_file(version) for version in directory.versions}
        return TargetForms(self._store, handler, weights, directory.config, files)


def _of_how_many(lanes: list[tuple[str, Device]]) -> str:
    """How many GPUs there are, if a model is on any: its code may take memory of each."""
    return f" of {len(devices.gpu_uuids())}" if any(device.kind == "gpu" for _, device in lanes) else ""


def _opened(source: Unpacked | InRepository, name: str, scripts: Scripts, override: str) -> ModelDirectory:
    if isinstance(source, Unpacked):
        return open_target(source.path, name, scripts, override=override)
    # The folder is called otherwise where the name tells the repository too, and where it holds a client's files.
    strict = source.path.name == name
    return open_model(source.path, name, scripts, strict_name=strict, override=override, others=source.others)
