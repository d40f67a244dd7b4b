"""How to start processes by MPI on this machine."""

import os
import shutil
import sys

# Where the wheel of Open MPI puts it.
_BESIDE = os.path.dirname(sys.executable)
MPIRUN = shutil.which("mpirun", path=f"{_BESIDE}:{os.environ.get('PATH', '')}")
# Open MPI's; others allow all of that, and pass over variables that they do not know.
ALLOWED = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}
