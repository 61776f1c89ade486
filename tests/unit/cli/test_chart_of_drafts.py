"""Step charts of speculative decoding: drafts, and how many of them were right."""

from baton.request import FinishReason
from cli.trace_chart.steps import make_chart
from tests.factories.traces import make_step, make_trace
from tests.unit.cli.test_step_chart import assert_picture


def test_c61_drafts_are_shown_with_how_many_were_right() -> None:
    drafting = {"num_drafts": {"one": 4}}
    trace = make_trace(
        [
            make_step(1, {"one": (30, 0, 1), "two": (20, 0, 1)}, num_prompt_tokens={"one": 30, "two": 20}),
            make_step(2, {"one": (5, 30, 3), "two": (1, 20, 1)}, **drafting),
            *[
                make_step(n, {"one": (5, 18 + 5 * n, 5), "two": (1, 18 + n, 1)}, **drafting)
                for n in (3, 4, 5, 6)
            ],
            make_step(
                7, {"one": (5, 53, 1), "two": (1, 25, 1)}, **drafting, ended={"two": FinishReason.STOP}
            ),
            make_step(8, {"one": (1, 54, 1)}, ended={"one": FinishReason.LENGTH}),
        ]
    )
    picture = """
w0  decode worker, 100 tokens a step, 50 blocks of 16
                 step   1    2    3-6   7    8
request  prompt    ms  0.0  10.0  20.0 60.0 70.0
one          30        [30] 3/5  5/5x4 1/5   1   ■ length
two          20        [20]  1    1x4   1   ■ stop

tokens of 100          50▄   6▁    6▁   6▁   1▁
free blocks             40   40    40   40   40

[n] prompt tokens   1 output token   m/n n tokens computed with drafts, m of them output
xn n equal steps
"""
    assert_picture(make_chart([trace], fold_above=4), picture)
