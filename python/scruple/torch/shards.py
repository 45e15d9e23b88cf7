"""What a rank holds of a parameter: all of it, or under FSDP2 a shard of a DTensor."""

import functools
import math
import sys

import torch

ROW = 128  # every format's group divides it


@functools.cache
def _are_sharded(kind):
    # Importing DTensor takes a second, and before somebody has, no kind of tensor is one.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and issubclass(kind, module.DTensor)


def is_sharded(tensor):
    return _are_sharded(type(tensor))


def _place(param):
    """Shape and first index, in each dimension, of what is here of a sharded parameter."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)


def local(tensor):
    """The part in this process' memory, sharing that memory."""
    return tensor._local_tensor if is_sharded(tensor) else tensor


def offset_of(param):
    """The index in the whole parameter of the first element that is here.

    A shard of rows, as FSDP2 makes them, is one run of elements, so that random numbers and groups are those of the
    whole. Other shards (columns, as tensor parallelism makes them) are counted on from their first element.
    """
    if not is_sharded(param):
        return 0
    (_, begins), index = _place(param), 0
    for begin, size in zip(begins, param.shape):
        index = index * size + begin
    return index if param._local_tensor.numel() else 0


def groups_of(param):
    """The groups over which a sum of its elements is added up, by ranks: objects of one group may differ."""
    if not is_sharded(param):
        return {}
    # FSDP2 over tensor parallelism has a placement of its own.
    cuts = [i for i, placement in enumerate(param.placements) if not placement.is_replicate()]
    groups = map(param.device_mesh.get_group, cuts)
    return {tuple(torch.distributed.get_process_group_ranks(group)): group for group in groups}


def part_of(param, values):
    """This rank's part of a whole tensor, or of a DTensor that is cut like the parameter."""
    if not is_sharded(param) or tuple(values.shape) == ():
        return values
    if is_sharded(values):
        same = values.placements == param.placements
        return local(values if same else values.redistribute(param.device_mesh, param.placements))
    shape, begins = _place(param)
    return values[tuple(slice(b, b + n) for b, n in zip(begins, shape))]


def is_run(param):
    """Whether what is here is one run of the parameter's elements that begins where groups begin."""
    return local(param).shape[1:] == param.shape[1:] and offset_of(param) % ROW == 0


def like(param, plane, values_per_unit, by_rows=False, bytes_apart=False):
    """A plane of this rank's shard as a DTensor, so that torch.distributed.checkpoint can cut it anew; None
    where its units (bytes, scales) do not follow the parameter's rows.

    `values_per_unit`: how many elements one entry of the plane covers, or a fraction of one.
    `by_rows`: a parameter that is not sharded gets the shapes of one that is.
    `bytes_apart`: a last dimension for the bytes of an entry, which those of 16 bits get in any case.
    """
    if not is_sharded(param) and not by_rows:
        return plane
    shape, here = tuple(param.shape), tuple(local(param).shape)
    if values_per_unit == 1:
        whole, plane = shape, plane.view(here)
    else:
        row = math.prod(shape[1:])
        if not shape or here[1:] != shape[1:] or row == 0 or row % ROW:
            return None
        whole = shape[0], round(row / values_per_unit)
        plane = plane.view(here[0], whole[1])
    if bytes_apart or plane.dtype == torch.int16:  # which neither gloo nor NCCL can send
        whole, plane = (*whole, plane.element_size()), plane.unsqueeze(-1).view(torch.uint8)
    if not is_sharded(param):
        return plane
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    # DTensor.from_local would move what lies on the host to the mesh's device.
    meta = TensorMeta(torch.Size(whole), torch.empty(whole, device="meta").stride(), plane.dtype)
    spec = DTensorSpec(param.device_mesh, param.placements, tensor_meta=meta)
    return DTensor(plane.detach(), spec, requires_grad=False)
