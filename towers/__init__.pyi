__version__: str

from . import callbacks as callbacks
from . import numerics as numerics
from .devices import configure as configure
from .model.api import multi_gpu_model as multi_gpu_model
from .model.options import Asynchronous as Asynchronous
from .model.options import Auto as Auto
from .model.options import ParameterServer as ParameterServer
from .model.options import Replicated as Replicated
from .model.options import Sharded as Sharded
from .model.options import Stages as Stages
from .model.tower_model import TowerModel as TowerModel
from .parity import Parity as Parity
from .parity import check_parity as check_parity
from .partition.functions.gradient_towers import GradientStep as GradientStep
from .partition.functions.gradient_towers import GradientTowers as GradientTowers
from .partition.functions.parallel import parallelize as parallelize
from .predict.trained import Trained as Trained
from .predict.trained import load_model as load_model
from .sparse.convert import sparsify as sparsify
from .sparse.pruning import PruneBlocks as PruneBlocks
from .sparse.rigl import RigL as RigL
