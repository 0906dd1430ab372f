"""The memory budget: what is promised to which load, and what has to go for it. On the event loop only.

Bytes are counted as residents' until closed or as reservations, never both. A claim that does not fit evicts, if that
makes enough room, or waits, and is looked at again at each change. What is freed for it is set aside, so that small
claims cannot starve a large one. A model is loaded beside the one it replaces, unless only that one's leaving makes
room, decided at each look: what it waits for may be pinned, or wait for the room that the old one holds.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from model_handlers.base import Footprint
from model_handlers.errors import Kind, MmeError, out_of_memory
from serve.cache import eviction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class _Claim:
    """A load that waits for room. `patient` ones wait for models in use, the others ask for more than they have."""

    def __init__(
        self, name: str, need: Footprint, *, patient: bool, give_way: Callable[[], None] | None = None
    ) -> None:
        self.name = name
        self.need = need
        self.patient = patient
        # has the model of that name leave that is in memory, if there is one and it has not been told yet
        self.give_way = give_way
        self.granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.evicted: list[str] = []
        self.awaits_own = False  # whether models leave for this claim, whose bytes no other is to take
        # what those must hold that may leave by the next look, for that to be of use; None if that is not known
        self.short: Footprint | None = None


class _NotNowError(Exception):
    """An impatient claim does not fit."""


@dataclass(eq=False, repr=False)
class Room:
    """Reservations within a budget of bytes for all models together."""

    budget: Footprint
    residents: eviction.Candidates
    # begins to carry out a plan, for a model and for a reason of `EVICTION_REASONS`; bytes come back later
    evict: Callable[[eviction.Plan, str, str], None]
    _: KW_ONLY
    policy: eviction.Policy = eviction.Policy.LRU
    evicts: bool  # whether models make room for others at all, or what does not fit is out of memory at once
    patience: float  # seconds that a claim waits

    def __post_init__(self) -> None:
        self.reserved = Footprint()  # bytes promised to loads under way
        self.grown = Footprint()  # bytes that executions took and no model is charged for
        self.claims: list[_Claim] = []  # that wait
        self._may_leave = Footprint()  # what those hold at most whose leases ended since the last look
        self._look_again: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Room {megabytes(self.used())} of {megabytes(self.budget)} taken, {len(self.claims)} claims waiting>"

    def used(self) -> Footprint:
        """Bytes of everything in memory and of everything promised."""
        return self.residents.taken + self._apart()

    def _apart(self) -> Footprint:
        """Bytes that are taken and no resident's, so that no eviction gives them back."""
        return self.reserved + self.grown

    async def reserve(self, name: str, need: Footprint, give_way: Callable[[], None] | None = None) -> list[str]:
        """Have `need` bytes promised to model `name`, evicting others, whose names it returns, or waiting for them.

        `give_way` has the one begin to leave whose place it takes; called only if there is no room for both.

        Raises:
            MmeError: OUT_OF_MEMORY when it can never fit, or does not fit and nothing may be evicted; UNAVAILABLE when
                models that may not leave yet did not make room in time.
        """
        return await self._reserve(_Claim(name, need, patient=True, give_way=give_way), need)

    async def extend(self, name: str, promised: Footprint, whole: Footprint) -> list[str] | None:
        """Have more promised to a model that has `promised` bytes already and turned out to take `whole`.

        It may evict, but it does not wait for models in use: two that hold what the other waits for would wait for
        ever. The names of those evicted; None when the rest is not to be had now.
        """
        try:
            return await self._reserve(_Claim(name, whole.beyond(promised), patient=False), whole)
        except _NotNowError:
            return None

    def check_together(self, whole: str, need: Footprint, names: Iterable[str]) -> None:
        """Refuse an ensemble whose models need more together than may ever be free for them: OUT_OF_MEMORY."""
        pinned = [each for each in self._named(names) if each.keep_until == eviction.FOR_EVER]
        room = self.budget - eviction.without(self.residents.pinned, pinned)
        if not need.fits(room):
            raise out_of_memory(
                f"the models of ensemble '{whole}' need {megabytes(need)} together, and the memory budget has "
                f"{megabytes(room, need)} for them: raise {_setting(need, room)} or serve it on a larger instance"
            )

    def spare(self, need: Footprint) -> bool:
        """Have `need` bytes promised if they are free and no load waits for them; to be given back."""
        if self.claims or not need.fits(self.budget - self.used()):
            return False
        self.reserved += need
        return True

    async def _reserve(self, claim: _Claim, whole: Footprint) -> list[str]:
        if claim.need == Footprint():
            return []
        if not whole.fits(self.budget):
            raise out_of_memory(self._too_big(claim.name, whole))
        self.claims.append(claim)
        self.settle()
        try:
            async with asyncio.timeout(self.patience):
                await claim.granted
        except BaseException as error:
            self._withdraw(claim)
            if isinstance(error, TimeoutError):
                raise MmeError(Kind.UNAVAILABLE, self._in_use(claim)) from None
            raise
        return claim.evicted

    def relieve(self, name: str, need: Footprint | None, reason: str) -> tuple[str, ...]:
        """Begin to evict others that hold `need` bytes together, or all that may go if they hold less.

        A need of None is one of them, whatever it holds. It is for model `name`, which is short of what no budget here
        counts.
        """
        if not self.evicts:
            return ()
        plan = eviction.relief(
            self.residents,
            need,
            self.budget,
            self.policy,
            time.monotonic(),
            name=name,
            and_from_disk=reason == "disk",
        )
        if plan.victims:
            self.evict(plan, name, reason)
        return plan.victims

    def regain(self, name: str) -> None:
        """Model `name`, or "" for none, grew in memory: others leave if all take too much, and that is enough."""
        if not self.evicts or self.used().fits(self.budget):
            return
        grown = self.residents.named(name)
        plan = eviction.regain(self.residents, self._apart(), grown, self.budget, self.policy, time.monotonic())
        if plan.victims:
            self.evict(plan, name, "growth")

    def overdrawn(self) -> int:
        """Bytes of the host that are taken beyond the budget, and stay so when all that are leaving have left."""
        return max((self.residents.staying.total + self._apart()).host - self.budget.host, 0)

    def give_back(self, bytes_promised: Footprint) -> None:
        """End a reservation: the bytes are free, or counted as a resident's from now on."""
        self.reserved -= bytes_promised

    def lease_ended(self, holds: Footprint) -> None:
        """A resident may leave now that holds so many bytes at most: claims are looked at if that can be enough."""
        self._may_leave += holds
        if any(claim.short is None or claim.short.fits(self._may_leave) for claim in self.claims):
            self.settle()

    def settle(self) -> None:
        """Look at every claim again, first come first: grant it, evict for it, or refuse it."""
        if not self.claims:
            return
        self._may_leave = Footprint()
        set_aside = ahead = Footprint()
        again_at = eviction.FOR_EVER
        for claim in list(self.claims):
            if not claim.granted.done():
                again_at = min(again_at, self._attempt(claim, set_aside, ahead) or again_at)
            if not claim.granted.done():
                set_aside += claim.need if claim.awaits_own else Footprint()
                ahead += claim.need
        self.claims = [claim for claim in self.claims if not claim.granted.done()]
        self._settle_again(again_at)

    def _settle_again(self, at: float) -> None:
        if self._look_again is not None:
            self._look_again.cancel()
            self._look_again = None
        if at < eviction.FOR_EVER and self.claims:
            seconds = max(at - time.monotonic(), 0.0)
            self._look_again = asyncio.get_running_loop().call_later(seconds, self.settle)

    def _attempt(self, claim: _Claim, set_aside: Footprint, ahead: Footprint) -> float:
        """Grant a claim, evict for it or refuse it; else when to try again, 0 if time alone changes nothing.

        Of what those claims need that came before, `set_aside` is theirs alone, and `ahead` is all of it.
        """
        if claim.give_way is not None:
            set_aside -= self._never_together(claim)
        if claim.need.fits(self.budget - self.used() - set_aside):
            self.reserved += claim.need
            claim.granted.set_result(None)
            return 0.0
        if claim.give_way is not None and self._only_instead(claim, ahead):
            claim.give_way()
            claim.give_way = None
            claim.awaits_own = True
        plan = eviction.plan(
            self.residents, self._apart() + set_aside, claim.need, self.budget, self.policy, time.monotonic()
        )
        claim.short = plan.short
        full = not plan.fits or (bool(plan.victims) and not self.evicts)
        if full and claim.patient and not self.evicts:
            claim.granted.set_exception(out_of_memory(self._full(claim)))
        elif not plan.possible:
            claim.granted.set_exception(out_of_memory(self._pinned(claim)))
        elif full and not claim.patient:
            claim.granted.set_exception(_NotNowError())
        elif plan.victims:
            claim.evicted += plan.victims
            claim.awaits_own = True
            self.evict(plan, claim.name, "load" if claim.patient else "growth")
        return plan.again_at

    def _never_together(self, claim: _Claim) -> Footprint:
        """What is set aside for claims ahead of one that have no room before the model leaves whose place it takes.

        They would wait for it, and it for them.
        """
        room = self.budget - self._kept(self._named([claim.name]), stays=True)
        ahead = itertools.takewhile(lambda each: each is not claim, self.claims)
        held_up = (each.need for each in ahead if each.awaits_own and not each.granted.done())
        return sum((need for need in held_up if not need.fits(room)), Footprint())

    def _only_instead(self, claim: _Claim, ahead: Footprint) -> bool:
        """Whether there can be room for a model, but not while the one stays whose place it takes.

        Where nothing is evicted, claims ahead of it wait for bytes that are on their way, and will have them.
        """
        own = self._named([claim.name])
        room = self.budget if self.evicts else self.budget - ahead
        if not claim.need.fits(room - self._kept(own, stays=False)):
            return False
        return not claim.need.fits(room - self._kept(own, stays=True)) or self._wait_for_each_other()

    def _named(self, names: Iterable[str]) -> list[eviction.Candidate]:
        return [each for name in names if (each := self.residents.named(name)) is not None]

    def _kept(self, own: list[eviction.Candidate], *, stays: bool) -> Footprint:
        """Bytes that no eviction gives back, with or without the claimant's own."""
        if not self.evicts:
            staying = self.residents.staying
            return self._apart() + (staying.total if stays else eviction.without(staying, own))
        pinned = [each for each in own if each.keep_until == eviction.FOR_EVER]
        if stays:
            return eviction.beside(self.residents.pinned, [each for each in own if each not in pinned])
        return eviction.without(self.residents.pinned, pinned)

    def _wait_for_each_other(self) -> bool:
        """Whether no model that is to take a place has room beside those that stay until their places are taken."""
        waiting = {claim.name: claim for claim in self.claims if claim.give_way and not claim.granted.done()}
        stay = [each for each in self._named(waiting) if each.keep_until != eviction.FOR_EVER]
        free = self.budget - eviction.beside(self.residents.pinned, stay)
        return not any(claim.need.fits(free) for claim in waiting.values())

    def _withdraw(self, claim: _Claim) -> None:
        """Of a load that left: what was granted in that very moment, or set aside, is for the next."""
        granted = claim.granted
        if granted.done() and not granted.cancelled() and granted.exception() is None:
            self.give_back(claim.need)
        self.settle()

    def _too_big(self, name: str, need: Footprint) -> str:
        return (
            f"model '{name}' needs {megabytes(need)}, more than the whole memory budget of "
            f"{megabytes(self.budget, need)}: raise {_setting(need, self.budget)} or serve it on a larger instance"
        )

    def _full(self, claim: _Claim) -> str:
        need = claim.need
        return (
            f"model '{claim.name}' needs {megabytes(need)}, but {megabytes(self.used(), need)} of "
            f"{megabytes(self.budget, need)} are taken: unload a model first"
        )

    def _pinned(self, claim: _Claim) -> str:
        need = claim.need
        taken, count = self.residents.pinned.total, self.residents.pinned.count
        return (
            f"model '{claim.name}' needs {megabytes(need)}, but {megabytes(taken, need)} of "
            f"{megabytes(self.budget, need)} are taken by {count} pinned models: pin fewer of them (MME_PIN), or "
            f"raise {_setting(need, self.budget - taken)}"
        )

    def _in_use(self, claim: _Claim) -> str:
        kept = self.residents.again_at(time.monotonic())
        whose = "in use or loaded too recently to leave (MME_MIN_RESIDENCY)" if kept else "in use"
        return (
            f"model '{claim.name}' waited {self.patience:.0f} s for {megabytes(claim.need)} of memory held by models "
            f"{whose}; try again, or give the server a larger memory budget"
        )


def _setting(need: Footprint, room: Footprint) -> str:
    return "MME_MEMORY_BUDGET" if need.host > room.host else "MME_GPU_MEMORY_BUDGET"


def megabytes(footprint: Footprint, of: Footprint | None = None) -> str:
    """A footprint as text; of devices, those alone that `of`, by default itself, takes any of."""
    sizes = dict(enumerate(footprint.devices))
    on = [
        f"{sizes.get(number, 0) / 1e6:.1f} MB on GPU {number}"
        for number, size in enumerate((of or footprint).devices)
        if size
    ]
    return " and ".join([f"{footprint.host / 1e6:.1f} MB", ", ".join(on)] if on else [f"{footprint.host / 1e6:.1f} MB"])
