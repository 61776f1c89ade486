"""RankTransferTable: the rank transfers of one end, by the key that peers use and by the engine's request id."""

from collections import Counter
from collections.abc import Collection
from typing import Generic, Protocol, TypeVar

from kv_transfer.protocol.effects import RankTransfer
from kv_transfer.protocol.messages import TransferKey


class _Transfer(Protocol):
    @property
    def key(self) -> TransferKey: ...

    @property
    def rank_transfer(self) -> RankTransfer | None: ...


T = TypeVar("T", bound=_Transfer)


class RankTransferTable(Generic[T]):
    """Every transfer has a key. `bind` also makes it available by its RankTransfer, once our engine has named it."""

    def __init__(self) -> None:
        self._by_key: dict[TransferKey, T] = {}
        self._by_rank_transfer: dict[RankTransfer, T] = {}
        self._num_by_producer: Counter[str] = Counter()

    def add(self, transfer: T) -> None:
        self._by_key[transfer.key] = transfer
        self._num_by_producer[transfer.key.producer] += 1

    def bind(self, transfer: T) -> None:
        """Makes the transfer available by its RankTransfer, too."""
        assert transfer.rank_transfer is not None
        self._by_rank_transfer[transfer.rank_transfer] = transfer

    def remove(self, transfer: T) -> None:
        del self._by_key[transfer.key]
        if transfer.rank_transfer is not None:
            del self._by_rank_transfer[transfer.rank_transfer]
        producer = transfer.key.producer
        self._num_by_producer[producer] -= 1
        if not self._num_by_producer[producer]:
            del self._num_by_producer[producer]

    def get(self, key: TransferKey) -> T | None:
        return self._by_key.get(key)

    def __getitem__(self, key: TransferKey) -> T:
        return self._by_key[key]

    def __contains__(self, key: TransferKey) -> bool:
        return key in self._by_key

    def of(self, rank_transfer: RankTransfer) -> T | None:
        """The transfer of this RankTransfer. None if it has ended, or if another request used the same key before."""
        return self._by_rank_transfer.get(rank_transfer)

    def has_from(self, producer: str) -> bool:
        """Whether any rank transfer comes from this incarnation."""
        return producer in self._num_by_producer

    def values(self) -> Collection[T]:
        return self._by_key.values()

    @property
    def num_bound(self) -> int:
        return len(self._by_rank_transfer)

    def __len__(self) -> int:
        return len(self._by_key)
