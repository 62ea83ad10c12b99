# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Build the fork: the pinned base release with the files of this repository laid over it.

The steps, each a function below:

1. stop early if setuptools or torch is too old,
2. get the base's source archive (kept between builds) and check it against the hash in requirements/base.txt,
3. unpack it under build/, keep its ZeRO-3 native sources beside ours, lay our files over it, and make EDITS,
4. run the base's own setup.py in that tree with the arguments this script was given.

A wheel gets copies of our files. An editable install gets symbolic links, so that edits of files are live. A new file
and a change of this script, of the pin or of EDITS need one more install, and ds_report says so until then. An sdist
has the files of this repository, and none of the base. If the build fails, one sentence on standard error tells the
user why and what to do.
"""

import hashlib
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.parse
from pathlib import Path
from typing import Any, Dict, Iterator, List, NoReturn, Optional, Tuple

ROOT = Path(__file__).resolve().parent
BUILD = ROOT / "build"
BASE_PIN = ROOT / "requirements" / "base.txt"
ARCHIVE_DIR_VARIABLE = "DS_BASE_ARCHIVE_DIR"

# The commit follows, because pip leaves in place what has the version that it is asked to install.
LOCAL_VERSION = "+zerograd.1"
RECIPE = "recipe"
COMPILE = ROOT / "deepspeed" / "compile"
# Stated there, because the engine refuses an older torch too.
OPTIONS = ROOT / "deepspeed" / "compile" / "zero_1_and_2" / "engine" / "options.py"
(OLDEST_TORCH,) = re.findall(r'(?m)^OLDEST_TORCH = "(.*)"$', OPTIONS.read_text())
SETUPTOOLS_MINIMUM = "70.1"

# Files of ours that take the place of a base file. Every other file of ours must be new to the base.
REPLACED = {
    "csrc/includes/deepcompile.h",
    "deepspeed/compile/config.py",
    "deepspeed/compile/fx.py",
    "deepspeed/compile/init_z1_and_2.py",
    "deepspeed/ops/op_builder/dc.py",
}

# Files of REPLACED that import the base's file and override a part of it. Beside each, the base's file is kept as
# <name>_base.py.
KEPT = REPLACED - {"csrc/includes/deepcompile.h", "deepspeed/compile/init_z1_and_2.py"}

# Changes of lines in base files: {file: {anchor: new text}}. The anchor must occur exactly once in the file; the first
# "..." in the new text stands for it. The new lines name the files in deepspeed/compile/ whose functions they call.
# These edits are the core's; an optional part has its own in a file edits.py.
EDITS = {
    "deepspeed/runtime/engine.py": {
        "from deepspeed.compile.z3_eager_fallback import": (
            "# Lines that name what these imports bring are not DeepSpeed's: "
            "setup.py of a fork of it has put them here.\n"
            "from deepspeed.compile.zero_1_and_2.engine import calls as deepcompile\n..."
        ),
        "        with deepcompile_z3_forward_context(self) as": (
            "        around = deepcompile.around_forward(self, inputs, kwargs)\n"
            "        with around as (inputs, kwargs), \\\n"
            "                deepcompile_z3_forward_context(self) as"
        ),
        "    def _backward_prologue(self):\n        if is_functorch_transforming():\n": (
            "    def _backward_prologue(self):\n"
            "        if is_functorch_transforming() or not deepcompile.is_own_backward(self):\n"
        ),
        "        graph_loss_scaled = _ENGINE_BACKWARD_GRAPH_TRACKER.is_current_graph_registered()\n": (
            "        deepcompile.announce_backward(self)\n..."
        ),
        "        if self._is_gradient_accumulation_boundary is None:\n": (
            "        deepcompile.settle_if_abandoned(self)\n..."
        ),
        "        self.micro_steps += 1\n": (
            "        at_boundary = self.is_gradient_accumulation_boundary()\n"
            "...        if at_boundary:\n            deepcompile.after_step(self)\n"
        ),
        # The end of zero_grad().
        "\n    def clip_fp32_gradients(": "        deepcompile.drop_gradients(self)\n...",
        "self.module.compile(**{**compile_kwargs, 'backend': backend})": (
            "deepcompile.compile_module(self, **{**compile_kwargs, 'backend': backend})"
        ),
    },
    "deepspeed/runtime/zero/stage_1_and_2.py": {
        # Otherwise the parameters are linked with states in the order of the model, and they lie in another order.
        "            if any(self.round_robin_bit16_padding[i]):\n": (
            "            if self.round_robin_gradients or any(self.round_robin_bit16_padding[i]):\n"
        ),
        # A later engine of the same parameters has links of its own.
        "                if getattr(p, '_hp_mapping', None):\n": (
            "                links = getattr(p, '_hp_mapping', None)\n"
            "                if links and links.gradient_dict is self.averaged_gradients:\n"
        ),
    },
    "deepspeed/ops/op_builder/builder.py": {
        "        from torch.utils.cpp_extension import load\n": (
            "        # In a folder for all that the build depends on.\n        from .build_folder import load\n"
        ),
    },
}

# The source archive carries these folders twice, once at the top and once inside the package.
CSRC_COPIES = ("csrc", "deepspeed/ops/csrc")
OP_BUILDER_COPIES = ("deepspeed/ops/op_builder", "op_builder")


def stop(sentence: str) -> NoReturn:
    """End the build with this sentence on standard error."""
    raise SystemExit(f"Cannot build deepspeed: {sentence}")


def release(version: str) -> Tuple[int, ...]:
    """Return (major, minor) of a version string, as numbers that compare."""
    return tuple(int(part) for part in re.match(r"(\d+)\.(\d+)", version).groups())


def check_setuptools() -> None:
    import setuptools

    if release(setuptools.__version__) < release(SETUPTOOLS_MINIMUM):
        stop(
            f"setuptools {setuptools.__version__} is too old to build this, {SETUPTOOLS_MINIMUM} or newer is needed "
            "(pip install --upgrade setuptools)."
        )


def check_torch() -> bool:
    """Say whether torch can be imported here. An isolated build has no torch, so pip has to check the version then."""
    try:
        import torch
    except ImportError:
        if os.environ.get("DS_BUILD_DEEP_COMPILE", "") not in ("", "0"):
            stop(
                "DS_BUILD_DEEP_COMPILE compiles against the installed torch, but no torch can be imported here: "
                "install torch first and add --no-build-isolation to the pip command."
            )
        return False
    if release(torch.__version__) < release(OLDEST_TORCH):
        stop(f"torch {torch.__version__} is installed, but torch {OLDEST_TORCH} or newer is needed.")
    return True


def read_pin() -> Tuple[str, str]:
    """Return the version and the sha256 of the base, from requirements/base.txt."""
    pins = re.findall(r"(?m)^deepspeed==(\S+) --hash=sha256:([0-9a-f]{64})$", BASE_PIN.read_text())
    if len(pins) != 1:
        stop(f"{BASE_PIN} must pin deepspeed once, by version and by one sha256.")
    return pins[0]


def fetch_base(version: str, sha256: str) -> Path:
    """Return the path of the base's verified source archive. pip downloads it unless an earlier build has left it."""
    folder = Path(os.environ.get(ARCHIVE_DIR_VARIABLE) or BUILD / "archive").expanduser().resolve()
    archive = folder / f"deepspeed-{version}.tar.gz"
    if not archive.is_file():
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-build-isolation"]
        command += ["--no-binary", ":all:", "--require-hashes", "--no-input", "--dest", str(folder)]
        command += ["--requirement", str(BASE_PIN)]
        # To read the archive's metadata, pip runs the archive's setup.py. The DS_BUILD_* switches are meant for our
        # build and not for this one.
        env = {name: value for name, value in os.environ.items() if not name.startswith("DS_BUILD_")}
        result = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if "DO NOT MATCH THE HASHES" in result.stdout:
            stop(f"the deepspeed {version} archive that pip found does not match the sha256 in {BASE_PIN}.")
        if result.returncode or not archive.is_file():
            lines = [line.strip() for line in result.stdout.splitlines() if line.strip()]
            # Newer releases of pip write "error:", and end with a hint that names no reason.
            lines = [line for line in lines if not line.startswith(("hint:", "note:"))]
            reasons = [line for line in lines if line.lower().startswith("error:")] or lines or ["nothing"]
            stop(
                f"could not fetch the source archive deepspeed-{version}.tar.gz (pip said: {reasons[-1]}); put that "
                f"file into {folder}, or name the folder that holds it in {ARCHIVE_DIR_VARIABLE}, and try again."
            )
    if hashlib.sha256(archive.read_bytes()).hexdigest() != sha256:
        stop(f"{archive} does not match the sha256 in {BASE_PIN}; delete it to have it downloaded again.")
    return archive


def our_files() -> Iterator[str]:
    """Yield every source file of ours below deepspeed/ and csrc/, relative to the repository."""
    for top in ("csrc", "deepspeed"):
        for path in sorted((ROOT / top).rglob("*")):
            relative = path.relative_to(ROOT)
            litter = path.suffix == ".pyc" or path.name.endswith("~") or "__pycache__" in relative.parts
            if path.is_file() and not litter and not any(part.startswith(".") for part in relative.parts):
                yield relative.as_posix()


def places(name: str) -> List[str]:
    """Return where a file of ours goes in the composed tree. Some files go to two places."""
    for copies in (CSRC_COPIES, OP_BUILDER_COPIES):
        if name.startswith(copies[0] + "/"):
            return [copy + name[len(copies[0]) :] for copy in copies]
    return [name]


def check_overlay(tree: Path, ours: List[str], version: str) -> None:
    """Stop if a file of REPLACED is missing among our files or in the base."""
    for name in sorted(REPLACED):
        if name not in ours:
            stop(f"{name} is listed in setup.py as replacing a base file, but this repository has no such file.")
        for place in places(name):
            if not (tree / place).is_file():
                stop(f"{name} is meant to replace a base file, but deepspeed {version} has no {place}.")


def keep_zero3_sources(tree: Path, version: str) -> None:
    """Move the base's native DeepCompile code from compile/ to compile_zero3/, with the header it was written for."""
    for copy in CSRC_COPIES:
        csrc = tree / copy
        if not (csrc / "compile").is_dir():
            stop(f"the ZeRO-3 native sources should be kept, but deepspeed {version} has no {copy}/compile.")
        (csrc / "compile").rename(csrc / "compile_zero3")
        shutil.copy2(csrc / "includes" / "deepcompile.h", csrc / "compile_zero3")


def lay_over(tree: Path, ours: List[str], version: str, link: bool) -> None:
    """Copy or link our files into the tree. Stop if a file that is not in REPLACED meets a file of the base."""
    for name in ours:
        for place in places(name):
            target = tree / place
            if name in KEPT:
                kept = target.with_name(f"{target.stem}_base{target.suffix}")
                if kept.exists():
                    stop(f"{place} of the base would be kept as {kept.name}, but deepspeed {version} has such a file.")
                target.rename(kept)
            elif name in REPLACED:
                target.unlink()
            elif target.exists():
                stop(
                    f"{name} is not listed in setup.py as replacing a base file, but deepspeed {version} has {place}."
                )
            target.parent.mkdir(parents=True, exist_ok=True)
            if link:
                target.symlink_to(ROOT / name)
            else:
                shutil.copy2(ROOT / name, target)
    shutil.copy2(ROOT / "NOTICE", tree)


def all_edits() -> Iterator[Tuple[str, str, str]]:
    """Yield (file, anchor, replacement) of EDITS, and then of the parts that deepspeed/compile/parts.py names."""
    edits = [EDITS]
    for part in runpy.run_path(str(COMPILE / "parts.py"))["NAMES"]:
        folder = COMPILE / part.replace(".", "/")
        if not folder.is_dir():
            stop(f"{COMPILE / 'parts.py'} names {part}, but there is no folder {folder}.")
        file = folder / "edits.py"
        if file.is_file():
            edits.append(runpy.run_path(str(file))["EDITS"])
    for of_one in edits:
        for name, changes in of_one.items():
            for anchor, new in changes.items():
                # The first alone: code of ours may have an ellipsis.
                yield name, anchor, new.replace("...", anchor, 1)


def edit(tree: Path, version: str) -> None:
    """Make the changes of all_edits()."""
    for name, anchor, replacement in all_edits():
        path = tree / name
        text = path.read_text() if path.is_file() else ""
        if text.count(anchor) != 1:
            stop(
                f"an edit of {name} needs text that deepspeed {version} has {text.count(anchor)} times "
                f"instead of once: {anchor!r}"
            )
        path.write_text(text.replace(anchor, replacement))


def require_torch(tree: Path) -> None:
    """Raise the base's requirement on torch to ours and leave its other requirements alone."""
    path = tree / "requirements" / "requirements.txt"
    text, count = re.subn(r"(?m)^torch(?![\w.-]).*$", f"torch>={OLDEST_TORCH}", path.read_text())
    if count != 1:
        stop(f"the base's requirements/{path.name} should name torch once, but names it {count} times.")
    path.write_text(text)


def recipe() -> str:
    """Return a hash of all that makes the composed tree, except the contents of files that are linked there."""
    files = [ROOT / "setup.py", BASE_PIN, COMPILE / "parts.py", *sorted(COMPILE.rglob("edits.py"))]
    told = [*our_files(), *(file.read_text() for file in files)]
    return hashlib.sha256("\0".join(told).encode()).hexdigest()


def compose(archive: Path, version: str, tree: Path, link: bool) -> None:
    """Make a new tree in place of the former tree, which stays as it is until the new one is complete."""
    BUILD.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILD) as scratch:
        with tarfile.open(archive) as tar:
            safely: Dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            tar.extractall(scratch, **safely)
        fresh = Path(scratch, f"deepspeed-{version}")
        ours = list(our_files())
        check_overlay(fresh, ours, version)
        keep_zero3_sources(fresh, version)
        lay_over(fresh, ours, version, link)
        edit(fresh, version)
        require_torch(fresh)
        if link:
            # ds_report compares.
            (fresh / RECIPE).write_text(recipe())
        shutil.rmtree(tree, ignore_errors=True)
        fresh.rename(tree)


def offer_native_code_on_cpu() -> None:
    """Let DS_BUILD_DEEP_COMPILE work without a GPU.

    The base compiles the builders in ALL_OPS ahead of time. On a CPU, ALL_OPS is a fixed list without DeepCompile, so
    this function adds our builder before the base's setup.py reads the list.
    """
    from op_builder import all_ops

    if all_ops.accelerator_name == "cpu":
        from op_builder.dc import DeepCompileBuilder

        builder = DeepCompileBuilder()
        all_ops.ALL_OPS.setdefault(builder.name, builder)


def pack_sources(version: str) -> None:
    """Make a source archive of this repository. MANIFEST.in names the files that a build reads.

    The archive does not contain the composed tree: its installation gets the base by its hash, as from a clone.
    """
    import setuptools

    os.chdir(ROOT)
    BUILD.mkdir(exist_ok=True)
    at = sys.argv.index("sdist")
    sys.argv[at:at] = ["egg_info", "--egg-base", str(BUILD)]
    version += local_version(commit_of_sources())
    setuptools.setup(name="deepspeed", version=version, packages=[], py_modules=[], license_files=["LICENSE"])


def local_version(commit: str) -> str:
    """Return what follows the base's version: what the user asks for, or a label with the commit if it is known."""
    # The letter keeps a commit of digits from being read as a number.
    known = "" if commit == "unknown" else f".g{commit}"
    return os.environ.get("DS_BUILD_STRING") or LOCAL_VERSION + known


def commit_of_sources() -> str:
    """Return the commit of this checkout or sdist, which ds_report names; "unknown" if it is neither."""
    packed = ROOT / "PKG-INFO"
    if not (ROOT / ".git").exists():
        of_sdist = re.search(r"(?m)^Version: .*\.g([0-9a-f]+)$", packed.read_text()) if packed.is_file() else None
        return of_sdist[1] if of_sdist else "unknown"
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def home_of_checkout() -> Optional[str]:
    """Return the address from which this checkout was cloned, for reports; None if it is no address of the web."""
    command = ["git", "-C", str(ROOT), "remote", "get-url", "origin"]
    try:
        address = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    parts = urllib.parse.urlsplit(address)
    # A clone's address may have a password.
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl() if parts.scheme == "https" else None


def main() -> None:
    check_setuptools()
    version, sha256 = read_pin()
    if "sdist" in sys.argv:
        pack_sources(version)
        return
    have_torch = check_torch()
    archive = fetch_base(version, sha256)

    # Keep two trees, so that building a wheel leaves the tree of an editable install as it is.
    editable = not {"editable_wheel", "develop"}.isdisjoint(sys.argv)
    tree = BUILD / ("editable" if editable else "wheel")
    compose(archive, version, tree, link=editable)

    os.environ["DS_FORK_COMMIT"] = commit_of_sources()
    os.environ["DS_BUILD_STRING"] = local_version(os.environ["DS_FORK_COMMIT"])
    home = home_of_checkout()
    if home is not None:
        os.environ["DS_FORK_HOME"] = home
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    if have_torch:
        offer_native_code_on_cpu()
    runpy.run_path(str(tree / "setup.py"), run_name="__main__")


if __name__ == "__main__":
    main()
