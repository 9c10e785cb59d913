"""What a training step starts from, and how to put it back, bit for bit."""

import random
import sys
from collections.abc import Mapping
from copy import copy

import torch


def tensors_of(value, name="batch", found=None):
    """[(name, tensor)] for every tensor in sequences, mappings, dataclasses and other objects."""
    found = [] if found is None else found
    if isinstance(value, torch.Tensor):
        found.append((name, value))
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            tensors_of(item, f"{name}[{i}]", found)
    elif isinstance(value, Mapping):
        for key in value:
            tensors_of(value[key], f"{name}[{key!r}]", found)
    elif hasattr(value, "__dict__") and name.count(".") < 3:  # objects may refer to themselves
        for key, item in vars(value).items():
            tensors_of(item, f"{name}.{key}", found)
    return found


def put(tensor, value):
    """Write in place, unseen by autograd; not where nobody can (expanded, sparse, inference)."""
    if tensor.layout == torch.strided and 0 not in tensor.stride() and not tensor.is_inference():
        tensor.data.copy_(value)


def rng_state():
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    return torch.get_rng_state(), cuda


def set_rng_state(state):
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state_all(state[1])


class MicroBatch:
    """What `begin` keeps: references only, and copies once a step was seen to write its batch."""

    def __init__(self, batch, with_copies=False):
        self.batch, self.tensors, self.rng = batch, tensors_of(batch), rng_state()
        self.versions = [version(t) for _, t in self.tensors]
        self.copies = [(t, t.detach().clone()) for _, t in self.tensors] if with_copies else ()

    def is_written(self):
        return self.versions != [version(t) for _, t in self.tensors]


def version(tensor):
    """How often it was written in place; inference tensors do not count."""
    return 0 if tensor.is_inference() else tensor._version


class Snapshot:
    """Everything of the user's that a replay may touch; `restore` puts it back, bit for bit."""

    def __init__(self, model, leaves, tensors):
        self.rng, self.python = rng_state(), random.getstate()
        self.numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
        self.grads = [(leaf, leaf.grad) for leaf in leaves]
        owners = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
        attributes = [value for m in owners for value in (vars(m), *vars(m).values())]
        attributes += [leaf._post_accumulate_grad_hooks for leaf in leaves]
        tensors = [*tensors, *(value for value in attributes if torch.is_tensor(value))]
        self.values = [(tensor, tensor.detach().clone()) for tensor in tensors]
        containers = [value for value in attributes if isinstance(value, (dict, list, set))]
        self.containers = [(container, copy(container)) for container in containers]

    def restore(self):
        for live, kept in self.containers:
            live.clear()
            live.extend(kept) if isinstance(live, list) else live.update(kept)
        for tensor, value in self.values:
            put(tensor, value)
        for leaf, grad in self.grads:
            leaf.grad = grad
        set_rng_state(self.rng)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        torch.clear_autocast_cache()
