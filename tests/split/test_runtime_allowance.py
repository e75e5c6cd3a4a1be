from pathlib import Path

import pytest

from split.runtime.allowance import allowed_cores, memory_limit_bytes, quota_cores, usable_threads


def lay_out(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def status(cores: str) -> dict[str, str]:
    return {"proc/self/status": f"Name:\tpython\nCpus_allowed:\tff\nCpus_allowed_list:\t{cores}\n"}


def test_without_a_quota_every_allowed_core_is_used(tmp_path: Path) -> None:
    root = lay_out(tmp_path, status("0-3"))
    assert usable_threads(root) == 4
    assert quota_cores(root) is None


@pytest.mark.parametrize(
    ("text", "cores"), [("0", {0}), ("0-1,4,6-7", {0, 1, 4, 6, 7}), ("2-2", {2}), ("0-1\n", {0, 1})]
)
def test_the_kernels_list_of_cores_is_understood(tmp_path: Path, text: str, cores: set[int]) -> None:
    assert allowed_cores(lay_out(tmp_path, status(text))) == cores


@pytest.mark.parametrize(
    ("quota", "threads"),
    [("max 100000", 4), ("400000 100000", 4), ("250000 100000", 3), ("150000 100000", 2), ("20000 100000", 1)],
)
def test_o_re_02_threads_are_the_quota_rounded_up_never_the_cores_of_the_host(
    tmp_path: Path, quota: str, threads: int
) -> None:
    root = lay_out(
        tmp_path, status("0-3") | {"proc/self/cgroup": "0::/app\n", "sys/fs/cgroup/app/cpu.max": f"{quota}\n"}
    )
    assert usable_threads(root) == threads


def test_the_tightest_quota_on_the_way_to_the_root_holds(tmp_path: Path) -> None:
    root = lay_out(
        tmp_path,
        status("0-7")
        | {
            "proc/self/cgroup": "0::/system.slice/isthmus.service\n",
            "sys/fs/cgroup/system.slice/cpu.max": "200000 100000\n",
            "sys/fs/cgroup/system.slice/isthmus.service/cpu.max": "600000 100000\n",
        },
    )
    assert quota_cores(root) == 2.0
    assert usable_threads(root) == 2


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
def test_a_v1_quota_is_found_under_either_name_of_its_mount(tmp_path: Path, mount: str) -> None:
    root = lay_out(
        tmp_path,
        status("0-3")
        | {
            "proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc\n",
            f"sys/fs/cgroup/{mount}/docker/abc/cpu.cfs_quota_us": "250000\n",
            f"sys/fs/cgroup/{mount}/docker/abc/cpu.cfs_period_us": "100000\n",
        },
    )
    assert quota_cores(root) == 2.5
    assert usable_threads(root) == 3


def test_a_v1_quota_of_minus_one_means_none(tmp_path: Path) -> None:
    root = lay_out(
        tmp_path,
        status("0-3")
        | {
            "proc/self/cgroup": "1:cpu:/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert quota_cores(root) is None


def test_in_a_container_that_sees_its_hosts_path_the_mounts_own_quota_holds(tmp_path: Path) -> None:
    root = lay_out(
        tmp_path,
        status("0-3") | {"proc/self/cgroup": "0::/kubepods/pod1/c1\n", "sys/fs/cgroup/cpu.max": "100000 100000\n"},
    )
    assert usable_threads(root) == 1


def test_memory_limits_of_both_cgroup_versions_are_read(tmp_path: Path) -> None:
    v2 = lay_out(tmp_path / "2", {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "536870912\n"})
    v1 = lay_out(
        tmp_path / "1",
        {
            "proc/self/cgroup": "4:memory:/a/b\n",
            "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "268435456\n",
        },
    )
    assert memory_limit_bytes(v2) == 512 * 2**20
    assert memory_limit_bytes(v1) == 256 * 2**20
    assert memory_limit_bytes(tmp_path / "nothing") is None
