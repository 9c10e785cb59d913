"""The mode that sees every ATen operation of a step: births of inf and NaN, and their place."""

import contextlib
import functools
import linecache
import math
import os
import sys
import sysconfig
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from nan_lab.report import Report, describe, kind_of

# These hand on an inf that somebody put there on purpose.
PLUMBING = {"add", "sub", "mul", "div", "copy", "_to_copy", "clone", "where", "masked_fill", "cat"}
PLUMBING |= {"stack", "index", "gather", "triu", "tril", "constant_pad_nd", "repeat", "lift_fresh"}


class Site(NamedTuple):
    """A place where an operation runs. Births with an equal site are one suspect."""

    phase: str
    op: str
    node: str
    module: str
    file: str
    number: int

    @property
    def line(self):
        """`file.py:12`; in a notebook, whose cells live in files of no lasting name, `cell 7:3`."""
        shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
        cells = getattr(getattr(shell, "compile", None), "_filename_map", {})
        name = f"cell {cells[self.file]}" if self.file in cells else os.path.basename(self.file)
        return self.file and f"{name}:{self.number}"

    def report(self):
        source = linecache.getline(self.file, self.number).strip()
        return Report(None, *self[:4], self.line, source=source)


class Birth(NamedTuple):
    site: Site
    tier: int  # 1: out of finite numbers, 2: NaN out of inf, 3: inf out of inf, 4: written there
    call: int  # its place in the order of operations
    report: Report


def non_finite(tensor):
    """The mask of inf and NaN, or None where there is none."""
    tensor = tensor._values() if tensor.is_sparse else tensor
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
        return None
    bad = ~torch.isfinite(tensor)
    return bad if bad.any() else None


_STDLIB = [sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")]
_LIBRARIES = tuple(os.path.join(path, "") for path in [os.path.dirname(torch.__file__), *_STDLIB])
_OURS = {f"{name}.py" for name in ("tracer", "locate", "guard", "autocast")}
_CHECKPOINT = os.path.join("torch", "utils", "checkpoint.py")


@functools.cache
def _is_users(file):
    folder, name = os.path.split(file)
    if folder == os.path.dirname(__file__) and name in _OURS:
        return False
    installed = "site-packages" in file or "dist-packages" in file or file.startswith(_LIBRARIES)
    return not installed and not file.startswith(("<frozen", "<eval_with"))


class Tracer(TorchDispatchMode):
    """Record births, or, at the sites in `patch` ({site: highest tier}), make them finite."""

    def __init__(self, model, leaves, patch):
        super().__init__()
        self.names = {id(m): n.removeprefix("_orig_mod.") for n, m in model.named_modules()}
        self.patch, self.births, self.calls = patch, {}, 0
        self.first_use = dict.fromkeys(map(id, leaves))
        # Who made the autograd node of which number; and the last operation, if it was in place.
        self.made_by, self.next_node, self.in_place = {}, torch.autograd._get_sequence_nr(), None
        self.bad = self.error = ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        site, call = self._site(func), (args, kwargs or {})
        for tensor in _tensors(call):
            if self.first_use.get(id(tensor), site) is None:
                self.first_use[id(tensor)] = site
        # Writing into an operand hides what it was: keep a copy. (native_batch_norm writes its
        # running statistics and does not say so in its schema.)
        writes = func._schema.is_mutable or "batch_norm" in site.op
        before = _copy(call) if writes else call
        result = func(*call[0], **call[1])
        outputs = _tensors(result) + (_tensors(call) if writes else [])
        masks = [non_finite(tensor) for tensor in outputs]
        if any(mask is not None for mask in masks):
            tier, masks = _born(func, before, writes, outputs, masks)
            born = [(t, m) for t, m in zip(outputs, masks, strict=True) if _any(m)]
            if 0 < tier <= self.patch.get(site, 0):
                for tensor, mask in born:
                    _put_finite(tensor, mask)
            elif tier:
                self._record(site, tier, func, before, *born[0])
        self.in_place = site if writes else None
        return result

    def _record(self, site, tier, func, before, tensor, mask):
        known = self.births.get(site)
        if known and known.tier <= tier:
            return
        report, index = site.report(), tuple(mask.nonzero()[0].tolist())
        operands = [x for x in tree_leaves(before) if isinstance(x, (torch.Tensor, float, int))]
        at = ["..."]
        with contextlib.suppress(RuntimeError, TypeError):
            if torch.Tag.pointwise in func.tags:  # then the operands at this index tell it all
                at = [torch.as_tensor(x).expand(mask.shape)[index].item() for x in operands]
                at = [f"{x:.6g}" for x in at]
        report.first_bad = f"{site.op}({', '.join(at)}) = {tensor[index].item():g} at {list(index)}"
        report.first_bad += f" of {describe(tensor)}"
        report.kind, report.operands = kind_of(tensor[mask]), [describe(x) for x in operands]
        self.births[site] = Birth(site, tier, known.call if known else self.calls, report)

    def _site(self, func):
        """Where an operation comes from: the Python stack. What the autograd engine runs of its
        own has none: then the line whose forward operation made the node.
        """
        op = func._schema.name.split("::")[-1]
        node = torch._C._current_autograd_node()
        file, number, module, recomputed = self._stack()
        if node is None or recomputed:
            site = Site("forward", op, "", module or "", file, number)
        else:
            name = node.name().split("::")[-1]
            made = self.made_by.get(node._sequence_nr())
            if name == "AccumulateGrad":
                made = self.first_use.get(id(node.variable))
            if made:
                file, number = (file, number) if file else (made.file, made.number)
                module = made.module if module is None else module
            site = Site("backward", op, name, module or "", file, number)
        # Nodes are numbered before their operation arrives here. Only an in-place operation on a
        # view makes one more afterwards.
        new = range(self.next_node, torch.autograd._get_sequence_nr())
        for i in new:
            self.made_by[i] = self.in_place if self.in_place and i != new[-1] else site
        self.next_node = new.stop
        return site

    def _stack(self):
        """File and line of the innermost frame of the user, innermost module, is it recomputed."""
        file, number, module, recomputed, frame = "", 0, None, False, sys._getframe(1)
        while frame and frame.f_code.co_name not in ("_engine_run_backward", "_run_micro_batches"):
            code = frame.f_code
            if not file and _is_users(code.co_filename):
                file, number = code.co_filename, frame.f_lineno
            if module is None and "self" in code.co_varnames:
                module = self.names.get(id(frame.f_locals.get("self")))
            recomputed |= code.co_filename.endswith(_CHECKPOINT)
            frame = frame.f_back
        return file, number, module, recomputed


def _tensors(tree):
    leaves = [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]
    return [x for x in leaves if x.layout == torch.strided]


def _copy(tree, unwanted=None):
    """Clone the tensors of a call; entries that are `unwanted(x)` become 0.5, plain numbers too."""

    def copied(x):
        if isinstance(x, float) and unwanted and unwanted(torch.tensor(x)):
            return 0.5
        if not isinstance(x, torch.Tensor):
            return x
        return torch.where(unwanted(x), 0.5, x) if unwanted and x.is_floating_point() else x.clone()

    return tree_map(copied, tree)


def _born(func, before, writes, outputs, masks):
    """Which non-finite outputs began here: (tier, masks), tier 0 for none.

    Finite operands decide at once. Otherwise the operation runs again on operands whose inf and
    NaN are replaced: what is still non-finite began here, whatever else was carried along.
    """
    name = func._schema.name.split("::")[-1].strip("_")
    numbers = [x for x in tree_leaves(before) if isinstance(x, float) and not math.isfinite(x)]
    carried = [x for x in _tensors(before) if non_finite(x) is not None]
    if name.startswith(("empty", "new_empty")):  # memory as it was found
        return 4, masks
    if not carried and not numbers:
        return 1, masks
    is_view = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
    if is_view or func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags:
        return 0, masks

    def still(test, unwanted):
        """Where `test` holds for the outputs, once the operands' unwanted entries are replaced."""
        try:
            call = _copy(before, unwanted)
            again = _tensors(func(*call[0], **call[1])) + (_tensors(call) if writes else [])
        except RuntimeError:
            again = [torch.zeros(())] * len(masks)
        pairs = zip(masks, again, strict=True)
        return [
            m if m is None else m & (test(x) if m.shape == x.shape else False) for m, x in pairs
        ]

    fresh = still(lambda x: ~x.isfinite(), unwanted=lambda x: ~x.isfinite())
    nan = still(torch.isnan, unwanted=torch.isnan)
    if any(_any(mask) for mask in fresh):
        return 1, [a if a is None else a | b for a, b in zip(fresh, nan, strict=True)]
    inf = [] if numbers or name in PLUMBING else still(torch.isinf, unwanted=torch.isnan)
    for tier, found in ((2, nan), (3, inf), (4, masks if numbers else [])):
        if any(_any(mask) for mask in found):
            return tier, found
    return 0, masks


def _any(mask):
    return mask is not None and bool(mask.any())


def _put_finite(tensor, mask):
    """The intervention: +-1, because 0 makes new divisions by zero and the largest overflows."""
    ones = torch.where(tensor == -math.inf, -1.0, 1.0).to(tensor.dtype)
    tensor.copy_(torch.where(mask, ones, tensor))
