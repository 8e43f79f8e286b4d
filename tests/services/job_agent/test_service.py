"""The cores that an agent may use."""

import os
from pathlib import Path

from services.job_agent.service import usable_cores


def test_quotas_of_control_groups_limit_the_usable_cores(tmp_path: Path) -> None:
    plain = usable_cores(tmp_path)
    assert plain == len(os.sched_getaffinity(0))
    group = tmp_path / "sys/fs/cgroup/outer/inner"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/outer/inner\n")
    (group / "cpu.max").write_text("max 100000\n")
    assert usable_cores(tmp_path) == plain
    (group.parent / "cpu.max").write_text("50000 100000\n")
    assert usable_cores(tmp_path) == 0.5
    old = tmp_path / "sys/fs/cgroup/cpu,cpuacct/box"
    old.mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:cpu,cpuacct:/box\n")
    (old / "cpu.cfs_quota_us").write_text("25000\n")
    (old / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores(tmp_path) == 0.25
