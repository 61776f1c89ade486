"""VirtualDriver: runs the gateway's own dispatcher on virtual time, as gateway/requests/driver.py does on asyncio."""

from collections.abc import Callable, Sequence
from functools import partial

from gateway.requests.dispatcher import Dispatcher
from gateway.requests.events import Effect, Event, StreamEnded, Tick
from gateway.text import TextStream
from simulator.world import World


class VirtualDriver:
    """Passes events to the dispatcher, and has its effects carried out. A stream ends
    together with its last delta or its error: no client reads late."""

    def __init__(
        self, world: World, dispatcher: Dispatcher, carry_out: Callable[[Effect], StreamEnded | None]
    ) -> None:
        """`carry_out` returns an event if the effect ended a client's stream."""
        self._world = world
        self._dispatcher = dispatcher
        self._carry_out = carry_out
        self._tick_at: float | None = None

    def handle(self, event: Event) -> None:
        events = [event]
        for each in events:
            ended = map(self._carry_out, self._dispatcher.handle(each, self._world.now))
            events += [event for event in ended if event is not None]
        deadline = self._dispatcher.next_deadline()
        if deadline is not None and (self._tick_at is None or deadline < self._tick_at):
            self._tick_at = deadline
            self._world.at(deadline, partial(self._tick, deadline), is_plane=False)

    def _tick(self, deadline: float) -> None:
        if self._tick_at == deadline:
            self._tick_at = None
            self.handle(Tick())


class SilentText(TextStream):
    """A text stream without a tokenizer: every token counts, and none has any text."""

    def __init__(self) -> None:
        """Creates no part of a real stream, such as its tokenizer."""

    @property
    def matched_stop(self) -> str | None:
        return None

    def push(self, token_ids: Sequence[int], stop_token_id: int | None = None) -> tuple[int, str]:
        return len(token_ids), ""

    def flush(self) -> str:
        return ""
