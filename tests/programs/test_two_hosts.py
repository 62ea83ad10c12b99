# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's launcher starts a training on two hosts from a hostfile. The hosts are namespaces of one machine."""

import os
import shutil
import time

import pytest
import torch

from support.hosts import serve_ssh, two_hosts
from support.training import BOUND, NOTHING, relative_error

pytestmark = pytest.mark.program(
    "deepspeed/compile/zero_1_and_2/engine/state.py", "tests/support/hosts.py", "tests/support/on_hosts.py"
)

PROGRAM = ("--module", "support.on_hosts")
STEPS = 3
# Seconds after which a collective gives up, and after which a host that lost the other must have ended. Torch's own
# timeout is half an hour.
TIMEOUT, PATIENCE = 60, 300
# A thread of gloo's that drops a Python tensor takes the interpreter's lock. If Python ends at that moment, CPython
# before 3.14 unwinds the thread through a destructor of torch's, and the C++ library ends the process:
# https://github.com/pytorch/pytorch/issues/190489
ABORTED, TERMINATED = 250, "terminate called without an active exception"


def write_hostfile(folder):
    (folder / "hostfile").write_text("node0 slots=2\nnode1 slots=2\n")


def launch_by_hand(hosts, folder, *arguments, **variables):
    """Starts the launcher on each host, as people do whose hosts cannot log in to each other."""
    write_hostfile(folder)
    everywhere = ("--hostfile", "hostfile", "--no_ssh", "--master_addr", "node0")
    return [
        host.launch(folder / host.name, *everywhere, "--node_rank", str(rank), *PROGRAM, *arguments, **variables)
        for rank, host in enumerate(hosts)
    ]


def by_hand(hosts, folder):
    """Trains to the end; returns what the launchers have written."""
    for launcher in launch_by_hand(hosts, folder, str(STEPS), GLOO_SOCKET_IFNAME="eth0"):
        launcher.wait()
    return [(folder / host.name).read_text() for host in hosts]


def by_pdsh(hosts, folder):
    """The same in the launcher's own way: from the first host it starts all hosts through ssh."""
    if shutil.which("pdsh") is None:
        pytest.skip("needs pdsh (on Debian: apt-get install pdsh)")
    serve_ssh(hosts, folder)
    write_hostfile(folder)
    # A session of ssh has none of this process's variables.
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "TORCH_EXTENSIONS_DIR")}
    variables = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **kept}
    (folder / ".deepspeed_env").write_text("".join(f"{name}={value}\n" for name, value in variables.items()))
    hosts[0].launch(folder / "output", "--hostfile", "hostfile", *PROGRAM, str(STEPS)).wait()
    return [(folder / "output").read_text()]


def results(folder, outputs):
    """What the ranks have written, in their order."""
    files = [folder / f"rank{rank}.pt" for rank in range(4)]
    assert all(file.exists() for file in files), "\n".join(outputs)
    return [torch.load(file) for file in files]


@pytest.fixture(scope="module")
def on_one_host(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    with two_hosts(folder) as (host, _):
        host.launch(folder / "output", "--num_accelerators", "4", *PROGRAM, str(STEPS)).wait()
        return results(folder, [(folder / "output").read_text()])


# Debian's installer gives each host a loopback address for its own name. Gloo then must be told an interface.
@pytest.mark.parametrize("start, own_address", [(by_hand, "127.0.1.1"), (by_pdsh, None)], ids=["by_hand", "by_pdsh"])
def test_two_hosts_train_as_one(on_one_host, tmp_path, start, own_address):
    with two_hosts(tmp_path, own_address) as hosts:
        on_two_hosts = results(tmp_path, start(hosts, tmp_path))

    # Through its loopback a rank reaches the first rank of its own host alone, so nothing but the cable joins the two.
    assert [report["where"] for report in on_one_host] == [("node0", rank, True) for rank in range(4)]
    where = [report["where"] for report in on_two_hosts]
    assert where == [("node0", 0, True), ("node0", 1, True), ("node1", 0, False), ("node1", 1, False)]

    for of_rank, expected in zip(on_two_hosts, on_one_host):
        for trained, on_one in zip(of_rank["trained"], expected["trained"], strict=True):
            # In which order gloo adds up follows from the ranks alone, wherever these run.
            for part in ("begun", "went on", "resumed"):
                assert trained[part]["losses"] == on_one[part]["losses"], part
                assert torch.equal(trained[part]["parameters"], on_one[part]["parameters"]), part
            begun, went_on, resumed = (trained[part]["parameters"] for part in ("begun", "went on", "resumed"))
            assert relative_error([went_on], [begun]) > 1e-3, "the parameters hardly changed"
            # A new engine packs the buckets of its first step in another order, so that sums round differently.
            assert relative_error([resumed], [went_on]) < BOUND
            assert trained["held"] == NOTHING and trained["from graphs"] > 0


@pytest.mark.parametrize("lost", ["first host", "cable"])
def test_a_host_that_loses_the_other_ends(tmp_path, lost):
    with two_hosts(tmp_path) as hosts:
        launchers = launch_by_hand(hosts, tmp_path, str(10**6), "--timeout", str(TIMEOUT))
        while not all((tmp_path / f"rank{rank}-trains").exists() for rank in range(4)):
            assert all(launcher.poll() is None for launcher in launchers), (tmp_path / "node0").read_text()
            time.sleep(0.1)
        if lost == "cable":
            hosts[0].run("ip", "link", "set", "eth0", "down")
        else:
            hosts[0].end()
        left = list(zip(hosts, launchers))[0 if lost == "cable" else 1 :]
        for host, launcher in left:
            status, output = launcher.wait(PATIENCE), (tmp_path / host.name).read_text()
            assert "because another rank has died, hangs, raised" in output
            assert status == 1 or (status == ABORTED and TERMINATED in output), output
