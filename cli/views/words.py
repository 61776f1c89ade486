"""Describes a worker, node or controller in a few words and a colour; used by `status` and `top`."""

import re
from typing import Any

from rich.table import Table
from rich.text import Text

from baton.system.cpus import cpus_text

WIDE = 120
"""From this width on, a table has room for more columns per worker."""

_STYLES = {
    "ready": "green",
    "starting": "yellow",
    "placing": "yellow",
    "draining": "yellow",
    "backing_off": "red",
    "crash_loop": "bold red",
    "dead": "bold red",
    "hung": "bold red",
    "stopped": "red",
}


def plain_table(*headings: str, **options: Any) -> Table:
    """A table without lines, and with one space between its columns."""
    table = Table(
        box=None, padding=(0, 1), collapse_padding=True, pad_edge=False, header_style="bold", **options
    )
    for heading in headings:
        table.add_column(heading, no_wrap=True, overflow="ellipsis")
    return table


def state_text(worker: dict[str, Any]) -> Text:
    """The worker's state, and the time until its next start while it backs off."""
    state = worker["state"]
    words = state.replace("_", " ")
    slot = worker["slot"]
    if state in ("backing_off", "crash_loop") and slot["next_start_in_s"] is not None:
        words += f" {slot['next_start_in_s']:.0f} s"
    return Text(words, _STYLES.get(state, ""))


def role_text(worker: dict[str, Any], is_wide: bool) -> str:
    """The worker's role. During a change of role, the old and the new role; in a narrow table, only the
    new one."""
    role, slot = worker["role"], worker["slot"]
    if slot is None or slot["role"] == role:
        return str(role)
    return f"{role} > {slot['role']}" if is_wide else f"> {slot['role']}"


def node_of(worker: dict[str, Any]) -> str:
    """The node's name as the controller gives it; otherwise as the worker reports it."""
    return str((worker["slot"] or {}).get("node") or worker["node"] or "-")


def starts_of(worker: dict[str, Any]) -> str:
    return str(worker["slot"]["starts"]) if worker["slot"] else "-"


def threads_text(worker: dict[str, Any]) -> str:
    """The number of computing threads and their CPUs: `4 on 0-3`, `4` without pinning, `-` on a GPU."""
    if not worker["threads"]:
        return "-"
    return f"{worker['threads']}" + (f" on {cpus_text(worker['cpus'])}" if worker["cpus"] else "")


def dtypes_text(description: dict[str, Any]) -> str:
    """The data types of the model and of the KV cache, such as `float32, KV in bfloat16`; only `float32` if both are
    the same."""
    dtype, of_kv = description["dtype"], description["kv_cache_dtype"]
    return dtype if of_kv in ("", dtype) else f"{dtype}, KV in {of_kv}"


def weights_text(workers: list[dict[str, Any]]) -> str:
    """How the workers store their weights, such as `, int8 weights` if all workers with a process use int8.

    If workers differ, each kind is followed by the names of its workers.
    """
    names: dict[str, list[str]] = {}
    for worker in workers:
        if worker["incarnation"]:
            names.setdefault(worker["quantization"], []).append(worker["name"])
    if len(names) == 1:
        (kind,) = names
        return f", {kind} weights" if kind else ""
    return "".join(f", {kind or 'plain'} weights on {', '.join(names[kind])}" for kind in sorted(names))


def failures(description: dict[str, Any]) -> list[tuple[str, str]]:
    """For every worker that has failed: its name, and its last failure in one line."""
    found = []
    for worker in description["workers"]:
        what = worker["failure"] or (worker["slot"] or {}).get("last_failure")
        if what:
            found.append((worker["name"], one_line(what)))
    return found


def one_line(text: str) -> str:
    """Removes line ends, colours and all other characters that would move a terminal's cursor.

    The text may come from any program.
    """
    plain = re.sub(r"\x1b\[[0-9;?]*[ -/]*[@-~]", "", text)
    return " ".join("".join(c if c.isprintable() else " " for c in plain).split())


def controller_text(controller: dict[str, Any]) -> Text:
    match controller["state"]:
        case "answering":
            return Text.assemble("controller ", (controller["incarnation"][:8], "green"))
        case "away":
            return Text.assemble(("controller away", "bold red"), ": ", one_line(controller["failure"]))
        case _:
            return Text("no controller", "dim")


def paths_text(paths: dict[str, int]) -> str:
    """Finished requests by path: `12 disaggregated, 1 local, 0 fallback`."""
    return ", ".join(f"{count} {path}" for path, count in paths.items()) or "none"


def outcomes_text(counters: dict[str, int]) -> str:
    """Requests that did not finish normally: `0 failed ...; 3 moved to other workers (2 lost, 1 refused)`."""
    text = ", ".join(f"{counters.get(what, 0)} {what}" for what in ("failed", "rejected", "aborted"))
    moves = {key.removeprefix("migrated_"): n for key, n in counters.items() if key.startswith("migrated_")}
    if total := sum(moves.values()):
        causes = ", ".join(f"{n} {cause.replace('_', ' ')}" for cause, n in moves.items() if n)
        text += f"; {total} moved to other workers ({causes})"
    return text


def amount(value: float) -> str:
    """The value in at most four characters, such as 9.5, 340, 1.2k, 34k or 1.2M, so that columns keep their places."""
    for unit, size in (("", 1.0), ("k", 1e3), ("M", 1e6), ("G", 1e9)):
        scaled = value / size
        if scaled < 9.95:
            return f"{scaled:.1f}{unit}" if unit or scaled % 1 else f"{scaled:.0f}"
        if scaled < 999.5:
            return f"{scaled:.0f}{unit}"
    return f"{value:.1e}"
