# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""How the fork is built and installed, by real pip runs on copies of this repository.

Each copy has its own build/ folder; the base's archive is shared with the repository, so that it is downloaded at
most once. Installs go to fresh virtual environments that see the packages of the running one, except DeepSpeed.
"""

import email
import hashlib
import io
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.program(
    "MANIFEST.in", "Makefile", "NOTICE", "pyproject.toml", "requirements/base.txt", "setup.py"
)

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("LICENSE", "MANIFEST.in", "Makefile", "NOTICE", "csrc", "deepspeed", "pyproject.toml", "requirements")
SOURCES += ("setup.py",)
ARCHIVE_DIR = Path(os.environ.get("DS_BASE_ARCHIVE_DIR") or ROOT / "build" / "archive").resolve()
VERSION = "0.19.8+zerograd.1"
REPLACED = "deepspeed/compile/fx.py"


def run(*command, cwd, env=None, ok=True):
    """Output of a command, which must succeed, or must fail if not ok."""
    settings = {k: v for k, v in os.environ.items() if not k.startswith(("DS_", "PYTHON"))}
    settings.update({"DS_BASE_ARCHIVE_DIR": str(ARCHIVE_DIR), "DS_ACCELERATOR": "cpu", "PIP_NO_COMPILE": "1"})
    settings.update(env or {})
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=settings,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert (result.returncode == 0) == ok, result.stdout
    return result.stdout


class Venv:
    """A fresh virtual environment; pip and all else but DeepSpeed come from the running one."""

    def __init__(self, folder, packages):
        run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
        self.folder = folder
        self.bin = folder / "bin"
        (self.site,) = folder.glob("lib/python*/site-packages")
        (self.site / "packages.pth").write_text(f"{packages}\n")

    def pip(self, *arguments, cwd, **options):
        return run(self.bin / "python", "-m", "pip", *arguments, cwd=cwd, **options)

    def python(self, *lines):
        """The last line that the code prints, run where no checkout is in sight."""
        return run(self.bin / "python", "-c", "\n".join(lines), cwd=self.folder).splitlines()[-1]

    def files(self):
        return {path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*")}


@pytest.fixture(scope="session")
def packages(tmp_path_factory):
    """A folder of links to every installed package except DeepSpeed."""
    folder = tmp_path_factory.mktemp("packages")
    for site in [Path(entry) for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]:
        for path in site.iterdir():
            if not re.match(r"(deepspeed\b|__editable__|__pycache__)", path.name) and path.suffix != ".pth":
                if not (folder / path.name).exists():
                    (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture
def venv(tmp_path, packages):
    return Venv(tmp_path / "venv", packages)


def copy_repository(folder):
    folder.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(ROOT / name, folder)
    return folder


@pytest.fixture
def checkout(tmp_path):
    return copy_repository(tmp_path / "checkout")


def fake_torch(folder, code):
    """Settings under which Python finds a torch that consists of the given code."""
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text(code)
    return {"PYTHONPATH": str(folder)}


@pytest.fixture(scope="session")
def no_torch(tmp_path_factory):
    """Settings that hide torch, which most builds do not need and which is slow to import."""
    return fake_torch(tmp_path_factory.mktemp("no_torch"), "raise ImportError\n")


@pytest.fixture(scope="session")
def made(tmp_path_factory, packages, no_torch):
    """The folder in which `make wheel` has put a wheel and an sdist of the repository as it stands."""
    folder = tmp_path_factory.mktemp("made")
    checkout, venv = copy_repository(folder / "checkout"), Venv(folder / "venv", packages)
    # A checkout with a commit, by which a report names the build.
    run("git", "init", "--quiet", ".", cwd=checkout)
    name = ("-c", "user.name=nobody", "-c", "user.email=nobody@localhost")
    run("git", *name, "commit", "--quiet", "--allow-empty", "--message", "Build", cwd=checkout)
    # The recipe itself, in an environment that exists.
    run("make", "wheel", "PACK=", f"PACK_BIN={venv.bin}", cwd=checkout, env=no_torch)
    return checkout / "dist"


@pytest.fixture(scope="session")
def built(made):
    """The wheel."""
    (path,) = made.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        yield wheel


@pytest.fixture(scope="session")
def base(built):
    """The files of the base's archive, without its top folder; building the wheel has fetched the archive."""
    with tarfile.open(ARCHIVE_DIR / "deepspeed-0.19.8.tar.gz") as tar:
        return {member.name.split("/", 1)[1]: tar.extractfile(member).read() for member in tar if member.isfile()}


def metadata(text):
    return email.message_from_string(text)


def our_files():
    for top in ("csrc", "deepspeed"):
        for path in (ROOT / top).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path.relative_to(ROOT).as_posix()


def packaged(name):
    return f"deepspeed/ops/{name}" if name.startswith("csrc/") else name


def of_commit(made):
    """The commit of what `make wheel` has made, and its version."""
    commit = run("git", "rev-parse", "--short", "HEAD", cwd=made.parent).strip()
    return commit, f"{VERSION}.g{commit}"


def test_wheel_is_named_and_labelled(made, built):
    """pip would install nothing where another commit of the release is installed: both would have one version."""
    commit, version = of_commit(made)
    assert Path(built.filename).name == f"deepspeed-{version}-py3-none-any.whl"
    written = built.read("deepspeed/git_version_info_installed.py").decode()
    assert f"version='{version}'" in written and f"git_hash='{commit}'" in written


def test_an_extra_brings_what_draws_pictures(made, built):
    metadata = built.read(f"deepspeed-{of_commit(made)[1]}.dist-info/METADATA").decode()
    assert re.search("(?m)^Requires-Dist: matplotlib; extra == .pictures.$", metadata)


def test_wheel_holds_every_file_of_ours(built):
    ours = set(our_files())
    assert REPLACED in ours and "csrc/includes/deepcompile.h" in ours
    for name in ours:
        assert built.read(packaged(name)) == (ROOT / name).read_bytes(), name


def edited(name, content):
    """The content of a base file with the lines changed that setup.py lists."""
    for edited_name, anchor, replacement in runpy.run_path(str(ROOT / "setup.py"))["all_edits"]():
        if edited_name == name:
            assert anchor.encode() in content
            content = content.replace(anchor.encode(), replacement.encode())
    return content


def test_wheel_holds_every_other_file_of_the_base(built, base):
    ours = {packaged(name) for name in our_files()}
    compile_folder = "deepspeed/ops/csrc/compile/"
    moved, kept = 0, 0
    for name, content in base.items():
        if name.startswith(compile_folder):
            name = name.replace("/compile/", "/compile_zero3/")
            moved += 1
        elif name in ours or name == "deepspeed/git_version_info_installed.py":
            if name in runpy.run_path(str(ROOT / "setup.py"))["KEPT"]:
                assert built.read(f"{name.removesuffix('.py')}_base.py") == content, name
                kept += 1
            continue
        if name.startswith("deepspeed/"):
            assert built.read(name) == edited(name, content), name
    assert (moved, kept) == (9, 3)
    # What is left under the base's folder name is ours alone.
    assert {name for name in built.namelist() if name.startswith(compile_folder)} <= ours


def test_wheel_keeps_the_header_that_the_zero3_sources_include(built, base):
    kept = built.read("deepspeed/ops/csrc/compile_zero3/deepcompile.h")
    assert kept == base["csrc/includes/deepcompile.h"]
    assert kept != built.read("deepspeed/ops/csrc/includes/deepcompile.h")


def test_wheel_metadata_is_the_base_s_but_for_torch_and_pictures(made, built, base):
    folder = f"deepspeed-{of_commit(made)[1]}.dist-info"
    ours = metadata(built.read(f"{folder}/METADATA").decode())
    theirs = metadata(base["PKG-INFO"].decode())
    changed = {"torch>=2.0.0": "torch>=2.11"}
    wanted = {changed.get(requirement, requirement) for requirement in theirs.get_all("Requires-Dist")}
    # The base's extra 'all' has what each of its extras has.
    wanted |= {f'matplotlib; extra == "{extra}"' for extra in ("pictures", "all")}
    gpu_only = {"nvidia-ml-py"}
    assert set(ours.get_all("Requires-Dist")) - gpu_only == wanted - gpu_only
    assert set(ours.get_all("Provides-Extra")) == {*theirs.get_all("Provides-Extra"), "pictures"}
    assert built.read(f"{folder}/licenses/NOTICE") == (ROOT / "NOTICE").read_bytes()
    # Reports would go to DeepSpeed's team.
    assert ours["Author"] == "the authors of this fork of DeepSpeed" and ours["Author-email"] is None
    assert "deepspeed.ai" not in str(ours["Home-page"]) and ours.get_all("Project-URL") is None


def test_wheel_has_the_base_s_commands(built, base):
    scripts = {name.rpartition("/")[2] for name in built.namelist() if ".data/scripts/" in name}
    assert scripts == {name.removeprefix("bin/") for name in base if name.startswith("bin/")}


@pytest.mark.follows("install torch first and add --no-build-isolation")
def test_install_reinstall_with_native_code_and_uninstall(venv, checkout):
    before = venv.files()
    added = checkout / "deepspeed" / "compile" / "added_by_test.py"
    added.write_text("HERE = 'yes'\n")
    venv.pip("install", "--no-build-isolation", ".", cwd=checkout)
    assert VERSION in run(venv.bin / "ds_report", cwd=venv.folder)
    assert "--num_accelerators" in run(venv.bin / "deepspeed", "--help", cwd=venv.folder)
    assert venv.python("from deepspeed.compile import added_by_test; print(added_by_test.HERE)") == "yes"
    assert not list(venv.site.glob("deepspeed/ops/*.so"))

    # What was edited is taken up, and what was taken away does not linger in build/.
    with open(checkout / REPLACED, "a") as file:
        file.write("\nEDITED = 'once'\n")
    added.unlink()
    env = {"DS_BUILD_DEEP_COMPILE": "1", "DS_ENABLE_NINJA": "1"}
    venv.pip("install", "--no-build-isolation", ".", cwd=checkout, env=env)
    assert not [name for name in venv.files() if added.stem in name]

    # This time the native code was compiled at install, and that is what gets loaded.
    edited, recorded, loaded = venv.python(
        "from deepspeed.compile import fx",
        "from deepspeed.compile.zero_1_and_2.gradient.native import reducer_module",
        "from deepspeed.git_version_info import installed_ops",
        "print(fx.EDITED, installed_ops['dc'], reducer_module().__file__)",
    ).split()
    assert (edited, recorded) == ("once", "1")
    assert Path(loaded).parent == venv.site / "deepspeed" / "ops"

    venv.pip("uninstall", "--yes", "deepspeed", cwd=checkout)
    assert venv.files() == before


@pytest.mark.follows("edits DeepSpeed in another way, than at its installation; run")
def test_editable_install_is_live_and_uninstall_leaves_nothing(venv, checkout):
    """After git pull, old edits would call new code, and ds_report would name the new commit and nothing else."""
    before = venv.files()
    venv.pip("install", "--no-build-isolation", "--editable", ".", cwd=checkout)
    with open(checkout / REPLACED, "a") as file:
        file.write("\nEDITED = 'live'\n")
    code = "import deepspeed; from deepspeed.compile import fx; print(deepspeed.__version__, fx.EDITED)"
    assert venv.python(code) == f"{VERSION} live"
    code = "from deepspeed.compile.tools.reports.ds_report import outdated; print([*outdated()])"
    assert venv.python(code) == "[]"
    advice = f"; run pip install --no-build-isolation -e {checkout}"
    for changed in (checkout / "setup.py", checkout / "deepspeed/compile/fixes/base/edits.py"):
        text = changed.read_text()
        changed.write_text(f"{text}\n# One more line.\n")
        assert advice in venv.python(code), changed
        changed.write_text(text)
    assert venv.python(code) == "[]"
    (checkout / "deepspeed" / "compile" / "added.py").touch()
    assert advice in venv.python(code)
    venv.pip("install", "--no-build-isolation", "-e", checkout, cwd=venv.folder)
    assert venv.python("from deepspeed.compile import added", code) == "[]"

    # Building a wheel in the same checkout leaves the editable install alone.
    run(venv.bin / "python", "setup.py", "--version", cwd=checkout)
    code = "import importlib.util as util; print(util.find_spec('deepspeed').submodule_search_locations[0])"
    package = Path(venv.python(code))
    for name in our_files():
        assert (package.parent / packaged(name)).samefile(checkout / name), name

    venv.pip("uninstall", "--yes", "deepspeed", cwd=checkout)
    assert venv.files() == before


def test_make_keeps_links(venv, checkout):
    """make would put copies in the place of a developer's links, and edits would change nothing from then on."""
    settings = (f"BIN={venv.bin}", "TOOLS=", "VENV=made", "COMPILE=", "COMPILE_ADAM=")
    # The target whose programs Python looks for in the checkout. Here it prints where the fork is.
    seen = checkout / "benchmarks" / "compare.py"
    seen.parent.mkdir()
    seen.write_text("import deepspeed; print(deepspeed.__file__)")
    make = ("make", "bench", "BENCH=", "BASE=", *settings)
    where = "import deepspeed.compile.fx as fx, os; print(os.path.realpath(fx.__file__))"
    (checkout / "made").mkdir()
    assert f"{venv.site}/deepspeed/__init__.py" in run(*make, cwd=checkout)
    assert Path(venv.python(where)).is_relative_to(venv.site)

    venv.pip("install", "--no-build-isolation", "--editable", ".", cwd=checkout)
    assert venv.python(where) == str(checkout / REPLACED)
    (checkout / "deepspeed" / "compile" / "added.py").write_text("IS_HERE = 'added'\n")
    assert f"{checkout}/build/editable/deepspeed/__init__.py" in run(*make, cwd=checkout)
    assert venv.python(where) == str(checkout / REPLACED)
    assert venv.python("from deepspeed.compile import added; print(added.IS_HERE)") == "added"

    # Links to another checkout are none to this one.
    other = copy_repository(checkout.parent / "other")
    (other / "made").mkdir()
    run("make", "bench", "RUN=true", "BENCH=", "BASE=", *settings, cwd=other)
    assert Path(venv.python(where)).is_relative_to(venv.site)


def skip_without_an_index(venv):
    probe = venv.folder / "probe"
    arguments = ("install", "--quiet", "--no-deps", "--target", probe, "setuptools>=70.1", "pip", "wheel")
    reachable = subprocess.run([venv.bin / "python", "-m", "pip", *arguments], stdin=subprocess.DEVNULL)
    if reachable.returncode:
        pytest.skip("the packages that an isolated build starts from cannot be fetched here")


def test_the_sdist_installs_with_nothing_but_an_index(venv, made, base, tmp_path):
    """`make wheel` would make no sdist, or one that lacks a file that the build reads, or has files of the base."""
    (archive,) = made.glob("*.tar.gz")
    commit, version = of_commit(made)
    assert archive.name == f"deepspeed-{version}.tar.gz" and len([*made.iterdir()]) == 2
    with tarfile.open(archive) as tar:
        packed = {name.partition("/")[2] for name in tar.getnames()}
    assert {name for name in packed & base.keys() if name.startswith(("csrc/", "deepspeed/"))} <= {*our_files()}
    skip_without_an_index(venv)
    # The index has the base's archive too. A variable that is empty names no folder.
    find_links = f"{ARCHIVE_DIR} {os.environ.get('PIP_FIND_LINKS', '')}".strip()
    offer = {"DS_BASE_ARCHIVE_DIR": "", "PIP_FIND_LINKS": find_links}
    venv.pip("install", "--no-deps", archive, cwd=tmp_path, env=offer)
    code = (
        "import deepspeed; from deepspeed.compile.zero_1_and_2 import gradient_counters",
        "print(deepspeed.__version__, deepspeed.__git_hash__)",
    )
    assert venv.python(*code) == f"{version} {commit}"
    for name in our_files():
        assert (venv.site / packaged(name)).read_bytes() == (ROOT / name).read_bytes(), name


def test_the_newest_changes_are_those_of_this_release():
    """A release would be built whose changes stand under another one's heading."""
    newest = re.search(r"(?m)^## (\S+)", (ROOT / "CHANGELOG.md").read_text())[1]
    assert newest == VERSION and f"DeepSpeed {VERSION}" in (ROOT / "NOTICE").read_text()


def test_isolated_build(venv, checkout, built):
    """pip's default: the build sees no torch, only what pyproject.toml asks for."""
    skip_without_an_index(venv)
    # With no kept archive, the pip inside of the isolated build has to fetch it.
    find_links = f"{ARCHIVE_DIR} {os.environ.get('PIP_FIND_LINKS', '')}".strip()
    offer = {"DS_BASE_ARCHIVE_DIR": str(checkout / "own"), "PIP_FIND_LINKS": find_links}
    venv.pip("wheel", "--no-deps", "--wheel-dir", checkout / "out", ".", cwd=checkout, env=offer)
    assert (checkout / "out" / f"deepspeed-{VERSION}-py3-none-any.whl").is_file()
    assert (checkout / "own" / "deepspeed-0.19.8.tar.gz").is_file()


def test_setup_py_runs_directly_and_heeds_the_user_s_label(venv, checkout, base, tmp_path, no_torch):
    # The label is for our build only: the base's own, which pip runs to fetch it, must not see it.
    env = offline(tmp_path / "archives", find_links=ARCHIVE_DIR) | no_torch | {"DS_BUILD_STRING": "+mine"}
    printed = run(venv.bin / "python", "setup.py", "--version", cwd=checkout, env=env)
    assert "0.19.8+mine" in printed.splitlines()


def refusal(venv, checkout, env):
    """The sentence with which pip's build of the checkout stops."""
    output = venv.pip("wheel", "--no-deps", "--no-build-isolation", ".", cwd=checkout, env=env, ok=False)
    assert "Traceback" not in output, output
    sentences = re.findall(r"Cannot build deepspeed: .*", output)
    assert len(sentences) == 1, output
    return sentences[0]


def repin(checkout, sha256):
    path = checkout / "requirements" / "base.txt"
    path.write_text(re.sub(r"[0-9a-f]{64}", sha256, path.read_text()))


def offline(archives, find_links=""):
    """Settings under which pip reaches nothing but the given folder."""
    return {
        "DS_BASE_ARCHIVE_DIR": str(archives),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_FIND_LINKS": str(find_links),
        "PIP_NO_INDEX": "1",
    }


@pytest.mark.follows("put that file into {}, or name the folder that holds it in {}")
def test_unreachable_base_is_named_and_can_be_provided(venv, checkout, base, tmp_path, no_torch):
    archives = tmp_path / "archives"
    sentence = refusal(venv, checkout, offline(archives) | no_torch)
    assert "could not fetch the source archive deepspeed-0.19.8.tar.gz" in sentence
    assert f"put that file into {archives}, or name the folder that holds it in DS_BASE_ARCHIVE_DIR" in sentence

    archives.mkdir(exist_ok=True)
    shutil.copy2(ARCHIVE_DIR / "deepspeed-0.19.8.tar.gz", archives)
    for folder in (archives, ARCHIVE_DIR):
        printed = run(venv.bin / "python", "setup.py", "--version", cwd=checkout, env=offline(folder) | no_torch)
        assert VERSION in printed.splitlines()


def test_downloaded_archive_with_another_hash_is_refused(venv, checkout, base, tmp_path, no_torch):
    repin(checkout, "0" * 64)
    sentence = refusal(venv, checkout, offline(tmp_path / "archives", find_links=ARCHIVE_DIR) | no_torch)
    assert "archive that pip found does not match the sha256" in sentence
    assert not list(tmp_path.glob("archives/*"))


@pytest.mark.follows("delete it to have it downloaded again")
def test_kept_archive_with_another_hash_is_refused(venv, checkout, base, tmp_path, no_torch):
    archives = tmp_path / "archives"
    archives.mkdir()
    archive = archives / "deepspeed-0.19.8.tar.gz"
    archive.write_bytes((ARCHIVE_DIR / archive.name).read_bytes() + b"!")
    sentence = refusal(venv, checkout, offline(archives) | no_torch)
    assert f"{archive} does not match the sha256" in sentence and "; delete it to have it downloaded again" in sentence
    archive.unlink()
    env = offline(archives, find_links=ARCHIVE_DIR) | no_torch
    assert VERSION in run(venv.bin / "python", "setup.py", "--version", cwd=checkout, env=env).splitlines()


def test_old_torch_is_refused(venv, checkout, tmp_path):
    sentence = refusal(venv, checkout, fake_torch(tmp_path / "fake", "__version__ = '2.9.1+cpu'\n"))
    assert "torch 2.9.1+cpu is installed, but torch 2.11 or newer is needed" in sentence


@pytest.mark.follows("or newer is needed (pip install --upgrade setuptools)")
def test_an_old_setuptools_is_refused(venv, checkout, base, tmp_path, no_torch):
    """Who upgrades setuptools, as the refusal says, would be refused again."""
    skip_without_an_index(venv)
    older = tmp_path / "older"
    env = offline(ARCHIVE_DIR) | {"PYTHONPATH": os.pathsep.join([str(older), no_torch["PYTHONPATH"]])}
    venv.pip("install", "--target", older, "setuptools<70", cwd=tmp_path)
    sentence = refusal(venv, checkout, env)
    assert "is too old to build this" in sentence and "(pip install --upgrade setuptools)" in sentence
    venv.pip("install", "--upgrade", "--target", older, "setuptools", cwd=tmp_path)
    printed = run(venv.bin / "python", "setup.py", "--version", cwd=checkout, env=env)
    assert VERSION in printed.splitlines()


def test_compiling_without_torch_is_refused(venv, checkout, no_torch):
    sentence = refusal(venv, checkout, no_torch | {"DS_BUILD_DEEP_COMPILE": "1"})
    assert "no torch can be imported" in sentence and "--no-build-isolation" in sentence


def test_replaced_file_that_the_base_has_no_more_is_named(venv, checkout, base, tmp_path, no_torch):
    archives = tmp_path / "archives"
    archives.mkdir()
    archive = archives / "deepspeed-0.19.8.tar.gz"
    with tarfile.open(ARCHIVE_DIR / archive.name) as full, tarfile.open(archive, "w:gz") as partial:
        for member in full:
            if not member.name.endswith(REPLACED):
                partial.addfile(member, full.extractfile(member) if member.isfile() else None)
    repin(checkout, hashlib.sha256(archive.read_bytes()).hexdigest())
    sentence = refusal(venv, checkout, offline(archives) | no_torch)
    assert f"{REPLACED} is meant to replace a base file, but deepspeed 0.19.8 has no {REPLACED}" in sentence


def test_new_file_that_the_base_has_too_is_named(venv, checkout, base, no_torch):
    name = "deepspeed/compile/backend.py"
    (checkout / name).write_text("")
    sentence = refusal(venv, checkout, no_torch)
    assert f"{name} is not listed in setup.py as replacing a base file, but deepspeed 0.19.8 has {name}" in sentence


def test_listed_file_that_is_not_ours_is_named(venv, checkout, base, no_torch):
    (checkout / REPLACED).unlink()
    sentence = refusal(venv, checkout, no_torch)
    assert (
        f"{REPLACED} is listed in setup.py as replacing a base file, but this repository has no such file" in sentence
    )


def test_anchor_of_an_edit_that_has_gone_is_named(venv, checkout, base, tmp_path, no_torch):
    archives = tmp_path / "archives"
    archives.mkdir()
    archive = archives / "deepspeed-0.19.8.tar.gz"
    with tarfile.open(ARCHIVE_DIR / archive.name) as full, tarfile.open(archive, "w:gz") as changed:
        for member in full:
            content = full.extractfile(member).read() if member.isfile() else b""
            if member.name.endswith("deepspeed/runtime/engine.py"):
                content = content.replace(b"        self.micro_steps += 1\n", b"        self.micro_steps += 2\n")
                member.size = len(content)
            changed.addfile(member, io.BytesIO(content) if member.isfile() else None)
    repin(checkout, hashlib.sha256(archive.read_bytes()).hexdigest())
    sentence = refusal(venv, checkout, offline(archives) | no_torch)
    edit = "an edit of deepspeed/runtime/engine.py"
    needs = "needs text that deepspeed 0.19.8 has 0 times instead of once: "
    assert f"{edit} {needs}" in sentence
