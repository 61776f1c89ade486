"""Acceptance: how likely a request's next draft is to be right; knows no token."""

import math

WEIGHT = 0.2
"""Weight of the latest draft in the moving average of a request's acceptance."""
FIRST_LIKELIHOOD, MAX_LIKELIHOOD = 0.8, 0.98
LEAST_LIKELIHOOD = 0.3
"""A draft that is less likely to be right than this does not pay, even if verifying costs nothing."""
PROBE_COST = 0.01
"""If a request's drafts are rarely right, this share of a token's time is still spent on drafts. So the
request gets drafts again if its text becomes easier to guess."""
MAX_STEPS_WITHOUT = 8
"""After more than this many steps in a row without a draft, no draft is expected, and the scheduler need not wait for
outputs. Waiting for the outputs of this many steps costs about one step. If the scheduler does not wait, and plans a
step before the step's draft is known, the draft is lost. This costs about one step, too (decision 0022)."""


class Acceptance:
    """Estimates from a request's verified drafts how likely its next draft is right."""

    __slots__ = ("_likelihood", "_num_skipped", "_num_without", "is_probing")

    def __init__(self) -> None:
        self._likelihood = FIRST_LIKELIHOOD
        self._num_skipped = 0
        """Steps since a draft was verified."""
        self._num_without = 0
        """Steps in a row for which nothing was guessed."""
        self.is_probing = False
        """Whether the next draft is a probe: a draft that is unlikely to be right."""

    @property
    def expects_drafts(self) -> bool:
        """Whether a step may soon bring drafts that are likely to be right."""
        return not self.is_probing and self._num_without <= MAX_STEPS_WITHOUT

    def guessed(self, num_drafts: int) -> None:
        """Counts a step after which this many tokens were guessed, perhaps none."""
        self._num_without = 0 if num_drafts else self._num_without + 1

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        """Counts the accepted drafts and the first wrong draft; the drafts after a wrong one are ignored."""
        if self.is_probing and num_accepted == num_drafts:
            self._likelihood = max(self._likelihood, FIRST_LIKELIHOOD)  # the text has changed
        likelihood = 1.0 - (1.0 - self._likelihood) * (1.0 - WEIGHT) ** num_accepted
        if num_accepted < num_drafts:
            likelihood *= 1.0 - WEIGHT
        self._likelihood, self._num_skipped = min(likelihood, MAX_LIKELIHOOD), 0

    def num_useful(self, cost: float) -> int:
        """How many drafts in a row are likely enough to be right; call it once in a step.

        `cost`: the time to guess and verify a draft, divided by the time of a token without drafts.
        """
        least = LEAST_LIKELIHOOD + (1.0 - LEAST_LIKELIHOOD) * cost
        self._num_skipped += 1
        self.is_probing = self._likelihood < least
        if self.is_probing:
            return int(self._num_skipped * PROBE_COST > cost)
        return int(math.log(least) / math.log(self._likelihood))
