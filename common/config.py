"""The configuration: the defaults below, overridden by `coadapt.toml`, overridden by `COADAPT_*` variables.

The environment variable of a key is `COADAPT_<SECTION>_<KEY>`; a few keys that people set often also have a
short name (`SHORT_NAMES`). Names that end in `_s` are seconds, names that end in `_bytes` are bytes. The text
below each key is its reference.
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
"""Variables that are not keys of the configuration."""

Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Fraction = Annotated[float, Meta(gt=0, le=1)]
Count = Annotated[int, Meta(ge=1, le=1_000_000)]


class ConfigError(Exception):
    """The configuration cannot be used. The text names the file or variable and says what is allowed."""


class RunConfig(Struct, frozen=True):
    """One run: its name, its place, its seed."""

    logs_dir: Annotated[str, Meta(min_length=1)] = "logs"
    """Folder that gets one subfolder for each run."""
    run_id: Annotated[str, Meta(pattern=r"^([A-Za-z0-9][A-Za-z0-9_.-]{0,99})?$")] = ""
    """Name of the run: at most 100 letters, digits, `_`, `.` and `-`. Empty: made from the time and the
    policy."""
    workload: str = ""
    """Name of the workload, for the log only. `coadapt run` sets it."""
    seed: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    """Seed of everything random in the scheduler's decisions, from 0 to 2**31 - 1."""


class EndpointsConfig(Struct, frozen=True):
    """ZeroMQ endpoints. Scheduler, collector and logger bind them; all other processes connect to them."""

    scheduler_requests: str = "tcp://127.0.0.1:7801"
    """Where the scheduler answers clients, agents and the collector."""
    scheduler_orders: str = "tcp://127.0.0.1:7802"
    """Where the scheduler publishes its orders to the agents."""
    collector_requests: str = "tcp://127.0.0.1:7803"
    """Where the metrics collector answers the scheduler."""
    collector_events: str = "tcp://127.0.0.1:7804"
    """Where the metrics collector receives events."""
    logger_requests: str = "tcp://127.0.0.1:7805"
    """Where the event logger acknowledges events and accepts repeated ones."""
    logger_events: str = "tcp://127.0.0.1:7806"
    """Where the event logger receives events."""
    keys_dir: str = ""
    """Folder of CURVE keys, required for any address that is not loopback. Empty: no keys."""


class SchedulerConfig(Struct, frozen=True):
    """The scheduler and its policy."""

    policy: str = "pollux"
    """Name of the policy, one of the project's own (see the page about policies) or an installed one.
    `NAME:KEY=NUMBER,KEY=NUMBER` sets parameters of the policy."""
    round_s: Seconds = 2.0
    """Time between two rounds. An arrival or a finish starts a round at once."""
    heartbeat_s: Seconds = 0.5
    """How often agents report to the scheduler, and how often the scheduler repeats its orders."""
    agent_timeout_s: Seconds = 5.0
    """An agent that has been silent for this long counts as gone."""
    max_failures: Count = 3
    """How many losses of replicas or nodes a job survives; one more fails it."""
    restart_penalty_s: Seconds = 1.0
    """How much time a policy assumes that a resize costs, until the job has been resized."""


class CollectorConfig(Struct, frozen=True):
    """The metrics collector."""

    memory: bool = True
    """Whether new jobs start with what earlier jobs of their application have shown, under every policy."""
    memory_file: str = ""
    """File that keeps this memory from run to run. Empty: `memory.json` in `run.logs_dir`."""


class AgentConfig(Struct, frozen=True):
    """A node and its job agent."""

    slots: Annotated[int, Meta(ge=0, le=4096)] = 4
    """Slots of a node, from 0 to 4096. 0: one slot for every usable core."""
    slot_speed: Fraction = 0.125
    """Fraction of a core that one slot is worth, above 0 and at most 1."""
    host: str = "127.0.0.1"
    """Address of this node at which replicas on other nodes reach its store."""
    stop_s: Seconds = 3.5
    """How long an agent takes at most to stop its replicas: by an order, then SIGTERM, then SIGKILL."""


class TrainerConfig(Struct, frozen=True):
    """Replicas and verifiers."""

    sample_every_s: Seconds = 0.5
    """Time between two samples of a job's step time, gradient statistics and progress."""
    collective_timeout_s: Seconds = 10.0
    """A collective or a rendezvous that takes longer has failed, and its group is broken."""
    newcomers_timeout_s: Seconds = 3.0
    """How long a group trains on while it waits for the newcomers of the next group. Then it switches anyway,
    because the newcomers may be waiting for slots that it will free."""
    order_timeout_s: Seconds = 60.0
    """A replica that has had neither a group nor an order for this long gives up."""
    hang_timeout_s: Seconds = 60.0
    """The agent ends a replica that has not read its orders for this long. Replicas read them in every step.
    `collective_timeout_s` comes on top, since a replica may wait for others that long."""
    checkpoint_every_s: Seconds = 15.0
    """Time between two periodic checkpoints, which are used if no replica of a job survives."""
    verify_timeout_s: Seconds = 300.0
    """The agent ends a verifier that takes longer, and another one is started."""
    warmup_steps: Annotated[int, Meta(ge=0, le=1000)] = 3
    """Steps after each change of replicas or batch whose times are not measured, from 0 to 1000."""


class LimitsConfig(Struct, frozen=True):
    """Limits of the messages that a process accepts."""

    message_bytes: Count = 1_000_000
    """Size of the largest message that is read."""
    depth: Count = 32
    """How deeply the lists and maps of a message may be nested."""
    map_keys: Count = 10_000
    """How many keys one map of a message may have."""


class ApplicationsConfig(Struct, frozen=True):
    """Applications of your own."""

    modules: tuple[str, ...] = ()
    """Python modules that hold them, in addition to those of `workloads.applications`. In the environment,
    separate the names by commas."""


class Config(Struct, frozen=True):
    """All sections of the configuration."""

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
        """The file of `collector.memory_file`, with its default filled in."""
        return Path(self.collector.memory_file or Path(self.run.logs_dir) / "memory.json")

    def run_dir(self, run_id: str) -> Path:
        """Folder of a run."""
        return Path(self.run.logs_dir) / run_id


def load_config(environment: Mapping[str, str], path: Path | None = None) -> Config:
    """Read `path`, or else the file named by `COADAPT_CONFIG`, or else `coadapt.toml` of the current folder
    if it exists; then apply the other `COADAPT_*` variables.

    Raises ConfigError naming the file or variable, the key and what is allowed.
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
    """Choose the id of a new run and create its folder, so that no other run gets the same id.

    The id is <time>-<policy>, or the first free one of <time>-<policy>-2, -3, ... Raises OSError if the
    folder cannot be created.
    """
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
    """The `COADAPT_*` variables that pass this configuration to another process."""
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
