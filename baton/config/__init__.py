"""The configuration: one Python module for each section of the YAML file, and one for the whole file."""

from baton.config.access import ANONYMOUS, ApiKey, Tls, contradiction_among
from baton.config.autoscaling import AutoscalingConfig
from baton.config.cluster import ClusterConfig
from baton.config.engine import EngineConfig, KVCacheDtype, ModelConfig
from baton.config.file import BatonConfig, merge
from baton.config.gateway import GatewayConfig
from baton.config.kv_transfer import KVTransferConfig
from baton.config.logging import LoggingConfig
from baton.config.network import NetworkConfig
from baton.config.scheduler import SchedulerConfig
from baton.config.section import Section, describe
from baton.config.speculation import SpeculationConfig

__all__ = [
    "ANONYMOUS",
    "ApiKey",
    "AutoscalingConfig",
    "BatonConfig",
    "ClusterConfig",
    "EngineConfig",
    "GatewayConfig",
    "KVCacheDtype",
    "KVTransferConfig",
    "LoggingConfig",
    "ModelConfig",
    "NetworkConfig",
    "SchedulerConfig",
    "Section",
    "SpeculationConfig",
    "Tls",
    "contradiction_among",
    "describe",
    "merge",
]
