"""One worker as a child process: started with a configuration, watched through its pipes."""

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path

from baton.config import BatonConfig
from baton.errors import WorkerUnavailable
from baton.system.cpus import CpuShare, cpus_text
from baton.system.curve import ClusterSecret
from baton.system.module_command import module_command
from baton.system.secret import SECRET_VARIABLE
from baton.worker import WorkerEndpoint, WorkerRole
from worker.control_channel import StdioControlClient
from worker.ready_line import endpoint_from_json

STOP_TIMEOUT_S = 30.0


class WorkerProcess:
    """One worker process. It also ends when this process ends, because that closes the worker's stdin."""

    def __init__(
        self,
        config: BatonConfig,
        model_path: Path,
        secret: ClusterSecret | None,
        role: WorkerRole,
        name: str,
        log_level: str | None = "INFO",
        share: CpuShare | None = None,
    ) -> None:
        """`log_level` None: the level in the configuration. `share` None: all cores of this machine.

        The configuration is passed as a file in memory, so that a worker can start even if the disk is full. The
        secret is passed in the environment, because all users can read the arguments of a process. Raises OSError if
        the system has no room for the process.
        """
        self.name = name
        environment = dict(os.environ)
        if secret is not None:
            environment[SECRET_VARIABLE] = secret.text
        command = module_command("worker", "--role", role.value, "--name", name)
        if log_level is not None:
            command += ["--log-level", log_level]
        if share is not None:
            command += ["--threads", str(share.num_threads), "--cpus", cpus_text(share.cpus)]
        with open(os.memfd_create("baton-config"), "w") as file:
            file.write(_config_text(config, model_path))
            file.flush()
            self._process = subprocess.Popen(
                [*command, "--config", f"/proc/self/fd/{file.fileno()}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
                pass_fds=[file.fileno()],
                start_new_session=True,  # Ctrl-C goes only to the command, which drains its workers first
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self) -> WorkerEndpoint:
        """Blocks until the worker serves. If it fails, raises ConfigError, ModelError or WorkerUnavailable."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WorkerUnavailable(f"{how_it_ended(self.wait())} before it was ready")
        return endpoint_from_json(line)

    def control(self) -> StdioControlClient:
        """A client for a serving worker. From now on, only this client reads the worker's stdout."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        return StdioControlClient(self.name, self._process.stdin, self._process.stdout)

    def wait(self, timeout_s: float | None = None) -> int:
        """Blocks until the process has ended; returns its exit code. Ends the processes that it left behind."""
        if (code := self._process.returncode) is None:
            code = self._process.wait(timeout_s)
            self._kill_group()
        return code

    def ask_to_end(self) -> None:
        """Sends SIGTERM, after which a worker ends cleanly."""
        self._process.terminate()

    def kill(self) -> None:
        """Ends the process by SIGKILL, and the processes that it has started, such as a compiler of kernels."""
        if self._process.returncode is None:  # not yet waited for, so the number is still its own
            self._kill_group()

    def close(self) -> None:
        """Closes the pipes. A process that still runs ends then."""
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):  # unsent data is lost
                stream.close()

    def stop(self) -> int:
        """Lets the worker end by itself, or kills it after STOP_TIMEOUT_S; returns its exit code."""
        self.close()
        try:
            return self.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return self.wait()

    def _kill_group(self) -> None:
        # All have ended; macOS forbids signals to a process that has ended, but was not waited for.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def how_it_ended(code: int) -> str:
    """Text for a message, from the exit code as `subprocess` gives it: a signal is a negative number."""
    if code >= 0:
        return f"its process ended with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = " (perhaps for lack of memory)" if -code == signal.SIGKILL else ""
    return f"its process was killed by {name}{hint}"


def _config_text(config: BatonConfig, model_path: Path) -> str:
    """JSON, which is YAML, without unset keys: their defaults may depend on the device."""
    values = config.model_dump(exclude_unset=True)
    values.setdefault("model", {})["path"] = str(model_path)
    return json.dumps(values)
