"""What a rank holds of a parameter: all of it, or under FSDP2 a shard of a DTensor."""
import math

import torch

try:
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
except ImportError:  # a torch built without torch.distributed
    DTensor = None

ROW = 128  # every format's group divides it


def is_sharded(tensor):
    return DTensor is not None and isinstance(tensor, DTensor)


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
    _, begins = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    index = 0
    for begin, size in zip(begins, param.shape):
        index = index * size + begin
    return index if param._local_tensor.numel() else 0


def groups_of(param):
    """The process groups over which a sum of this parameter's elements must be added up."""
    if not is_sharded(param):
        return ()
    return tuple(param.device_mesh.get_group(i) for i, placement in enumerate(param.placements)
                 if isinstance(placement, Shard))


def part_of(param, values):
    """This rank's part of a whole tensor, or of a DTensor that is cut like the parameter."""
    if not is_sharded(param) or tuple(values.shape) == ():
        return values
    if is_sharded(values):
        if values.placements == param.placements:
            return values._local_tensor
        return values.redistribute(param.device_mesh, param.placements)._local_tensor
    shape, begins = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    return values[tuple(slice(b, b + n) for b, n in zip(begins, shape))]


def like(param, plane, values_per_unit):
    """A plane of this rank's shard as a DTensor, so that torch.distributed.checkpoint can cut it anew; None where
    its units (bytes, scales) do not follow the parameter's rows.

    `values_per_unit`: how many elements one entry of the plane covers, or a fraction of one.
    """
    if not is_sharded(param):
        return plane
    shape, here = tuple(param.shape), tuple(param._local_tensor.shape)
    if values_per_unit == 1:
        whole, plane = shape, plane.view(here)
    else:
        row = math.prod(shape[1:])
        if not shape or here[1:] != shape[1:] or row == 0 or row % ROW:
            return None
        whole, plane = (shape[0], int(row / values_per_unit)), plane.view(here[0], -1) if here[0] else \
            plane.view(0, int(row / values_per_unit))
    stride = torch.empty(whole, device="meta").stride()
    return DTensor.from_local(plane, param.device_mesh, param.placements, run_check=False, shape=torch.Size(whole),
                              stride=stride)
