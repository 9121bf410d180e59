"""Door: ``accelerate.utils.operations`` under our name, with what it has imported there."""

from notebook_accel.training.agreement import (
    DistributedOperationException as DistributedOperationException,
)
from notebook_accel.training.collectives import (
    CannotPadNestedTensorWarning as CannotPadNestedTensorWarning,
)
from notebook_accel.training.collectives import broadcast as broadcast
from notebook_accel.training.collectives import broadcast_object_list as broadcast_object_list
from notebook_accel.training.nested import concatenate as concatenate
from notebook_accel.training.nested import convert_outputs_to_fp32 as convert_outputs_to_fp32
from notebook_accel.training.nested import convert_to_fp32 as convert_to_fp32
from notebook_accel.training.nested import find_batch_size as find_batch_size
from notebook_accel.training.nested import find_device as find_device
from notebook_accel.training.nested import honor_type as honor_type
from notebook_accel.training.nested import ignorant_find_batch_size as ignorant_find_batch_size
from notebook_accel.training.nested import is_namedtuple as is_namedtuple
from notebook_accel.training.nested import is_torch_tensor as is_torch_tensor
from notebook_accel.training.nested import listify as listify
from notebook_accel.training.nested import pad_input_tensors as pad_input_tensors
from notebook_accel.training.nested import recursively_apply as recursively_apply
from notebook_accel.training.nested import send_to_device as send_to_device
from notebook_accel.training.nested import slice_tensors as slice_tensors
from notebook_accel.training.operations import *
from notebook_accel.training.state import AcceleratorState as AcceleratorState
from notebook_accel.training.state import PartialState as PartialState
from notebook_accel.training.strategies.zero_engine import GatheredParameters as GatheredParameters
from notebook_accel.training.tensor_layout import TensorInformation as TensorInformation
from notebook_accel.training.tensor_layout import get_data_structure as get_data_structure
from notebook_accel.training.tensor_layout import get_shape as get_shape
from notebook_accel.training.tensor_layout import initialize_tensors as initialize_tensors
from notebook_accel.training.tensor_layout import is_tensor_information as is_tensor_information

from .constants import *
from .dataclasses import *
from .imports import *
from .versions import *
