"""The configuration: `coadapt.toml`, overridden by `COADAPT_*` of the environment, as frozen structs.

Every key has its default here and its line in `coadapt.toml`. The environment name of a key is
`COADAPT_<SECTION>_<KEY>`; a few that people set often have a short name too (`SHORT_NAMES`).
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from common.types import Struct

CONFIG_FILE = "coadapt.toml"
PREFIX = "COADAPT_"
SHORT_NAMES = {
    "COADAPT_POLICY": ("scheduler", "policy"),
    "COADAPT_RUN_ID": ("run", "run_id"),
    "COADAPT_LOGS_DIR": ("run", "logs_dir"),
    "COADAPT_SEED": ("run", "seed"),
}
RESERVED_NAMES = {"COADAPT_CONFIG": "the configuration file", "COADAPT_OSDI21": "the data of the artifact"}

Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Fraction = Annotated[float, Meta(gt=0, le=1)]
Count = Annotated[int, Meta(ge=1, le=1_000_000)]


class ConfigError(Exception):
    """The configuration cannot be used; the text says where and what is allowed."""


class RunConfig(Struct, frozen=True):
    """Name, place and seed of a run."""

    logs_dir: Annotated[str, Meta(min_length=1)] = "logs"
    """Folder in which each run creates a folder of its own."""
    run_id: Annotated[str, Meta(pattern=r"^([A-Za-z0-9][A-Za-z0-9_.-]{0,99})?$")] = ""
    """Name of the run; empty: made from the time and the policy."""
    workload: str = ""
    """Name of the workload, for the event log; `coadapt run` sets it."""
    seed: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    """Seed of all random choices in the scheduler's decisions."""


class EndpointsConfig(Struct, frozen=True):
    """ZeroMQ endpoints. Scheduler, metrics-collector and event-logger bind them; all others connect."""

    scheduler_requests: str = "tcp://127.0.0.1:7801"
    """The scheduler answers clients, agents and the metrics-collector here."""
    scheduler_orders: str = "tcp://127.0.0.1:7802"
    """The scheduler publishes its orders to the agents here."""
    collector_requests: str = "tcp://127.0.0.1:7803"
    """The metrics-collector answers the scheduler here."""
    collector_events: str = "tcp://127.0.0.1:7804"
    """The metrics-collector receives events here."""
    logger_requests: str = "tcp://127.0.0.1:7805"
    """The event-logger acknowledges and repairs events here."""
    logger_events: str = "tcp://127.0.0.1:7806"
    """The event-logger receives events here."""
    keys_dir: str = ""
    """Folder of CURVE keys; required for addresses other than loopback."""


class SchedulerConfig(Struct, frozen=True):
    """When and how the scheduler decides."""

    policy: str = "pollux"
    """Policy that decides: one of coadapt's own, or one of an installed package."""
    round_s: Seconds = 2.0
    """Seconds between two rounds; an arrival or a finished job starts a round at once."""
    heartbeat_s: Seconds = 0.5
    """Seconds between two reports of an agent, and between two repetitions of its orders."""
    agent_timeout_s: Seconds = 5.0
    """An agent that sends nothing for this long counts as lost."""
    max_failures: Count = 3
    """How many lost replicas or nodes a job survives."""
    restart_penalty_s: Seconds = 1.0
    """What a policy assumes that a resize costs until the job has shown its own cost."""


class CollectorConfig(Struct, frozen=True):
    """What the metrics-collector remembers."""

    memory: bool = True
    """Whether new jobs start from the measurements of earlier jobs of the same application."""
    memory_file: str = ""
    """File that keeps these measurements across runs; empty: memory.json in logs_dir."""


class AgentConfig(Struct, frozen=True):
    """The node that a job-agent offers."""

    slots: Annotated[int, Meta(ge=0, le=4096)] = 4
    """Slots of the node; 0: one for each usable core."""
    slot_speed: Fraction = 0.125
    """Fraction of a core that one slot is worth, above 0 and at most 1."""
    host: str = "127.0.0.1"
    """Address of the node for torch's own connections."""
    stop_s: Seconds = 3.5
    """Seconds within which the agent stops its replicas and itself."""


class TrainerConfig(Struct, frozen=True):
    """How replicas train, report and fail."""

    sample_every_s: Seconds = 0.5
    """Seconds between two samples of a job's step times, gradient statistics and progress."""
    collective_timeout_s: Seconds = 10.0
    """A collective operation or a rendezvous that takes longer has failed."""
    newcomers_timeout_s: Seconds = 3.0
    """How long a group keeps training while it waits for new replicas of the next group. Then it switches
    anyway, since they may be waiting for its slots."""
    order_timeout_s: Seconds = 60.0
    """A replica that has had no group and no orders for this long exits."""
    hang_timeout_s: Seconds = 60.0
    """A replica that has not read its orders, as it does in each step, for this long is killed and counts as
    lost. The time that it may wait in a collective operation is added."""
    checkpoint_every_s: Seconds = 15.0
    """Seconds between two checkpoints, which are needed only if no replica survives."""
    verify_timeout_s: Seconds = 300.0
    """A verifier that takes longer is killed, and another one starts."""
    warmup_steps: Annotated[int, Meta(ge=0, le=1000)] = 3
    """Number of steps after a change that are not timed."""


class LimitsConfig(Struct, frozen=True):
    """Limits for messages from other processes."""

    message_bytes: Count = 1_000_000
    """Largest message that is read."""
    depth: Count = 32
    """Deepest nesting of a message."""
    map_keys: Count = 10_000
    """Most keys in one map of a message."""


class ApplicationsConfig(Struct, frozen=True):
    """Which applications can be trained."""

    modules: tuple[str, ...] = ()
    """Modules with your own applications, in addition to the built-in ones."""


class Config(Struct, frozen=True):
    run: RunConfig = RunConfig()
    endpoints: EndpointsConfig = EndpointsConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    collector: CollectorConfig = CollectorConfig()
    agent: AgentConfig = AgentConfig()
    trainer: TrainerConfig = TrainerConfig()
    limits: LimitsConfig = LimitsConfig()
    applications: ApplicationsConfig = ApplicationsConfig()

    @property
    def memory_file(self) -> Path:
        return Path(self.collector.memory_file or Path(self.run.logs_dir) / "memory.json")

    def run_dir(self, run_id: str) -> Path:
        return Path(self.run.logs_dir) / run_id


def load_config(environment: Mapping[str, str], path: Path | None = None) -> Config:
    """Read `path`, or the file that `COADAPT_CONFIG` names, or `coadapt.toml` of this folder if there is one.

    Raises ConfigError with the file or variable, the key, the value and what is allowed.
    """
    named = path or (Path(environment["COADAPT_CONFIG"]) if environment.get("COADAPT_CONFIG") else None)
    file = named or Path(CONFIG_FILE)
    tree: dict[str, Any] = {}
    if named or file.exists():
        try:
            tree = msgspec.toml.decode(file.read_bytes())
        except OSError as error:
            raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file}: not valid TOML: {error}") from error
        _convert(tree, str(file))
    for name in sorted(environment):
        if name.startswith(PREFIX) and name not in RESERVED_NAMES:
            _set_from_environment(tree, name, environment[name])
    return _convert(tree, "the environment")


def new_run_id(logs_dir: Path, policy: str, wall_s: float) -> str:
    """The id of a new run, its folder made so that nobody else takes it: <time>-<policy>, or the first free
    one of <time>-<policy>-2, -3, ... Raises OSError where no folder can be made."""
    base = f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(wall_s))}-{policy}"
    number = 1
    while True:
        run_id = base if number == 1 else f"{base}-{number}"
        try:
            (logs_dir / run_id).mkdir(parents=True)
            return run_id
        except FileExistsError:
            number += 1


def config_environment(config: Config) -> dict[str, str]:
    """The `COADAPT_*` variables that give another process this configuration."""
    environment = {}
    for section, values in msgspec.to_builtins(config).items():
        for key, value in values.items():
            text = ",".join(value) if isinstance(value, (list, tuple)) else str(value)
            environment[f"{PREFIX}{section.upper()}_{key.upper()}"] = text
    return environment


def _convert(tree: dict[str, Any], where: str) -> Config:
    try:
        return msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error


def _set_from_environment(tree: dict[str, Any], name: str, text: str) -> None:
    section, key = SHORT_NAMES.get(name) or _split_name(name)
    section_type = {field.name: field.type for field in msgspec.structs.fields(Config)}[section]
    field_type = {field.name: field.type for field in msgspec.structs.fields(section_type)}[key]
    value = [part for part in text.split(",") if part] if field_type == tuple[str, ...] else text
    try:
        tree.setdefault(section, {})[key] = msgspec.convert(value, field_type, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}={text!r}: {error}") from error


def _split_name(name: str) -> tuple[str, str]:
    for section in msgspec.structs.fields(Config):
        start = f"{PREFIX}{section.name.upper()}_"
        key = name[len(start) :].lower()
        if name.startswith(start) and key in section.type.__struct_fields__:
            return section.name, key
    raise ConfigError(f"{name}: no such setting; see coadapt.toml for all of them")
