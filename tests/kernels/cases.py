"""Several cases, each with its options, as arguments of one process, since a process spends most of its time on
imports."""

from collections.abc import Iterable, Iterator, Sequence

NEXT = "--next"


def joined(cases: Iterable[Sequence[str]]) -> list[str]:
    """The arguments of a process for all cases."""
    return [word for options in cases for word in (NEXT, *options)][1:]


def split(arguments: Iterable[str]) -> Iterator[list[str]]:
    """Each case's options."""
    options: list[str] = []
    for word in arguments:
        if word == NEXT:
            yield options
            options = []
        else:
            options.append(word)
    yield options
