# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Keeps graphs of the backend "eager" in torch's cache of AOTAutograd, so that ranks trace and split each graph once.

Tracing and splitting take most of the time of a small training, and tests train the same few models hundreds of times.
DeepCompile itself keeps only what Inductor compiles.

Entries lie beside Inductor's, in ``TORCHINDUCTOR_CACHE_DIR``. torch writes an entry under a temporary name and renames
it, so ranks may write and read at the same time.

torch finds an entry by a key that covers the graph, its inputs, torch's source and torch's options. :func:`_tag` adds
what else shapes a graph. A graph is traced anew if key and tag do not cover all of that. A test that looks at how
graphs are made runs its engines in :func:`compiled_anew`.
"""

import contextlib
import fcntl
import hashlib
import sys
import time
import types
from pathlib import Path

# Ranks import this module first, and this time is earlier than the import of what shapes graphs.
_STARTED = time.time()
_IS_FIRST = "deepspeed" not in sys.modules

import torch  # noqa: E402
from torch._dynamo.backends import debugging  # noqa: E402
from torch._functorch import config as functorch_config  # noqa: E402
from torch._functorch import partitioners  # noqa: E402
from torch._inductor.output_code import OutputCode  # noqa: E402
from torch._inductor.runtime.cache_dir_utils import cache_dir  # noqa: E402
from torch._ops import OpOverload, OpOverloadPacket  # noqa: E402
from torch._subclasses import FakeTensor  # noqa: E402
from torch.fx import GraphModule  # noqa: E402

try:
    from deepspeed.compile.zero_1_and_2.feature import Feature, classes
    from deepspeed.compile.zero_1_and_2.graph import backend, keys
except ModuleNotFoundError:
    # Some tests have ranks import the released DeepSpeed.
    backend = None

# Whether this torch keeps graphs that run as traced. Older releases keep only what Inductor has compiled.
SUPPORTED = backend is not None and hasattr(debugging, "AOTEagerOutputCode")


# The parts that do something when a graph is compiled, and leave the graph as it is.
_LOOK_ON = ("blocks", "reports", "overlap_gather")


def _parts_that_shape_graphs():
    for part in [] if backend is None else classes():
        package = part.__module__.removesuffix("feature")
        looks_on = package.endswith(tuple(f".{name}." for name in _LOOK_ON))
        # A part tells the backend how it changes or splits joint graphs.
        tells = "context.backend." in Path(sys.modules[part.__module__].__file__).read_text()
        if not looks_on and (tells or part.around_compile is not Feature.around_compile):
            yield package


# The modules whose functions split a graph and insert reductions.
_OURS = (
    "deepspeed.compile.zero_1_and_2.graph.",
    "deepspeed.compile.zero_1_and_2.gradient.native",
)
_OURS = (*_OURS, *_parts_that_shape_graphs())
_SHAPING = [*(module for name, module in sorted(sys.modules.items()) if name.startswith(_OURS)), partitioners]
# A source that was edited after this process started may differ from what the process imported, but has the same hash.
_FILES = [Path(__file__), *(Path(module.__file__) for module in _SHAPING)]
_IS_AS_IMPORTED = _IS_FIRST and all(file.stat().st_mtime < _STARTED for file in _FILES)
_OWN_HASH = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
# Hashes the sources now, for the life of the process and of the processes that are forked from it.
if backend is not None:
    keys.cache_key()
    for file in _FILES:
        keys.hash_of_source(file)


class StoredGraph(OutputCode):
    """A graph that runs as traced, and is stored as the source that torch.fx generated for it.

    The source also drops each value after its last use. torch's own class stores all that is known of each node, and
    takes longer to load that than all else of a compilation whose graph was found.

    Args:
        gm: a graph module whose ``forward`` takes a list of inputs and empties it, or None.
        stored: instead of ``gm``, the source and the attributes of the graph module that the source uses.
    """

    def __init__(self, gm=None, stored=None):
        super().__init__()
        self._gm, self._stored = gm, stored
        self._run = gm.forward if stored is None else _bound_forward(*stored)
        # Tells AOTAutograd that the graph takes one list.
        self._boxed_call = True

    def __call__(self, inputs):
        return self._run(inputs)

    def __reduce__(self):
        return StoredGraph, (None, self._stored or _source_and_attributes(self._gm))

    # AOTAutograd calls these when it stores or has loaded a graph. StoredGraph needs nothing done.

    def prepare_for_serialization(self):
        pass

    def post_compile(self, *_):
        pass

    def set_triton_bundle(self, _):
        pass


def _source_and_attributes(gm):
    _, (_, imports) = gm.__reduce__()
    uses = [node.target.partition(".")[0] for node in gm.graph.nodes if node.op in ("get_attr", "call_module")]
    return f"{imports}\n{gm.code}", {name: getattr(gm, name) for name in uses}


def _bound_forward(source, attributes):
    namespace = {}
    exec(compile(source, "<stored graph>", "exec", dont_inherit=True), namespace)
    return types.MethodType(namespace["forward"], types.SimpleNamespace(**attributes))


# Seconds for which a process waits for another that traces the same graph.
PATIENCE = 60

# Whether install() had this process use torch's cache.
is_installed = False
_is_allowed = True


@contextlib.contextmanager
def compiled_anew():
    """Context, or decorator of a function for ranks, in which ranks trace and split graphs that they could load."""
    global _is_allowed
    before, _is_allowed = _is_allowed, False
    try:
        yield
    finally:
        _is_allowed = before


def install():
    """Called in a rank: from now on the backend "eager" takes graphs from torch's cache, if torch can keep them."""
    global is_installed
    if not SUPPORTED or not _IS_AS_IMPORTED:
        return
    trace = backend.run_as_traced

    def load_or_trace(gm, inputs, partitioner):
        tag = None
        # Logged graphs are seen. Tests, and TORCHINDUCTOR_AUTOGRAD_CACHE=0, switch torch's cache off by the option.
        is_seen = partitioner.debug_log or _any_replaced(installed)
        if _is_allowed and functorch_config.enable_autograd_cache and not is_seen:
            tag = _tag(gm, inputs, partitioner)
        if tag is None:
            return trace(gm, inputs, partitioner)
        # torch stores a graph with its backward, so the backward must not wait for its first call.
        options = {"force_non_lazy_backward_lowering": True}
        options.update(force_autograd_cache=True, bundled_autograd_cache=True)
        cached = functorch_config.patch(options), torch.compiler.config.patch(cache_key_tag=tag)
        with cached[0], cached[1], _no_other_process_traces(gm, tag):
            return trace(gm, inputs, partitioner)

    # With these options the compiler boxed_nop, which the backend uses, makes objects of this class.
    debugging.AOTEagerOutputCode = StoredGraph
    backend.run_as_traced = load_or_trace
    installed, is_installed = _names(), True


@contextlib.contextmanager
def _no_other_process_traces(gm, tag):
    """Context in which other processes wait before they trace this graph, and then find it in the cache.

    All ranks of a test come to a graph that is not there yet at the same time, and each would trace it. Tracing waits
    for no other rank. If that changes, ``PATIENCE`` ends the wait.
    """
    number = int.from_bytes(hashlib.sha256(f"{tag}{gm.code}".encode()).digest()[:7], "big")
    folder = Path(cache_dir())
    folder.mkdir(parents=True, exist_ok=True)
    # The lock is that of one byte of an empty file. It ends when the file is closed, or with the process.
    with open(folder / "graphs_being_traced", "a") as file:
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
                break
            except BlockingIOError:
                time.sleep(0.01)
        yield


def _names():
    """Returns (module, class or None, name) -> value, for all names in the modules and classes that shape graphs."""
    names = {}
    for module in _SHAPING:
        for name, value in vars(module).items():
            names[module, None, name] = value
            if isinstance(value, type) and value.__module__ == module.__name__:
                names.update({(module, value, member): function for member, function in vars(value).items()})
    return names


def shapes_no_graph(function):
    """Marks what a test puts in place of a function, if graphs are the same with it. Returns the function."""
    function.shapes_no_graph = True
    return function


def _any_replaced(installed):
    """Whether a test has replaced a name: no key has what the replacement does, and the test counts on its calls."""
    now = _names()
    # Classes and functions get attributes of the interpreter's later, so pass over new names.
    replaced = (now.get(name) for name, value in installed.items() if now.get(name) is not value)
    # A mock has any attribute.
    return not all(getattr(value, "shapes_no_graph", False) is True for value in replaced)


def _tag(gm, inputs, partitioner):
    """Returns what torch's key does not cover, as text, or None if no text could cover it."""
    facts = _facts(inputs)
    if facts is None or not _is_covered(gm):
        return None
    autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    defaults = torch.get_default_dtype(), torch.get_default_device()
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast
    # The name tells the entry from Inductor's of the same graph.
    return repr(("eager, in tests", _OWN_HASH, partitioner.uuid().hex(), facts, defaults, modes))


def _facts(inputs):
    """Lists what torch's key leaves out of inputs, or returns None if an input is of a kind that this may not list.

    These are sizes, where the graph has names for them; which inputs share memory; and which are leaves.
    """
    facts, first = [], {}
    for index, value in enumerate(inputs):
        if type(value) in (int, torch.SymInt):
            facts.append(_number(value))
        elif type(value) in (torch.Tensor, torch.nn.Parameter, FakeTensor) and value.layout is torch.strided:
            layout = [_number(number) for number in (*value.shape, *value.stride(), value.storage_offset())]
            facts.append((layout, first.setdefault(value.untyped_storage()._cdata, index), value.is_leaf))
        else:
            return None
    return facts


def _number(value):
    return value if isinstance(value, int) else value.node.hint


def _is_covered(gm):
    """Whether torch's key says what each node of a graph computes, in the forward and in the backward."""
    for module in gm.modules():
        if not isinstance(module, GraphModule):
            return False
        for node in module.graph.nodes:
            # The key has operators' names, and constants' shapes. It has torch's source, so torch's own operators too.
            # Graphs within the graph are in gm.modules().
            if isinstance(node.target, (OpOverload, OpOverloadPacket)):
                if str(node.target).partition(".")[0] not in ("aten", "prims", "prim"):
                    return False
            elif node.op == "get_attr" and not isinstance(getattr(module, node.target, None), GraphModule):
                return False
    return True
