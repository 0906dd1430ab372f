"""What tests of serve/ see of an engine and of what it is made of, where nothing public tells: private names are here alone."""

from dataclasses import replace

from serve.cache.eviction import Plan

# -- an engine ---------------------------------------------------------------------------------------------------------


def artifacts_of(engine):
    """What is unpacked on disk."""
    return engine.origins.artifacts


def weights_of(engine):
    """Models' weights on disk."""
    return engine._store


def tiering_of(engine):
    """What changes the forms of models' weights."""
    return engine._tiering


def upkeep_of(engine):
    """What looks at the memory of models' processes."""
    return engine._upkeep


def loads_of(engine):
    """The executor of loads."""
    return engine.pools.loads


def give_clients(engine, **patience):
    """Other options for those who ask for a load or an unload from now on."""
    engine._load_api.options = replace(engine.options, **patience)


def admits_nothing(engine):
    """Whether nothing that was asked for is under way."""
    return not engine._load_api._tasks


def users_of(engine):
    """Who uses what is unpacked on disk, by path."""
    return engine.origins.room._users


def look(engine):
    """Have the memory of every model's process looked at now; returns what tells whether that is over."""
    return _look_now(upkeep_of(engine).maintenance)


def measure(engine):
    """Have the memory of the serving process measured now; returns what tells whether that is over."""
    return _look_now(engine._meter.maintenance)


def executing(engine):
    """The names of the models that the next look at the serving process reads."""
    return [each.target.name for each in engine._meter.executing]


def _look_now(maintenance):
    maintenance.look()
    return lambda: maintenance.looking is None


# -- a register --------------------------------------------------------------------------------------------------------


def journal_of(register):
    """Where it is written down."""
    return register._journal


def next_look(register):
    """What tells whether it has looked at models' last uses once more."""
    timer = register._timer
    return lambda: register._timer is not timer


def noted_use(register):
    """The last use that it has noted of any model."""
    return register._noted_use


# -- a cache -----------------------------------------------------------------------------------------------------------


def loader_of(cache):
    """What prepares and loads for it."""
    return cache.loading.loader


def give_loads(cache, seconds):
    """Another time for loads that begin from now on."""
    cache.loading.patience = seconds


def evict(cache, name):
    """Put a model out of memory as if another one wanted its place; returns what ends when it has left."""
    cache._evict(Plan((name,), fits=True, possible=True), "another", "load")
    return cache.entries[name].closing


def books_of(cache):
    """What it keeps of those in memory for eviction plans, as `eviction.Candidates`."""
    return cache.residents


def residents_of(cache):
    """Those in memory, one by one."""
    return [cache.residents.candidate(entry) for entry in cache.residents.own]


# -- weights -----------------------------------------------------------------------------------------------------------


def watched_by(tiering):
    """Models in memory whose form may change."""
    return tiering._watched


def changes_nothing(tiering):
    """Whether no form is being changed."""
    return not tiering._tasks


def ticks_of(tiering):
    """How often it has looked."""
    return tiering._ticks


def turn(tiering, watched, tier):
    """Change a model's form now."""
    return tiering._turn(watched, tier)


def idle_for_long(tiering):
    """Let the process that refines have had nothing to do for an hour."""
    tiering._refiner._until = 0.0


# -- a model -----------------------------------------------------------------------------------------------------------


def idle(model):
    """How many lanes wait for work; a lane sets no event when it comes to rest."""
    return len(model._idle.numbers)


def lanes_of(model):
    """The names of its lanes."""
    return [executor.name for executor in model.executors.each]


def left_open(model):
    """How many requests are answered outside of their batch."""
    return len(model._replies.open)


def known_layouts(model):
    """How many layouts it has checked and remembers."""
    return len(model._checked)


def wakes_at(model):
    """When it looks at its queue again though nothing comes, None where it will not."""
    return model._timer.wakes_at or None


def guard_queue(model, guarded):
    """Put `guarded(queue)` in the place of its queue; returns that."""
    model._queue = guarded(model._queue)
    return model._queue
