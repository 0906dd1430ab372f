"""How target models are loaded: fetched, opened, loaded on their devices, warmed up, and measured.

All of it runs on load threads; what it makes lives on the event loop.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from model_handlers import devices
from model_handlers.base import CPU, Footprint, Handler, Placement
from model_handlers.config import InstanceGroup, ModelConfig
from model_handlers.config_checks import normalise
from model_handlers.errors import Kind, MmeError, invalid_model
from model_handlers.gpus import uuid_of
from model_handlers.isolation.parameters import placement_of
from model_handlers.mapped import MappedHandler
from model_handlers.outside import offering
from model_handlers.pbtxt.fields import refusal
from model_handlers.registry import find_backend, handler_for
from serve.cache.footprints import Footprints
from serve.latencies import DEFAULT_LATENCIES
from serve.models.dispatches import Dispatches
from serve.models.ensemble import EnsembleModel
from serve.models.initial_states import initial_states
from serve.models.labels import ensemble_labels, read_labels
from serve.models.limited_lanes import Limits
from serve.models.model import Model
from serve.models.warmup_samples import Warmup
from serve.scheduling.ensemble_check import check_members
from serve.sources.gathering import Gathering
from serve.sources.override import digest_of
from serve.sources.repositories import print_of
from serve.sources.repository import ModelDirectory, made_of_parts, open_model, open_target
from serve.sources.scripts import Scripts
from serve.sources.source import Archived, InBucket, InRepository, Overridden, Source, Unpacked
from serve.stats import new_stats
from serve.targets.environments import Brought, look, make
from serve.targets.measuring import Scales
from serve.targets.prepared import PreparedTarget, in_order, is_pinned
from serve.targets.proofs import Proofs
from serve.targets.target import Target
from serve.weights.forms import TargetForms
from serve.weights.mode import Weights, weights_of

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from model_handlers.base import Device
    from model_handlers.environments.cache import Environments
    from serve.latencies import Latencies
    from serve.models.labels import Labels
    from serve.models.loop_poll import LoopPoll
    from serve.models.rescue import RescueRequest
    from serve.outside import EngineOutside
    from serve.request import InferenceResponse
    from serve.scheduling.response_cache import ResponseCache
    from serve.sources.override import OverrideFolder
    from serve.stats import ModelStats
    from serve.targets.measuring import Others
    from serve.targets.target import AnyModel
    from serve.weights.store import WeightStore


class ModelLoader:
    """Fetches, opens and loads. All methods run on load threads.

    Args:
        loop: the event loop that the models will serve.
        stats: (name, version) → counters that outlive a model's stay in memory.
        footprints: what models took before.
        proofs: which files were loaded before.
        inline_ns: see `Model`.
        require_gpu: whether KIND_GPU without a GPU is an error.
        outside: what a target's models may ask of the server, by its name.
        rescue: see `Model`.
        scripts: tells what is the same for all inference scripts.
        environments: those that models bring; may only be left out where none does.
        store: keeps the forms of models that can be mapped; None for no forms at all.
        weights: how models hold their weights whose configuration does not say.
        responses: see `Model`.
        latencies: which are kept of models.
        limits: the resources that instances share.
        poll: see `Model`.
        started: told of every target that begins to serve; on the event loop.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        stats: dict[tuple[str, int], ModelStats],
        *,
        footprints: Footprints | None = None,
        proofs: Proofs | None = None,
        inline_ns: int = 0,
        require_gpu: bool = False,
        outside: Callable[[str], EngineOutside] | None = None,
        rescue: RescueRequest | None = None,
        scripts: Callable[[], Scripts] = Scripts,
        environments: Environments | None = None,
        store: WeightStore | None = None,
        weights: Weights = Weights.AUTO,
        responses: ResponseCache[InferenceResponse] | None = None,
        latencies: Latencies = DEFAULT_LATENCIES,
        limits: Limits | None = None,
        poll: LoopPoll | None = None,
        started: Callable[[Target], None] | None = None,
    ) -> None:
        self.scales = Scales()
        self._loop = loop
        self._stats = stats
        self._footprints = footprints or Footprints()
        self._proofs = proofs or Proofs()
        self._inline_ns = inline_ns
        self._require_gpu = require_gpu
        self._outside = outside
        self._scripts = scripts
        self._rescue = rescue
        self._environments = environments
        self._store = store
        self._weights = weights
        self._responses = responses
        self._latencies = latencies
        self._limits = limits or Limits(loop, None)
        self._dispatches = Dispatches(loop)
        self._poll = poll
        self._started = started

    def prepare(self, name: str, source: Source, cancelled: Callable[[], bool]) -> PreparedTarget:
        """Fetch what has to be downloaded, and understand what is in it."""
        override, sent = "", None
        if isinstance(source, Overridden):
            override, sent = source.config, source.folder
            source = source.base if sent is None else InRepository(sent.path)
        if isinstance(source, InBucket):
            return self._gathered(name, source, override, cancelled)
        if not isinstance(source, Archived):
            return self._found(name, source, override, sent, cancelled)
        return self._fetched(name, source, override, cancelled)

    def _found(
        self,
        name: str,
        source: Unpacked | InRepository,
        override: str,
        sent: OverrideFolder | None,
        cancelled: Callable[[], bool],
    ) -> PreparedTarget:
        """What is in a folder, or was sent by a client, and the models beside it that it consists of."""
        # First: what is written while the rest is read is a change.
        prints = [print_of(source.path) if sent is None else sent.contents]
        directory = _opened(source, name, self._scripts(), override)
        beside = [member.path for member in directory.members if not member.path.is_relative_to(source.path)]
        prints += [print_of(path) for path in beside]
        prepared = self._prepared(directory, name, directory.fingerprint() + digest_of(override), cancelled)
        return replace(prepared, content=(*prints, override))

    def _fetched(self, name: str, source: Archived, override: str, cancelled: Callable[[], bool]) -> PreparedTarget:
        """What is in an archive."""
        began = time.perf_counter_ns()
        artifact = source.artifacts.fetch(source.name, cancelled)
        download_ns = time.perf_counter_ns() - began if artifact.downloaded else 0
        try:
            directory = open_target(artifact.path, name, self._scripts(), override=override)
            prepared = self._prepared(directory, name, artifact.identity + digest_of(override), cancelled)
        except BaseException:
            artifact.hold.release()
            raise
        return replace(prepared, download_ns=download_ns, hold=artifact.hold, content=(artifact.identity, override))

    def _gathered(self, name: str, source: InBucket, override: str, cancelled: Callable[[], bool]) -> PreparedTarget:
        """A model of a repository in S3, and the models that it consists of."""
        models = Gathering(source.artifacts, cancelled)
        if override:
            source.artifacts.want_whole(source.name)
        try:
            path = models.fetch(source.name)
            directory = open_model(path, name, self._scripts(), override=override, fetch=models.fetch_known)
            prepared = self._prepared(directory, name, models.identity + digest_of(override), cancelled)
        except BaseException:
            models.release()
            raise
        return replace(
            prepared, download_ns=int(models.seconds * 1e9), hold=models, content=(models.identity, override)
        )

    def overrule(self) -> None:
        """See `Scales`."""
        self.scales.overrule()

    def _prepared(
        self, directory: ModelDirectory, name: str, content: str, cancelled: Callable[[], bool]
    ) -> PreparedTarget:
        """The model of a target and its members."""
        prepared = self._understood(directory, name, content, cancelled)
        with made_of_parts(directory.config):
            members = tuple(self._understood(m, name, f"{content}/{m.path.name}", cancelled) for m in directory.members)
        estimate = sum((member.estimate for member in members), prepared.estimate)
        return replace(prepared, members=members, estimate=estimate)

    def equip(self, prepared: PreparedTarget, cancelled: Callable[[], bool]) -> PreparedTarget:
        """Make the environments that its models bring and that are not there yet, which may take minutes."""
        environments = self._environments
        assert environments is not None  # noqa: S101 - an engine has them
        return replace(
            prepared,
            brought=make(environments, prepared.brought, prepared.directory, cancelled),
            members=tuple(self.equip(member, cancelled) for member in prepared.members),
        )

    def _understood(
        self, directory: ModelDirectory, target: str, content: str, cancelled: Callable[[], bool]
    ) -> PreparedTarget:
        """One model of a target, and how it is to be loaded."""
        name = directory.name
        if directory.config.ensemble:
            none = Footprint()
            return PreparedTarget(
                target, directory, None, [], Placement.INLINE, Brought(), content, none, none, pinned=False
            )
        backend = find_backend(directory.config.backend, directory.config.platform, name, directory.first)
        handler = handler_for(backend, name)
        if handler.sees_requests and (directory.config.batch_inputs or directory.config.batch_outputs):
            field = "batch_input" if directory.config.batch_inputs else "batch_output"
            raise refusal(field, f"models of backend '{backend.name}' get each request as it came", name)
        if directory.config.op_libraries and not handler.custom_operations:
            field = "model_operations.op_library_filename"
            raise refusal(field, f"backend '{backend.name}' loads no libraries of operations", name)
        directory, lanes = self._placed(directory, handler)
        placement = placement_of(directory.config, handler)
        if placement is Placement.INLINE:
            handler.prepare(directory.config, directory.model_file(max(directory.versions)))
        brought = look(self._environments, directory, handler, placement, cancelled)
        size = directory.size() - brought.size_in(directory)
        on_gpus = len({device for _, device in lanes if device.kind == "gpu"})
        on_disk = Footprint(size if any(device == CPU for _, device in lanes) else 0, size * on_gpus)
        identity = f"{content} {placement.value} {','.join(str(device) for _, device in lanes)}"
        estimate = self._footprints.expected(identity, handler.backend, on_disk, handler.estimate_factor)
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

    def _placed(
        self, directory: ModelDirectory, handler: type[Handler]
    ) -> tuple[ModelDirectory, list[tuple[str, Device]]]:
        """The model with its instance groups as they are on this machine, and their lanes."""
        name, gpu_capable = directory.name, handler.gpu_capable()
        groups = directory.config.instance_groups or (InstanceGroup(name),)
        lanes = devices.place(groups, name, gpu_capable=gpu_capable, require_gpu=self._require_gpu)
        groups = devices.settled(groups, name, gpu_capable=gpu_capable)
        return replace(directory, config=replace(directory.config, instance_groups=groups)), lanes

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

    def try_files(self, prepared: PreparedTarget, cancelled: Callable[[], bool]) -> None:
        """Have files tried of which there is no proof: see `serve/targets/proofs.py`."""
        for each in (*prepared.members, prepared):
            versions = each.directory.versions if each.is_delicate else ()
            with made_of_parts(prepared.directory.config), _blamed(each, prepared):
                for version in versions:
                    _must_go_on(prepared, cancelled)
                    with _of_version(version):
                        self._proofs.provide(*_to_prove(each, version))

    def load(self, prepared: PreparedTarget, cancelled: Callable[[], bool] = lambda: False) -> tuple[Target, Footprint]:
        """Load every selected version on its devices, members first, warm it up, measure, and remember."""
        members: dict[str, Target] = {}
        try:
            with made_of_parts(prepared.directory.config):
                for member in in_order(prepared):
                    with _blamed(member, prepared):
                        members[member.directory.path.name] = self._load(member, members, {}, cancelled)
                target = self._load(prepared, members, members, cancelled)
        except BaseException:
            for loaded in members.values():
                loaded.close()
            raise
        return target, target.takes()

    def _load(
        self,
        prepared: PreparedTarget,
        parts: dict[str, Target],
        members: dict[str, Target],
        cancelled: Callable[[], bool],
    ) -> Target:
        """One model of a target; ensembles consist of the `parts` that are loaded already."""
        name, forms, config = prepared.directory.name, prepared.forms, prepared.directory.config
        labels: Labels = read_labels(config, prepared.directory.path)
        if prepared.handler is None:
            versions = self._ensembles(prepared, parts)
            labels = ensemble_labels(config, labels, {part: target.labels for part, target in parts.items()})
            return Target(name, versions, members, labels=labels, started=self._started)
        models, taken = self._load_measured(prepared, cancelled)
        self._footprints.measured(prepared.identity, prepared.handler.backend, prepared.on_disk, taken.whole())
        forms = forms if forms is not None and forms.known else None
        return Target(name, models, members, forms=forms, footprint=taken, labels=labels, started=self._started)

    def _load_measured(
        self, prepared: PreparedTarget, cancelled: Callable[[], bool]
    ) -> tuple[dict[int, AnyModel], Footprint]:
        """All versions, and what they take; none of them where that can't be told."""
        models: dict[int, AnyModel] = {}

        def load() -> None:
            models.update(self._load_versions(prepared, cancelled))

        try:
            with self.scales.apart() as others:
                if prepared.placement is Placement.PROCESS:
                    load()
                    all_of_it = sum((model.memory() for model in models.values()), Footprint())
                    taken = replace(all_of_it, device=max(all_of_it.device - others.take.device, 0))
                    here = Footprint(0, taken.device)
                else:
                    taken = here = self._weighed(prepared, load, cancelled, others)
        except BaseException:
            _close_all(models)
            raise
        self.scales.note(here)
        return models, taken

    def _weighed(
        self, prepared: PreparedTarget, load: Callable[[], None], cancelled: Callable[[], bool], others: Others
    ) -> Footprint:
        """What a load into this process takes; see `alone`. A model in a process of its own tells that itself."""
        size = prepared.directory.size() if prepared.forms is None else 0  # its files may be replaced meanwhile
        _, taken = self.scales.weigh(load, cancelled)
        taken -= others.take
        if prepared.forms is not None:
            return prepared.forms.weighed(taken)
        # A heap page that an unloaded model left behind may be used again without being seen: never less than the file.
        return Footprint(max(taken.host, size), max(taken.device, 0))

    def _ensembles(self, prepared: PreparedTarget, members: dict[str, Target]) -> dict[int, AnyModel]:
        """Every selected version of an ensemble: they differ in nothing but their numbers."""
        directory = prepared.directory
        missing = dict.fromkeys(step.model for step in directory.config.ensemble if step.model not in members)
        if missing:
            there = f"; there are {', '.join(members)}: a step names a model's directory" if members else ""
            raise invalid_model(
                f"ensemble {directory.name} contains models that are not available or ambiguous: {', '.join(missing)}"
                f"{there}"
            )
        steps = []
        for step in directory.config.ensemble:
            if step.version is not None and step.version not in members[step.model].versions:
                which = f"whose required version {step.version} is not loaded"
                raise invalid_model(f"ensemble '{directory.name}' depends on '{step.model}' {which}")
            steps.append(members[step.model].version(step.version))
        check_members(directory.config, [step.config for step in steps])
        config = normalise(replace(directory.config, decoupled=any(step.config.decoupled for step in steps)))
        return {version: self._ensemble(directory, version, config, steps) for version in directory.versions}

    def _ensemble(
        self, directory: ModelDirectory, version: int, config: ModelConfig, steps: list[AnyModel]
    ) -> EnsembleModel:
        stats = self._stats_of(directory, version)
        return EnsembleModel(directory.name, version, config, steps, stats, self._loop, self._responses)

    def _load_versions(self, prepared: PreparedTarget, cancelled: Callable[[], bool]) -> dict[int, AnyModel]:
        """All selected versions, or none."""
        loaded: dict[int, AnyModel] = {}
        try:
            for version in prepared.directory.versions:
                _must_go_on(prepared, cancelled)
                with _of_version(version):
                    loaded[version] = self._load_version(prepared, version, cancelled)
        except BaseException:
            _close_all(loaded)
            raise
        return loaded

    def _stats_of(self, directory: ModelDirectory, version: int) -> ModelStats:
        """Those that it had when it was here before, or new ones."""
        name = directory.counted_as or directory.name
        return self._stats.setdefault((name, version), new_stats(self._latencies))

    def _load_version(self, prepared: PreparedTarget, version: int, cancelled: Callable[[], bool]) -> Model:
        directory = prepared.directory
        config = directory.config
        handlers: list[Handler] = []
        lanes: list[tuple[str, Handler]] = []
        shared: dict[Device, Handler] = {}
        outside = self._outside(prepared.target) if self._outside is not None else None
        try:
            for lane, device in prepared.lanes:
                handler = shared.get(device)
                if handler is None:
                    if prepared.is_delicate:  # it was tried, and waited for its turn since
                        self._proofs.check(*_to_prove(prepared, version))
                    with offering(outside):
                        handler = prepared.start(version, config, device, lane)
                    handlers.append(handler)
                    config = handler.config
                if prepared.placement is Placement.INLINE:  # a process executes one batch at a time
                    shared[device] = handler
                lanes.append((lane, handler))
            if config.warmup:
                warmup = Warmup(config, directory.path)
                for lane, handler in lanes:
                    warmup.run(handler, lane, lambda: _must_go_on(prepared, cancelled))
            if outside is not None:
                outside.loaded()
            stats = self._stats_of(directory, version)
            stats.gpu_uuid = uuid_of([device for _, device in prepared.lanes])
            return Model(
                directory.name,
                version,
                lanes,
                stats,
                self._loop,
                self._inline_ns,
                self._rescue,
                self._responses,
                initial_states(config, directory.path),
                self._limits.lanes(directory.name, config.instance_groups, prepared.lanes),
                self._dispatches,
                self._poll,
                turns=len({device for _, device in prepared.lanes}) > 1,
            )
        except BaseException:
            for handler in handlers:
                handler.close()
            raise


def _opened(source: Unpacked | InRepository, name: str, scripts: Scripts, override: str) -> ModelDirectory:
    if isinstance(source, Unpacked):
        return open_target(source.path, name, scripts, override=override)
    # The folder is called otherwise where the name tells the repository too, and where it holds a client's files.
    strict = source.path.name == name
    return open_model(source.path, name, scripts, strict_name=strict, override=override, others=source.others)


@contextlib.contextmanager
def _of_version(version: int) -> Iterator[None]:
    """What goes wrong in there is wrong with a version."""
    try:
        yield
    except MmeError as error:
        error.version = version
        raise


def _close_all(models: dict[int, AnyModel]) -> None:
    for model in models.values():
        model.close()


@contextlib.contextmanager
def _blamed(member: PreparedTarget, whole: PreparedTarget) -> Iterator[None]:
    """What is wrong with a model of an ensemble keeps the ensemble from loading, which says so."""
    try:
        yield
    except MmeError as error:
        if error.kind is not Kind.INVALID_MODEL or not whole.directory.config.ensemble:
            raise
        name, part = whole.directory.name, member.directory.path.name
        raise invalid_model(
            f"ensemble '{name}' depends on '{part}' which has no loaded version. Model '{part}' loading failed with "
            f"error: {error.message}"
        ) from error


def _to_prove(prepared: PreparedTarget, version: int) -> tuple[type[Handler], ModelConfig, Path]:
    """What reads a version's file, and the file; what dies of files has no other file for GPUs."""
    assert prepared.handler is not None  # noqa: S101 - it is delicate
    config = prepared.directory.config
    return prepared.handler, config, prepared.file(version, config, CPU)


def _must_go_on(prepared: PreparedTarget, cancelled: Callable[[], bool]) -> None:
    if cancelled():
        raise MmeError(Kind.CANCELLED, f"the load of model '{prepared.target}' was cancelled")
