"""Gateway: connects one request driver with the two frontends, gRPC and HTTP, and runs them."""

import asyncio
import secrets
from functools import partial

from starlette.routing import Route

from baton.clock import Clock
from baton.config import GatewayConfig, NetworkConfig, SchedulerConfig
from baton.fleet import GatewayReport
from baton.messages.control import ControlApi
from baton.system.curve import PlaneKeys
from baton.system.open_files import raise_open_files
from baton.v1.cluster_service_pb2_grpc import add_ClusterServiceServicer_to_server
from baton.v1.generation_service_pb2_grpc import add_GenerationServiceServicer_to_server
from baton.worker import WorkerEndpoint, WorkerRole
from gateway.auth.authenticator import Authenticator
from gateway.auth.certificates import watched_certificates
from gateway.grammars import CompileProcess, GrammarCheck, process_arguments
from gateway.grpc.cluster_service import ClusterService
from gateway.grpc.generated.vllm_engine_pb2_grpc import add_VllmEngineServicer_to_server
from gateway.grpc.generation_service import GenerationService
from gateway.grpc.server import GrpcServer
from gateway.grpc.vllm_engine import VllmEngine
from gateway.http.anthropic.routes import anthropic_routes
from gateway.http.app import make_app
from gateway.http.cluster import PageTrial, cluster_routes
from gateway.http.count_responses import CountResponses
from gateway.http.openai.routes import openai_routes
from gateway.http.operations import metrics_routes, probe_routes
from gateway.http.page import page_routes
from gateway.http.responses.routes import responses_routes
from gateway.http.responses.stores import store_for
from gateway.http.server import HttpServer
from gateway.http.tokenize import tokenize_routes
from gateway.model import ServedModel
from gateway.open_files import fitted_to_open_files, num_files_needed
from gateway.preprocess import Preprocessor
from gateway.requests.driver import RequestDriver
from gateway.requests.retry import LoadFailurePolicy
from gateway.routing.cost import DEFAULT_SCHEDULER
from gateway.telemetry.access_log import log_request
from gateway.telemetry.call_log import CallError, log_call_error
from gateway.telemetry.cluster_view import ClusterView
from gateway.telemetry.live_feed import LiveFeed
from gateway.telemetry.loop_lag import LoopLag
from gateway.telemetry.metrics import GatewayMetrics
from gateway.telemetry.scrape import GatewayScrape
from gateway.telemetry.trace_export import tracing_for
from gateway.text import Tokenizer
from gateway.timing.latency_window import MAX_WINDOW_S

LAST_ERRORS_S = 1.0
"""How long a stopping gateway gives the errors of its last requests to reach the clients."""


class Gateway:
    """One gateway. Call all methods on one event loop. Several gateways may run side by side."""

    def __init__(
        self,
        config: GatewayConfig,
        network: NetworkConfig,
        keys: PlaneKeys | None,
        prefix_key: bytes,
        load_failure_policy: LoadFailurePolicy,
        model: ServedModel,
        tokenizer: Tokenizer,
        clock: Clock,
        control: ControlApi | None = None,
        *,
        log_prompts: bool = False,
        scheduler: SchedulerConfig = DEFAULT_SCHEDULER,
    ) -> None:
        """`keys`: the keys of the request plane, which the workers share; None if `network.security` is
        `none`. `prefix_key`: the key with which workers hash prefixes. `control` sends operators' calls to
        the controller; with None, the gateway refuses them."""
        assert (keys is None) == (network.security == "none")
        config = fitted_to_open_files(config)
        certificates = watched_certificates(config.tls, clock) if config.tls else None
        self._config = config
        self.model_name = model.name
        """The model's name in clients' requests."""
        self._clock = clock
        self._incarnation = secrets.token_hex(8)
        self._is_stopping = False
        self._metrics = GatewayMetrics(model.name, model.max_model_len)
        self._loop_lag = LoopLag(self._metrics.loop_was_late)
        self._tracing = tracing_for(config, model.name, self._incarnation)
        traced = [] if self._tracing is None else [self._tracing.ended]
        self._driver = RequestDriver(
            config,
            network,
            keys,
            prefix_key,
            load_failure_policy,
            clock,
            on_end=[self._metrics.ended, log_request, *traced],
            scheduler=scheduler,
        )
        self._driver.dispatcher.latencies.on_first_token = self._metrics.first_token
        self.workers = self._driver.workers
        """Add and remove the gateway's workers here."""
        self._metrics.collect_too(GatewayScrape(self._driver, model.name, self._not_ready).collect)
        authenticator = Authenticator(config, clock)
        self._grammars = GrammarCheck(
            partial(CompileProcess, process_arguments(tokenizer.folder, model)),
            clock,
            config.max_accepted,
            self._metrics.grammar_checked,
        )
        self._preprocessor = preprocessor = Preprocessor(
            tokenizer,
            model,
            self._grammars,
            config.max_accepted,
            log_prompts=log_prompts,
            isolate_prefix_cache=config.isolate_prefix_cache,
        )
        self._cluster = ClusterService(self._driver, model, control)
        generation = GenerationService(self._driver, preprocessor, model)
        engine = VllmEngine(self._driver, preprocessor, model, self._not_ready, clock)
        self._grpc = GrpcServer(
            config,
            {
                "baton.v1.GenerationService": partial(add_GenerationServiceServicer_to_server, generation),
                "baton.v1.ClusterService": partial(add_ClusterServiceServicer_to_server, self._cluster),
                "vllm.grpc.engine.VllmEngine": partial(add_VllmEngineServicer_to_server, engine),
            },
            self._metrics.grpc_call_ended,
            self._call_failed,
            authenticator,
            certificates,
        )
        self._feed = LiveFeed(ClusterView(self._driver, model, control, clock), clock)
        self._response_store = store_for(config, clock)
        routes = [
            probe_routes(self._not_ready),
            metrics_routes(self._metrics.render, self._endpoints),
            openai_routes(self._driver, preprocessor, model),
            responses_routes(
                self._driver, preprocessor, model, self._response_store, config.max_message_mib * 2**20
            ),
            anthropic_routes(self._driver, preprocessor, model),
            page_routes(),
            cluster_routes(self._feed, PageTrial(self._driver, preprocessor, clock)),
            tokenize_routes(preprocessor.pool, model),
        ]
        also_open = frozenset() if config.metrics_need_key else frozenset({"/metrics"})
        own_names = (config.host, *config.allowed_hosts) if config.is_open_to_its_machine else None
        app = make_app(routes, authenticator, config.max_message_mib * 2**20, also_open, own_names)
        paths = {route.path for router in routes for route in router.routes if isinstance(route, Route)}
        counted = CountResponses(app, paths, self._metrics.http_response, self._call_failed)
        self._http: HttpServer | None = None
        if config.http_port is not None:
            self._http = HttpServer(
                counted,
                config.host,
                config.http_port,
                clock,
                certificates,
                max_connections=config.max_connections,
                write_timeout_s=config.write_timeout_s,
                on_refused=self._metrics.connection_refused,
            )

    async def start(self) -> None:
        """Binds the ports and begins to serve. Raises ConfigError if a port is in use."""
        raise_open_files(num_files_needed(self._config))
        await self._grpc.start()
        if self._http is not None:
            await self._http.start()
        self._loop_lag.start()

    async def warm_up(self) -> None:
        """Starts the compile process of grammars, so that the first request with a grammar does not wait for
        it."""
        await self._grammars.warm_up()

    @property
    def grpc_port(self) -> int:
        return self._grpc.port

    @property
    def http_port(self) -> int | None:
        """The port of the HTTP frontend; None if the gateway was configured without HTTP."""
        return None if self._http is None else self._http.port

    def report(self, window_s: float = MAX_WINDOW_S) -> GatewayReport:
        """Latencies of the last `window_s` (at most a minute), and the workers' latest heartbeats."""
        driver = self._driver
        seen = driver.dispatcher.latencies.latencies(window_s, self._clock.now())
        return GatewayReport(
            gateway=self._incarnation,
            oldest_queued_s=driver.oldest_waiting_for_worker_s,
            oldest_without_prefill_s=driver.oldest_without_prefill_s,
            num_first_tokens=seen.num_first_tokens,
            ttft_s=seen.ttft_s,
            itl_s=seen.itl_s,
            workers=tuple(self.workers.statuses),
        )

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls and ends watches at once (for HTTP, see HttpServer.stop), and lets all other calls
        continue for `grace_s`. Then requests end with an error, and other calls are cancelled. If this call is
        cancelled, `stop` may be called again, with a shorter time.
        """
        self._is_stopping = True
        self._cluster.end_watches()
        frontends = (self._grpc, self._http) if self._http else (self._grpc,)
        ending = asyncio.get_running_loop().call_later(grace_s, self._driver.end_requests)
        try:
            stops = [frontend.stop(grace_s + LAST_ERRORS_S) for frontend in frontends]
            await asyncio.gather(*stops, self._feed.stop())
        finally:
            ending.cancel()
        await self._driver.stop()
        if self._tracing is not None:
            await self._tracing.stop()
        self._loop_lag.stop()
        await self._grammars.stop()
        self._preprocessor.pool.close()
        if self._response_store is not None:
            await self._response_store.close()

    def _call_failed(self, error: CallError) -> None:
        self._metrics.call_failed(error)
        log_call_error(error)

    def _not_ready(self) -> str | None:
        """Why no request can be served now; None if requests can be served."""
        if self._is_stopping:
            return "this gateway is stopping"
        roles = {status.role for status in self.workers.statuses}
        if WorkerRole.DECODE not in roles:
            return "no decode worker is reachable"
        if WorkerRole.PREFILL not in roles and self._config.require_disaggregated:
            return "no prefill worker is reachable, and gateway.require_disaggregated is set"
        return None

    def _endpoints(self) -> list[WorkerEndpoint]:
        return [client.endpoint for client in self.workers.reachable]
