from .api import multi_gpu_model as multi_gpu_model
from .tower_model import TowerModel as TowerModel
