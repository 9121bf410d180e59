"""Door: ``accelerate.utils.environment`` under our name."""

from notebook_accel.training.devices import get_current_device_type as get_current_device_type
from notebook_accel.training.environment import CPUInformation as CPUInformation
from notebook_accel.training.environment import (
    are_libraries_initialized as are_libraries_initialized,
)
from notebook_accel.training.environment import clear_environment as clear_environment
from notebook_accel.training.environment import (
    convert_dict_to_env_variables as convert_dict_to_env_variables,
)
from notebook_accel.training.environment import (
    get_cpu_distributed_information as get_cpu_distributed_information,
)
from notebook_accel.training.environment import get_int_from_env as get_int_from_env
from notebook_accel.training.environment import parse_choice_from_env as parse_choice_from_env
from notebook_accel.training.environment import parse_flag_from_env as parse_flag_from_env
from notebook_accel.training.environment import patch_environment as patch_environment
from notebook_accel.training.environment import (
    purge_accelerate_environment as purge_accelerate_environment,
)
from notebook_accel.training.environment import str_to_bool as str_to_bool
from notebook_accel.training.float8 import (
    check_cuda_fp8_capability as check_cuda_fp8_capability,
)
from notebook_accel.training.host import check_cuda_p2p_ib_support as check_cuda_p2p_ib_support
from notebook_accel.training.host import get_driver_version as get_driver_version
from notebook_accel.training.host import get_gpu_info as get_gpu_info
from notebook_accel.training.host import set_numa_affinity as override_numa_affinity
from notebook_accel.training.host import set_numa_affinity as set_numa_affinity
