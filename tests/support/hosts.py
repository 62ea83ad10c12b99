# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Two hosts on one machine: processes of each have a network, a name and shared memory of their own.

Linux makes them of namespaces. A cable joins them, a pair of ``veth`` devices that are named ``eth0`` on either host.
Files are those of the machine, so a folder is shared as over a network file system.
"""

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Dict, Iterator, List, Optional

import psutil
import pytest

from support.pool import TESTS

# Addresses that are kept for documentation. They exist within the two hosts only.
ADDRESSES = {"node0": "192.0.2.1", "node1": "192.0.2.2"}
# /dev/shm is the host's own, or processes of both hosts might exchange gradients through it.
SETUP = "mount --bind {file} /etc/hosts && mount -t tmpfs tmpfs /dev/shm && hostname {name} && ip link set lo up"


class Host:
    """A host. It is there as long as the process that made it, and ends with all its processes.

    Args:
        name: what the host is called.
        folder: where its programs run.
        addresses: the names that the host knows, and what it takes for their addresses.
    """

    def __init__(self, name: str, folder: Path, addresses: Dict[str, str]):
        self.name = name
        file = folder / f"hosts-of-{name}"
        file.write_text("".join(f"{address} {known}\n" for known, address in addresses.items()))
        setup = SETUP.format(file=shlex.quote(str(file)), name=name)
        namespaces = ["--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        # The host's first process ends when its standard input does, which the system closes if this process dies. All
        # other processes of the host die with it.
        self._process = subprocess.Popen(
            ["unshare", *namespaces, "sh", "-c", f"{setup} && echo is up && exec cat"],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        if self._process.stdout.readline() != "is up\n":
            problem = self._process.stderr.read().strip()
            self.end()
            raise OSError(problem)
        (self.pid,) = [child.pid for child in psutil.Process(self._process.pid).children()]

    def command(self, *words: str) -> List[str]:
        """The command that runs a command on the host."""
        return ["nsenter", f"--target={self.pid}", "--net", "--uts", "--mount", "--pid", "--wd", "--", *words]

    def run(self, *words: str) -> None:
        subprocess.run(self.command(*words), check=True, stdin=subprocess.DEVNULL)

    def launch(self, output: Path, *arguments: str, **variables: str) -> subprocess.Popen:
        """Starts DeepSpeed's launcher on the host, without a GPU. Its output is written to a file."""
        # As a person's shell has it.
        unset = ("PYTHONSAFEPATH", "GLOO_SOCKET_IFNAME")
        environment = {name: value for name, value in os.environ.items() if name not in unset}
        environment.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", PYTHONPATH=str(TESTS))
        with output.open("w") as file:
            return subprocess.Popen(
                self.command(sys.executable, "-m", "deepspeed.launcher.runner", *arguments),
                env={**environment, **variables},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def end(self) -> None:
        """Ends the host at once, as a power cut does."""
        self._process.communicate()


@contextlib.contextmanager
def two_hosts(folder: Path, own_address: Optional[str] = None) -> Iterator[List[Host]]:
    """Yields two hosts that are joined by a cable. Skips the test where this machine lets it make none.

    Args:
        folder: where programs of both run.
        own_address: what each host takes for the address of its own name, if not the one that the cable leads to.
    """
    with contextlib.ExitStack() as ends:
        hosts = []
        try:
            for name in ADDRESSES:
                own = {name: own_address or ADDRESSES[name]}
                hosts.append(Host(name, folder, {"localhost": "127.0.0.1", **ADDRESSES, **own}))
                ends.callback(hosts[-1].end)
            first, second = hosts
            cable = f"ip link add eth0 netns {first.pid} type veth peer name eth0 netns {second.pid}"
            subprocess.run(cable.split(), check=True, capture_output=True, text=True)
        except OSError as error:
            pytest.skip(f"needs Linux's namespaces, as root, with unshare, nsenter and ip: {error}")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"needs a pair of veth devices: {error.stderr.strip()}")
        for host in hosts:
            host.run("ip", "address", "add", f"{ADDRESSES[host.name]}/24", "dev", "eth0")
            host.run("ip", "link", "set", "eth0", "up")
        yield hosts


# For both ends: one key is that of the hosts and of the user. Nobody else can reach the hosts.
SSH_SERVER = "HostKey {folder}/key\nAuthorizedKeysFile {folder}/key.pub\nStrictModes no\nPermitRootLogin yes\n"
SSH_CLIENT = "IdentityFile {folder}/key\nStrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\n"


def serve_ssh(hosts: List[Host], folder: Path) -> None:
    """Starts an ssh server on each host, in which programs of all hosts can log in. Skips the test where none is.

    Args:
        hosts: from ``two_hosts()``.
        folder: gets the key and the configuration.
    """
    server = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if server is None:
        pytest.skip("needs an ssh server (on Debian: apt-get install openssh-server)")
    subprocess.run(["ssh-keygen", "-q", "-N", "", "-f", str(folder / "key")], check=True)
    (folder / "ssh_config").write_text(SSH_CLIENT.format(folder=folder))
    (folder / "sshd_config").write_text(SSH_SERVER.format(folder=folder))
    configure = "mount --bind ssh_config /etc/ssh/ssh_config && mount -t tmpfs tmpfs /run && mkdir /run/sshd"
    for host in hosts:
        host.run("sh", "-c", f"{configure} && {server} -f sshd_config")
