"""The bounds of the gateway's histograms.

If vLLM has the same histogram, Baton's bounds include vLLM's, so that dashboards and alerts for vLLM keep
their meaning. Lower bounds are added for small models and fast networks.
"""


def _bounds(text: str) -> tuple[float, ...]:
    return tuple(float(word) for word in text.split())


TTFT_S = _bounds(".001 .0025 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560")
ITL_S = _bounds(".001 .0025 .005 .01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80")
REQUEST_S = _bounds(".01 .05 .1 .3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680")
PART_S = _bounds(".0005 .001 .0025 .005 .01 .025 .05 .1 .25 .5 1 2.5 5 10 30 60")
HANDOVER_S = _bounds(".0005 .001 .002 .005 .01 .02 .05 .1 .2 .5 1 2 5 10")
HANDOVER_BYTES = tuple(2.0**exponent for exponent in range(14, 36, 2))
"""Bounds from 16 KiB to 16 GiB."""
LAG_S = _bounds(".001 .0025 .005 .01 .025 .05 .1 .25 .5 1")


def one_two_five(largest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 and so on up to `largest`."""
    steps = (factor * 10.0**exponent for exponent in range(len(str(largest))) for factor in (1, 2, 5))
    return tuple(step for step in steps if step <= largest)
