"""Those in memory as a list, for plans: everything that the cache keeps of them is summed up and sorted here each time."""

from model_handlers.base import Footprint, Tally, total
from serve.cache.eviction import FOR_EVER, Policy, worth


class Listed:
    """See `eviction.Candidates`.

    Attributes:
        looks: how often all of them were looked at for an order.
    """

    def __init__(self, residents, budget, policy=Policy.LRU):
        self._residents = residents
        self._budget = budget
        self._policy = policy
        self.looks = 0

    def _staying(self):
        return [each for each in self._residents() if not each.leaving]

    @property
    def taken(self):
        """All that they are charged for."""
        return total(each.footprint for each in self._residents())

    @property
    def staying(self):
        """Those that are not leaving."""
        return tally(self._staying())

    @property
    def pinned(self):
        """Those of them that are pinned."""
        return tally(each for each in self._staying() if each.keep_until == FOR_EVER)

    def candidates(self, now, *, and_from_disk=False):  # noqa: ARG002 - they know what they cost
        """Those who may go, in order."""
        self.looks += 1
        free = [each for each in self._staying() if not each.leased and each.keep_until <= now]
        return sorted(free, key=self.place)

    def place(self, resident):
        """By what the policy puts it in order."""
        if self._policy is Policy.GDSF:
            return worth(resident, self._budget), resident.last_used
        return (resident.uses if self._policy is Policy.LFU else 0), resident.last_used

    def again_at(self, now):
        """When the first may go that may not yet."""
        kept = [each.keep_until for each in self._staying()]
        return min((until for until in kept if now < until < FOR_EVER), default=0.0)

    def named(self, name):
        """The one of that name."""
        return next((each for each in self._staying() if each.name == name), None)


def tally(residents):
    """Their bytes together."""
    together = Tally()
    for each in residents:
        together.add(each.own, each.shared)
    return together


def bytes_of(residents):
    """The same, added up."""
    residents = list(residents)
    shared = {file: size for each in residents for file, size in each.shared.items()}
    return sum((each.own for each in residents), Footprint(sum(shared.values())))
