import re
from pathlib import Path

import msgspec
import pytest

from common.config import (
    RESERVED_NAMES,
    SHORT_NAMES,
    Config,
    ConfigError,
    EndpointsConfig,
    config_environment,
    load_config,
)

FILE = Path(__file__).parents[2] / "coadapt.toml"
SECTIONS = msgspec.to_builtins(Config())


def test_the_file_names_every_key_with_its_default_and_nothing_else():
    written = msgspec.toml.decode(FILE.read_bytes())
    assert written == SECTIONS | {"applications": {"modules": []}}
    assert load_config({}, FILE) == Config()


def test_a_section_that_is_left_out_has_its_defaults(tmp_path):
    file = tmp_path / "own.toml"
    file.write_text("[agent]\nslots = 2\n")
    config = load_config({}, file)
    assert config.agent.slots == 2
    assert msgspec.structs.replace(config, agent=Config().agent) == Config()


def test_the_environment_overrides_the_file(tmp_path):
    file = tmp_path / "own.toml"
    file.write_text('[scheduler]\npolicy = "fixed"\nround_s = 5\n')
    config = load_config({"COADAPT_CONFIG": str(file), "COADAPT_POLICY": "dynamic"})
    assert (config.scheduler.policy, config.scheduler.round_s) == ("dynamic", 5.0)
    assert load_config({"COADAPT_SCHEDULER_ROUND_S": "0.5"}, file).scheduler.round_s == 0.5
    assert load_config({"COADAPT_APPLICATIONS_MODULES": "a.b,c"}, file).applications.modules == ("a.b", "c")


def test_every_short_name_and_every_long_one_sets_its_key(tmp_path):
    file = tmp_path / "empty.toml"
    file.write_text("")
    for name, (section, key) in SHORT_NAMES.items():
        config = load_config({name: "7"}, file)
        assert str(getattr(getattr(config, section), key)) == "7"
    assert load_config(dict.fromkeys(RESERVED_NAMES, str(file))) == Config()


def test_a_configuration_travels_through_the_environment_unchanged(tmp_path):
    file = tmp_path / "empty.toml"
    file.write_text("")
    text = """
        [run]
        run_id = "r-1"
        seed = 12
        [endpoints]
        scheduler_requests = "tcp://127.1.2.3:4567"
        [scheduler]
        round_s = 0.25
        [agent]
        slot_speed = 0.125
        [applications]
        modules = ["one.two", "three"]
    """
    config = msgspec.toml.decode(text.encode(), type=Config)
    assert load_config(config_environment(config), file) == config
    assert load_config(config_environment(Config()), file) == Config()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[scheduler\n", "not valid TOML"),
        ("[schedular]\n", "schedular"),
        ("[scheduler]\nround = 1\n", "round"),
        ('[scheduler]\nround_s = "2"\n', "round_s"),
        ("[scheduler]\nround_s = 0\n", "round_s"),
        ("[scheduler]\nround_s = nan\n", "round_s"),
        ("[agent]\nslot_speed = 1.5\n", "slot_speed"),
        ("[agent]\nslots = -1\n", "slots"),
        ("[run]\nseed = 0.5\n", "seed"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_its_name_and_the_key(tmp_path, text, told):
    file = tmp_path / "own.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(told)) as caught:
        load_config({}, file)
    assert str(file) in str(caught.value)


def test_a_named_file_must_exist(tmp_path):
    with pytest.raises(ConfigError, match=r"missing\.toml: cannot be read"):
        load_config({"COADAPT_CONFIG": str(tmp_path / "missing.toml")})
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config({}, tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("COADAPT_SCHEDULER_ROUND_S", "soon"),
        ("COADAPT_SCHEDULER_ROUND_S", "nan"),
        ("COADAPT_SCHEDULER_ROUND_S", "-1"),
        ("COADAPT_AGENT_SLOTS", "1.5"),
        ("COADAPT_SCHEDULER_ROUNDS", "1"),
        ("COADAPT_", "1"),
        ("COADAPT_SEED", "-1"),
    ],
)
def test_a_variable_that_cannot_be_used_is_refused_with_its_name(tmp_path, name, value):
    file = tmp_path / "empty.toml"
    file.write_text("")
    with pytest.raises(ConfigError, match=name):
        load_config({name: value}, file)


def test_variables_of_others_are_left_alone(tmp_path):
    file = tmp_path / "empty.toml"
    file.write_text("")
    assert load_config({"PATH": "/bin", "coadapt_policy": "x"}, file) == Config()


def test_only_loopback_is_bound_by_default():
    defaults = msgspec.structs.asdict(EndpointsConfig())
    assert {value for key, value in defaults.items() if key != "keys_dir" and "//127." not in value} == set()
