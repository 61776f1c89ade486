"""The configuration file: one frozen section per package, handed down as values.

Every key here may appear in the YAML file of `baton serve`. The command and each worker's process validate the
configuration once, when they start. Only the code that composes a process reads the file and the environment. An
unknown key, a wrong type or an impossible value raises a ConfigError that names it.
"""

import re
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import ValidationError, model_validator

from baton.config.autoscaling import AutoscalingConfig
from baton.config.cluster import ClusterConfig
from baton.config.engine import EngineConfig, ModelConfig
from baton.config.gateway import GatewayConfig
from baton.config.kv_transfer import KVTransferConfig
from baton.config.logging import LoggingConfig
from baton.config.network import NetworkConfig
from baton.config.scheduler import SchedulerConfig
from baton.config.section import Section, describe
from baton.config.speculation import SpeculationConfig
from baton.errors import ConfigError
from baton.worker import WorkerRole

_MERGE = "tag:yaml.org,2002:merge"
"""The tag of `<<`, which adds the keys of another mapping."""


class BatonConfig(Section):
    """The whole file."""

    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    kv_transfer: KVTransferConfig = KVTransferConfig()
    gateway: GatewayConfig = GatewayConfig()
    network: NetworkConfig = NetworkConfig()
    cluster: ClusterConfig = ClusterConfig()
    autoscaling: AutoscalingConfig = AutoscalingConfig()
    logging: LoggingConfig = LoggingConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.cluster.ray_address == "none" and self.engine.device == "cuda":
            raise ValueError(
                "cluster.ray_address 'none' needs engine.device 'cpu', because only Ray assigns a "
                "machine's GPUs to workers; use cluster.ray_address 'local'"
            )
        for role in WorkerRole:
            if self.engine.device == "cuda" and self._own(role, "num_threads") is not None:
                key = f"cluster.{role.value}_num_threads"
                raise ValueError(f"{key} is only for engine.device 'cpu'; remove the key")
        prefill, decode = self.num_ranks(WorkerRole.PREFILL), self.num_ranks(WorkerRole.DECODE)
        if self.cluster.prefill and max(prefill, decode) % min(prefill, decode):
            raise ValueError(
                f"prefill workers of {prefill} ranks cannot hand KV over to decode workers of {decode} ranks; one of "
                "cluster.prefill_tensor_parallel and cluster.decode_tensor_parallel must be a multiple of the other"
            )
        self._check_hand_overs()
        self._check_swap_space()
        if self.speculation.forced_tokens and self.engine.device == "cuda":
            raise ValueError(
                "speculation.forced_tokens (true) needs engine.device 'cpu', got 'cuda'; remove one of the two keys"
            )
        self._check_expert_parallel()
        self._check_draft_model()
        self._check_room_for_drafts()
        self._check_whole_prompts()
        if self.autoscaling.mode != "off":
            self._check_bounds()
        return self

    def _check_hand_overs(self) -> None:
        """Refuses `require_disaggregated` without prefill workers, if their number is known.

        A gateway that joins a fleet by its address does not know the number.
        """
        is_known = self.cluster.fleet_address is None
        _, most = self.worker_bounds(WorkerRole.PREFILL) if self.autoscaling.mode == "on" else (0, 0)
        if self.gateway.require_disaggregated and is_known and not (self.cluster.prefill or most):
            raise ValueError(
                "gateway.require_disaggregated (true) hands every prompt over from a prefill worker, but "
                "cluster.prefill is 0; raise cluster.prefill, or remove gateway.require_disaggregated"
            )

    def _check_swap_space(self) -> None:
        scheduler, key = self.scheduler, ("swap_space_mib",)
        if scheduler.preemption != "swap":
            needs = f"needs scheduler.preemption 'swap', not '{scheduler.preemption}'"
            self.engine.refuse_changed(key, needs, "engine.")
        if scheduler.num_swap_blocks is not None:
            blocks = f"scheduler.num_swap_blocks ({scheduler.num_swap_blocks})"
            self.engine.refuse_changed(
                key, f"has no effect with {blocks}; remove one of the two keys", "engine."
            )

    def _check_expert_parallel(self) -> None:
        keys = {"engine.enable_expert_parallel": (self.engine.enable_expert_parallel, tuple(WorkerRole))}
        for role in WorkerRole:
            is_enabled = bool(self._own(role, "enable_expert_parallel"))
            keys[f"cluster.{role.value}_enable_expert_parallel"] = (is_enabled, (role,))
        for key, (is_enabled, roles) in keys.items():
            if is_enabled and all(self.num_ranks(role) == 1 for role in roles):
                raise ValueError(
                    f"{key} (true) divides experts among a worker's ranks, but each of these workers has only one "
                    "rank; raise engine.tensor_parallel, or remove the key"
                )

    def _check_draft_model(self) -> None:
        speculation = self.speculation
        if speculation.method == "draft_model" and self.engine.device != "cpu":
            raise ValueError(
                f"speculation.method 'draft_model' needs engine.device 'cpu', got '{self.engine.device}'; use 'ngram'"
            )
        num_ranks = max(self.num_ranks(role) for role in WorkerRole)
        if speculation.draft_layers is not None and num_ranks > 1:
            raise ValueError(
                f"speculation.draft_layers ({speculation.draft_layers}) needs workers of one rank, but some workers "
                f"have {num_ranks} ranks; use speculation.draft_model, which rank 0 computes alone"
            )

    def _check_room_for_drafts(self) -> None:
        """Checks that a step has room for a request with drafts. With one draft, a request computes two tokens, and all
        requests with drafts together may use at most half of a step."""
        if self.speculation.method == "off":
            return
        scheduler, method = self.scheduler, self.speculation.method
        budgets = {
            "scheduler.max_num_batched_tokens": scheduler.max_num_batched_tokens,
            **self._own_step_tokens(),
        }
        for key, budget in budgets.items():
            if budget < 4:
                raise ValueError(
                    f"{key} ({budget}) leaves no room for the drafts of speculation.method '{method}'; set it to 4 or "
                    "more, or the method to 'off'"
                )
        if scheduler.long_prefill_token_threshold == 1:
            raise ValueError(
                "scheduler.long_prefill_token_threshold (1) leaves no room for the drafts of speculation.method "
                f"'{method}'; set the threshold to 0, or to 2 or more, or the method to 'off'"
            )

    def _own_step_tokens(self) -> dict[str, int]:
        """Each role's own number of tokens in a step, if it has one, by its key."""
        key = "max_num_batched_tokens"
        budgets = {f"cluster.{role.value}_{key}": self._own(role, key) for role in WorkerRole}
        return {key: budget for key, budget in budgets.items() if budget is not None}

    def _check_whole_prompts(self) -> None:
        """Checks that each role's own step budget holds a whole prompt, if prompts are not split. The section
        `scheduler` checks its own budget in the same way."""
        length = self.scheduler.max_model_len
        if self.scheduler.enable_chunked_prefill or length is None:
            return
        for key, budget in self._own_step_tokens().items():
            if budget < length:
                raise ValueError(
                    f"{key} ({budget}) must be at least scheduler.max_model_len ({length}) when "
                    "scheduler.enable_chunked_prefill is false; otherwise long prompts could never run"
                )

    def _check_bounds(self) -> None:
        for role in WorkerRole:
            (low, high), start = self.worker_bounds(role), self.num_workers(role)
            if not low <= start <= high:
                raise ValueError(
                    f"cluster.{role.value} ({start}) must be between autoscaling.min_{role.value} ({low}) and "
                    f"autoscaling.max_{role.value} ({high})"
                )
        if all(low == high for low, high in map(self.worker_bounds, WorkerRole)):
            raise ValueError(
                f"autoscaling.mode '{self.autoscaling.mode}' has nothing to change, because all bounds "
                "are equal; raise autoscaling.max_decode, or change another bound"
            )

    def num_workers(self, role: WorkerRole) -> int:
        """How many workers of this role a fleet begins with. Autoscaling and operators' commands change the number."""
        return self.cluster.prefill if role is WorkerRole.PREFILL else self.cluster.decode

    def num_ranks(self, role: WorkerRole) -> int:
        """Tensor-parallel ranks of a worker started in this role."""
        own: int | None = self._own(role, "tensor_parallel")
        return own or self.engine.tensor_parallel

    def has_expert_parallel(self, role: WorkerRole) -> bool:
        """Whether each rank of a worker started in this role holds whole experts."""
        own: bool | None = self._own(role, "enable_expert_parallel")
        is_enabled = self.engine.enable_expert_parallel if own is None else own
        return is_enabled and self.num_ranks(role) > 1

    def for_worker(self, role: WorkerRole) -> Self:
        """A copy in which `engine` and `scheduler` have the values of a worker started in this role.

        So ranks need not know their worker's role."""
        is_enabled = self.has_expert_parallel(role)
        engine = self.engine.with_values("engine", enable_expert_parallel=is_enabled)
        scheduler = self.scheduler
        if (step_tokens := self._own(role, "max_num_batched_tokens")) is not None:
            scheduler = scheduler.with_values("scheduler", max_num_batched_tokens=step_tokens)
        return self.model_copy(update={"engine": engine, "scheduler": scheduler})

    def num_threads(self, role: WorkerRole) -> int | None:
        """Threads of each rank of a worker started in this role; None: an equal part of the machine's cores."""
        own: int | None = self._own(role, "num_threads")
        return own or self.engine.num_threads

    def _own(self, role: WorkerRole, key: str) -> Any:
        """The role's own value of a key, which is in `cluster`; None if it is unset."""
        return getattr(self.cluster, f"{role.value}_{key}")

    def worker_bounds(self, role: WorkerRole) -> tuple[int, int]:
        """The fewest and the most workers of this role under autoscaling."""
        start, bounds = self.num_workers(role), self.autoscaling
        low, high = getattr(bounds, f"min_{role.value}"), getattr(bounds, f"max_{role.value}")
        return start if low is None else low, start if high is None else high

    @classmethod
    def from_mapping(cls, values: dict[str, Any], source: str = "configuration") -> Self:
        """Validates a nested mapping; ConfigError lists every offending key with its value."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(describe(error, source)) from None

    @classmethod
    def from_yaml(cls, path: Path, overrides: dict[str, dict[str, Any]] | None = None) -> Self:
        """Reads a YAML file and applies `overrides` (section -> key -> value)."""
        try:
            values = yaml.load(path.read_text(encoding="utf-8"), _Loader) or {}
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read configuration file {path}: {error}") from error
        except yaml.YAMLError as error:  # its text quotes the file, which may have passwords
            raise ConfigError(f"cannot read configuration file {path}: {_problem(error)}") from None
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: expected a mapping of sections, got {type(values).__name__}")
        return cls.from_mapping(merge(values, overrides or {}), str(path))


class _Loader(yaml.SafeLoader):
    """Raises YAMLError for each file that it cannot load. Also refuses a mapping that has a key twice: YAML forbids it,
    but PyYAML would ignore all but the last."""

    def get_single_data(self) -> Any:
        try:
            return super().get_single_data()
        except RecursionError:
            raise yaml.MarkedYAMLError(problem="found too many levels") from None

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (yaml.YAMLError, RecursionError):
            raise
        except Exception:
            # PyYAML raises many classes, for example for a date that does not exist. Their texts quote the value.
            problem = f"found no valid {node.tag.rpartition(':')[2]}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set[tuple[str, str]]()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            if (key.tag, key.value) in seen:
                problem = f"found the key {key.value!r} a second time"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add((key.tag, key.value))
        return node


# Numbers such as 1e-07, as YAML 1.2 and Helm write them. PyYAML reads them as texts.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _problem(error: yaml.YAMLError) -> str:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    where = "" if mark is None else f" in line {mark.line + 1}, column {mark.column + 1}"
    return f"{problem or 'not valid YAML'}{where}"


def merge(values: dict[str, Any], overrides: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Merges `overrides` into `values`, section by section; changes neither. An override of None removes a key."""
    merged = dict(values)
    for section, keys in overrides.items():
        under = merged.get(section) or {}
        if isinstance(under, dict):
            removed = {key for key, value in keys.items() if value is None}
            under = {key: value for key, value in {**under, **keys}.items() if key not in removed}
        merged[section] = under
    return merged
