"""KVCache: whatever is opened, extended, leased, quarantined, freed and reset, a hit is always the same prefix."""

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.kv_groups import NULL_BLOCK_ID, ONE_GROUP, KVGroups
from scheduler import Request
from scheduler.block_pool import Block
from scheduler.kv_cache import KVCache
from tests.factories.scheduling import make_request

SIZE = 4
NUM_BLOCKS = 14


class KVCacheMachine(RuleBasedStateMachine):
    """A model remembers the last content computed into every block, and the holders of each block."""

    groups = ONE_GROUP

    def __init__(self) -> None:
        super().__init__()
        num_blocks = 1 + (NUM_BLOCKS - 1) * self.groups.num_groups
        self.kv = KVCache(num_blocks, SIZE, enable_caching=True, hash_key=b"k" * 16, groups=self.groups)
        self.contents: dict[int, tuple[object, ...]] = {}
        """Block id to group, salt and all tokens up to the block's end, for full blocks that were computed."""
        self.open: list[Request] = []
        self.loading: list[tuple[Request, int]] = []
        """Requests whose blocks are written by a transfer, with the number of hits before those."""
        self.held: dict[str, str] = {}
        """Request id to `leased` or `quarantined`."""
        self.outdated: set[str] = set()
        """Requests that had blocks when the prefixes were forgotten; nothing that they compute may be hit."""
        self.num_requests = 0

    @rule(
        stem=st.integers(0, 1),
        stem_length=st.integers(0, 20),
        tail_length=st.integers(1, 10),
        salt=st.sampled_from([None, None, "salt"]),
        num_spare=st.integers(0, 2),
        is_load=st.booleans(),
    )
    def admit(
        self, stem: int, stem_length: int, tail_length: int, salt: str | None, num_spare: int, is_load: bool
    ) -> None:
        self.num_requests += 1
        prompt = [*[stem] * stem_length, *[100 + self.num_requests % 3] * tail_length]
        request = make_request(request_id=f"r{self.num_requests}", prompt=prompt, cache_salt=salt)
        self.kv.tokens_arrived(request)
        hits = self.kv.find_cached_prefix(request, num_loaded=request.num_tokens if is_load else None)
        num_hit_tokens = self.kv.num_tokens_in(hits)
        assert num_hit_tokens < request.num_tokens, "one token at least is computed"
        num_ready = request.num_tokens if is_load else num_hit_tokens
        self.check_hits(request, hits, num_ready)
        before = self.kv.counts()
        needed = self.kv.num_missing(request, request.num_tokens, hits, num_ready)
        cache_up_to = num_hit_tokens if is_load else None
        if not self.kv.open_table(
            request,
            request.num_tokens,
            hits,
            cache_up_to=cache_up_to,
            num_spare=num_spare,
            num_ready=num_ready,
        ):
            assert needed + num_spare > before.free
            assert self.kv.counts() == before
            return
        assert before.free - self.kv.counts().free == needed
        if is_load:
            self.loading.append((request, len(hits)))
            return
        request.num_computed_tokens = request.num_tokens
        self.compute(request)
        self.open.append(request)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), num_tokens=st.integers(1, 9))
    def grow(self, data: st.DataObject, num_tokens: int) -> None:
        request = data.draw(st.sampled_from(self.open))
        before = self.kv.counts()
        num_left = num_null(self.kv.block_ids(request))
        new = self.kv.extend_table(request, request.num_tokens + num_tokens)
        if new is None:
            num_given_back = num_null(self.kv.block_ids(request)) - num_left
            assert 0 <= self.kv.counts().free - before.free <= num_given_back
            assert replace(self.kv.counts(), free=before.free) == before
            assert num_given_back == 0 or self.groups.num_windowed
            return
        request.all_token_ids.extend([7] * num_tokens)
        self.kv.tokens_arrived(request)
        assert self.kv.extend_table(request, request.num_tokens) == ()
        request.num_computed_tokens = request.num_tokens
        self.compute(request)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), is_leased=st.booleans())
    def end(self, data: st.DataObject, is_leased: bool) -> None:
        request = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        if is_leased:
            self.kv.lease(request)
            self.held[request.request_id] = "leased"
        else:
            self.kv.free(request)

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), is_whole=st.booleans())
    def end_load(self, data: st.DataObject, is_whole: bool) -> None:
        request, num_hits = self.loading.pop(data.draw(st.integers(0, len(self.loading) - 1)))
        if is_whole:
            self.compute(request)
            request.num_computed_tokens = request.num_tokens
            self.kv.cache_received(request, request.num_tokens)
            self.open.append(request)
        else:
            self.kv.quarantine(request, num_hits)
            self.held[request.request_id] = "quarantined"

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end_hold(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.held)))
        del self.held[request_id]
        assert self.kv.is_held(request_id)
        assert self.kv.end_hold(request_id)
        assert not self.kv.end_hold(request_id), "said twice, it means nothing"

    @rule()
    def forget(self) -> None:
        self.kv.forget_prefixes()
        self.contents.clear()
        self.outdated.update(r.request_id for r in [*self.open, *(request for request, _ in self.loading)])
        fresh = make_request(request_id="probe", prompt=[0] * 9)
        self.kv.tokens_arrived(fresh)
        assert self.kv.find_cached_prefix(fresh) == []

    @invariant()
    def every_block_has_its_owners(self) -> None:
        self.kv.check_integrity()
        counts = self.kv.counts()
        assert counts.free + counts.referenced + counts.leased + counts.quarantined == counts.total
        assert self.kv.num_tables == len(self.open) + len(self.loading)
        if not self.open and not self.loading and not self.held:
            assert counts.free == counts.total

    def compute(self, request: Request) -> None:
        """The device fills the request's blocks. Blocks shared with other requests already have the same content."""
        for index, block_id in enumerate(self.kv.block_ids(request)):
            if block_id == NULL_BLOCK_ID:
                continue
            is_full = (index // self.groups.num_groups + 1) * SIZE <= request.num_tokens
            if is_full and request.request_id not in self.outdated:
                self.contents[block_id] = self.prefix(request, index)
            else:
                self.contents.pop(block_id, None)

    def prefix(self, request: Request, index: int) -> tuple[object, ...]:
        row, group = divmod(index, self.groups.num_groups)
        return (group, request.cache_salt, *request.all_token_ids[: (row + 1) * SIZE])

    def check_hits(self, request: Request, hits: list[Block], num_ready: int) -> None:
        """Checks that hits contain the request's prefix. Null blocks may only replace blocks that no later token
        reads."""
        for index, block in enumerate(hits):
            row, group = divmod(index, self.groups.num_groups)
            if block.block_id != NULL_BLOCK_ID:
                assert self.contents.get(block.block_id) == self.prefix(request, index), (
                    "a hit is the same prefix"
                )
            else:
                assert group >= self.groups.num_full
                assert (row + 1) * SIZE <= num_ready - self.groups.window + 1, "the next token would miss it"


def num_null(block_ids: tuple[int, ...]) -> int:
    return block_ids.count(NULL_BLOCK_ID)


class TwoGroupsMachine(KVCacheMachine):
    groups = KVGroups(1, 1, 6)


class WindowsAloneMachine(KVCacheMachine):
    groups = KVGroups(0, 2, 9)


TestKVCache = KVCacheMachine.TestCase
TestKVCache.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestTwoGroups = TwoGroupsMachine.TestCase
TestTwoGroups.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestWindowsAlone = WindowsAloneMachine.TestCase
TestWindowsAlone.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)
